"""`triton.wide.ordered`: `triton.ordered` of heads of 512 dimensions, those of Gemma 4's layers without a window.

The kernels and the order are those of `kernels/portable/ordered.py`, by a tile of fewer keys for twice the threads.
"""

import triton
from torch import Tensor, empty, float32

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.page_table import page_table_argument
from kernels.calls.processors import shared_bytes
from kernels.portable.launch_config import flag_arguments, padded_head_dim
from kernels.portable.ordered import _SCRATCH_BYTES as SCRATCH_BYTES
from kernels.portable.ordered import PART_KEYS, hallmark_ordered, hallmark_ordered_combine
from kernels.portable.wide import wide_query_tiles


def run_wide_ordered(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *,
    part_keys: int = PART_KEYS,
) -> None:  # fmt: skip
    """Launch once or twice for the whole batch, as `run_ordered`; arguments likewise.

    part_keys  another number, of another order: a multiple of every tile's
    """
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = (k.shape[1] if batch.is_paged else 0), k.shape[-2]
    group = num_heads // num_kv_heads
    tiles = wide_query_tiles(q.element_size(), shared_bytes(q.device))
    num_parts = max(1, -(-batch.max_context // part_keys))
    scratch = num_parts * num_heads * num_tokens
    is_few = batch.is_paged and batch.max_seqlen_q * group <= tiles.block_m
    is_split = is_few and scratch * 4 * (head_dim + 2) <= SCRATCH_BYTES
    parts = empty(scratch * head_dim if is_split else 1, dtype=float32, device=q.device)
    stats = empty(scratch * 2 if is_split else 1, dtype=float32, device=q.device)
    num_tiles = num_parts if is_split else triton.cdiv(batch.max_seqlen_q * group, tiles.block_m)
    page_table = page_table_argument(batch)
    k_strides, v_strides = ((0, *x.stride()) if page_size == 0 else x.stride() for x in (k, v))
    hallmark_ordered[num_tiles, num_kv_heads, batch.num_seqs](
        q, k, v, out, parts, stats, batch.cu_seqlens_q, batch.cu_seqlens_k, page_table, batch.context_lens, flags.sinks,
        flags.spans, q.stride(0), q.stride(1), *k_strides[:3], *v_strides[:3], out.stride(0),
        out.stride(1), 0 if batch.page_table is None else batch.page_table.stride(0), num_tokens,
        **flag_arguments(flags), GROUP=group, PAGE_SIZE=page_size, HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PART_KEYS=part_keys,
        IS_SPLIT=is_split, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if is_split:
        hallmark_ordered_combine[num_heads, num_tokens](
            parts, stats, out, flags.sinks, batch.cu_seqlens_q, out.stride(0), out.stride(1), num_parts, num_tokens,
            batch.num_seqs, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim), HAS_SINKS=flags.sinks is not None,
        )  # fmt: skip
