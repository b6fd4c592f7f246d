"""Inputs of products that the norm before them has rounded to numbers of 8 bits, and the calls that take such."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.fused.norm import rms_norm


@dataclass(frozen=True, slots=True)
class RoundedInput:
    """RMSNorm of rows, rounded as the weight of one product says: in the place of that product's x.

    maker     the call that takes it: another one may read codes and scales otherwise
    codes     [at least rows, size_in up to the next 128] e4m3, zeros behind the inputs' columns
    scales    fp32: [1, rows], [1] for all, or [runs, at least rows] of 128 columns each
    residual  [rows, size_in]: what the norm is of. It must not change before the product is launched
    weight    [size_in], and eps: of the norm
    """

    maker: "TakesRounded"
    codes: Tensor
    scales: Tensor
    residual: Tensor
    weight: Tensor
    eps: float

    @property
    def shape(self) -> torch.Size:
        """Return rows and columns of the inputs."""
        return self.residual.shape

    def plain(self) -> Tensor:
        """Return the inputs [rows, size_in] as they were rounded from, to the bit: the norm once more, alone."""
        return rms_norm(self.residual, self.weight, self.eps)

    def new_empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        return self.residual.new_empty(*size, dtype=dtype)


Input = Tensor | RoundedInput  # [rows, size_in] of a product


def unrounded(x: Input) -> Tensor:
    """Return inputs in their own dtype."""
    return x.plain() if isinstance(x, RoundedInput) else x


class TakesRounded(ABC):
    """A call of products, in the form of `RunLinear`, that takes what its own `normed` makes in the place of x.

    most_columns  of a row that it norms
    """

    __slots__ = ()
    most_columns: ClassVar[int] = 16_384

    @abstractmethod
    def __call__(self, x: Input, weight: Any, bias: Tensor | None, epilogue: Any, out: Tensor, /) -> None:
        """Fill out [rows, size_out] with epilogue(x @ weight^T + bias)."""

    @abstractmethod
    def round_norm(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Any, /
    ) -> tuple[Tensor, Tensor]:
        """Add x to the residual, in place, norm that, and return its codes and scales, as `RoundedInput` has them.

        x, residual  [rows, size_in], contiguous, of one dtype, apart in memory; without a residual the norm is of x
        norm         [size_in], the factors
        weight       of the product, whose format says how inputs are rounded
        The numbers are those of `kernels/fused/norm.py`, rounded to x's dtype and then to 8 bits, to the bit.
        """

    def normed(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Any
    ) -> tuple[RoundedInput, Tensor]:
        """Return the input that `round_norm` makes, and the residual behind it: x itself where there was none."""
        codes, scales = self.round_norm(x, residual, norm, eps, weight)
        total = x if residual is None else residual
        return RoundedInput(self, codes, scales, total, norm, eps), total
