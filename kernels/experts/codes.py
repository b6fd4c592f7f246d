"""mxfp4 in Triton: eight codes of an int32, and their scales, as numbers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

_CODE = tl.constexpr(-0x7E400000)  # 0x81C00000: the sign, two bits of exponent, one of mantissa
_TWO_126 = tl.constexpr(2.0**126)


@triton.jit
def numbers(codes, PLACE: tl.constexpr):
    """fp32, times 2^-126, of the codes at one of the 8 places of each int32.

    A code's exponent and mantissa, as those of an fp32 number, are the number times 2^-126, subnormal ones too.
    """
    return (((codes << (28 - 4 * PLACE)) >> 6) & _CODE).to(tl.float32, bitcast=True)


@triton.jit
def factors_of(scales):
    """fp32 of scales. 2^-127 is subnormal, and 255 is NaN: both as the format has them."""
    exponents = scales.to(tl.int32)
    bits = tl.where(exponents == 0, 0x00400000, tl.where(exponents == 255, 0x7FC00000, exponents << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def unpacked(codes, factors, dtype: tl.constexpr):
    """[rows, 8 * words] of dtype, exact in fp32 and rounded once; codes and factors [rows, words]."""
    ROWS: tl.constexpr = codes.shape[0]
    WORDS: tl.constexpr = codes.shape[1]
    pairs01 = tl.join(number(codes, factors, 0, dtype), number(codes, factors, 1, dtype))
    pairs23 = tl.join(number(codes, factors, 2, dtype), number(codes, factors, 3, dtype))
    pairs45 = tl.join(number(codes, factors, 4, dtype), number(codes, factors, 5, dtype))
    pairs67 = tl.join(number(codes, factors, 6, dtype), number(codes, factors, 7, dtype))
    # [rows, words, bit 0, bit 1, bit 2 of the place]
    places = tl.join(tl.join(pairs01, pairs23), tl.join(pairs45, pairs67))
    return tl.reshape(tl.permute(places, [0, 1, 4, 3, 2]), [ROWS, 8 * WORDS])


@triton.jit
def number(codes, factors, PLACE: tl.constexpr, dtype: tl.constexpr):
    return (numbers(codes, PLACE) * _TWO_126 * factors).to(dtype)
