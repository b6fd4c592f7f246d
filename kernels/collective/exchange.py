"""The kernel behind an exchange of two ranks' rows: their sum, or the residual's with it, and its norm."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl


@triton.jit
def _await(word_ptr):
    """Return 0, when a word is 0: what was written before it is seen by what is read behind this."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred is_other;
        again:
        ld.acquire.sys.global.u32 $0, [$1];
        setp.ne.u32 is_other, $0, 0;
        @is_other bra again;
        }""",
        "=r,l", [word_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["second", "third", "fourth"])
def hallmark_exchange_sum(
    own_ptr, other_ptr, words_ptr, second, third, fourth, residual_ptr, weight_ptr, out_ptr, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, WORD: tl.constexpr, AWAITS: tl.constexpr = True,
):  # fmt: skip
    """One program a row, which is in registers: in the order and with the roundings of NCCL and `_rms_norm_kernel`.

    All rows [rows, SIZE] and contiguous; out may be own.
    other                  what the other rank sends
    words                  of each piece `arrived` and `sent`, each WORD integers
    second, third, fourth  rows that these pieces begin with
    """
    index = tl.program_id(0)
    row = index.to(tl.int64) * SIZE
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    x = tl.load(own_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        before = tl.load(residual_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if AWAITS:
        piece = (index >= second).to(tl.int32) + (index >= third).to(tl.int32) + (index >= fourth).to(tl.int32)
        word = words_ptr + piece * (2 * WORD)
        row += _await(word) + _await(word + WORD)  # nothing: addresses depend on it, so that no access goes ahead
    x += tl.load(other_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
    rounded = x.to(own_ptr.dtype.element_ty)
    if HAS_NORM:
        x = rounded.to(tl.float32) + before
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row + cols, rounded, mask=mask)
        x = rounded.to(tl.float32)  # the next layer reads the rounded sum, and so does this norm
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
        rounded = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row + cols, rounded, mask=mask)
