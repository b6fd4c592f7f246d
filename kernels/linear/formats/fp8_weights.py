"""Weights of 8 bits: numbers e4m3, at most 448, times scales of fp32; and the rounding of inputs that goes with each.

A product multiplies the rounded inputs by the weight's own numbers: `as_multiplied` and `dequantized` are both exact,
so that a path is judged by what it was given. Sources: OCP 8-bit floating point 1.0; the makers' definitions, which
docs/quantization.md lists.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, WeightFormat
from kernels.linear.weights import LinearWeight, StoredTensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3; a conversion of more gives NaN
BLOCK = 128  # rows and columns that share a scale, and numbers of a row of x that do
LEAST_SCALE = 2.0**-100  # of a row or run of zeros
_SCALE_OF_INPUTS = 0.05  # where no checkpoint says one: large inputs of a trial are then cut off


def rounded(values: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers e4m3 nearest to values / scales, those beyond 448 cut off. Both fp32; scales broadcast."""
    return (values / scales).clamp_(-LARGEST, LARGEST).to(E4M3)


def scales_of(largest: Tensor) -> Tensor:
    """Return the scales fp32 by which these largest magnitudes become 448."""
    # By a tensor: on a GPU PyTorch multiplies by a number's reciprocal, which is one unit of the last place off.
    by = torch.full((), LARGEST, device=largest.device)
    return (largest / by).clamp_min_(LEAST_SCALE)


def scales_of_rows(values: Tensor) -> Tensor:
    """Return the scale of each row [rows, 1] fp32, by which its largest magnitude becomes 448."""
    return scales_of(values.float().abs().amax(-1, keepdim=True))


def scales_of_runs(values: Tensor) -> Tensor:
    """Return the scale of each 128 numbers of a row [rows, ceil(columns / 128)] fp32; the last run may be shorter."""
    rows, columns = values.shape
    padded = F.pad(values.float(), (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    return scales_of(padded.abs().amax(-1))


def spread(scales: Tensor, size: int, dim: int) -> Tensor:
    """Return scales of 128 numbers along a dim, one for each of `size` numbers."""
    return scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)


@dataclass(frozen=True, slots=True)
class _Fp8Weight(LinearWeight):
    """codes   [rows, columns] e4m3
    scales  fp32
    inputs  dtype of x
    """

    codes: Tensor
    scales: Tensor
    inputs: torch.dtype

    @property
    def size(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs

    @property
    def device(self) -> torch.device:
        return self.codes.device


class _ScaledRows(_Fp8Weight):
    """scales [rows, 1]"""

    __slots__ = ()

    def dequantized(self, rows: slice | Tensor = slice(None)) -> Tensor:
        return self.codes[rows].double() * self.scales[rows].double()


@dataclass(frozen=True, slots=True)
class Fp8RowsWeight(_ScaledRows):
    """scales [rows, 1]; a row of x is rounded with a scale of its own."""

    @classmethod
    def format(cls) -> WeightFormat:
        return FP8_ROWS

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Self:
        return cls(_empty_codes(rows, columns, device), torch.empty(rows, 1, device=device), dtype)

    @classmethod
    def of(cls, values: Tensor) -> Self:
        scales = scales_of_rows(values)
        return cls(rounded(values.float(), scales), scales, values.dtype)

    @property
    def stored(self) -> dict[str, StoredTensor]:
        scales = StoredTensor(self.scales, columns=None, is_scale=True)
        return {"weight": StoredTensor(self.codes), "weight_scale": scales}

    def rows(self, first: int, count: int) -> Self:
        part = slice(first, first + count)
        return replace(self, codes=self.codes[part], scales=self.scales[part])

    def as_multiplied(self, x: Tensor) -> Tensor:
        scales = scales_of_rows(x)
        return rounded(x.float(), scales).double() * scales.double()


@dataclass(frozen=True, slots=True)
class Fp8StaticWeight(_ScaledRows):
    """scales [rows, 1]; all of x is rounded with one scale.

    input_scales  [rows, 1], which must all be the same once the weight is loaded: those of the parts that a checkpoint
                  keeps apart are of the same x
    """

    input_scales: Tensor

    @classmethod
    def format(cls) -> WeightFormat:
        return FP8_STATIC

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Self:
        scales = (torch.empty(rows, 1, device=device) for _ in range(2))
        return cls(_empty_codes(rows, columns, device), next(scales), dtype, next(scales))

    @classmethod
    def of(cls, values: Tensor) -> Self:
        scales = scales_of_rows(values)
        return cls(rounded(values.float(), scales), scales, values.dtype, torch.full_like(scales, _SCALE_OF_INPUTS))

    @property
    def stored(self) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor(self.codes),
            "weight_scale": StoredTensor(self.scales, columns=None, is_scale=True),
            "input_scale": StoredTensor(self.input_scales, columns=None, is_scale=True),
        }

    def rows(self, first: int, count: int) -> Self:
        part = slice(first, first + count)
        scales, input_scales = self.scales[part], self.input_scales[part]
        return replace(self, codes=self.codes[part], scales=scales, input_scales=input_scales)

    def as_multiplied(self, x: Tensor) -> Tensor:
        scale = self.input_scales[0]
        return rounded(x.float(), scale).double() * scale.double()

    def why_unusable(self) -> str | None:
        if bool((self.input_scales == self.input_scales[0]).all()):
            return None
        found = sorted(set(self.input_scales.flatten().tolist()))
        return f"input_scale of parts that are one product must be the same, found {found[:4]}"


@dataclass(frozen=True, slots=True)
class Fp8BlocksWeight(_Fp8Weight):
    """scales [ceil(rows / 128), ceil(columns / 128)]; each 128 numbers of a row of x are rounded with their own."""

    @classmethod
    def format(cls) -> WeightFormat:
        return FP8_BLOCKS

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Self:
        scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK), device=device)
        return cls(_empty_codes(rows, columns, device), scales, dtype)

    @classmethod
    def of(cls, values: Tensor) -> Self:
        rows, columns = values.shape
        padded = F.pad(values.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
        scales = scales_of(blocks.abs().amax((1, 3)))
        return cls(rounded(values.float(), _of_each_number(scales, rows, columns)), scales, values.dtype)

    @property
    def stored(self) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor(self.codes),
            "weight_scale": StoredTensor(self.scales, rows=BLOCK, columns=BLOCK, is_scale=True),
        }

    def rows(self, first: int, count: int) -> Self:
        """Raises ValueError where a block would be cut."""
        end = first + count
        if first % BLOCK or (end % BLOCK and end != self.codes.shape[0]):
            raise ValueError(f"rows {first} to {end} cut a block of {BLOCK}")
        return replace(self, codes=self.codes[first:end], scales=self.scales[first // BLOCK : -(-end // BLOCK)])

    def dequantized(self, rows: slice | Tensor = slice(None)) -> Tensor:
        scales = spread(self.scales, self.codes.shape[0], 0)[rows]
        return self.codes[rows].double() * spread(scales, self.codes.shape[1], 1).double()

    def as_multiplied(self, x: Tensor) -> Tensor:
        scales = spread(scales_of_runs(x), x.shape[1], 1)
        return rounded(x.float(), scales).double() * scales.double()


Fp8Weight = Fp8RowsWeight | Fp8StaticWeight | Fp8BlocksWeight


def _empty_codes(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.empty(rows, columns, dtype=E4M3, device=device)


def _of_each_number(scales: Tensor, rows: int, columns: int) -> Tensor:
    return spread(spread(scales, rows, 0), columns, 1)
