"""Fused ops, as kernels (in Triton's interpreter) and in torch, against plain fp32 arithmetic."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from kernels.fp8_cache import pages as fp8_pages
from kernels.fused.activation import gated, gated_torch, swiglu, swiglu_torch
from kernels.fused.activation_kind import Activation
from kernels.fused.asymmetric_kv import rope_and_write_asymmetric
from kernels.fused.backend import runs_on_triton
from kernels.fused.gated_norm import norm_and_gate
from kernels.fused.head_gate import gate_heads_
from kernels.fused.head_gate_kind import GateFunction
from kernels.fused.head_norm import norm_heads, norm_heads_torch
from kernels.fused.index_kv import write_index
from kernels.fused.latent_kv import write_latents
from kernels.fused.layer_norm import add_layer_norm, layer_norm, layer_norm_torch
from kernels.fused.norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from kernels.fused.rope_kv import Turns, rope_and_write_kv, rope_and_write_kv_torch, rotate_queries
from kernels.fused.row_gate import add_gated_, add_scaled_
from kernels.fused.split_norm import mean_squares, norm_by
from kernels.fused.turn_heads import turn_heads, turn_heads_torch
from kernels.latent.head_products import multiply_heads
from kernels.sampling.log_sum import log_sum_exp
from qualification.measure.inputs.far_memory import FAR, far_memory

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="no interpreter; test_gpu_fused.py runs the kernels")

DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}  # a few ulps of values of about 1
Op = Callable[..., object]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotations(table: Tensor, positions: Tensor) -> Turns:
    cos, sin = table[positions.long()][:, None].chunk(2, dim=-1)
    return Turns(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    precise = x.double()
    return (precise / (precise.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).float()


def test_these_tests_run_the_kernels_in_the_interpreter() -> None:
    assert runs_on_triton(torch.empty(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 48, 257, 1024])  # below, off and on a power of two
@pytest.mark.parametrize("op", [rms_norm, rms_norm_torch])
def test_the_norm_has_the_value_of_its_formula(op: Op, size: int, dtype: torch.dtype) -> None:
    """Rows lie in a wider tensor: some as they come, one whose squares are beyond fp16, and one of zeros."""
    wide, weight = torch.full((6, size + 7), torch.nan, dtype=dtype), randn(size, seed=1, dtype=dtype)
    x = wide[:5, :size]
    x[:3], x[3], x[4] = randn(3, size), 60_000.0, 0
    actual = op(x, weight, 1e-5)
    assert isinstance(actual, Tensor)
    assert_near(actual, exact_norm(x, weight, 1e-5))
    assert not actual[4].any()
    assert op(x[:0], weight, 1e-5).shape == (0, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [layer_norm, layer_norm_torch])
def test_the_norm_without_mean_has_the_value_of_its_formula(op: Op, dtype: torch.dtype) -> None:
    x, weight = randn(3, 257, dtype=dtype) + 3, randn(257, seed=1, dtype=dtype)
    expected = torch.nn.functional.layer_norm(x.double(), (257,), weight.double(), eps=1e-2).float()
    actual = op(x, weight, 1e-2)
    assert isinstance(actual, Tensor)
    assert_near(actual, expected)
    added, residual = randn(3, 257, dtype=dtype, seed=2), x - randn(3, 257, dtype=dtype, seed=2)
    normed, total = add_layer_norm(added, residual, weight, 1e-2)
    assert total is residual
    assert_near(normed, torch.nn.functional.layer_norm(total.double(), (257,), weight.double(), eps=1e-2).float())


@pytest.mark.parametrize("is_triton", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_of_heads_turn_against_each_other_in_place(dtype: torch.dtype, is_triton: bool) -> None:
    num_heads, half = 3, 6  # neither is a power of two
    qkv, angles = randn(5, 3 * num_heads * 2 * half, dtype=dtype), randn(5, half, seed=1)
    parts = qkv.double().view(5, 3, num_heads, 2, half)
    turns = torch.polar(torch.ones(5, half), angles).to(torch.complex128)[:, None, None]
    turned = torch.complex(parts[:, :2, :, 0], parts[:, :2, :, 1]) * turns
    expected = torch.cat((torch.stack((turned.real, turned.imag), 3), parts[:, 2:]), dim=1).view(5, -1)
    (turn_heads if is_triton else turn_heads_torch)(qkv, angles.cos(), angles.sin(), num_heads)
    assert_near(qkv, expected.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [add_rms_norm, add_rms_norm_torch])
def test_the_residual_becomes_the_sum_and_the_norm_is_of_it(op: Op, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(3, 80, seed=n, dtype=dtype) for n in range(3))
    total = residual + x
    normed, updated = op(x, residual, weight[0], 1e-5)
    assert updated is residual
    assert torch.equal(residual, total)
    assert_near(normed, exact_norm(total, weight[0], 1e-5))


def test_the_norm_of_a_sum_lies_where_what_was_added_lay() -> None:
    x, residual, weight = randn(3, 80), randn(3, 80, seed=1), randn(80, seed=2)
    total = residual + x
    normed, _ = add_rms_norm(x, residual, weight, 1e-5)
    assert normed.data_ptr() == x.data_ptr()
    assert_near(x, exact_norm(total, weight, 1e-5))


def test_the_norm_of_a_sum_leaves_rows_of_a_wider_tensor_alone() -> None:
    wide, residual, weight = randn(3, 90), randn(3, 80, seed=1), randn(80, seed=2)
    before, total = wide.clone(), residual + wide[:, :80]
    normed, _ = add_rms_norm(wide[:, :80], residual, weight, 1e-5)
    assert_near(normed, exact_norm(total, weight, 1e-5))
    assert normed.is_contiguous()
    assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 37, 2049])  # the last one is a block and one column
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("op", [gated, gated_torch])
def test_gated_has_the_value_of_its_formula(
    op: Callable[[Tensor, Activation], Tensor], activation: Activation, size: int, dtype: torch.dtype
) -> None:
    gate_up = 3 * randn(3, 2 * size, dtype=dtype)
    gate_up[2] = torch.tensor([-1e4] * size + [2.0] * size)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(op(gate_up, activation), (ACT2FN[activation.value](gate) * up).float())


def test_swiglu_is_gated_by_silu() -> None:
    gate_up = randn(2, 74)
    assert torch.equal(swiglu(gate_up), gated(gate_up, Activation.SILU))
    assert torch.equal(swiglu_torch(gate_up), gated_torch(gate_up, Activation.SILU))


class RopeCase:
    """Inputs of one rotation, every byte outside of the views NaN, and its answer in plain arithmetic."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, tokens: int = 5) -> None:
        width = (heads + 2 * kv_heads) * head_dim
        self.projection = torch.full((tokens, width + 3), torch.nan, dtype=dtype)
        self.projection[:, :width] = randn(tokens, width, dtype=dtype)
        rows = self.projection[:, :width].unflatten(1, (-1, head_dim))
        self.q, self.k, self.v = rows.split([heads, kv_heads, kv_heads], dim=1)
        angles = randn(64, head_dim // 2, seed=1) * 3
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.positions = torch.tensor([63, 0, 7, 7, 31][:tokens], dtype=torch.int32)
        self.slots = torch.tensor([11, 0, 3, 4, 8][:tokens], dtype=torch.int64)
        self.k_pages = torch.full((3, 4, kv_heads, head_dim), torch.nan, dtype=dtype)
        self.v_pages = self.k_pages.clone()

    def run(self, op: Op, **norms: Tensor | None) -> None:
        where = self.cos_sin, self.positions, self.k_pages, self.v_pages, self.slots
        op(self.q, self.k, self.v, *where, **norms)

    def rotated(self, x: Tensor, norm: Tensor | None = None) -> Tensor:
        """Rotate by the definition: each pair (i, i + d / 2) as a complex number, turned by its angle."""
        precise = x.float() if norm is None else exact_norm(x, norm, 1e-6)
        left, right = precise.double().chunk(2, dim=-1)
        cos, sin = self.cos_sin.double()[self.positions.long()][:, None].chunk(2, dim=-1)
        turned = torch.complex(left, right) * torch.complex(cos, sin)
        return torch.cat((turned.real, turned.imag), dim=-1).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 10), (1, 1, 2), (7, 7, 80)])
