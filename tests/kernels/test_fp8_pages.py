"""Pages of 8 bits by Triton's kernels: what they write, and attention over it, as by the definition."""

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.catalog import path_named
from kernels.fp8_cache import pages
from kernels.fused.rope_kv import rope_and_write_kv, rope_and_write_kv_torch
from kernels.reference.compare import compare

CPU = torch.device("cpu")
PAGE_SIZE, KV_HEADS, DIM = 8, 2, 20


@pytest.fixture
def held() -> tuple[Tensor, Tensor]:
    """Keys and values of 12 pages, NaN where nothing is written: all but the last slot of each page."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(2):
        memory = pages.allocate(12, PAGE_SIZE, KV_HEADS, DIM, CPU)
        pages.memory_of(memory).fill_(0xFF)
        slots = torch.arange(12 * PAGE_SIZE).view(12, PAGE_SIZE)[:, :-1].flatten()
        spread = torch.randn(len(slots), KV_HEADS, 1, generator=generator).mul(2).exp2()
        pages.write(torch.randn(len(slots), KV_HEADS, DIM, generator=generator) * spread, memory, slots)
        found.append(memory)
    return found[0], found[1]


@pytest.mark.parametrize("name", ["triton.decode.fp8", "triton.extend.fp8", "sdpa.cpu.fp8"])
def test_attention_over_pages(name: str, held: tuple[Tensor, Tensor]) -> None:
    lengths, queries = [7, 39, 0, 15], [1, 1, 0, 1] if "decode" in name else [5, 9, 0, 1]
    table = torch.full((4, 6), 11, dtype=torch.int32)  # behind a sequence's pages: one that it does not own
    table[0, :1], table[1, :5], table[3, :2] = torch.tensor([3]), torch.tensor([0, 9, 4, 7, 2]), torch.tensor([10, 1])
    held = tuple(_whole(it) for it in held)  # type: ignore[assignment]
    batch = AttentionBatch(
        torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32), max(queries), 40,
        page_table=table, context_lens=torch.tensor(lengths, dtype=torch.int32),
    )  # fmt: skip
    q = torch.randn(sum(queries), 4, DIM, generator=torch.Generator().manual_seed(1))
    sinks = None if name == "sdpa.cpu.fp8" else torch.tensor([0.5, -1.0, 3.0, 0.0])
    flags, out = AttentionFlags(0.3, window=17, sinks=sinks), torch.full_like(q, torch.nan)
    run = path_named(name).run
    assert run is not None
    run(q, *held, batch, flags, out)
    errors = compare(out, q, *(pages.dequantized(it, torch.float64) for it in held), batch, flags)
    assert errors.is_within_rule, errors


def _whole(memory: Tensor) -> Tensor:
    """Write the last slot of each page too, but for the last one's."""
    slots = torch.arange(1, 12) * PAGE_SIZE - 1
    pages.write(torch.ones(len(slots), KV_HEADS, DIM), memory, slots)
    return memory


@pytest.mark.parametrize(("rotated", "has_norm"), [(20, False), (12, True)])
def test_the_kernel_that_writes(rotated: int, has_norm: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    given = torch.randn(9, 4 * KV_HEADS * DIM, generator=generator).half()
    table, positions = torch.randn(30, rotated, generator=generator), torch.arange(9, dtype=torch.int32) * 3
    slots, norm = torch.randperm(24, generator=generator)[:9], torch.rand(DIM, generator=generator).half()
    norms = {"q_norm": norm, "k_norm": norm} if has_norm else {}
    results = []
    for write in (rope_and_write_kv, rope_and_write_kv_torch):
        parts = given.clone().split([2 * KV_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
        q, k, v = (it.unflatten(1, (-1, DIM)) for it in parts)
        memory = [pages.allocate(3, PAGE_SIZE, KV_HEADS, DIM, CPU) for _ in range(2)]
        write(q, k, v, table, positions, *memory, slots, **norms)  # type: ignore[operator]
        for x, it in zip((k, v), memory, strict=True):
            back = pages.dequantized(it).flatten(0, 1)[slots]
            assert torch.equal(x, back.half())  # who reads them beside the pages reads the same
        results.append((q, [pages.scales_of(it) for it in memory], [pages.dequantized(it) for it in memory]))
    (q, scales, numbers), (wanted_q, wanted_scales, wanted) = results
    torch.testing.assert_close(q, wanted_q, rtol=2e-3, atol=2e-3)
    for scale, of, number, it in zip(scales, wanted_scales, numbers, wanted, strict=True):
        torch.testing.assert_close(scale, of, rtol=2e-3, atol=0)
        # The interpreter (Triton 3.6) cuts an exponent's carry off: 127.9 becomes 64 there and 128 on a GPU.
        is_apart = (number - it).abs() > 0.07 * it.abs() + 2e-3 * of.transpose(1, 2)[..., None]
        assert float(is_apart.float().mean()) < 0.05
