"""mxfp4 in Triton: 16 codes of two int32 in the order of bit_order.py, and their scales, as numbers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.experts.bit_order import KEPT, LAST_ROTATIONS, PATTERN, ROTATIONS, SHARED_ROTATION

_CODE = tl.constexpr(PATTERN & 0xFFFF0000)  # the sign, two bits of exponent, one of mantissa of an fp32 number
_ROTATIONS = tl.constexpr(ROTATIONS)
_LAST_ROTATIONS = tl.constexpr(LAST_ROTATIONS)
_KEPT = tl.constexpr(KEPT)
_SHARED = tl.constexpr(SHARED_ROTATION)
_TWO_126 = tl.constexpr(2.0**126)


@triton.jit
def rotated(bits, BY: tl.constexpr):
    """uint32 rotated right by 0 to 31, one instruction."""
    return bits if BY == 0 else (bits >> BY) | (bits << (32 - BY))


@triton.jit
def units_of(codes):
    """Both words of each unit of int32 codes [rows, words] and the one that holds their last pairs, uint32."""
    ROWS: tl.constexpr = codes.shape[0]
    WORDS: tl.constexpr = codes.shape[1]
    bits = tl.reshape(codes.to(tl.uint32, bitcast=True), [ROWS, WORDS // 2, 2])
    first, second = tl.split(bits)
    return first, second, (first & _KEPT) | (rotated(second, 32 - _SHARED) & (0xFFFFFFFF - _KEPT))


@triton.jit
def numbers(units, WORD: tl.constexpr, PLACE: tl.constexpr):
    """fp32, times 2^-126, of the codes at one of the 8 places of one word of each unit.

    A code's exponent and mantissa, as those of an fp32 number, are the number times 2^-126, subnormal ones too.
    """
    PAIR: tl.constexpr = PLACE % 4
    TO_HIGH: tl.constexpr = 0 if PLACE >= 4 else 16
    if PAIR < 3:
        bits = rotated(units[WORD], _ROTATIONS[PAIR] + TO_HIGH)
    else:
        bits = rotated(units[2], _LAST_ROTATIONS[WORD] + TO_HIGH)
    return (bits & _CODE).to(tl.float32, bitcast=True)


@triton.jit
def factors_of(scales):
    """fp32 of scales. 2^-127 is subnormal, and 255 is NaN: both as the format has them."""
    exponents = scales.to(tl.int32)
    bits = tl.where(exponents == 0, 0x00400000, tl.where(exponents == 255, 0x7FC00000, exponents << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def unpacked(codes, factors, dtype: tl.constexpr):
    """[rows, 8 * words] of dtype, exact in fp32 and rounded once; codes [rows, words], factors [rows, words / 2]."""
    ROWS: tl.constexpr = codes.shape[0]
    WORDS: tl.constexpr = codes.shape[1]
    units = units_of(codes)
    words = tl.join(word_of(units, factors, 0, dtype), word_of(units, factors, 1, dtype))
    # [rows, units, bit 2 of the place, bit 1, bit 0, word]
    return tl.reshape(tl.permute(words, [0, 1, 5, 2, 3, 4]), [ROWS, 8 * WORDS])


@triton.jit
def word_of(units, factors, WORD: tl.constexpr, dtype: tl.constexpr):
    """[rows, units, bit 2 of the place, bit 1, bit 0] of dtype."""
    pairs04 = tl.join(number(units, factors, WORD, 0, dtype), number(units, factors, WORD, 4, dtype))
    pairs15 = tl.join(number(units, factors, WORD, 1, dtype), number(units, factors, WORD, 5, dtype))
    pairs26 = tl.join(number(units, factors, WORD, 2, dtype), number(units, factors, WORD, 6, dtype))
    pairs37 = tl.join(number(units, factors, WORD, 3, dtype), number(units, factors, WORD, 7, dtype))
    # [rows, units, bit 2 of the place, bit 1, bit 0]
    return tl.join(tl.join(pairs04, pairs26), tl.join(pairs15, pairs37))


@triton.jit
def number(units, factors, WORD: tl.constexpr, PLACE: tl.constexpr, dtype: tl.constexpr):
    return (numbers(units, WORD, PLACE) * _TWO_126 * factors).to(dtype)
