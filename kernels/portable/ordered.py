"""`triton.ordered`: attention whose bits depend on a token's own keys only, in every phase, on any GPU since Ampere.

Keys are cut at absolute multiples of PART_KEYS. Inside a part an online softmax goes over tiles of BLOCK_N keys from
the part's first key on; parts are folded from the first to the last:

    M' = max(M, m)    T' = fma(l, w, T d)    A' = fma(a, w, A d)    with d = 2**(M - M'), w = 2**(m - M')

A tile or a part of which a row sees no key changes nothing of it: weights are 0, d is 1, and fma gives back T and A to
the bit. All phases have the same tile, so that Triton lays out, and sums, every row alike. Of a few queries a sequence
each part is a program of its own and a second kernel folds them; elsewhere the tile's program does, by the same
arithmetic. So how a batch is split does not show.
"""

import triton
import triton.language as tl
from torch import Tensor, empty, float32

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.page_table import page_table_argument
from kernels.calls.processors import shared_bytes
from kernels.portable.launch_config import Tiles, flag_arguments, padded_head_dim
from kernels.portable.tile import key_offsets, start_softmax, tanh, visible, visible_range

PART_KEYS = 512  # the name of the order says it
_SCRATCH_BYTES = 256 << 20  # of parts, at most: where they would take more, a tile's program folds its own
_INTERPRETED = Tiles(32, 32, 4, 1)  # small: so that short test inputs cross tile edges
# By padded head dim: as many rows as warps have, 16 each, so that no row's keys are shared by warps.
_16_BIT = {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 4, 2)}
_32_BIT = {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 32, 4, 1)}  # fp32 FMAs, for tests


def ordered_tiles(head_dim: int, element_bytes: int, shared: int | None) -> Tiles:
    """The tile of every phase. `shared`: the GPU's limit for one program in bytes; None in the interpreter."""
    if shared is None:
        return _INTERPRETED
    row = max(64, padded_head_dim(head_dim))
    return (_32_BIT if element_bytes == 4 else _16_BIT)[row]