@pytest.mark.parametrize("op", [rope_and_write_kv, rope_and_write_kv_torch])
def test_queries_and_keys_are_turned_and_the_cache_is_written(
    op: Op, heads: int, kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    case = RopeCase(heads, kv_heads, head_dim, dtype)
    norms = [randn(head_dim, seed=seed, dtype=dtype) for seed in (8, 9)] if has_norm else [None, None]
    q, k, v = case.rotated(case.q, norms[0]), case.rotated(case.k, norms[1]), case.v.clone()
    case.run(op, **dict(zip(("q_norm", "k_norm"), norms, strict=True)))
    assert_near(case.q, q)
    assert_near(case.k, k)
    assert torch.equal(case.v, v)
    is_written = torch.zeros(12, dtype=torch.bool)
    is_written[case.slots] = True
    for pages, rows in ((case.k_pages, case.k), (case.v_pages, case.v)):
        assert torch.equal(pages.flatten(0, 1)[case.slots], rows)
        assert pages.flatten(0, 1)[~is_written].isnan().all()
    assert case.projection[:, -3:].isnan().all()


@pytest.mark.parametrize("op", [rope_and_write_kv, rope_and_write_kv_torch])
def test_the_cache_may_be_of_another_dtype(op: Op) -> None:
    case = RopeCase(2, 1, 8, torch.float32)
    case.k_pages, case.v_pages = case.k_pages.half(), case.v_pages.half()
    case.run(op)
    assert torch.equal(case.k_pages.flatten(0, 1)[case.slots], case.k.half())
    assert torch.equal(case.v_pages.flatten(0, 1)[case.slots], case.v.half())


@pytest.mark.parametrize("op", [rope_and_write_kv, rope_and_write_kv_torch])
def test_pages_that_are_not_contiguous_are_refused(op: Op) -> None:
    case = RopeCase(2, 1, 8, torch.float32)
    case.k_pages = case.k_pages.transpose(0, 1)
    with pytest.raises(RuntimeError, match=r"contiguous|view"):
        case.run(op)


def test_keys_that_do_not_lie_behind_the_queries_are_turned_too() -> None:
    case, apart = RopeCase(4, 2, 24, torch.float32), RopeCase(4, 2, 24, torch.float32)
    apart.k = apart.k.clone()
    case.run(rope_and_write_kv_torch)
    apart.run(rope_and_write_kv_torch)
    assert torch.equal(apart.q, case.q)
    assert torch.equal(apart.k, case.k)
    assert torch.equal(apart.k_pages.nan_to_num(), case.k_pages.nan_to_num())


def far_and_near(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two pages of `size` numbers, and as many at the end of a pool of 2^32 numbers, of addresses without memory."""
    first = -(-FAR // size)
    memory = far_memory((first + 2) * size * dtype.itemsize, torch.device("cpu"))
    if memory is None:
        pytest.skip("the pool takes addresses that this machine refuses")
    return memory.view(dtype).view(-1, size), torch.zeros(2, size, dtype=dtype)


@pytest.mark.parametrize("kind", ["of one size", "of 8 bits", "narrow values", "latents"])
def test_slots_past_2_to_the_32_numbers_are_written_as_near_ones(kind: str) -> None:
    dim, value_dim, page_size, num_tokens = 64, 64 if kind != "narrow values" else 48, 16, 3
    dtype = torch.uint8 if kind == "of 8 bits" else torch.float16
    angles = randn(9, dim // 2, seed=3)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.tensor([4, 0, 8], dtype=torch.int32), torch.tensor([5, 31, 16])
    sizes = [page_size * (it + (4 if kind == "of 8 bits" else 0)) for it in (dim, value_dim)]
    both = [far_and_near(it, dtype) for it in sizes]
    for which in range(2):  # of far, of near
        pools = [it[which] for it in both]
        k_pages, v_pages = (it.view(-1, page_size, 1, it.shape[1] // page_size) for it in pools)
        at = slots if which else slots + (len(pools[0]) - 2) * page_size
        q, k, v = (randn(num_tokens, 1, it, dtype=torch.float16, seed=it) for it in (dim, dim, value_dim))
        if kind == "latents":
            rotated = table[:, [*range(4), *range(dim // 2, dim // 2 + 4)]].contiguous()
            norm = torch.ones(dim - 8, dtype=torch.float16)
            write_latents(q, q[..., -8:].clone(), k[:, 0], norm, rotated, positions, k_pages, at, eps=1e-6)
        elif kind == "narrow values":
            rope_and_write_asymmetric(q, k, v, table, positions, k_pages, v_pages, at)
        else:
            if kind == "of 8 bits":
                k_pages, v_pages = (fp8_pages.view_of(it, page_size, 1) for it in pools)
            rope_and_write_kv(q, k, v, table, positions, k_pages, v_pages, at)
    for far, near in both if kind != "latents" else both[:1]:
        end = len(both[0][0])
        assert near.any()
        assert torch.equal(far[end - 2 : end], near)


@pytest.mark.parametrize("op", [rope_and_write_kv, rope_and_write_kv_torch])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_of_part_of_a_head_leaves_the_rest(op: Op, has_norm: bool) -> None:
    """Compare with the rotation of heads that are as wide as the part."""
    heads, kv_heads, dim, part, tokens = 3, 2, 20, 12, 5
    q, k, v = randn(tokens, heads + 2 * kv_heads, dim).split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    weights = {"q_norm": randn(dim), "k_norm": randn(dim)} if has_norm else {}
    normed = [rms_norm_torch(x, w, 1e-6) for x, w in zip((q, k), weights.values(), strict=True)] if has_norm else [q, k]
    cos_sin, positions = randn(9, part), torch.tensor([0, 1, 2, 8, 3], dtype=torch.int32)
    slots = torch.tensor([7, 0, 3, 2, 9])
    rotated = [x[..., :part].contiguous() for x in normed]
    unused = torch.zeros(5, 2, kv_heads, part)
    where = cos_sin, positions, unused, unused.clone(), slots
    rope_and_write_kv_torch(*rotated, v[..., :part].contiguous(), *where)
    expected = [torch.cat((turned, x[..., part:]), dim=-1) for turned, x in zip(rotated, normed, strict=True)]
    k_pages, v_pages = torch.zeros(2, 5, 2, kv_heads, dim)
    op(q, k, v, cos_sin, positions, k_pages, v_pages, slots, **weights, eps=1e-6)
    torch.testing.assert_close(q, expected[0])
    torch.testing.assert_close(k, expected[1])
    assert torch.equal(k_pages.flatten(0, 1)[slots], k)
    assert torch.equal(v_pages.flatten(0, 1)[slots], v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("size", [1, 100, 1024])
def test_what_all_tokens_visit_is_added_by_a_gate(size: int, has_gate: bool, dtype: torch.dtype) -> None:
    out, shared, x = (randn(5, size, dtype=dtype, seed=seed) for seed in range(3))
    gate = randn(size, dtype=dtype, seed=3) * 0.2
    x[3] *= -1000  # a share far out
    share = torch.sigmoid((x.double() * gate.double()).sum(dim=1, keepdim=True)) if has_gate else 1.0
    expected = (out.double() + 0.75 * share * shared.double()).float()
    own = out[1:2].clone()
    assert (add_gated_(out, shared, x, gate, 0.75) if has_gate else add_scaled_(out, shared, 0.75)) is out
    assert_near(out, expected)
    for other in (shared, x):
        other[0], other[2:] = torch.nan, torch.nan
    read = shared[1:2], x[1:2]  # in another place: of a row alone
    assert torch.equal(add_gated_(own, *read, gate, 0.75) if has_gate else add_scaled_(own, read[0], 0.75), out[1:2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size_in", "size_out"), [(1, 10, 20), (70, 40, 12), (33, 72, 140)])
def test_each_head_is_multiplied_by_a_matrix_of_its_own(
    tokens: int, size_in: int, size_out: int, dtype: torch.dtype
) -> None:
    """Multiply views: queries before their rotated numbers, a transposed matrix, into the first numbers of rows."""
    x, weights = randn(tokens, 3, size_in + 4, dtype=dtype)[..., :size_in], randn(3, size_out, size_in, seed=1) * 0.2
    weights = weights.to(dtype).transpose(1, 2)
    whole = torch.full((tokens, 3, size_out + 4), 7.0, dtype=dtype)
    multiply_heads(x, weights, whole[..., :size_out])
    expected = torch.einsum("thk,hkn->thn", x.double(), weights.double()).float()
    assert_near(whole[..., :size_out], expected)
    assert bool((whole[..., size_out:] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", GateFunction)
@pytest.mark.parametrize("by_dimension", [False, True])
def test_heads_are_gated_by_a_function_of_their_numbers(
    by_dimension: bool, function: GateFunction, dtype: torch.dtype
) -> None:
    wide = randn(5, 400, dtype=dtype, seed=1) * 20  # far out a softplus is 0, or the number itself
    out, gate = randn(5, 3, 44, dtype=dtype), wide[:, : 132 if by_dimension else 3]
    shares = gate.double().sigmoid() if function is GateFunction.SIGMOID else gate.double().exp().log1p()
    expected = out.double() * shares.view(5, 3, -1)
    assert gate_heads_(out, gate, function) is out
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "size"), [(3, 44), (19, 120), (2, 300)])  # in one, two and two blocks
def test_heads_are_normed_and_gated_by_themselves(num_heads: int, size: int, dtype: torch.dtype) -> None:
    x, weight = randn(5, num_heads, size, dtype=dtype), randn(size, seed=2)
    gate = randn(5, num_heads * size + 60, dtype=dtype, seed=1)[:, 7:-53]
    x[0, 0] = 0
    expected = exact_norm(x, weight, 1e-6).double() * torch.nn.functional.silu(gate.double()).view(x.shape)
    assert_near(norm_and_gate(x, gate, weight, 1e-6), expected.flatten(1).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_are_normed_with_weights_of_their_own(dtype: torch.dtype) -> None:
    x, wide, weight = randn(5, 3, 44, dtype=dtype), randn(5, 200, dtype=dtype, seed=1), randn(3 * 44, seed=2)
    gate = wide[:, 7:139]
    normed = exact_norm(x, torch.ones(44), 1e-6).double() * weight.double().view(3, 44)
    expected = normed * gate.double().sigmoid().view(5, 3, 44)
    assert_near(norm_and_gate(x, gate, weight, 1e-6, is_sigmoid=True), expected.flatten(1).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_row_are_normed_by_all_its_squares(dtype: torch.dtype) -> None:
    rows = randn(5, 2 * (100 + 36), dtype=dtype)  # of two ranks, each with 100 columns of q and 36 of k
    ranks = rows.unflatten(1, (2, 136)).unbind(dim=1)
    parts = [rank.split_with_sizes([100, 36], dim=1) for rank in ranks]
    squares = (mean_squares(*parts[0]) + mean_squares(*parts[1])) / 2
    for place, size in enumerate((100, 36)):
        weight = randn(2 * size, dtype=dtype, seed=1)
        expected = rms_norm_torch(torch.cat([part[place] for part in parts], dim=1).float(), weight, 1e-3)
        normed = [norm_by(p[place], w, squares[:, place], 1e-3) for p, w in zip(parts, weight.chunk(2), strict=True)]
        assert_near(torch.cat(normed, dim=1), expected)


def test_the_sum_of_exponentials_is_torchs() -> None:
    logits = randn(4, 5000) * 20
    logits[1, 3:] = -torch.inf
    assert_near(log_sum_exp(logits), logits.logsumexp(dim=1, keepdim=True))


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 12), (3, 24), (9, 512)])
@pytest.mark.parametrize("op", [norm_heads, norm_heads_torch])
def test_each_head_of_the_values_is_normed_by_itself(op: Op, num_heads: int, head_dim: int) -> None:
    rows = torch.randn(5, num_heads + 2, head_dim)
    values = rows[:, 1:-1]  # between the keys and what is behind them
    due = values.double() / (values.double().square().mean(dim=-1, keepdim=True) + 1e-3).sqrt()
    before = rows.clone()
    found = op(values, 1e-3)
    assert found.is_contiguous()
    assert (found - due).abs().max() < 1e-5
    assert torch.equal(rows, before)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("num_heads", "head_dim", "rotated"), [(4, 24, 24), (9, 512, 512), (3, 20, 12)])
def test_queries_alone_are_turned_as_beside_keys(num_heads: int, head_dim: int, rotated: int, has_norm: bool) -> None:
    rows, table = torch.randn(5, num_heads + 2, head_dim), torch.randn(30, rotated)
    positions, norm = torch.tensor([3, 0, 29, 7, 7], dtype=torch.int32), torch.rand(head_dim) + 0.5
    both, alone = rows.clone(), rows.clone()
    norms = {"q_norm": norm, "k_norm": norm} if has_norm else {}
    q, k, v = both.split((num_heads, 1, 1), dim=1)
    pages = torch.zeros(2, 5, 4, 1, head_dim)
    rope_and_write_kv(q, k, v, table, positions, *pages, torch.arange(5), **norms)
    rotate_queries(alone[:, :num_heads], table, positions, q_norm=norm if has_norm else None)
    assert (alone[:, :num_heads] - q).abs().max() < 1e-5
    assert torch.equal(alone[:, num_heads:], rows[:, num_heads:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "rotated"), [(5, 5, 6), (34, 1, 6), (18, 17, 10)])
def test_narrow_values_are_multiplied_and_written(heads: int, kv_heads: int, rotated: int, dtype: torch.dtype) -> None:
    """The kernel, and torch's operations where rotations are at hand: as keys of their size, but for the factor."""
    dim, value_dim, num_tokens = 10, 6, 3
    table, positions = randn(9, rotated, seed=3), torch.tensor([4, 0, 8], dtype=torch.int32)
    slots = torch.tensor([5, 31, 16])
    sizes = (heads * dim, kv_heads * dim, kv_heads * value_dim)
    rows = randn(num_tokens, 7 + sum(sizes), dtype=dtype)
    for turns in (None, rotations(table, positions)):
        given = rows.clone()
        q, k, v = given[:, 7:].split_with_sizes(sizes, dim=1)
        q, k, v = q.view(num_tokens, heads, dim), k.view(num_tokens, kv_heads, dim), v.view(num_tokens, kv_heads, -1)
        old_q, old_k, old_v = q.clone(), k.clone(), v.clone()
        keys, values = (torch.full((2, 16, kv_heads, it), 7.0, dtype=dtype) for it in (dim, value_dim))
        rope_and_write_asymmetric(q, k, v, table, positions, keys, values, slots, value_scale=0.7, turns=turns)
        assert torch.equal(given[:, :7], rows[:, :7])
        assert torch.equal(keys.flatten(0, 1)[slots], k)
        assert torch.equal(values.flatten(0, 1)[slots], v)
        assert int((keys != 7).flatten(2).any(-1).sum()) == int((values != 7).flatten(2).any(-1).sum()) == num_tokens
        assert_near(v, old_v.float() * 0.7)
        pages = torch.zeros(2, 2, 16, kv_heads, dim, dtype=dtype)
        rope_and_write_kv(old_q, old_k, old_k.clone(), table, positions, *pages, slots)
        assert_near(q, old_q.float())
        assert_near(k, old_k.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize(("heads", "dim"), [(1, 6), (40, 20)])
def test_an_indexers_keys_are_normed_rotated_and_written(
    heads: int, dim: int, neighbours: bool, dtype: torch.dtype
) -> None:
    """The kernel, and torch's operations where rotations are at hand; what lies before the keys in a row stays."""
    rotated, before, num_tokens = 6, 9, 3
    projected = randn(num_tokens, 7 + dim, dtype=dtype)[:, 7:]
    queries = randn(num_tokens, heads, dim, dtype=dtype, seed=1)
    norm, bias = (randn(dim, dtype=dtype, seed=seed) for seed in (2, 4))
    angles = randn(9, rotated // 2, seed=3)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.tensor([4, 0, 8], dtype=torch.int32), torch.tensor([5, 31, 16])
    cos, sin = table[positions.long()][:, None].chunk(2, dim=-1)

    def turned(x: Tensor) -> Tensor:
        pairs = x[..., :rotated].float()
        first, second = (pairs[..., 0::2], pairs[..., 1::2]) if neighbours else pairs.chunk(2, dim=-1)
        rest = x[..., rotated:].float()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    normed = torch.nn.functional.layer_norm(projected.double(), (dim,), norm.double(), bias.double(), 1e-6)
    for given in (None, rotations(table, positions)):
        keys = torch.full((num_tokens, 1, before + dim), 7.0, dtype=dtype)
        pages = torch.full((2, 16, 1, before + dim), 7.0, dtype=dtype)
        found = write_index(
            queries, projected, norm, bias, table, positions, keys, pages, slots, neighbours=neighbours, turns=given
        )
        assert torch.equal(pages.flatten(0, 1)[slots], keys)
        assert int((pages != 7).any(-1).sum()) == num_tokens
        assert bool((keys[..., :before] == 7).all())
        assert_near(keys[..., before:], turned(normed.to(dtype)[:, None]))
        assert_near(found, turned(queries))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 5, 40])
@pytest.mark.parametrize("latent", [20, 64])
def test_latents_are_normed_rotated_and_written(latent: int, heads: int, dtype: torch.dtype) -> None:
    """The kernel, and torch's operations where rotations are at hand, of views as they are in the model."""
    rotated, plain, num_tokens = 6, 10, 3
    projected = randn(num_tokens, 7 + latent + rotated, dtype=dtype)[:, 7:]
    q = randn(num_tokens, heads, plain + rotated, dtype=dtype, seed=1)[..., plain:]
    norm, angles = randn(latent, dtype=dtype, seed=2), randn(9, rotated // 2, seed=3)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.tensor([4, 0, 8], dtype=torch.int32), torch.tensor([5, 31, 16])
    cos, sin = table[positions.long()][:, None].chunk(2, dim=-1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    for given in (None, rotations(table, positions)):
        pages = torch.full((2, 16, 1, latent + rotated), 7.0, dtype=dtype)
        queries = torch.full((num_tokens, heads, latent + rotated), 7.0, dtype=dtype)
        keys = write_latents(queries, q, projected, norm, table, positions, pages, slots, eps=1e-6, turns=given)
        assert torch.equal(pages.flatten(0, 1)[slots], keys)
        assert int((pages != 7).any(-1).sum()) == num_tokens
        assert bool((queries[..., :latent] == 7).all())
        assert_near(keys[:, 0, :latent], exact_norm(projected[:, :latent], norm, 1e-6))
        assert_near(keys[..., latent:], turned(projected[:, None, latent:]))
        assert_near(queries[..., latent:], turned(q))
