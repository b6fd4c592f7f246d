"""`gluon.prefill.hopper` on an sm_90 GPU: against the oracle's rule, and against `triton.prefill`."""

import random
from collections.abc import Iterator

import pytest
import torch
from attention_inputs import FIXED_SEEDS, fresh_seeds
from torch import Tensor

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.hopper.prefill.launch import run_prefill
from kernels.hopper.variants import LONG, variant_of
from kernels.portable.prefill import run_prefill as run_triton_prefill
from kernels.reference.compare import compare

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_hopper")]

LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 0, 191, 192, 193, 255, 256, 257, 300, 777, 1024, 2049, 2500]
BF16, FP16 = torch.bfloat16, torch.float16


def edges(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def packed(q_lens: list[int], k_lens: list[int] | None = None) -> AttentionBatch:
    cu_seqlens = edges(q_lens)
    keys = cu_seqlens if k_lens is None else edges(k_lens)
    return AttentionBatch(cu_seqlens, max(q_lens), max(k_lens or q_lens), cu_seqlens_k=keys)


def tensors(
    q_lens: list[int], k_lens: list[int] | None, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor]:
    num_keys = sum(q_lens if k_lens is None else k_lens)
    sizes = ((sum(q_lens), heads), (num_keys, kv_heads), (num_keys, kv_heads))
    q, k, v = (torch.randn(tokens, count, dim, device="cuda", dtype=dtype) for tokens, count in sizes)
    return q, k, v


def spans_of(q_lens: list[int], k_lens: list[int] | None = None, *, every: int = 5) -> Tensor:
    """Images of `every` * 7 tokens, one after the other, at every other place; the rest has empty spans."""
    size, rows = every * 7, []
    for num_rows, num_keys in zip(q_lens, k_lens or q_lens, strict=True):
        for row in range(num_rows):
            image = max(0, num_keys - num_rows + row) // size
            rows.append((image * size, image * size + size) if image % 2 else (0, 0))
    return torch.tensor(rows, dtype=torch.int32, device="cuda").view(-1, 2)


def flags_from(
    given: dict[str, object], dim: int, heads: int, q_lens: list[int], k_lens: list[int] | None = None
) -> AttentionFlags:
    return AttentionFlags(
        dim**-0.5,
        window=given.get("window"),  # type: ignore[arg-type]
        softcap=given.get("softcap"),  # type: ignore[arg-type]
        sinks=torch.randn(heads, device="cuda") * 2 if "sinks" in given else None,
        spans=spans_of(q_lens, k_lens) if "spans" in given else None,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags) -> Tensor:
    out = torch.full(q.shape, float("nan"), device=q.device, dtype=q.dtype)
    run_prefill(q, k, v, batch, flags, out)
    return out


def assert_right(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags) -> None:
    errors = compare(attend(q, k, v, batch, flags), q, k, v, batch, flags)
    assert errors.is_within_rule, errors


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads"), [(64, 8, 8), (64, 8, 2), (128, 8, 2), (128, 7, 1), (256, 4, 1), (256, 4, 4)]
)
def test_ragged_prompts_are_within_the_rule(dim: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    q, k, v = tensors(LENGTHS, None, heads, kv_heads, dim, dtype)
    assert_right(q, k, v, packed(LENGTHS), AttentionFlags(dim**-0.5))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1025])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_one_sequence_of_any_length_is_within_the_rule(dim: int, length: int) -> None:
    q, k, v = tensors([length], None, 4, 1, dim)
    assert_right(q, k, v, packed([length]), AttentionFlags(dim**-0.5))


@pytest.mark.parametrize("dim", [48, 64])
def test_three_consumers_are_within_the_rule(dim: int) -> None:
    lengths = [5, LONG + 9, 0, 300, 193]
    q, k, v = tensors(lengths, None, 2, 1, dim)
    assert variant_of(dim, packed(lengths), AttentionFlags(1.0)).tiling.consumers == 3
    assert_right(q, k, v, packed(lengths), AttentionFlags(dim**-0.5))


@pytest.mark.parametrize("given", [{}, {"window": 200, "softcap": 20.0, "sinks": True, "spans": True}], ids=["", "all"])
@pytest.mark.parametrize("dim", [40, 80, 96, 112, 192])
def test_padded_head_dims_are_within_the_rule(dim: int, given: dict[str, object]) -> None:
    q, k, v = tensors(LENGTHS, None, 4, 2, dim)
    assert_right(q, k, v, packed(LENGTHS), flags_from(given, dim, 4, LENGTHS))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_queries_after_a_packed_context_are_within_the_rule(dim: int) -> None:
    k_lens = [length + 333 * (i % 3) + 7 * (i % 2) for i, length in enumerate(LENGTHS)]
    q, k, v = tensors(LENGTHS, k_lens, 4, 1, dim)
    assert_right(q, k, v, packed(LENGTHS, k_lens), AttentionFlags(dim**-0.5))


