"""Weights of 4 bits: codes 0 to 15 less a zero point, times a scale, both of a group of numbers of a row.

Inputs are multiplied as they are. Checkpoints pack such codes in several ways, which all become this one when they are
loaded; docs/quantization.md lists them.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.formats.int4_formats import INT4_32, INT4_64, INT4_128
from kernels.linear.shape import WeightFormat
from kernels.linear.weights import LinearWeight, StoredTensor

CODES_IN_A_BYTE = 2  # the lower bits are the earlier column's
LARGEST = 15
_LEAST_SCALE = 2.0**-14  # of a group of equal numbers; normal in fp16, which files have


@dataclass(frozen=True, slots=True)
class Int4Weight(LinearWeight):
    """Numbers (code - zero) * scale.

    codes    [rows, ceil(columns / 2)] uint8, two codes each
    scales   [rows, ceil(columns / group)] fp32
    zeros    [rows, ceil(columns / group)] uint8, 0 to 16
    inputs   dtype of x
    columns  of the weight
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    inputs: torch.dtype
    columns: int

    group: ClassVar[int]

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Self:
        codes = torch.empty(rows, -(-columns // CODES_IN_A_BYTE), dtype=torch.uint8, device=device)
        groups = -(-columns // cls.group)
        zeros = torch.empty(rows, groups, dtype=torch.uint8, device=device)
        return cls(codes, torch.empty(rows, groups, device=device), zeros, dtype, columns)

    @classmethod
    def of(cls, values: Tensor) -> Self:
        rows, columns = values.shape
        padded = F.pad(values.float(), (0, -columns % cls.group))
        groups = padded.view(rows, -1, cls.group)
        least, most = groups.amin(-1).clamp_max_(0), groups.amax(-1).clamp_min_(0)
        scales = ((most - least) / LARGEST).clamp_min_(_LEAST_SCALE)
        zeros = (-least / scales).round_()
        codes = (groups / scales[..., None] + zeros[..., None]).round_().clamp_(0, LARGEST)
        packed = pack_pairs(codes.view(rows, -1)[:, :columns].to(torch.uint8))
        return cls(packed, scales, zeros.to(torch.uint8), values.dtype, columns)

    @property
    def size(self) -> tuple[int, int]:
        return self.codes.shape[0], self.columns

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def stored(self) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor(self.codes, columns=CODES_IN_A_BYTE),
            "weight_scale": StoredTensor(self.scales, columns=self.group),
            "weight_zero": StoredTensor(self.zeros, columns=self.group),
        }

    def rows(self, first: int, count: int) -> Self:
        part = slice(first, first + count)
        return replace(self, codes=self.codes[part], scales=self.scales[part], zeros=self.zeros[part])

    def dequantized(self, rows: slice | Tensor = slice(None)) -> Tensor:
        codes = unpack_pairs(self.codes[rows], self.columns).double()
        return (codes - self._of_each(self.zeros[rows])) * self._of_each(self.scales[rows])

    def _of_each(self, of_groups: Tensor) -> Tensor:
        return of_groups.double().repeat_interleave(self.group, 1)[:, : self.columns]


class Int4Weight32(Int4Weight):
    """32 numbers of a row are a group."""

    __slots__ = ()
    group = 32

    @classmethod
    def format(cls) -> WeightFormat:
        return INT4_32


class Int4Weight64(Int4Weight):
    """64 numbers of a row are a group."""

    __slots__ = ()
    group = 64

    @classmethod
    def format(cls) -> WeightFormat:
        return INT4_64


class Int4Weight128(Int4Weight):
    """128 numbers of a row are a group."""

    __slots__ = ()
    group = 128

    @classmethod
    def format(cls) -> WeightFormat:
        return INT4_128


def pack_pairs(codes: Tensor) -> Tensor:
    """Return codes [rows, columns] uint8, below 16, as [rows, ceil(columns / 2)]: the earlier one in the lower bits."""
    padded = F.pad(codes, (0, codes.shape[1] % CODES_IN_A_BYTE))
    return padded[:, 0::2] | padded[:, 1::2] << 4


def unpack_pairs(packed: Tensor, columns: int) -> Tensor:
    """Return codes [rows, columns] uint8 out of pairs."""
    return torch.stack((packed & LARGEST, packed >> 4), -1).flatten(1)[:, :columns]
