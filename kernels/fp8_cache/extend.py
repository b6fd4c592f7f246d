"""`triton.extend.fp8`: attention of prompt chunks, and of drafted tokens, over pages of 8 bits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.processors import shared_bytes
from kernels.fp8_cache.pages import scales_of
from kernels.fp8_cache.tile import attend_scaled_keys
from kernels.portable.launch_config import flag_arguments, padded_head_dim, query_tiles
from kernels.portable.tile import start_softmax, visible_range


@triton.jit(do_not_specialize=["stride_table", "window"])
def hallmark_extend_fp8(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, cu_seqlens_q_ptr, page_table_ptr, context_lens_ptr,
    sinks_ptr, spans_ptr, stride_q_token, stride_q_head, stride_page, stride_token, stride_head, stride_scales,
    stride_out_token, stride_out_head, stride_table, scale, softcap, window,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of packed query rows of one KV head of one sequence, as `hallmark_extend` has them.

    The tiles of keys that every row sees whole go first, without a mask; then those on the diagonal.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tile sees the most keys: start it first
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    first_row = tl.load(cu_seqlens_q_ptr + sequence)
    num_queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - first_row
    if tile * BLOCK_M >= num_queries * GROUP:
        return
    num_keys = tl.load(context_lens_ptr + sequence)
    page_table_ptr += sequence.to(tl.int64) * stride_table
    k_ptr += kv_head * stride_head
    v_ptr += kv_head * stride_head
    k_scales_ptr += kv_head * PAGE_SIZE
    v_scales_ptr += kv_head * PAGE_SIZE

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = packed // GROUP
    heads = kv_head * GROUP + packed % GROUP
    is_row = queries < num_queries
    dims = tl.arange(0, BLOCK_D)
    is_stored = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (first_row + queries).to(tl.int64)
    q_ptrs = q_ptr + rows[:, None] * stride_q_token + heads[:, None] * stride_q_head + dims[None, :]
    q = tl.load(q_ptrs, mask=is_stored, other=0.0)
    span_lo, span_hi = queries, queries  # unused without spans
    if HAS_SPANS:
        span_lo = tl.load(spans_ptr + rows * 2, mask=is_row, other=0)
        span_hi = tl.load(spans_ptr + rows * 2 + 1, mask=is_row, other=0)

    context = num_keys - num_queries  # the position of query 0
    positions = context + queries
    first = context + tile * BLOCK_M // GROUP
    last = context + tl.minimum(num_queries - 1, (tile * BLOCK_M + BLOCK_M - 1) // GROUP)
    lo, hi = visible_range(first, last, num_keys, window, span_lo, span_hi, CAUSAL, HAS_WINDOW, HAS_SPANS)
    whole = lo  # keys [lo, whole) are seen by every row
    if not (HAS_WINDOW or HAS_SPANS):
        seen_by_all = num_keys
        if CAUSAL:
            seen_by_all = tl.maximum(0, tl.minimum(num_keys, first + 1))
        whole = seen_by_all // BLOCK_N * BLOCK_N

    largest, denominator = start_softmax(heads, sinks_ptr, BLOCK_M, HAS_SINKS)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc, largest, denominator = attend_scaled_keys(
        q, acc, largest, denominator, positions, span_lo, span_hi, lo, whole, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
        page_table_ptr, stride_page, stride_token, stride_scales, scale, softcap, window,
        PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, False, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
    )  # fmt: skip
    acc, largest, denominator = attend_scaled_keys(
        q, acc, largest, denominator, positions, span_lo, span_hi, whole, hi, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
        page_table_ptr, stride_page, stride_token, stride_scales, scale, softcap, window,
        PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
    )  # fmt: skip
    out = acc / tl.where(denominator == 0.0, 1.0, denominator)[:, None]  # a query that sees no key gives 0
    out_ptrs = out_ptr + rows[:, None] * stride_out_token + heads[:, None] * stride_out_head + dims[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_stored)


def run_extend_fp8(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Launch once for the whole batch, without waiting for the device.

    q, out [tokens, heads, head_dim]; k, v pages as `pages.allocate` makes them. Slots past a context may hold anything;
    page-table entries past a sequence's last page are not read. Raises ValueError for pages without scales.
    """
    assert batch.page_table is not None, "extend reads pages"
    num_heads, head_dim = q.shape[1:]
    _, page_size, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    tiles = query_tiles(head_dim, q.element_size(), shared_bytes(q.device))
    num_tiles = triton.cdiv(batch.max_seqlen_q * group, tiles.block_m)
    k_scales, v_scales = scales_of(k), scales_of(v)
    hallmark_extend_fp8[num_tiles, num_kv_heads, batch.num_seqs](
        q, k, v, k_scales, v_scales, out, batch.cu_seqlens_q, batch.page_table, batch.context_lens, flags.sinks,
        flags.spans, q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), k_scales.stride(0),
        out.stride(0), out.stride(1), batch.page_table.stride(0), **flag_arguments(flags),
        GROUP=group, PAGE_SIZE=page_size, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
