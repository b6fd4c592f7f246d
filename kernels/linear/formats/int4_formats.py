"""Formats of weights of 4 bits: codes less a zero point, times a scale, both of so many numbers of a row.

What a product of such a weight must read is counted as 16 bits by its shape, whose code evidence is bound to.
"""

from kernels.linear.shape import WeightFormat
from kernels.vocabulary.shape import Dtype

INT4_32, INT4_64, INT4_128 = (WeightFormat(f"int4_{group}") for group in (32, 64, 128))
INT4_FORMATS = frozenset({INT4_32, INT4_64, INT4_128})


def bytes_of(weight_format: WeightFormat, count: int, dtype: Dtype) -> int:
    """Return the bytes of so many numbers of a weight, scales not counted, for products of inputs of that dtype."""
    return count // 2 if weight_format in INT4_FORMATS else count * weight_format.num_bytes(dtype)