@pytest.mark.parametrize(("dim", "with_sinks"), [(64, False), (128, False), (256, False), (128, True)])
def test_queries_before_the_first_key_give_zero(dim: int, with_sinks: bool) -> None:
    q_lens, k_lens = [5, 300, 200, 64], [0, 60, 1, 64]
    q, k, v = tensors(q_lens, k_lens, 4, 2, dim)
    flags = AttentionFlags(dim**-0.5, sinks=torch.randn(4, device="cuda") if with_sinks else None)
    out = attend(q, k, v, packed(q_lens, k_lens), flags)
    assert compare(out, q, k, v, packed(q_lens, k_lens), flags).is_within_rule
    assert out[:5].abs().max() == 0, "a sequence without keys"
    assert out[5 : 5 + 240].abs().max() == 0, "rows before the first key"


def flag_cases() -> Iterator[tuple[str, dict[str, object]]]:
    for window in (1, 2, 63, 64, 65, 127, 128, 129, 500, 1024, 100_000):
        yield f"window {window}", {"window": window}
    yield "softcap", {"softcap": 30.0}
    yield "sinks", {"sinks": True}
    yield "spans", {"spans": True}
    yield "window softcap", {"window": 300, "softcap": 50.0}
    yield "window sinks", {"window": 128, "sinks": True}
    yield "window spans", {"window": 100, "spans": True}
    yield "all", {"window": 200, "softcap": 20.0, "sinks": True, "spans": True}


@pytest.mark.parametrize("given", [case for _, case in flag_cases()], ids=[name for name, _ in flag_cases()])
@pytest.mark.parametrize(("dim", "has_context"), [(64, False), (128, False), (256, False), (128, True)])
def test_flags_are_within_the_rule(dim: int, has_context: bool, given: dict[str, object]) -> None:
    lengths = [1, 64, 65, 129, 0, 300, 777, 1300]
    k_lens = [length + 211 * (i % 3) for i, length in enumerate(lengths)] if has_context else None
    q, k, v = tensors(lengths, k_lens, 6, 2, dim)
    flags = flags_from(given, dim, 6, lengths, k_lens)
    assert_right(q, k, v, packed(lengths, k_lens), flags)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_large_logits_are_within_the_rule(dim: int) -> None:
    q, k, v = tensors(LENGTHS, None, 4, 1, dim)
    assert_right(q * 15, k, v, packed(LENGTHS), AttentionFlags(dim**-0.5))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nan_past_the_packed_end_reaches_no_row(dim: int) -> None:
    lengths = [200, 65, 1, 300]
    tokens = sum(lengths)
    q, k, v = tensors([*lengths, 500], None, 4, 2, dim)
    for x in (q, k, v):
        x[tokens:] = float("nan")
    batch, flags = packed(lengths), AttentionFlags(dim**-0.5)
    out = attend(q, k, v, batch, flags)
    assert compare(out[:tokens], q[:tokens], k[:tokens], v[:tokens], batch, flags).is_within_rule
    assert out[tokens:].isnan().all(), "rows past the last sequence are nobody's to write"


