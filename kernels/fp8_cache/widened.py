"""`sdpa.cpu.fp8` and `sdpa.math.fp8`: attention over pages of 8 bits, widened first, by PyTorch.

The pages that a batch reads are multiplied out into new ones, once a call, over which `sdpa.cpu` or `sdpa.math`
attends: in fp32, since a number times its scale has more digits than 16 bits hold.
"""

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.fp8_cache.pages import scales_of
from kernels.sdpa.backends import run_cpu, run_math


def run_cpu_fp8(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """`sdpa.cpu.fp8`; arguments as of `RunAttention`, pages as `pages.allocate` makes them."""
    queries, keys, values, read = _widened(q, k, v, batch)
    found = torch.empty_like(queries)
    run_cpu(queries, keys, values, read, flags, found)
    out.copy_(found)


def run_math_fp8(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """`sdpa.math.fp8`; arguments as of `RunAttention`, pages as `pages.allocate` makes them."""
    queries, keys, values, read = _widened(q, k, v, batch)
    found = torch.empty_like(queries)
    run_math(queries, keys, values, read, flags, found)
    out.copy_(found)


def _widened(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    """Return queries, keys and values in fp32, pages being those that the batch reads, and the batch over these."""
    table, pages = batch.once(("fp8 pages read", k.shape[1]), lambda: _pages_read(batch, k.shape[1]))
    keys, values = (
        x.view(torch.uint8).index_select(0, pages).view(x.dtype).float()
        * scales_of(x).index_select(0, pages).transpose(1, 2)[..., None]
        for x in (k, v)
    )
    over = AttentionBatch(
        batch.cu_seqlens_q, batch.max_seqlen_q, batch.max_context, page_table=table, context_lens=batch.context_lens
    )
    return q.float(), keys, values, over


def _pages_read(batch: AttentionBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """Return (a page table over the pages that are read alone, their numbers [n] int64, at least one)."""
    assert batch.page_table is not None, "an fp8 cache is read by pages"
    assert batch.context_lens is not None, "pages come with lengths"
    held = (batch.context_lens + (page_size - 1)) // page_size
    places = torch.arange(batch.page_table.shape[1], device=held.device)
    # Entries past a sequence's last page may be anything.
    named = torch.where(places < held[:, None], batch.page_table, 0).long()
    pages, table = torch.unique(named, return_inverse=True)
    if pages.numel() == 0:
        return batch.page_table, torch.zeros(1, dtype=torch.int64, device=held.device)
    return table.int().view_as(batch.page_table).contiguous(), pages
