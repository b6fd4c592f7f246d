"""Attention whose values have fewer numbers than its keys, by PyTorch: those of other values, on padded copies.

`sdpa.cpu.asymmetric`, `sdpa.math.asymmetric` and `torch.attention.asymmetric.tiles`. Values of the pages that a batch
reads are copied and end with zeros, and the results' numbers behind the values' are dropped: of 192 and 128 that is a
fifth more to multiply. The cache has no such numbers.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.sdpa.backends import run_cpu, run_math
from kernels.sdpa.key_tiles import run_attention_tiles

if TYPE_CHECKING:
    from kernels.vocabulary.path import RunAttention


def run_asymmetric_cpu(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> None:
    """`sdpa.cpu.asymmetric`; arguments as of `RunAttention`, out and v of heads of the values' size."""
    _padded(run_cpu, q, k, v, batch, flags, out)


def run_asymmetric_math(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> None:
    """`sdpa.math.asymmetric`; arguments likewise."""
    _padded(run_math, q, k, v, batch, flags, out)


def run_asymmetric_tiles(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> None:
    """`torch.attention.asymmetric.tiles`; arguments likewise."""
    _padded(run_attention_tiles, q, k, v, batch, flags, out)


def _padded(
    run: "RunAttention", q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> None:
    if batch.is_paged:
        pages, batch = batch.once(("asymmetric", k.shape[1]), lambda: _pages_read(batch, k.shape[1]))
        k, v = k.index_select(0, pages), v.index_select(0, pages)
    wide = torch.empty_like(q)
    run(q, k, pad(v, (0, q.shape[-1] - v.shape[-1])), batch, flags, wide)
    out.copy_(wide[..., : v.shape[-1]])


def _pages_read(batch: AttentionBatch, page_size: int) -> tuple[Tensor, AttentionBatch]:
    """Return the pages of a batch's contexts, [n] int64, and the same batch over copies of these alone."""
    assert batch.page_table is not None, "pages come with a table"
    assert batch.context_lens is not None, "pages come with lengths"
    counts = (batch.context_lens.long() + page_size - 1) // page_size
    is_read = torch.arange(batch.page_table.shape[1], device=counts.device) < counts[:, None]
    pages = batch.page_table[is_read].long()
    if pages.numel() == 0:
        pages = pages.new_zeros(1)  # of no context any page stands for all
    table = torch.zeros_like(batch.page_table)
    table[is_read] = torch.arange(int(is_read.sum()), dtype=table.dtype, device=table.device)
    return pages, replace(batch, page_table=table, plans=None if batch.plans is None else {})
