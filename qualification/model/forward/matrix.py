"""A weight as its file has it, and the product with it: inputs are rounded first where the weight has 8 bits.

The rounding of OCP's e4m3: three bits behind the first one, exponents from -6 on, at most 448, what is beyond cut off.
docs/limits.md ("Layers") says what becomes of inputs that may themselves be off.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from qualification.model.forward.bounded import Bounded, Precision, U, chunks_of, product

_LARGEST = 448.0
_SMALLEST_EXPONENT = -6
_BLOCK = 128  # rows and columns of a weight that share a scale, and inputs of a row that do
_LEAST_SCALE = 2.0**-100
_OF_A_QUOTIENT = 4 * U  # a scale, and a quotient by it, each rounded to fp32
_ONE_SIDED = 3**0.5  # a step to the next number has one direction: its variance is no third of its square


class Inputs(Enum):
    """Groups of a product's inputs that share a scale, by the names of the formats in a LayerConfig."""

    AS_THEY_ARE = "plain"
    ROWS = "fp8_rows"
    ALL = "fp8_static"
    RUNS = "fp8_blocks"

    @classmethod
    def of(cls, weight_format: str) -> "Inputs":
        """Return what products of a format, by its name, do with inputs: those of 4 bits leave them as they are."""
        is_of_4_bits = weight_format.startswith("int4_") or weight_format == "mxfp4"
        return cls.AS_THEY_ARE if is_of_4_bits else cls(weight_format)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [out, in].

    values       its numbers, or of 8 bits what is multiplied by the scales
    inputs       how a product rounds what it is given
    scales       [out, 1], or [out, ceil(in / 128)] of blocks, fp64; None where `values` are its numbers
    input_scale  of all inputs, fp64, where they have one
    input_bound  where inputs are cut off before they are rounded; None: nowhere
    rounds       whether `values` are rounded to 8 bits first, each row of the columns that are taken with its own scale
    """

    values: Tensor
    inputs: Inputs = Inputs.AS_THEY_ARE
    scales: Tensor | None = None
    input_scale: Tensor | None = None
    input_bound: float | None = None
    rounds: bool = False

    @classmethod
    def of_file(cls, values: Tensor, scale: Tensor, inputs: Inputs, input_scale: Tensor | None) -> "Matrix":
        """Return a weight of 8 bits, its scale as the file has it: of the whole, of each row, or of each block."""
        rows = values.shape[0]
        found = scale.double()
        if inputs is Inputs.RUNS:
            found = found.repeat_interleave(_BLOCK, 0)[:rows]
        else:
            found = found.reshape(-1, 1).expand(rows, 1)
        return cls(values, inputs, found, None if input_scale is None else input_scale.double().reshape(()))

    @property
    def num_rows(self) -> int:
        return self.values.shape[0]

    @property
    def num_columns(self) -> int:
        return self.values.shape[1]

    def rows(self, own: slice) -> "Matrix":
        """Return some rows."""
        return replace(self, values=self.values[own], scales=None if self.scales is None else self.scales[own])

    def columns(self, own: slice) -> "Matrix":
        """Return some columns; of blocks, whole ones."""
        scales = self.scales
        if scales is not None and self.inputs is Inputs.RUNS:
            scales = scales[:, own.start // _BLOCK : -(-own.stop // _BLOCK)]
        return replace(self, values=self.values[:, own], scales=scales)

    def numbers(self) -> Tensor:
        """Return the numbers that its file stands for, fp64 where they have scales."""
        return self.values if self.scales is None else torch.cat(list(self._numbers()))

    def product(self, x: Bounded, bias: Tensor | None, precision: Precision) -> Bounded:
        """Return x W^T + bias, x [T, in], summed in fp32 and not yet rounded."""
        if self.inputs is Inputs.AS_THEY_ARE:
            return product(x, self._numbers, bias, precision)
        if self.input_bound is not None:
            x = _cut_off(x, self.input_bound)
        rounded = _rounded(x, self.inputs, self.input_scale)
        # A GPU's steps of more than 64 tokens are by matrix units of 8 bits, a CPU's are in fp32.
        of_8_bits = x.truth.device.type != "cpu"
        found = product(rounded.inputs, self._numbers, bias, precision, of_8_bits=of_8_bits)
        if rounded.off is None:
            return found
        return replace(found, most=found.most + self._moved(rounded.inputs.truth, rounded.off))

    def _numbers(self) -> Iterator[Tensor]:
        """Yield some rows after others, fp64."""
        start = 0
        for rows in chunks_of(self.values)():
            stop = start + rows.shape[0]
            if self.rounds:
                yield _rounded_rows(rows.float())
            else:
                yield rows if self.scales is None else rows * _spread(self.scales[start:stop], self.num_columns)
            start = stop

    def _moved(self, truth: Tensor, off: Tensor) -> Tensor:
        """Return what scales that are off by shares `off` [T, runs] change: a run's numbers move together."""
        size = self.num_columns if off.shape[1] == 1 else _BLOCK
        parts = []
        for rows in self._numbers():
            part = torch.zeros(truth.shape[0], rows.shape[0], dtype=torch.float64, device=truth.device)
            for run in range(off.shape[1]):
                own = slice(run * size, (run + 1) * size)
                part += off[:, run : run + 1] * (truth[:, own] @ rows[:, own].T).abs()
            parts.append(part)
        return torch.cat(parts, dim=1)


