"""`triton.latent.ordered`: `triton.latent` in one order of sums for all phases, so that a row's bits are its own.

The order is that of `kernels/portable/ordered.py`: keys are cut at absolute multiples of PART_KEYS, a part is an online
softmax over tiles at multiples of BLOCK_N, and parts are folded from the first to the last. All phases have one tile,
as many rows as wgmma multiplies. Of few queries each part is a program of its own, and a second kernel folds them;
elsewhere a tile's program folds its own. The grid depends on shapes and host bounds alone, so that a CUDA graph can
hold the launches.
"""

import triton
import triton.language as tl
from torch import Tensor, empty, float32

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.page_table import page_table_argument
from kernels.calls.processors import shared_bytes
from kernels.latent.launch_config import latent_tiles
from kernels.portable.launch_config import flag_arguments, padded_head_dim
from kernels.portable.ordered import _SCRATCH_BYTES as SCRATCH_BYTES
from kernels.portable.ordered import PART_KEYS, fold, normalised
from kernels.portable.tile import key_offsets, start_softmax, tanh, visible, visible_range

FEW_QUERIES = 8  # of a sequence, up to which its parts are programs: one, or one and drafted ones behind it
_ROWS = 64  # of a tile, whatever the phase: of fewer another instruction multiplies, which sums otherwise


