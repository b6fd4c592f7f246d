"""`triton.asymmetric`: attention whose values have fewer numbers than keys, in every phase, on any GPU since Ampere.

The order of sums is that of `kernels/portable/ordered.py`: keys are cut at absolute multiples of PART_KEYS, a part is
an online softmax over tiles at multiples of BLOCK_N, and parts are folded from the first to the last. So the bits of a
row depend on its own keys only. Of few queries each part is a program of its own, and a second kernel folds them; under
a window these are the parts that it can reach, whatever the context. The grid depends on shapes and host bounds alone,
so that a CUDA graph can hold the launches.
"""

import triton
import triton.language as tl
from torch import Tensor, empty, float32

from kernels.asymmetric.launch_config import KeyBlocks, asymmetric_tiles
from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.page_table import page_table_argument
from kernels.calls.processors import shared_bytes
from kernels.portable.launch_config import flag_arguments, padded_head_dim
from kernels.portable.ordered import fold, hallmark_ordered_combine, normalised
from kernels.portable.tile import key_offsets, start_softmax, tanh, visible, visible_range

PART_KEYS = 512  # the name of the order says it
_FEW_QUERIES = 8  # of a sequence, up to which its parts are programs: one, or one and drafted ones behind it
_SCRATCH_BYTES = 256 << 20  # of parts, at most: where they would take more, a tile's program folds its own


