"""Device functions of the Triton attention kernels: visible keys of a tile, their addresses, the online softmax.

One truth for every mask, page and sink rule. Queries are packed: row r of a tile is query r // GROUP under head
kv_head * GROUP + r % GROUP, so that the query heads of a KV head share its keys. Scores are in units of log2(e).
"""

import triton
import triton.language as tl

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """Compute tanh, near 0 by a polynomial: 1 - 2 / (e^2x + 1) cancels there; the interpreter has no libdevice."""
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    far = 1.0 - 2.0 / (tl.exp2(x * (2 * _LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def visible_range(
    first,
    last,
    num_keys,
    window,
    span_lo,
    span_hi,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):
    """The keys [lo, hi) outside which no query at positions first..last sees anything. Empty if hi <= lo."""
    lo = first * 0
    hi = num_keys
    if CAUSAL:
        hi = tl.minimum(num_keys, last + 1)
        if HAS_WINDOW:
            lo = tl.maximum(0, first - window + 1)
        if HAS_SPANS:
            has_span = span_lo < span_hi
            lo = tl.minimum(lo, tl.maximum(0, tl.min(tl.where(has_span, span_lo, lo))))
            hi = tl.maximum(hi, tl.minimum(num_keys, tl.max(tl.where(has_span, span_hi, hi))))
    return lo, hi


@triton.jit
def visible(
    positions, keys, window, span_lo, span_hi, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SPANS: tl.constexpr
):
    """Return which keys [N] queries at positions [M] see, all keys being inside the context: bool [M, N]."""
    seen = (positions[:, None] >= 0) | (keys[None, :] >= 0)  # all of them
    if CAUSAL:
        seen = keys[None, :] <= positions[:, None]
        if HAS_WINDOW:
            seen &= keys[None, :] > positions[:, None] - window
        if HAS_SPANS:
            seen |= (span_lo[:, None] <= keys[None, :]) & (keys[None, :] < span_hi[:, None])
    return seen


@triton.jit
def key_offsets(keys, is_in_range, page_table_ptr, stride_page, stride_token, PAGE_SIZE: tl.constexpr):
    """Element offsets of key positions from the sequence's first key, or through its row of the page table (int64)."""
    if PAGE_SIZE == 0:  # packed
        return keys.to(tl.int64) * stride_token
    # Masked: entries past the sequence's last page are never read.
    page = tl.load(page_table_ptr + keys // PAGE_SIZE, mask=is_in_range, other=0)
    return page.to(tl.int64) * stride_page + (keys % PAGE_SIZE).to(tl.int64) * stride_token


@triton.jit
def start_softmax(heads, sinks_ptr, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The running maximum and denominator before any key: a sink is a logit without a value."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks_ptr + heads).to(tl.float32) * _LOG2E
        denominator = tl.where(largest > float("-inf"), 1.0, 0.0)
    return largest, denominator


@triton.jit
def attend_keys(
    q, acc, largest, denominator, positions, span_lo, span_hi, lo, hi, k_ptr, v_ptr, page_table_ptr,
    stride_k_page, stride_k_token, stride_v_page, stride_v_token, scale, softcap, window,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """Online softmax of a query tile over keys [lo, hi).

    Without IS_MASKED every row must see all of them, and BLOCK_N divide their number.
    q [M, D]; acc [M, D] fp32; largest, denominator [M] fp32; positions, span_lo, span_hi [M]. Returns the three states.
    scale, softcap as `flag_arguments` makes them: without a softcap scores become q @ k * scale, in units of log2(e);
    with one they become softcap * tanh(q @ k * scale).
    Keys and values outside [lo, hi) are not read: 0 stands in for them, so that NaN there cannot leak through 0 * NaN.
    """
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(lo, hi, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_in_range = keys < hi
        load_mask = is_in_range[:, None] & (dims < HEAD_DIM)[None, :]
        k_offsets = key_offsets(keys, is_in_range, page_table_ptr, stride_k_page, stride_k_token, PAGE_SIZE)
        v_offsets = key_offsets(keys, is_in_range, page_table_ptr, stride_v_page, stride_v_token, PAGE_SIZE)
        k_ptrs = k_ptr + k_offsets[:, None] + dims[None, :]
        v_ptrs = v_ptr + v_offsets[:, None] + dims[None, :]
        if IS_MASKED or HEAD_DIM != BLOCK_D:
            k = tl.load(k_ptrs, mask=load_mask, other=0.0)
        else:
            k = tl.load(k_ptrs)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores)
        if IS_MASKED:
            seen = visible(positions, keys, window, span_lo, span_hi, CAUSAL, HAS_WINDOW, HAS_SPANS)
            scores = tl.where(seen & is_in_range[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet stays at -inf: 0 in its place keeps exp2(-inf + inf) from being NaN.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(largest - reference)
        denominator = denominator * decay + tl.sum(weights, 1)
        largest = new_largest
        if IS_MASKED or HEAD_DIM != BLOCK_D:
            v = tl.load(v_ptrs, mask=load_mask, other=0.0)
        else:
            v = tl.load(v_ptrs)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, largest, denominator


@triton.jit
def attend_query_tile(
    tile, kv_head, first_row, num_queries, num_keys, q_ptr, k_ptr, v_ptr, out_ptr, page_table_ptr, sinks_ptr, spans_ptr,
    stride_q_token, stride_q_head, stride_k_page, stride_k_token, stride_v_page, stride_v_token,
    stride_out_token, stride_out_head, scale, softcap, window,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_M packed rows of one sequence and one KV head, stored to their rows of out.

    k_ptr, v_ptr point at the KV head of the sequence's first key (packed) or of page 0; first_row is the sequence's
    first row of q. The tiles that every row sees whole go first, without a mask; then those on the diagonal.
    """
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
    whole = lo  # keys [lo, whole) are seen by every row
    if not (HAS_WINDOW or HAS_SPANS):
        seen_by_all = num_keys
        if CAUSAL:
            seen_by_all = tl.maximum(0, tl.minimum(num_keys, first + 1))
        whole = seen_by_all // BLOCK_N * BLOCK_N

    largest, denominator = start_softmax(heads, sinks_ptr, BLOCK_M, HAS_SINKS)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc, largest, denominator = attend_keys(
        q, acc, largest, denominator, positions, span_lo, span_hi, lo, whole, k_ptr, v_ptr, page_table_ptr,
        stride_k_page, stride_k_token, stride_v_page, stride_v_token, scale, softcap, window,
        PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, False, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
    )  # fmt: skip
    acc, largest, denominator = attend_keys(
        q, acc, largest, denominator, positions, span_lo, span_hi, whole, hi, k_ptr, v_ptr, page_table_ptr,
        stride_k_page, stride_k_token, stride_v_page, stride_v_token, scale, softcap, window,
        PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
    )  # fmt: skip
    out = acc / tl.where(denominator == 0.0, 1.0, denominator)[:, None]  # a query that sees no key gives 0
    out_ptrs = (
        out_ptr + rows[:, None] * stride_out_token + heads.to(tl.int64)[:, None] * stride_out_head + dims[None, :]
    )
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_stored)