@dataclass(frozen=True, slots=True)
class _RoundedInputs:
    """inputs  of the product
    off     the largest shares that their scales may be off by [T, runs]; None: by roundings of fp32 alone
    """

    inputs: Bounded
    off: Tensor | None


def _cut_off(x: Bounded, bound: float) -> Bounded:
    """Return x with magnitudes of at most a bound: what is beyond it by more than it may be off is exact then."""
    errs = x.truth.abs() - x.limit < bound
    return Bounded(x.truth.clamp(-bound, bound), x.most * errs, x.deviation * errs)


def _rounded(x: Bounded, inputs: Inputs, input_scale: Tensor | None) -> _RoundedInputs:
    """Return x [T, in] rounded to 8 bits. Where x may be off, a number may become the next one, and a scale differ."""
    size, width = x.truth.abs(), x.truth.shape[1]
    limit = x.limit
    if not bool(limit.any()):
        return _RoundedInputs(_exactly_rounded(x.truth.float(), inputs, input_scale), None)
    if inputs is Inputs.ALL:
        assert input_scale is not None, "the file has a scale of all inputs"
        scale = low = high = input_scale.expand(x.truth.shape[0], 1)
    else:
        scale, low, high = (
            (_largest(it, inputs) / _LARGEST).clamp_min(_LEAST_SCALE) for it in (size, size - limit, size + limit)
        )
    scales, lows, highs = (_spread(it, width) for it in (scale, low, high))
    nearest = e4m3(x.truth / scales)
    bottom, top = x.truth - limit, x.truth + limit
    lowest, highest = torch.minimum(bottom / lows, bottom / highs), torch.maximum(top / lows, top / highs)
    reach = torch.maximum(
        nearest - e4m3(lowest - _OF_A_QUOTIENT * lowest.abs()),
        e4m3(highest + _OF_A_QUOTIENT * highest.abs()) - nearest,
    )
    truth = nearest * scales
    found = Bounded(truth, _ONE_SIDED * reach * highs, 2 * U * truth.abs())
    return _RoundedInputs(found, None if inputs is Inputs.ALL else torch.maximum(high / scale - 1, 1 - low / scale))


def _exactly_rounded(x: Tensor, inputs: Inputs, input_scale: Tensor | None) -> Bounded:
    """Return x [T, in] fp32 rounded to 8 bits, scales and quotients in fp32: every right server has these codes.

    Inputs of 16 bits often lie halfway between two codes: half a percent of the demo's do.
    """
    if inputs is Inputs.ALL:
        assert input_scale is not None, "the file has a scale of all inputs"
        scale = input_scale.float().expand(x.shape[0], 1)
    else:
        scale = _scales(_largest(x.abs(), inputs))
    scales = _spread(scale, x.shape[1])
    truth = e4m3((x / scales).double()) * scales.double()
    return Bounded(truth, torch.zeros_like(truth), 2 * U * truth.abs())


def _rounded_rows(rows: Tensor) -> Tensor:
    """Return rows [n, in] fp32, each rounded with the scale that makes its largest number 448; quotients in fp32."""
    scales = _scales(rows.abs().amax(dim=1, keepdim=True))
    return e4m3((rows / scales).double()) * scales.double()


def _scales(largest: Tensor) -> Tensor:
    """Return the scales fp32 of these largest magnitudes, as IEEE 754 divides.

    By a tensor: on a GPU PyTorch divides by a number as it multiplies by its reciprocal.
    """
    return (largest / torch.full((), _LARGEST, device=largest.device)).clamp_min(_LEAST_SCALE)


def e4m3(values: Tensor) -> Tensor:
    """Return the nearest numbers of 8 bits, ties to those whose last bit is 0. fp64."""
    exponents = (torch.frexp(values.abs()).exponent - 1).clamp_min(_SMALLEST_EXPONENT)
    steps = torch.ldexp(torch.ones_like(values), exponents - 3)
    return ((values / steps).round() * steps).clamp(-_LARGEST, _LARGEST)


def _largest(sizes: Tensor, inputs: Inputs) -> Tensor:
    """Return the largest of each row [T, 1], or of each 128 numbers of a row [T, runs]."""
    if inputs is Inputs.ROWS:
        return sizes.amax(dim=1, keepdim=True)
    padded = F.pad(sizes, (0, -sizes.shape[1] % _BLOCK))
    return padded.reshape(sizes.shape[0], -1, _BLOCK).amax(dim=2)


def _spread(scales: Tensor, width: int) -> Tensor:
    """Return scales [n, 1], or of 128 numbers each, as one for each number [n, width], or [n, 1] still."""
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(_BLOCK, 1)[:, :width]
