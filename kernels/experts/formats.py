"""Formats of the matrices of experts: those of `kinds.py`, and those that products with one weight have too.

Torch-free, so that a model's configuration can hold them.
"""

from enum import Enum

from kernels.experts.kinds import ExpertFormat
from kernels.linear.formats.int4_formats import INT4_32, INT4_64, INT4_128
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, WeightFormat


class FewBitFormat(Enum):
    """Format of experts of 8 or 4 bits with scales: the weights of all experts are one of this `WeightFormat`."""

    FP8_ROWS = FP8_ROWS.name
    FP8_STATIC = FP8_STATIC.name
    FP8_BLOCKS = FP8_BLOCKS.name
    INT4_32 = INT4_32.name
    INT4_64 = INT4_64.name
    INT4_128 = INT4_128.name

    @property
    def of_weights(self) -> WeightFormat:
        return WeightFormat(self.value)


AnyExpertFormat = ExpertFormat | FewBitFormat
_BLOCK = 128  # rows and columns that share a scale in blocks


def expert_format(name: str) -> AnyExpertFormat:
    """Return the format of this name. Raises ValueError for none."""
    if name in {it.value for it in FewBitFormat}:
        return FewBitFormat(name)
    return ExpertFormat(name)


def why_not_experts(found: AnyExpertFormat, hidden: int, width: int) -> str | None:
    """Return why experts of these sizes cannot be in a format, whose blocks would hold rows of two experts or parts."""
    if found is FewBitFormat.FP8_BLOCKS and (hidden % _BLOCK or width % _BLOCK):
        return f"blocks of {_BLOCK} by {_BLOCK} must divide the hidden size {hidden} and the width {width}"
    return None
