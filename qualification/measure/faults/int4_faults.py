"""Wrong products with weights of 4 bits that must be refused: faults of codes, scales and zero points."""

from dataclasses import replace
from enum import Enum

from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.int4_formats import INT4_32, INT4_128
from kernels.linear.formats.int4_weights import Int4Weight
from kernels.linear.paths import RunLinear
from kernels.linear.shape import LinearShape
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.faults.linear_faults import product_of


class Int4Fault(Enum):
    """A fault of a wrong kernel or loader; the comment says how a real one comes by it."""

    NONE = "none"  # the checker must pass this one
    NEIGHBOURS_SCALE = "a group's scale is its neighbour's"  # an index off by one
    NEIGHBOURS_ZERO = "a group's zero point is the next row's"  # zero points are packed along the other dim
    ZERO_OFF_BY_ONE = "zero points are one less"  # GPTQ's first version read as its second
    ZERO_IN_THE_MIDDLE = "all zero points are 8"  # a kernel for symmetric weights
    PAIRS_SWAPPED = "the two codes of a byte are swapped"  # higher bits first
    LAST_GROUP_BY_THE_FIRST = "the last group has the first one's scale"  # a loop that wraps around


def trial_shapes() -> tuple[LinearShape, ...]:
    """Small shapes, in all of which each fault shows; the last group of a row is not full."""
    sizes = {INT4_32: (72, 40), INT4_128: (200, 40)}
    return tuple(LinearShape(Dtype.BF16, *size, LinearRows.LE_8, weight_format=it) for it, size in sizes.items())


def wrong_int4(fault: Int4Fault) -> RunLinear:
    """Return a product with this fault."""

    def run(x: Tensor, weight: Int4Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
        product_of(x.double(), _with(weight, fault).dequantized(), bias, epilogue, out)

    return run


def _with(weight: Int4Weight, fault: Int4Fault) -> Int4Weight:
    match fault:
        case Int4Fault.NEIGHBOURS_SCALE:
            return replace(weight, scales=weight.scales.roll(1, 1))
        case Int4Fault.NEIGHBOURS_ZERO:
            return replace(weight, zeros=weight.zeros.roll(1, 0))
        case Int4Fault.ZERO_OFF_BY_ONE:
            return replace(weight, zeros=weight.zeros - 1)
        case Int4Fault.ZERO_IN_THE_MIDDLE:
            return replace(weight, zeros=weight.zeros * 0 + 8)
        case Int4Fault.PAIRS_SWAPPED:
            return replace(weight, codes=weight.codes << 4 | weight.codes >> 4)
        case Int4Fault.LAST_GROUP_BY_THE_FIRST:
            scales = weight.scales.clone()
            scales[:, -1] = scales[:, 0]
            return replace(weight, scales=scales)
    return weight
