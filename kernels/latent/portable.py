"""`triton.latent`: attention whose values are the first numbers of its keys, in every phase, on any GPU since Ampere.

A tile of keys is read once: its first LATENT numbers are multiplied with the queries' and weighed as values, its last
REST numbers (the rotated ones) with the queries' last. Query rows are packed as in `kernels/portable/tile.py`, so that
all query heads share each key. Where queries are few, a sequence's keys are split among programs, which a second
kernel joins; the grid depends on shapes and host bounds alone, so that a CUDA graph can hold the launches.
Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1, whose products are absorbed into queries and results.
"""

import triton
import triton.language as tl
from torch import Tensor, empty, float32

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.page_table import page_table_argument
from kernels.calls.processors import num_processors, shared_bytes
from kernels.latent.launch_config import latent_tiles
from kernels.portable.decode import _MAX_SPLITS as MAX_SPLITS
from kernels.portable.decode import num_splits_for
from kernels.portable.launch_config import flag_arguments, padded_head_dim
from kernels.portable.tile import key_offsets, start_softmax, tanh, visible, visible_range

_FEW_QUERIES = 8  # of a sequence, up to which its keys are split: one, or one and drafted ones behind it
_MOST_ROWS = 64  # of a tile


@triton.jit(do_not_specialize=["stride_table", "num_splits", "window", "num_tokens"])
def hallmark_latent(
    q_ptr, k_ptr, out_ptr, part_ptr, stats_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, page_table_ptr, context_lens_ptr,
    sinks_ptr, spans_ptr, stride_q_token, stride_q_head, stride_k_page, stride_k_token, stride_k_head,
    stride_out_token, stride_out_head, stride_table, num_splits, num_tokens, scale, softcap, window,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, LATENT: tl.constexpr, REST: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of packed query rows of one KV head of one sequence; IS_SPLIT: over one split of its keys.

    PAGE_SIZE 0: keys are packed. IS_SPLIT: axis 0 is tiles times splits; a program writes its unnormalised part, its
    largest score and its denominator: 0, -inf and 0 for a split without keys.
    part_ptr   [splits, heads, tokens, LATENT] fp32, stats_ptr [splits, heads, tokens, 2] fp32
    """
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    split = tl.program_id(0) * 0
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tile sees the most keys: start it first
    if IS_SPLIT:
        split = tl.program_id(0) % num_splits
        tile = tl.program_id(0) // num_splits
    first_row = tl.load(cu_seqlens_q_ptr + sequence)
    num_queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - first_row
    if tile * BLOCK_M >= num_queries * GROUP:
        return
    k_ptr += kv_head.to(tl.int64) * stride_k_head
    if PAGE_SIZE == 0:
        first_key = tl.load(cu_seqlens_k_ptr + sequence)
        num_keys = tl.load(cu_seqlens_k_ptr + sequence + 1) - first_key
        k_ptr += first_key.to(tl.int64) * stride_k_token
    else:
        num_keys = tl.load(context_lens_ptr + sequence)
        page_table_ptr += sequence.to(tl.int64) * stride_table

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = packed // GROUP
    heads = kv_head * GROUP + packed % GROUP
    is_row = queries < num_queries
    dims = tl.arange(0, BLOCK_L)
    rests = tl.arange(0, BLOCK_R)
    is_stored = is_row[:, None] & (dims < LATENT)[None, :]
    rows = (first_row + queries).to(tl.int64)
    q_rows = q_ptr + rows[:, None] * stride_q_token + heads.to(tl.int64)[:, None] * stride_q_head
    q = tl.load(q_rows + dims[None, :], mask=is_stored, other=0.0)
    q_rest = tl.load(q_rows + LATENT + rests[None, :], mask=is_row[:, None] & (rests < REST)[None, :], other=0.0)
    span_lo, span_hi = queries, queries  # unused without spans
    if HAS_SPANS:
        span_lo = tl.load(spans_ptr + rows * 2, mask=is_row, other=0)
        span_hi = tl.load(spans_ptr + rows * 2 + 1, mask=is_row, other=0)
    context = num_keys - num_queries  # the position of query 0
    positions = context + queries
    first = context + tile * BLOCK_M // GROUP
    last = context + tl.minimum(num_queries - 1, (tile * BLOCK_M + BLOCK_M - 1) // GROUP)
    lo, hi = visible_range(first, last, num_keys, window, span_lo, span_hi, CAUSAL, HAS_WINDOW, HAS_SPANS)
    if IS_SPLIT:
        keys_each = tl.cdiv(tl.cdiv(hi - lo, num_splits), BLOCK_N) * BLOCK_N
        lo += split * keys_each
        hi = tl.minimum(hi, lo + keys_each)

    # Sinks join once: here, or when the splits do.
    largest, denominator = start_softmax(heads, sinks_ptr, BLOCK_M, HAS_SINKS and not IS_SPLIT)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    for start in tl.range(lo, hi, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_in_range = keys < hi
        offsets = key_offsets(keys, is_in_range, page_table_ptr, stride_k_page, stride_k_token, PAGE_SIZE)
        k_rows = k_ptr + offsets[:, None]
        # Keys outside of [lo, hi) are not read: 0 stands in for them, so that NaN there cannot leak through 0 * NaN.
        k = tl.load(k_rows + dims[None, :], mask=is_in_range[:, None] & (dims < LATENT)[None, :], other=0.0)
        k_rest = tl.load(
            k_rows + LATENT + rests[None, :], mask=is_in_range[:, None] & (rests < REST)[None, :], other=0.0
        )
        scores = tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores)
        seen = visible(positions, keys, window, span_lo, span_hi, CAUSAL, HAS_WINDOW, HAS_SPANS)
        scores = tl.where(seen & is_in_range[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet stays at -inf: 0 in its place keeps exp2(-inf + inf) from being NaN.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(largest - reference)
        denominator = denominator * decay + tl.sum(weights, 1)
        largest = new_largest
        acc = tl.dot(weights.to(k.dtype), k, acc * decay[:, None], input_precision="ieee")

    if IS_SPLIT:
        num_heads = tl.num_programs(1) * GROUP
        at = (split.to(tl.int64) * num_heads + heads) * num_tokens + rows
        tl.store(part_ptr + at[:, None] * LATENT + dims[None, :], acc, mask=is_stored)
        tl.store(stats_ptr + at * 2, largest, mask=is_row)
        tl.store(stats_ptr + at * 2 + 1, denominator, mask=is_row)
    else:
        out = acc / tl.where(denominator == 0.0, 1.0, denominator)[:, None]  # a query that sees no key gives 0
        out_rows = out_ptr + rows[:, None] * stride_out_token + heads.to(tl.int64)[:, None] * stride_out_head
        tl.store(out_rows + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_splits", "num_tokens", "num_seqs"])
def hallmark_latent_combine(
    part_ptr, stats_ptr, out_ptr, sinks_ptr, cu_seqlens_q_ptr, stride_out_token, stride_out_head, num_splits,
    num_tokens, num_seqs,
    LATENT: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token. Splits weigh by their largest score; one without keys weighs 0."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(cu_seqlens_q_ptr + num_seqs):
        return
    splits = tl.arange(0, BLOCK_SPLITS)
    is_split = splits < num_splits
    dims = tl.arange(0, BLOCK_L)
    is_dim = dims < LATENT
    at = (splits.to(tl.int64) * tl.num_programs(0) + head) * num_tokens + row
    split_largest = tl.load(stats_ptr + at * 2, mask=is_split, other=float("-inf"))
    split_denominator = tl.load(stats_ptr + at * 2 + 1, mask=is_split, other=0.0)
    acc = tl.load(part_ptr + at[:, None] * LATENT + dims[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0)
    sink, sink_weight = start_softmax(head + tl.arange(0, 1), sinks_ptr, 1, HAS_SINKS)
    largest = tl.maximum(tl.max(split_largest), tl.max(sink))
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(split_largest - reference)
    denominator = tl.sum(weights * split_denominator) + tl.sum(sink_weight * tl.exp2(sink - reference))
    out = tl.sum(weights[:, None] * acc, 0) / tl.where(denominator == 0.0, 1.0, denominator)
    out_ptrs = out_ptr + row * stride_out_token + head.to(tl.int64) * stride_out_head + dims
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_dim)


def run_latent(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Launch once, or twice where keys are split, for the whole batch, without waiting for the device.

    q [tokens, heads, latent + rest], out [tokens, heads, latent]; k [key tokens, kv_heads, latent + rest] or
    [num_pages, page_size, kv_heads, latent + rest]; v is the view of k's first `latent` numbers, whose sizes alone are
    read. Last dims contiguous. Slots past a context may hold anything, NaN too; page-table entries past a sequence's
    last page are not read.
    """
    num_tokens, num_heads, head_dim = q.shape
    latent = v.shape[-1]
    page_size, num_kv_heads = (k.shape[1] if batch.is_paged else 0), k.shape[-2]
    group = num_heads // num_kv_heads
    # Whether keys are split does not depend on their number: before ready, decode compiles the kernel that splits them.
    is_split = batch.is_paged and batch.max_seqlen_q <= _FEW_QUERIES
    tiles = latent_tiles(q.element_size(), group if is_split else _MOST_ROWS, shared_bytes(q.device))
    num_tiles = triton.cdiv(batch.max_seqlen_q * group, tiles.block_m)
    num_splits = 1
    if is_split:
        num_splits = num_splits_for(batch, num_tiles * num_kv_heads, tiles, num_processors(q.device))
    scratch = num_splits * num_heads * num_tokens if is_split else 0
    parts = empty(max(1, scratch * latent), dtype=float32, device=q.device)
    stats = empty(max(1, scratch * 2), dtype=float32, device=q.device)
    strides = (0, *k.stride()) if page_size == 0 else k.stride()
    block_l = padded_head_dim(latent)
    page_table = page_table_argument(batch)
    hallmark_latent[num_tiles * num_splits, num_kv_heads, batch.num_seqs](
        q, k, out, parts, stats, batch.cu_seqlens_q, batch.cu_seqlens_k, page_table, batch.context_lens, flags.sinks,
        flags.spans, q.stride(0), q.stride(1), *strides[:3], out.stride(0), out.stride(1),
        0 if batch.page_table is None else batch.page_table.stride(0), num_splits, num_tokens, **flag_arguments(flags),
        GROUP=group, PAGE_SIZE=page_size, LATENT=latent, REST=head_dim - latent, BLOCK_L=block_l,
        BLOCK_R=padded_head_dim(head_dim - latent), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, IS_SPLIT=is_split,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if is_split:
        hallmark_latent_combine[num_heads, num_tokens](
            parts, stats, out, flags.sinks, batch.cu_seqlens_q, out.stride(0), out.stride(1), num_splits, num_tokens,
            batch.num_seqs, LATENT=latent, BLOCK_L=block_l, BLOCK_SPLITS=MAX_SPLITS, HAS_SINKS=flags.sinks is not None,
        )  # fmt: skip
