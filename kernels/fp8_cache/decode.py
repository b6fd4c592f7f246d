"""`triton.decode.fp8`: attention of one query token a sequence over pages of 8 bits, split as by `triton.decode`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.processors import num_processors, shared_bytes
from kernels.fp8_cache.pages import scales_of
from kernels.fp8_cache.tile import attend_scaled_keys
from kernels.portable.decode import hallmark_decode_combine, num_splits_for
from kernels.portable.launch_config import decode_tiles, flag_arguments, padded_head_dim
from kernels.portable.tile import start_softmax, visible_range

_MAX_SPLITS = 32  # as the kernel that joins them has


@triton.jit(do_not_specialize=["stride_table", "num_splits", "window"])
def hallmark_decode_fp8(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, part_ptr, part_largest_ptr, part_denominator_ptr,
    cu_seqlens_q_ptr, page_table_ptr, context_lens_ptr, spans_ptr, stride_q_token, stride_q_head, stride_page,
    stride_token, stride_head, stride_scales, stride_table, num_splits, scale, softcap, window,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of one KV head of one sequence over one split of its keys; see `hallmark_decode`."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    row = tl.load(cu_seqlens_q_ptr + sequence).to(tl.int64)
    if tl.load(cu_seqlens_q_ptr + sequence + 1) == row:
        return
    num_keys = tl.load(context_lens_ptr + sequence)
    members = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + members
    dims = tl.arange(0, BLOCK_D)
    is_stored = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_ptrs = q_ptr + row * stride_q_token + heads[:, None] * stride_q_head + dims[None, :]
    q = tl.load(q_ptrs, mask=is_stored, other=0.0)
    positions = members * 0 + num_keys - 1
    span_lo, span_hi = positions, positions  # unused without spans
    if HAS_SPANS:
        span_lo = members * 0 + tl.load(spans_ptr + row * 2)
        span_hi = members * 0 + tl.load(spans_ptr + row * 2 + 1)
    lo, hi = visible_range(
        num_keys - 1, num_keys - 1, num_keys, window, span_lo, span_hi, CAUSAL, HAS_WINDOW, HAS_SPANS
    )
    keys_each = tl.cdiv(tl.cdiv(hi - lo, num_splits), BLOCK_N) * BLOCK_N
    lo += split * keys_each
    hi = tl.minimum(hi, lo + keys_each)

    largest, denominator = start_softmax(heads, q_ptr, BLOCK_M, False)  # sinks join once, when the splits do
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    page_table_ptr += sequence.to(tl.int64) * stride_table
    acc, largest, denominator = attend_scaled_keys(
        q, acc, largest, denominator, positions, span_lo, span_hi, lo, hi, k_ptr + kv_head * stride_head,
        v_ptr + kv_head * stride_head, k_scales_ptr + kv_head * PAGE_SIZE, v_scales_ptr + kv_head * PAGE_SIZE,
        page_table_ptr, stride_page, stride_token, stride_scales, scale, softcap, window,
        PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
    )  # fmt: skip
    num_heads = tl.num_programs(1) * GROUP
    part = (sequence.to(tl.int64) * num_heads + heads) * num_splits + split
    tl.store(part_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_stored)
    tl.store(part_largest_ptr + part, largest, mask=members < GROUP)
    tl.store(part_denominator_ptr + part, denominator, mask=members < GROUP)


def run_decode_fp8(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Launch twice (splits, then their combination) for the whole batch, without waiting for the device.

    q, out [tokens, heads, head_dim], at most one row a sequence; k, v pages as `pages.allocate` makes them. Slots past
    a context may hold anything; page-table entries past a sequence's last page are not read. Raises ValueError for
    pages without scales.
    """
    assert batch.page_table is not None, "decode reads pages"
    num_heads, head_dim = q.shape[1:]
    _, page_size, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    tiles = decode_tiles(head_dim, q.element_size(), group, shared_bytes(q.device))
    num_splits = num_splits_for(batch, num_kv_heads, tiles, num_processors(q.device))
    part = torch.empty(batch.num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    part_largest, part_denominator = torch.empty(2, *part.shape[:-1], dtype=torch.float32, device=q.device)
    arguments = flag_arguments(flags)
    has_sinks = arguments.pop("HAS_SINKS")
    k_scales, v_scales = scales_of(k), scales_of(v)
    hallmark_decode_fp8[num_splits, num_kv_heads, batch.num_seqs](
        q, k, v, k_scales, v_scales, part, part_largest, part_denominator, batch.cu_seqlens_q, batch.page_table,
        batch.context_lens, flags.spans, q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2),
        k_scales.stride(0), batch.page_table.stride(0), num_splits, **arguments,
        GROUP=group, PAGE_SIZE=page_size, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    hallmark_decode_combine[num_heads, batch.num_seqs](
        part, part_largest, part_denominator, out, batch.cu_seqlens_q, flags.sinks, out.stride(0), out.stride(1),
        num_splits, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim), BLOCK_SPLITS=_MAX_SPLITS, HAS_SINKS=has_sinks,
    )  # fmt: skip
