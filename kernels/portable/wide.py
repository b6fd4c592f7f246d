"""`triton.prefill.wide`, `triton.extend.wide`, `triton.decode.wide`: attention of heads of 512 dimensions.

The kernels are those of narrower heads, in smaller tiles: an accumulator of 64 queries takes half of the registers.
"""

import torch
import triton
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.processors import num_processors, shared_bytes
from kernels.portable.decode import hallmark_decode, hallmark_decode_combine, num_splits_for
from kernels.portable.extend import hallmark_extend
from kernels.portable.launch_config import SHARED_BYTES_HOPPER, Tiles, flag_arguments, padded_head_dim
from kernels.portable.prefill import hallmark_prefill

_INTERPRETED = Tiles(32, 32, 4, 1)  # small: so that short test inputs cross tile edges
_MAX_SPLITS = 32  # as the kernel that joins them has


def wide_query_tiles(element_bytes: int, shared: int | None) -> Tiles:
    """Tiles of prefill and extend. `shared`: bytes that one program can have; None in the interpreter."""
    if shared is None:
        return _INTERPRETED
    if element_bytes == 4:
        return Tiles(16, 16, 8, 1)
    # Of 512 dimensions they spill 104 bytes a thread with 16 keys, 200 with 32: ptxas of Triton 3.6.0 for sm_90.
    return Tiles(64, 16, 8, 2) if shared >= SHARED_BYTES_HOPPER else Tiles(32, 16, 4, 2)


def wide_decode_tiles(element_bytes: int, group: int, shared: int | None) -> Tiles:
    """Tiles of decode: all query heads of a KV head are rows of one tile."""
    block_m = max(16, 1 << (group - 1).bit_length())
    if shared is None:
        return Tiles(block_m, 32, 4, 1)
    if element_bytes == 4:
        return Tiles(block_m, 16, 8, 1)
    return Tiles(block_m, 32 if shared >= SHARED_BYTES_HOPPER else 16, 4, 2)


def run_wide_prefill(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> None:
    """Launch once for the whole batch, as `run_prefill`."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    tiles = wide_query_tiles(q.element_size(), shared_bytes(q.device))
    num_tiles = triton.cdiv(batch.max_seqlen_q * group, tiles.block_m)
    hallmark_prefill[num_tiles, num_kv_heads, batch.num_seqs](
        q, k, v, out, batch.cu_seqlens_q, batch.cu_seqlens_k, flags.sinks, flags.spans,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        **flag_arguments(flags), GROUP=group, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def run_wide_extend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Launch once for the whole batch, as `run_extend`."""
    assert batch.page_table is not None, "extend reads pages"
    num_heads, head_dim = q.shape[1:]
    _, page_size, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    tiles = wide_query_tiles(q.element_size(), shared_bytes(q.device))
    num_tiles = triton.cdiv(batch.max_seqlen_q * group, tiles.block_m)
    hallmark_extend[num_tiles, num_kv_heads, batch.num_seqs](
        q, k, v, out, batch.cu_seqlens_q, batch.page_table, batch.context_lens, flags.sinks, flags.spans,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
        out.stride(0), out.stride(1), batch.page_table.stride(0), **flag_arguments(flags),
        GROUP=group, PAGE_SIZE=page_size, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def run_wide_decode(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Launch twice (splits, then their combination) for the whole batch, as `run_decode`."""
    assert batch.page_table is not None, "decode reads pages"
    num_heads, head_dim = q.shape[1:]
    _, page_size, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    tiles = wide_decode_tiles(q.element_size(), group, shared_bytes(q.device))
    num_splits = num_splits_for(batch, num_kv_heads, tiles, num_processors(q.device))
    part = torch.empty(batch.num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    part_largest, part_denominator = torch.empty(2, *part.shape[:-1], dtype=torch.float32, device=q.device)
    arguments = flag_arguments(flags)
    has_sinks = arguments.pop("HAS_SINKS")
    hallmark_decode[num_splits, num_kv_heads, batch.num_seqs](
        q, k, v, part, part_largest, part_denominator, batch.cu_seqlens_q, batch.page_table, batch.context_lens,
        flags.spans, q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1),
        v.stride(2), batch.page_table.stride(0), num_splits, **arguments,
        GROUP=group, PAGE_SIZE=page_size, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    hallmark_decode_combine[num_heads, batch.num_seqs](
        part, part_largest, part_denominator, out, batch.cu_seqlens_q, flags.sinks, out.stride(0), out.stride(1),
        num_splits, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim), BLOCK_SPLITS=_MAX_SPLITS, HAS_SINKS=has_sinks,
    )  # fmt: skip
