"""Accesses of 16 bytes to one's own and to peers' memory, as four words of 32 bits; addresses are integers.

A word in an inbox is either a value or EMPTY, whose bits are all ones: two NaNs of 16 bits, or one of 32. A sender
replaces such a word by other NaNs, so that a word that is not EMPTY has arrived: no flag is needed, and no order
between words. A word is read and written as a whole, so a unit of four words may arrive in any order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)
OTHER_NANS = tl.constexpr(0x7FC07FC0)  # NaN as one fp32, and as two of fp16 or bf16


@triton.jit
def load_unit(at, inside):
    """The four words at each address; zeros where `inside` is 0."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $5, 0;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
        }""",
        "=&r,=&r,=&r,=&r,l,r",
        [at, inside],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_unit(at, words, inside):
    """Write four words to each address of this GPU's memory."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $6, 0;
        @p st.global.v4.b32 [$1], {$2, $3, $4, $5};
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r,r,r,r",
        [at, words[0], words[1], words[2], words[3], inside],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def send_unit(at, words, inside):
    """Write four words, none of them EMPTY, to each address of an inbox of any GPU."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $6, 0;
        @p st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r,r,r,r",
        [at, words[0], words[1], words[2], words[3], inside],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def await_unit(at, inside):
    """Wait until none of the four words at each address is EMPTY, and return them; zeros where `inside` is 0."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p, q;
        setp.ne.b32 p, $5, 0;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        @!p bra DONE;
        AGAIN:
        ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
        setp.eq.b32 q, $0, -1;
        setp.eq.or.b32 q, $1, -1, q;
        setp.eq.or.b32 q, $2, -1, q;
        setp.eq.or.b32 q, $3, -1, q;
        @q bra AGAIN;
        DONE:
        }""",
        "=&r,=&r,=&r,=&r,l,r",
        [at, inside],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def clear_unit(at, inside):
    """Write EMPTY to the four words at each address of one's own inbox."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 e;
        setp.ne.b32 p, $2, 0;
        mov.b32 e, -1;
        @p st.relaxed.sys.global.v4.b32 [$1], {e, e, e, e};
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [at, inside],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def sendable(words):
    """The words, those that are EMPTY as other NaNs."""
    a, b, c, d = words
    a = tl.where(a == EMPTY, OTHER_NANS, a)
    b = tl.where(b == EMPTY, OTHER_NANS, b)
    c = tl.where(c == EMPTY, OTHER_NANS, c)
    d = tl.where(d == EMPTY, OTHER_NANS, d)
    return a, b, c, d


@triton.jit
def _low(word, DTYPE: tl.constexpr):
    return (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high(word, DTYPE: tl.constexpr):
    return (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def unpacked(words, DTYPE: tl.constexpr):
    """The eight values of 16 bits in four words, as fp32; the one at the lower address first."""
    a, b, c, d = words
    return (
        _low(a, DTYPE), _high(a, DTYPE), _low(b, DTYPE), _high(b, DTYPE),
        _low(c, DTYPE), _high(c, DTYPE), _low(d, DTYPE), _high(d, DTYPE),
    )  # fmt: skip


@triton.jit
def _word(low, high, DTYPE: tl.constexpr):
    below = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return below | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def packed(values, DTYPE: tl.constexpr):
    """Eight fp32 rounded to DTYPE, in four words."""
    a, b, c, d, e, f, g, h = values
    return _word(a, b, DTYPE), _word(c, d, DTYPE), _word(e, f, DTYPE), _word(g, h, DTYPE)


@triton.jit
def add8(x, y):
    """Sums of eight pairs."""
    a, b, c, d, e, f, g, h = x
    i, j, k, m, n, o, p, q = y
    return a + i, b + j, c + k, d + m, e + n, f + o, g + p, h + q


@triton.jit
def multiply8(x, y):
    """Products of eight pairs."""
    a, b, c, d, e, f, g, h = x
    i, j, k, m, n, o, p, q = y
    return a * i, b * j, c * k, d * m, e * n, f * o, g * p, h * q


@triton.jit
def scale8(x, scale):
    """Eight products by one number."""
    a, b, c, d, e, f, g, h = x
    return a * scale, b * scale, c * scale, d * scale, e * scale, f * scale, g * scale, h * scale


@triton.jit
def sum_of_squares(x):
    """Return the sum of squares of eight tensors over all their elements."""
    a, b, c, d, e, f, g, h = x
    return tl.sum((a * a + b * b) + (c * c + d * d) + ((e * e + f * f) + (g * g + h * h)), axis=0)
