"""A toy format of weights: bytes with a scale a row. Its class, and a path that multiplies by it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.paths import LinearPath, RunLinear
from kernels.linear.shape import WeightFormat
from kernels.linear.torch_path import run_torch
from kernels.linear.weights import LinearWeight, PlainWeight, StoredTensor

INT8 = WeightFormat("int8")


@dataclass(frozen=True)
class Int8Weight(LinearWeight):
    """codes [rows, columns] int8 times scales [rows, 1] fp32, for inputs of fp32."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def format(cls) -> WeightFormat:
        return INT8

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> "Int8Weight":
        assert dtype is torch.float32
        return cls(torch.empty(rows, columns, dtype=torch.int8, device=device), torch.empty(rows, 1, device=device))

    @classmethod
    def of(cls, values: Tensor) -> "Int8Weight":
        scales = values.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
        return cls((values / scales).round().to(torch.int8), scales)

    @property
    def size(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def stored(self) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor(self.codes), "weight_scale": StoredTensor(self.scales, columns=None)}

    def rows(self, first: int, count: int) -> "Int8Weight":
        return Int8Weight(self.codes[first : first + count], self.scales[first : first + count])

    def dequantized(self, rows: slice | Tensor = slice(None)) -> Tensor:
        return self.codes[rows].double() * self.scales[rows].double()


def run_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill `out` with the product, in fp32."""
    run_torch(x, PlainWeight(weight.codes.float() * weight.scales), bias, epilogue, out)


def int8_path(like: LinearPath, run: RunLinear = run_int8) -> LinearPath:
    """Return a path of this format, with the other limits of `like`."""
    return replace(like, name="torch.int8", limits=replace(like.limits, formats=frozenset({INT8})), run=run)