@triton.jit
def latent_scores(
    q, q_rest, offsets, is_read, k_ptr, scale,
    LATENT: tl.constexpr, REST: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """(latents [N, BLOCK_L], scores [M, N] fp32) of the rows of keys at `offsets` [N] from k_ptr.

    Keys outside `is_read` are not read: 0 stands in for them, so that NaN there cannot leak through 0 * NaN.
    """
    dims = tl.arange(0, BLOCK_L)
    rests = tl.arange(0, BLOCK_R)
    k_rows = k_ptr + offsets[:, None]
    k = tl.load(k_rows + dims[None, :], mask=is_read[:, None] & (dims < LATENT)[None, :], other=0.0)
    k_rest = tl.load(k_rows + LATENT + rests[None, :], mask=is_read[:, None] & (rests < REST)[None, :], other=0.0)
    scores = tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
    scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee") * scale
    return k, scores


@triton.jit
def attend_latents(
    q, q_rest, positions, span_lo, span_hi, part, lo, hi, k_ptr, page_table_ptr, stride_k_page, stride_k_token, scale,
    softcap, window,
    PART_KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr, LATENT: tl.constexpr, REST: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """(a, m, l) of a query tile over one part of the keys, of which it sees those in [lo, hi).

    Keys outside [lo, hi) are not read.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    first = tl.maximum(part * PART_KEYS, lo // BLOCK_N * BLOCK_N)
    end = tl.minimum((part + 1) * PART_KEYS, hi)
    for start in tl.range(first, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_in_range = (keys >= lo) & (keys < hi)
        offsets = key_offsets(keys, is_in_range, page_table_ptr, stride_k_page, stride_k_token, PAGE_SIZE)
        k, scores = latent_scores(q, q_rest, offsets, is_in_range, k_ptr, scale, LATENT, REST, BLOCK_L, BLOCK_R)
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
    return acc, largest, denominator


@triton.jit(do_not_specialize=["stride_table", "window", "num_tokens", "num_parts"])
def hallmark_latent_ordered(
    q_ptr, k_ptr, out_ptr, part_ptr, stats_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, page_table_ptr, context_lens_ptr,
    sinks_ptr, spans_ptr, stride_q_token, stride_q_head, stride_k_page, stride_k_token, stride_k_head,
    stride_out_token, stride_out_head, stride_table, num_tokens, num_parts, scale, softcap, window,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, LATENT: tl.constexpr, REST: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of packed query rows of one KV head of one sequence; IS_SPLIT: over one part of its keys.

    PAGE_SIZE 0: keys are packed. IS_SPLIT: axis 0 is tiles times parts; a part without a key for its tile has m = -inf,
    and no a.
    part_ptr   [parts, heads, tokens, LATENT] fp32, stats_ptr [parts, heads, tokens, 2] fp32: (m, l)
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tile sees the most keys: start it first
    part = tile * 0
    if IS_SPLIT:
        tile = tl.program_id(0) // num_parts
        part = tl.program_id(0) % num_parts
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
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
        at = (part.to(tl.int64) * (tl.num_programs(1) * GROUP) + heads) * num_tokens + rows
        if (part * PART_KEYS >= hi) | ((part + 1) * PART_KEYS <= lo):
            tl.store(stats_ptr + at * 2, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
            return
    q = tl.load(q_rows + dims[None, :], mask=is_stored, other=0.0)
    q_rest = tl.load(q_rows + LATENT + rests[None, :], mask=is_row[:, None] & (rests < REST)[None, :], other=0.0)

    if IS_SPLIT:
        acc, largest, total = attend_latents(
            q, q_rest, positions, span_lo, span_hi, part, lo, hi, k_ptr, page_table_ptr, stride_k_page, stride_k_token,
            scale, softcap, window, PART_KEYS, PAGE_SIZE, LATENT, REST, BLOCK_L, BLOCK_R, BLOCK_M, BLOCK_N, CAUSAL,
            HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
        )  # fmt: skip
        tl.store(part_ptr + at[:, None] * LATENT + dims[None, :], acc, mask=is_stored)
        tl.store(stats_ptr + at * 2, largest, mask=is_row)
        tl.store(stats_ptr + at * 2 + 1, total, mask=is_row)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for each in range(lo // PART_KEYS, tl.cdiv(hi, PART_KEYS)):
            value, found_largest, found = attend_latents(
                q, q_rest, positions, span_lo, span_hi, each, lo, hi, k_ptr, page_table_ptr, stride_k_page,
                stride_k_token, scale, softcap, window, PART_KEYS, PAGE_SIZE, LATENT, REST, BLOCK_L, BLOCK_R, BLOCK_M,
                BLOCK_N, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
            )  # fmt: skip
            acc, largest, total = fold(acc, largest, total, value, found_largest, found)
        sink, sink_weight = start_softmax(heads, sinks_ptr, BLOCK_M, HAS_SINKS)
        out = normalised(acc, largest, total, sink, sink_weight) + 0.0  # no zero is negative
        out_rows = out_ptr + rows[:, None] * stride_out_token + heads.to(tl.int64)[:, None] * stride_out_head
        tl.store(out_rows + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_parts", "num_tokens", "num_seqs"])
def hallmark_latent_ordered_combine(
    part_ptr, stats_ptr, out_ptr, sinks_ptr, cu_seqlens_q_ptr, stride_out_token, stride_out_head, num_parts, num_tokens,
    num_seqs,
    LATENT: tl.constexpr, BLOCK_L: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token. Parts of which the token sees no key are not read, and change nothing."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(cu_seqlens_q_ptr + num_seqs):
        return
    dims = tl.arange(0, BLOCK_L)
    is_dim = (dims < LATENT)[None, :]
    one = tl.arange(0, 1)
    acc = tl.zeros([1, BLOCK_L], tl.float32)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for part in range(num_parts):
        at = row + (part * tl.num_programs(0) + head) * num_tokens.to(tl.int64)
        if tl.load(stats_ptr + at * 2) != float("-inf"):
            found_largest = tl.load(stats_ptr + at * 2 + one)
            found = tl.load(stats_ptr + at * 2 + 1 + one)
            value = tl.load(part_ptr + (at + one)[:, None] * LATENT + dims[None, :], mask=is_dim, other=0.0)
            acc, largest, total = fold(acc, largest, total, value, found_largest, found)
    sink, sink_weight = start_softmax(head + one, sinks_ptr, 1, HAS_SINKS)
    out = normalised(acc, largest, total, sink, sink_weight) + 0.0
    out_ptrs = out_ptr + row * stride_out_token + head.to(tl.int64) * stride_out_head + dims[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_dim)


def run_latent_ordered(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *,
    part_keys: int = PART_KEYS,
) -> None:  # fmt: skip
    """Launch once, or twice where parts are programs, for the whole batch, without waiting for the device.

    The bits of a row depend on its query and on the keys that it sees, and on nothing else.
    q [tokens, heads, latent + rest], out [tokens, heads, latent]; k [key tokens, kv_heads, latent + rest] or
    [num_pages, page_size, kv_heads, latent + rest]; v is the view of k's first `latent` numbers, whose sizes alone are
    read. Last dims contiguous. Slots past a context may hold anything, NaN too. Not read: page-table entries past a
    sequence's last page, and those behind its queries' windows.
    part_keys  another number, of another order: a multiple of every tile's
    """
    num_tokens, num_heads, head_dim = q.shape
    latent = v.shape[-1]
    page_size, num_kv_heads = (k.shape[1] if batch.is_paged else 0), k.shape[-2]
    group = num_heads // num_kv_heads
    tiles = latent_tiles(q.element_size(), _ROWS, shared_bytes(q.device))
    num_tiles = triton.cdiv(batch.max_seqlen_q * group, tiles.block_m)
    num_parts = max(1, -(-batch.max_context // part_keys))
    scratch = num_parts * num_heads * num_tokens
    # Whether parts are programs does not depend on their number: before ready, decode compiles both kernels.
    is_few = batch.is_paged and batch.max_seqlen_q <= FEW_QUERIES
    is_split = is_few and scratch * 4 * (latent + 2) <= SCRATCH_BYTES
    parts = empty(scratch * latent if is_split else 1, dtype=float32, device=q.device)
    stats = empty(scratch * 2 if is_split else 1, dtype=float32, device=q.device)
    strides = (0, *k.stride()) if page_size == 0 else k.stride()
    block_l, page_table = padded_head_dim(latent), page_table_argument(batch)
    hallmark_latent_ordered[num_tiles * (num_parts if is_split else 1), num_kv_heads, batch.num_seqs](
        q, k, out, parts, stats, batch.cu_seqlens_q, batch.cu_seqlens_k, page_table, batch.context_lens, flags.sinks,
        flags.spans, q.stride(0), q.stride(1), *strides[:3], out.stride(0), out.stride(1),
        0 if batch.page_table is None else batch.page_table.stride(0), num_tokens, num_parts, **flag_arguments(flags),
        GROUP=group, PAGE_SIZE=page_size, LATENT=latent, REST=head_dim - latent, BLOCK_L=block_l,
        BLOCK_R=padded_head_dim(head_dim - latent), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PART_KEYS=part_keys,
        IS_SPLIT=is_split, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if is_split:
        hallmark_latent_ordered_combine[num_heads, num_tokens](
            parts, stats, out, flags.sinks, batch.cu_seqlens_q, out.stride(0), out.stride(1), num_parts, num_tokens,
            batch.num_seqs, LATENT=latent, BLOCK_L=block_l, HAS_SINKS=flags.sinks is not None,
        )  # fmt: skip
