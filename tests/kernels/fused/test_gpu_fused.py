"""The fused ops on a GPU, in the dtypes and at the sizes they serve, against fp32 arithmetic of the same inputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.fused.activation import swiglu, swiglu_torch
from kernels.fused.gated_norm import norm_and_gate
from kernels.fused.norm import add_rms_norm, rms_norm, rms_norm_torch
from kernels.fused.rope_kv import rope_and_write_kv, rope_and_write_kv_torch
from kernels.latent.head_products import multiply_heads
from kernels.sampling.penalties import RowPenalties
from kernels.sampling.sampling import RowSampling, sample, sample_torch, sampling_tensors

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# One rounding to the dtype, on top of fp32's own noise.
TOLERANCE = {torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5, torch.float32: 2e-5}
GPU = torch.device("cuda")
CPU = torch.device("cpu")


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU).to(dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 4096), (513, 4096), (3, 8192), (7, 16384), (4097, 256), (5, 1000)])
def test_the_norm_rounds_once(tokens: int, size: int, dtype: torch.dtype) -> None:
    x, weight = randn(tokens, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
    assert_near(rms_norm(x, weight, 1e-5), rms_norm_torch(x.float(), weight.float(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 4096), (513, 4096), (5, 1000)])
def test_the_residual_is_the_sum_and_the_norm_is_of_it(tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual = randn(tokens, size, dtype=dtype), randn(tokens, size, dtype=dtype, seed=1)
    weight, total = randn(size, dtype=dtype, seed=2), residual + x
    normed, updated = add_rms_norm(x, residual, weight, 1e-5)
    assert updated is residual
    assert torch.equal(residual, total)
    assert_near(normed, rms_norm_torch(total.float(), weight.float(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 14336), (513, 14336), (2049, 640), (3, 2049)])
def test_swiglu_rounds_once(tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = randn(tokens, 2 * size, dtype=dtype) * 4
    assert_near(swiglu(gate_up), swiglu_torch(gate_up.float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size_in", "size_out"), [(192, 512), (512, 256), (40, 72)])
def test_products_of_heads_have_the_same_bits_in_any_batch(size_in: int, size_out: int, dtype: torch.dtype) -> None:
    x, weights = randn(300, 20, size_in, dtype=dtype), randn(20, size_in, size_out, dtype=dtype, seed=1) * 0.05
    whole = x.new_empty(300, 20, size_out)
    multiply_heads(x, weights, whole)
    assert_near(whole, torch.einsum("thk,hkn->thn", x.double(), weights.double()).float())
    for first, last in ((0, 1), (77, 78), (3, 11), (63, 65), (100, 229)):
        found = x.new_empty(last - first, 20, size_out)
        multiply_heads(x[first:last], weights, found)
        assert torch.equal(found, whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 128, 256, 1024])
def test_a_head_that_is_normed_and_gated_has_the_same_bits_alone(size: int, dtype: torch.dtype) -> None:
    x, gate, weight = (
        randn(9, 33, size, dtype=dtype),
        randn(9, 33 * size, dtype=dtype, seed=1),
        randn(size, dtype=dtype),
    )
    together = norm_and_gate(x, gate, weight, 1e-6).view(x.shape)
    precise, share = x.float(), torch.nn.functional.silu(gate.float()).view(x.shape)
    scale = torch.rsqrt(precise.square().mean(-1, keepdim=True) + 1e-6)
    assert_near(together, precise * scale * weight.float() * share)
    for heads in (slice(5, 6), slice(7, 9), slice(30, 33)):
        part = x[:, heads].contiguous(), gate.view(x.shape)[:, heads].flatten(1)
        assert torch.equal(norm_and_gate(*part, weight, 1e-6).view(9, -1, size), together[:, heads])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [
        (1, 32, 8, 128), (777, 32, 8, 128), (65, 4, 2, 64), (9, 16, 4, 256), (9, 3, 1, 80), (5, 7, 7, 6),
        (33, 64, 8, 128),
    ],
)  # fmt: skip
def test_the_rotation_rounds_once_and_the_cache_holds_it(
    tokens: int, heads: int, kv_heads: int, head_dim: int, is_normed: bool, dtype: torch.dtype
) -> None:
    rows = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    angles = randn(4096, head_dim // 2, dtype=torch.float32, seed=1) * 3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(4096, (tokens,), device=GPU, dtype=torch.int32)
    slots = torch.randperm(64 * 16, device=GPU)[:tokens]
    norms = [randn(head_dim, dtype=dtype, seed=n) for n in (2, 3)] if is_normed else [None, None]

    def run(op: Callable[..., None], rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pages = torch.zeros(2, 64, 16, kv_heads, head_dim, device=GPU, dtype=rows.dtype)
        q, k, v = rows.split([heads, kv_heads, kv_heads], dim=1)
        weights = [norm if norm is None else norm.to(rows.dtype) for norm in norms]
        op(q, k, v, cos_sin, positions, *pages, slots, q_norm=weights[0], k_norm=weights[1])
        return rows, pages[0], pages[1]

    expected = run(rope_and_write_kv_torch, rows.float().clone())  # it rotates in place
    for actual, truth in zip(run(rope_and_write_kv, rows), expected, strict=True):
        assert_near(actual, truth)


def test_a_slot_beyond_2_to_the_31_elements_is_addressed() -> None:
    pages = torch.zeros(2, 2**31 // 256 // 16 + 1, 16, 1, 256, device=GPU, dtype=torch.float16)
    rows = randn(1, 3, 256, dtype=torch.float16)
    q, k, v = rows.split(1, dim=1)
    cos_sin = torch.cat((torch.ones(1, 128), torch.zeros(1, 128)), dim=1).to(GPU)
    last = torch.tensor([pages.shape[1] * 16 - 1], device=GPU)
    rope_and_write_kv(q, k, v, cos_sin, torch.zeros(1, device=GPU, dtype=torch.int32), *pages, last)
    assert torch.equal(pages[0, -1, -1], k[0])
    assert torch.equal(pages[1, -1, -1], v[0])
    assert pages[:, 0].count_nonzero() == 0


def sampling_rows(num_rows: int) -> list[RowSampling]:
    return [
        RowSampling(
            temperature=(n % 5) / 2,
            top_k=None if n % 3 else 50,
            top_p=0.9 if n % 2 else 1.0,
            min_p=0.01 * (n % 7 == 0),
            seed=n * 2**40 - 77,
            position=n,
        )
        for n in range(num_rows)
    ]


def test_the_gpu_draws_the_tokens_that_the_cpu_draws() -> None:
    logits = randn(64, 32_000, dtype=torch.float32) * 3
    rows = sampling_rows(64)
    on_cpu = sample(logits.cpu(), sampling_tensors(rows, 32_000, CPU))
    on_gpu = sample(logits, sampling_tensors(rows, 32_000, GPU))
    assert on_gpu.token_ids.tolist() == on_cpu.token_ids.tolist()
    assert on_gpu.is_finite.all()


@pytest.mark.parametrize("scale", [0.05, 1.0, 3.0])
def test_kernels_and_torch_ops_draw_the_same_tokens(scale: float) -> None:
    logits = randn(64, 128_256, dtype=torch.float32) * scale
    tensors = sampling_tensors(sampling_rows(64), 128_256, GPU)
    by_torch = sample_torch(logits.clone(), tensors)
    assert sample(logits, tensors).token_ids.tolist() == by_torch.token_ids.tolist()


def test_the_gpu_penalises_as_the_cpu_does() -> None:
    logits = randn(3, 32_000, dtype=torch.float32) * 3
    penalties = RowPenalties([1, 5, 5, 31_999], [7, 7, 20_000], repetition=1.3, presence=0.25, frequency=0.1)
    rows = [RowSampling(0), RowSampling(0, penalties=penalties), RowSampling(0, penalties=RowPenalties([3], [], 2.0))]
    on_cpu = logits.cpu()
    sample(on_cpu, sampling_tensors(rows, 32_000, CPU))
    sample(logits, sampling_tensors(rows, 32_000, GPU))
    torch.testing.assert_close(logits.cpu(), on_cpu, rtol=1e-6, atol=1e-6)


def test_a_row_draws_the_same_token_alone_and_in_a_batch() -> None:
    logits = randn(32, 128_256, dtype=torch.float32) * 3
    rows = sampling_rows(32)
    together = sample(logits.clone(), sampling_tensors(rows, 128_256, GPU)).token_ids.tolist()
    alone = [
        sample(logits[n : n + 1].clone(), sampling_tensors(rows[n : n + 1], 128_256, GPU)).token_ids.item()
        for n in range(32)
    ]
    assert together == alone


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_sampling_never_waits_for_the_gpu() -> None:
    logits = randn(8, 1000, dtype=torch.float32)
    logits[3] = torch.nan
    tensors = sampling_tensors([RowSampling(1.0, top_p=0.9, banned_ids=[1]), *sampling_rows(7)], 1000, GPU)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = sample(logits, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.is_finite.tolist() == [True, True, True, False, True, True, True, True]