@pytest.mark.parametrize("given", [{}, {"window": 90}, {"spans": True}], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_sequence_of_nan_reaches_no_other(dim: int, given: dict[str, object]) -> None:
    lengths = [190, 65, 300]
    q, k, v = tensors(lengths, None, 4, 2, dim)
    flags = AttentionFlags(
        dim**-0.5,
        window=given.get("window"),  # type: ignore[arg-type]
        spans=spans_of(lengths) if "spans" in given else None,
    )
    clean = attend(q, k, v, packed(lengths), flags)
    for x in (q, k, v):
        x[190:255] = float("nan")
    dirty = attend(q, k, v, packed(lengths), flags)
    others = torch.arange(sum(lengths), device="cuda")
    others = others[(others < 190) | (others >= 255)]
    assert torch.equal(clean[others], dirty[others])


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_ten_repeats_are_bit_equal(dim: int) -> None:
    lengths = [random.Random(0).randrange(1, 3000) for _ in range(24)]
    q, k, v = tensors(lengths, None, 16, 4, dim)
    batch, flags = packed(lengths), AttentionFlags(dim**-0.5)
    first = attend(q, k, v, batch, flags)
    assert first.isfinite().all()
    for _ in range(9):
        assert torch.equal(first, attend(q, k, v, batch, flags))


def check_against_triton(seed: int) -> None:
    """Compare both kernels on a random batch."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dim, kv_heads = rng.choice([64, 128, 256]), rng.choice([1, 2, 4])
    heads = kv_heads * {64: 7, 128: 4, 256: 1}[dim]  # few: Triton's kernel is compiled for each
    q_lens = [rng.choice([0, 1, rng.randrange(1, 200), rng.randrange(1, 2500)]) for _ in range(rng.randrange(1, 40))]
    q_lens[0] = max(1, q_lens[0])
    has_context = dim == 128 and rng.random() < 0.5
    k_lens = [length + rng.choice([0, 0, 129, 1000]) for length in q_lens] if has_context else None
    given = rng.choice(["", "", "window", "sinks", "softcap", "spans", "window spans"])  # few: each is compiled
    flags = AttentionFlags(
        dim**-0.5,
        window=rng.randrange(1, 1500) if "window" in given else None,
        softcap=30.0 if given == "softcap" else None,
        sinks=torch.randn(heads, device="cuda") if given == "sinks" else None,
        spans=spans_of(q_lens, k_lens, every=rng.randrange(1, 40)) if "spans" in given else None,
    )
    q, k, v = tensors(q_lens, k_lens, heads, kv_heads, dim)
    batch = packed(q_lens, k_lens)
    expected = torch.full_like(q, float("nan"))
    run_triton_prefill(q, k, v, batch, flags, expected)
    difference = (attend(q, k, v, batch, flags).float() - expected.float()).abs()
    # Two roundings of outputs up to 4 units large (an ulp of 2 ** -6 there), and of the weights before.
    assert difference.max() <= 2**-5, difference.max()


@pytest.mark.parametrize("seed", FIXED_SEEDS)
def test_gluon_agrees_with_triton_on_random_ragged_batches(seed: int) -> None:
    check_against_triton(seed)


def test_gluon_agrees_with_triton_on_fresh_seeds() -> None:
    for seed in fresh_seeds():
        check_against_triton(seed)


@pytest.mark.parametrize("dim", [64, 128])
def test_slices_of_a_fused_projection_need_no_copy(dim: int) -> None:
    lengths = [100, 333]
    fused = torch.randn(433, 8, dim, device="cuda", dtype=BF16)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    assert_right(q, k, v, packed(lengths), AttentionFlags(dim**-0.5))


def test_tensors_that_tma_cannot_address_are_still_right() -> None:
    wide = torch.randn(300, 4, 65, device="cuda", dtype=BF16)  # rows of 130 bytes, not a multiple of 16
    q, k, v = wide[..., :64], wide[:, :2, 1:], wide[:, 2:, :64]
    assert_right(q, k, v, packed([100, 200]), AttentionFlags(0.125))


def test_a_batch_of_empty_sequences_writes_nothing() -> None:
    q, k, v = tensors([256], None, 4, 2, 128)
    out = attend(q, k, v, AttentionBatch(edges([0, 0]), 256, 256, cu_seqlens_k=edges([0, 0])), AttentionFlags(0.1))
    torch.cuda.synchronize()
    assert out.isnan().all()


def test_queries_without_any_key_give_zero() -> None:
    q, k, v = tensors([70], [0], 4, 2, 128)
    assert attend(q, k, v, packed([70], [0]), AttentionFlags(0.1)).abs().max() == 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    q, k, v = tensors(LENGTHS, None, 8, 2, 128)
    batch, flags = packed(LENGTHS), AttentionFlags(0.1)
    attend(q, k, v, batch, flags)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(q, k, v, batch, flags)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_past_two_billion_elements_are_right() -> None:
    num_seqs, length, heads, dim = 270, 2000, 32, 128  # 2.2e9 elements of q, and of k and of v
    lengths = [length] * num_seqs
    q, k, v = tensors(lengths, None, heads, heads, dim)
    batch, flags = packed(lengths), AttentionFlags(dim**-0.5, window=64)
    out = attend(q, k, v, batch, flags)
    rows = torch.arange(num_seqs * length - 200, num_seqs * length, 7, device="cuda")
    assert compare(out, q, k, v, batch, flags, rows=rows).is_within_rule