@triton.jit
def attend_part(
    q, positions, span_lo, span_hi, part, lo, hi, k_ptr, v_ptr, page_table_ptr, stride_k_page, stride_k_token,
    stride_v_page, stride_v_token, scale, softcap, window,
    PART_KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """(a, m, l) of a query tile over one part of the keys, of which it sees those in [lo, hi).

    Tiles begin at absolute multiples of BLOCK_N. Keys and values outside [lo, hi) are not read: 0 stands in for them.
    """
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    first = tl.maximum(part * PART_KEYS, lo // BLOCK_N * BLOCK_N)
    end = tl.minimum((part + 1) * PART_KEYS, hi)
    for start in tl.range(first, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_in_range = (keys >= lo) & (keys < hi)
        load_mask = is_in_range[:, None] & (dims < HEAD_DIM)[None, :]
        k_offsets = key_offsets(keys, is_in_range, page_table_ptr, stride_k_page, stride_k_token, PAGE_SIZE)
        v_offsets = key_offsets(keys, is_in_range, page_table_ptr, stride_v_page, stride_v_token, PAGE_SIZE)
        k = tl.load(k_ptr + k_offsets[:, None] + dims[None, :], mask=load_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
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
        v = tl.load(v_ptr + v_offsets[:, None] + dims[None, :], mask=load_mask, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, largest, denominator


@triton.jit
def fold(acc, largest, total, value, found_largest, found):
    """(A', M', T') of (A, M, T) and a part's (a, m, l): for all rows of a tile, [rows, dims] and [rows]."""
    new_largest = tl.maximum(largest, found_largest)
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    decay = tl.exp2(largest - reference)
    weight = tl.exp2(found_largest - reference)
    total = tl.fma(found, weight, total * decay)
    acc = tl.fma(value, tl.broadcast_to(weight[:, None], value.shape), acc * decay[:, None])
    return acc, new_largest, total


@triton.jit
def normalised(acc, largest, total, sink, sink_weight):
    """O of a row: a sink joins the sum once. 0 for a row that sees no key."""
    with_sink = tl.maximum(largest, sink)
    reference = tl.where(with_sink == float("-inf"), 0.0, with_sink)
    decay = tl.exp2(largest - reference)
    total = tl.fma(total, decay, sink_weight * tl.exp2(sink - reference))
    return acc * decay[:, None] / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["stride_table", "window", "num_tokens"])
def hallmark_ordered(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, stats_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, page_table_ptr,
    context_lens_ptr, sinks_ptr, spans_ptr, stride_q_token, stride_q_head, stride_k_page, stride_k_token, stride_k_head,
    stride_v_page, stride_v_token, stride_v_head, stride_out_token, stride_out_head, stride_table, num_tokens, scale,
    softcap, window,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PART_KEYS: tl.constexpr, IS_SPLIT: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of packed query rows of one KV head of one sequence; IS_SPLIT: over one part of its keys.

    PAGE_SIZE 0: keys are packed. IS_SPLIT: axis 0 is the part, and a sequence's rows are one tile.
    part_ptr   [parts, heads, tokens, HEAD_DIM] fp32, stats_ptr [parts, heads, tokens, 2] fp32: (m, l)
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tile sees the most keys: start it first
    if IS_SPLIT:
        tile = 0
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(cu_seqlens_q_ptr + sequence)
    num_queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - first_row
    if tile * BLOCK_M >= num_queries * GROUP:
        return
    k_ptr += kv_head.to(tl.int64) * stride_k_head
    v_ptr += kv_head.to(tl.int64) * stride_v_head
    if PAGE_SIZE == 0:
        first_key = tl.load(cu_seqlens_k_ptr + sequence)
        num_keys = tl.load(cu_seqlens_k_ptr + sequence + 1) - first_key
        k_ptr += first_key.to(tl.int64) * stride_k_token
        v_ptr += first_key.to(tl.int64) * stride_v_token
    else:
        num_keys = tl.load(context_lens_ptr + sequence)
        page_table_ptr += sequence.to(tl.int64) * stride_table

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = packed // GROUP
    heads = kv_head * GROUP + packed % GROUP
    is_row = queries < num_queries
    dims = tl.arange(0, BLOCK_D)
    is_stored = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (first_row + queries).to(tl.int64)
    q_ptrs = q_ptr + rows[:, None] * stride_q_token + heads.to(tl.int64)[:, None] * stride_q_head + dims[None, :]
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

    if IS_SPLIT:
        part = tl.program_id(0)
        acc, largest, total = attend_part(
            q, positions, span_lo, span_hi, part, lo, hi, k_ptr, v_ptr, page_table_ptr, stride_k_page, stride_k_token,
            stride_v_page, stride_v_token, scale, softcap, window, PART_KEYS, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_M,
            BLOCK_N, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
        )  # fmt: skip
        num_heads = tl.num_programs(1) * GROUP
        at = (part.to(tl.int64) * num_heads + heads) * num_tokens + rows
        tl.store(part_ptr + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_stored)
        tl.store(stats_ptr + at * 2, largest, mask=is_row)
        tl.store(stats_ptr + at * 2 + 1, total, mask=is_row)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for part in range(lo // PART_KEYS, tl.cdiv(hi, PART_KEYS)):
            value, found_largest, found = attend_part(
                q, positions, span_lo, span_hi, part, lo, hi, k_ptr, v_ptr, page_table_ptr, stride_k_page,
                stride_k_token, stride_v_page, stride_v_token, scale, softcap, window, PART_KEYS, PAGE_SIZE, HEAD_DIM,
                BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
            )  # fmt: skip
            acc, largest, total = fold(acc, largest, total, value, found_largest, found)
        sink, sink_weight = start_softmax(heads, sinks_ptr, BLOCK_M, HAS_SINKS)
        out = normalised(acc, largest, total, sink, sink_weight)
        out_ptrs = (
            out_ptr + rows[:, None] * stride_out_token + heads.to(tl.int64)[:, None] * stride_out_head + dims[None, :]
        )
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_parts", "num_tokens", "num_seqs"])
def hallmark_ordered_combine(
    part_ptr, stats_ptr, out_ptr, sinks_ptr, cu_seqlens_q_ptr, stride_out_token, stride_out_head, num_parts, num_tokens,
    num_seqs,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token. Parts past its keys have no weight, and change nothing."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(cu_seqlens_q_ptr + num_seqs):
        return
    dims = tl.arange(0, BLOCK_D)
    is_dim = (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for part in range(num_parts):
        at = row + (part * tl.num_programs(0) + head) * num_tokens.to(tl.int64) + tl.arange(0, 1)
        found_largest = tl.load(stats_ptr + at * 2)
        found = tl.load(stats_ptr + at * 2 + 1)
        value = tl.load(part_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=is_dim, other=0.0)
        acc, largest, total = fold(acc, largest, total, value, found_largest, found)
    sink, sink_weight = start_softmax(head + tl.arange(0, 1), sinks_ptr, 1, HAS_SINKS)
    out = normalised(acc, largest, total, sink, sink_weight)
    out_ptrs = out_ptr + row * stride_out_token + head.to(tl.int64) * stride_out_head + dims[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_dim)


def run_ordered(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Launch once or twice for the whole batch, without waiting for the device.

    The bits of a row depend on its query and on the keys and values that it sees, and on nothing else.
    q, out [tokens, heads, head_dim]; k, v [key tokens, kv_heads, head_dim] or [num_pages, page_size, kv_heads,
    head_dim]; last dims contiguous. Slots past a context may hold anything, NaN too. Not read: page-table entries past
    a sequence's last page, and those behind the windows of its queries.
    """
    attend_in_parts(q, k, v, batch, flags, out, part_keys=PART_KEYS)


def attend_in_parts(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *, part_keys: int
) -> None:
    """`run_ordered` with parts of another number of keys: a multiple of every tile's."""
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = (k.shape[1] if batch.is_paged else 0), k.shape[-2]
    group = num_heads // num_kv_heads
    tiles = ordered_tiles(head_dim, q.element_size(), shared_bytes(q.device))
    num_parts = -(-batch.max_context // part_keys)
    scratch = num_parts * num_heads * num_tokens
    is_few = batch.is_paged and batch.max_seqlen_q * group <= tiles.block_m
    is_split = is_few and num_parts > 1 and scratch * 4 * (head_dim + 2) <= _SCRATCH_BYTES
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