@triton.jit
def attend_values(
    q, q_rest, positions, span_lo, span_hi, part, lo, hi, k_ptr, v_ptr, page_table_ptr, stride_k_page, stride_k_token,
    stride_v_page, stride_v_token, scale, softcap, window,
    PART_KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """(a, m, l) of a query tile over one part of the keys, of which it sees those in [lo, hi).

    Keys and values outside [lo, hi) are not read: 0 stands in for them, so that NaN there cannot leak through 0 * NaN.
    """
    dims = tl.arange(0, BLOCK_F)
    rests = tl.arange(0, BLOCK_R)
    values = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    first = tl.maximum(part * PART_KEYS, lo // BLOCK_N * BLOCK_N)
    end = tl.minimum((part + 1) * PART_KEYS, hi)
    for start in tl.range(first, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_in_range = (keys >= lo) & (keys < hi)
        k_offsets = key_offsets(keys, is_in_range, page_table_ptr, stride_k_page, stride_k_token, PAGE_SIZE)
        v_offsets = key_offsets(keys, is_in_range, page_table_ptr, stride_v_page, stride_v_token, PAGE_SIZE)
        k_rows = k_ptr + k_offsets[:, None]
        k = tl.load(k_rows + dims[None, :], mask=is_in_range[:, None] & (dims < FIRST)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = tl.load(
                k_rows + FIRST + rests[None, :], mask=is_in_range[:, None] & (rests < REST)[None, :], other=0.0
            )
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores *= scale
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
        v_mask = is_in_range[:, None] & (values < VALUE)[None, :]
        v = tl.load(v_ptr + v_offsets[:, None] + values[None, :], mask=v_mask, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, largest, denominator


@triton.jit(do_not_specialize=["stride_table", "window", "num_tokens", "num_parts"])
def hallmark_asymmetric(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, stats_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, page_table_ptr,
    context_lens_ptr, sinks_ptr, spans_ptr, stride_q_token, stride_q_head, stride_k_page, stride_k_token, stride_k_head,
    stride_v_page, stride_v_token, stride_v_head, stride_out_token, stride_out_head, stride_table, num_tokens,
    num_parts, scale, softcap, window,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PART_KEYS: tl.constexpr, IS_SPLIT: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of packed query rows of one KV head of one sequence; IS_SPLIT: over one part of its keys.

    PAGE_SIZE 0: keys are packed. IS_SPLIT: axis 0 is tiles times parts, the first part being the first that is seen.
    part_ptr   [parts, heads, tokens, VALUE] fp32, stats_ptr [parts, heads, tokens, 2] fp32: (m, l)
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tile sees the most keys: start it first
    place = 0
    if IS_SPLIT:
        tile = tl.program_id(0) // num_parts
        place = tl.program_id(0) % num_parts
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
    dims = tl.arange(0, BLOCK_F)
    values = tl.arange(0, BLOCK_V)
    is_stored = is_row[:, None] & (values < VALUE)[None, :]
    rows = (first_row + queries).to(tl.int64)
    q_rows = q_ptr + rows[:, None] * stride_q_token + heads.to(tl.int64)[:, None] * stride_q_head
    q = tl.load(q_rows + dims[None, :], mask=is_row[:, None] & (dims < FIRST)[None, :], other=0.0)
    q_rest = q  # unused where a key is one block
    if REST > 0:
        rests = tl.arange(0, BLOCK_R)
        q_rest = tl.load(q_rows + FIRST + rests[None, :], mask=is_row[:, None] & (rests < REST)[None, :], other=0.0)
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
        part = lo // PART_KEYS + place
        acc, largest, total = attend_values(
            q, q_rest, positions, span_lo, span_hi, part, lo, hi, k_ptr, v_ptr, page_table_ptr, stride_k_page,
            stride_k_token, stride_v_page, stride_v_token, scale, softcap, window, PART_KEYS, PAGE_SIZE, FIRST, REST,
            VALUE, BLOCK_F, BLOCK_R, BLOCK_V, BLOCK_M, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
        )  # fmt: skip
        num_heads = tl.num_programs(1) * GROUP
        at = (tl.cast(place, tl.int64) * num_heads + heads) * num_tokens + rows
        tl.store(part_ptr + at[:, None] * VALUE + values[None, :], acc, mask=is_stored)
        tl.store(stats_ptr + at * 2, largest, mask=is_row)
        tl.store(stats_ptr + at * 2 + 1, total, mask=is_row)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for part in range(lo // PART_KEYS, tl.cdiv(hi, PART_KEYS)):
            value, found_largest, found = attend_values(
                q, q_rest, positions, span_lo, span_hi, part, lo, hi, k_ptr, v_ptr, page_table_ptr, stride_k_page,
                stride_k_token, stride_v_page, stride_v_token, scale, softcap, window, PART_KEYS, PAGE_SIZE, FIRST,
                REST, VALUE, BLOCK_F, BLOCK_R, BLOCK_V, BLOCK_M, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
            )  # fmt: skip
            acc, largest, total = fold(acc, largest, total, value, found_largest, found)
        sink, sink_weight = start_softmax(heads, sinks_ptr, BLOCK_M, HAS_SINKS)
        out = normalised(acc, largest, total, sink, sink_weight)
        out_rows = out_ptr + rows[:, None] * stride_out_token + heads.to(tl.int64)[:, None] * stride_out_head
        tl.store(out_rows + values[None, :], out.to(out_ptr.dtype.element_ty), mask=is_stored)


def num_parts_of(batch: AttentionBatch, flags: AttentionFlags, part_keys: int) -> int:
    """Return the parts that a tile of few queries can see, at most."""
    most = max(1, -(-batch.max_context // part_keys))
    if flags.window is None or not flags.causal or flags.spans is not None:
        return most
    # So many keys in a row lie in one part more than they fill, where they begin inside of one.
    return min(most, -(-(flags.window + batch.max_seqlen_q - 1) // part_keys) + 1)


def run_asymmetric(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *,
    part_keys: int = PART_KEYS,
) -> None:  # fmt: skip
    """Launch once, or twice where parts are programs, for the whole batch, without waiting for the device.

    The bits of a row depend on its query and on the keys and values that it sees, and on nothing else.
    q [tokens, heads, head_dim], out [tokens, heads, value_dim]; k, v [key tokens, kv_heads, head_dim or value_dim] or
    [num_pages, page_size, kv_heads, head_dim or value_dim]; last dims contiguous. Slots past a context may hold
    anything, NaN too. Not read: page-table entries past a sequence's last page, and those behind its queries' windows.
    part_keys  another number, of another order: a multiple of every tile's
    """
    num_tokens, num_heads, head_dim = q.shape
    value_dim = v.shape[-1]
    page_size, num_kv_heads = (k.shape[1] if batch.is_paged else 0), k.shape[-2]
    group = num_heads // num_kv_heads
    tiles, blocks = asymmetric_tiles(q.element_size(), shared_bytes(q.device)), KeyBlocks.of(head_dim)
    num_tiles, num_parts = triton.cdiv(batch.max_seqlen_q * group, tiles.block_m), num_parts_of(batch, flags, part_keys)
    scratch = num_parts * num_heads * num_tokens
    is_few = batch.is_paged and batch.max_seqlen_q <= _FEW_QUERIES
    is_split = is_few and scratch * 4 * (value_dim + 2) <= _SCRATCH_BYTES
    parts = empty(scratch * value_dim if is_split else 1, dtype=float32, device=q.device)
    stats = empty(scratch * 2 if is_split else 1, dtype=float32, device=q.device)
    k_strides, v_strides = ((0, *x.stride()) if page_size == 0 else x.stride() for x in (k, v))
    block_v, page_table = padded_head_dim(value_dim), page_table_argument(batch)
    hallmark_asymmetric[num_tiles * (num_parts if is_split else 1), num_kv_heads, batch.num_seqs](
        q, k, v, out, parts, stats, batch.cu_seqlens_q, batch.cu_seqlens_k, page_table, batch.context_lens, flags.sinks,
        flags.spans, q.stride(0), q.stride(1), *k_strides[:3], *v_strides[:3], out.stride(0),
        out.stride(1), 0 if batch.page_table is None else batch.page_table.stride(0), num_tokens, num_parts,
        **flag_arguments(flags), GROUP=group, PAGE_SIZE=page_size, FIRST=blocks.first, REST=blocks.rest,
        VALUE=value_dim, BLOCK_F=blocks.block_first, BLOCK_R=blocks.block_rest, BLOCK_V=block_v,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PART_KEYS=part_keys, IS_SPLIT=is_split,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if is_split:
        hallmark_ordered_combine[num_heads, num_tokens](
            parts, stats, out, flags.sinks, batch.cu_seqlens_q, out.stride(0), out.stride(1), num_parts, num_tokens,
            batch.num_seqs, HEAD_DIM=value_dim, BLOCK_D=block_v, HAS_SINKS=flags.sinks is not None,
        )  # fmt: skip
