"""Device functions of the Triton kernels over pages of 8 bits: the online softmax with scales of keys and of values.

Masks, pages and sinks are those of `kernels/portable/tile.py`. Keys and values are widened to the queries' dtype, which
is exact; a key's scale multiplies its scores, a value's its weight.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from kernels.portable.tile import key_offsets, tanh, visible

LARGEST_WEIGHT: tl.constexpr = tl.constexpr(4096.0)


@triton.jit
def attend_scaled_keys(
    q, acc, largest, denominator, positions, span_lo, span_hi, lo, hi, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
    page_table_ptr, stride_page, stride_token, stride_scales, scale, softcap, window,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """Online softmax of a query tile over keys [lo, hi), as `attend_keys` does it.

    Pointers are of the KV head in page 0; stride_page, stride_token of keys and values alike, stride_scales from page
    to page of scales. Weights times their values' scales, over the tile's largest scale, are at most 4096: any dtype of
    16 bits holds them, whatever the scales are, and in fp16 few are subnormal.
    """
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(lo, hi, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_in_range = keys < hi
        load_mask = is_in_range[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = key_offsets(keys, is_in_range, page_table_ptr, stride_page, stride_token, PAGE_SIZE)
        of_scales = key_offsets(keys, is_in_range, page_table_ptr, stride_scales, 1, PAGE_SIZE)
        k = tl.load(k_ptr + offsets[:, None] + dims[None, :], mask=load_mask, other=0.0)
        k_scales = tl.load(k_scales_ptr + of_scales, mask=is_in_range, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * (k_scales * scale)[None, :]
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
        v = tl.load(v_ptr + offsets[:, None] + dims[None, :], mask=load_mask, other=0.0)
        v_scales = tl.load(v_scales_ptr + of_scales, mask=is_in_range, other=0.0)
        unit = tl.max(v_scales, 0)  # positive: lo < hi
        weights = (weights * (v_scales * (LARGEST_WEIGHT / unit))[None, :]).to(q.dtype)
        summed = tl.dot(weights, v.to(q.dtype), input_precision="ieee")
        acc = acc * decay[:, None] + summed * (unit / LARGEST_WEIGHT)
    return acc, largest, denominator
