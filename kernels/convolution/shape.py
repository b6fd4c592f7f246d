"""The shape of a convolution: everything that selects a kernel for it, and what it costs."""

import re
from dataclasses import dataclass

from kernels.convolution.sizes import ConvolutionSizes
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.recurrence_operator import CONVOLUTION
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase

CONVOLUTION_PHASES = (Phase.EXTEND, Phase.DECODE, Phase.VERIFY)
_LINE = re.compile(
    r"convolution (?P<phase>\w+) (?P<dtype>\w+) c(?P<channels>\d+) width(?P<width>\d+)(?P<bias> bias)? r-(?P<rows>\w+)"
)


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """The gated short causal convolution.

    phase  EXTEND for tokens of prompts, the first ones or later ones, beside which others may be
    dtype  of tokens, results and state
    rows   tokens of a call
    """

    phase: Phase
    dtype: Dtype
    channels: int
    width: int
    has_bias: bool
    rows: TokenRows

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no layer has."""
        if self.phase not in CONVOLUTION_PHASES:
            raise ValueError("tokens of prompts are of the phase extend, whether others are before them or not")
        ConvolutionSizes(self.channels, self.width, self.has_bias)

    @classmethod
    def of(cls, sizes: ConvolutionSizes, phase: Phase, dtype: Dtype, rows: TokenRows) -> "ConvolutionShape":
        return cls(phase, dtype, sizes.channels, sizes.width, sizes.has_bias, rows)

    @property
    def sizes(self) -> ConvolutionSizes:
        return ConvolutionSizes(self.channels, self.width, self.has_bias)

    @property
    def operator(self) -> Operator:
        return CONVOLUTION

    @property
    def kind(self) -> str:
        """The line without the bucket."""
        bias = " bias" if self.has_bias else ""
        return f"{CONVOLUTION.value} {self.phase.value} {self.dtype.value} c{self.channels} width{self.width}{bias}"

    def __str__(self) -> str:
        """One line for logs, plans and reports; unique for every shape."""
        return f"{self.kind} r-{self.rows.label}"

    def flops(self, num_rows: int) -> int:
        """Floating-point operations: both gates, and a product and a sum of each tap."""
        return num_rows * self.channels * (2 + 2 * self.width)

    def hbm_bytes(self, num_rows: int) -> int:
        """HBM bytes when tokens and results cross memory once, and of each row that is decoded its latest inputs."""
        tokens = 4 * num_rows if self.phase is Phase.EXTEND else (4 + self.width) * num_rows
        return tokens * self.channels * self.dtype.num_bytes


def parse_convolution_shape(text: str) -> ConvolutionShape:
    """Parse a shape's line. Raises ValueError for text that `str` makes of no shape."""
    found = _LINE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no shape of a convolution")
    field = found.groupdict()
    sizes = ConvolutionSizes(int(field["channels"]), int(field["width"]), field["bias"] is not None)
    shape = ConvolutionShape.of(sizes, Phase(field["phase"]), Dtype(field["dtype"]), TokenRows(field["rows"]))
    if str(shape) != text:
        raise ValueError(f"{text!r} is no shape of a convolution as {shape} is written")
    return shape
