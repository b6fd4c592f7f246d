"""Weights of products: objects that own their tensors and know their format.

A product's kernel takes the object of its format. Whoever loads a checkpoint asks the object which tensors it keeps and
how they are cut by rows and columns; whoever proves or checks a product asks it for its numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import isabstract
from typing import Self

import torch
from torch import Tensor

from kernels.linear.shape import PLAIN, WeightFormat


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a weight, which a checkpoint stores under a name of its own.

    values    its first dim counts blocks of the weight's rows, its second, where it has one, blocks of columns
    rows      rows of the weight in a block, the last of which may have fewer
    columns   columns of the weight in a block, likewise; None: a block has all of them
    is_scale  where a row has one, the checkpoint may hold one number for all rows, which each row of `values` then gets
    """

    values: Tensor
    rows: int = 1
    columns: int | None = 1
    is_scale: bool = False


class LinearWeight(ABC):
    """A weight [rows, columns] of products x [n, columns] @ weight^T, in one storage format."""

    @classmethod
    @abstractmethod
    def format(cls) -> WeightFormat:
        """Return the format that shapes name."""

    @classmethod
    @abstractmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Return a weight that is not yet filled. `dtype`: of the products' inputs."""

    @classmethod
    @abstractmethod
    def of(cls, values: Tensor) -> Self:
        """Return the weight of this format that is nearest to values [rows, columns] of the inputs' dtype."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """Return its rows and columns."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Return the dtype of the products' inputs."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def stored(self) -> dict[str, StoredTensor]:
        """Return its tensors by the last word of their names in a checkpoint ("weight", "weight_scale")."""

    @abstractmethod
    def rows(self, first: int, count: int) -> Self:
        """Return a view of successive rows: what is written to one is seen in the other."""

    @abstractmethod
    def dequantized(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return the exact numbers of some rows [n, columns], in the inputs' dtype or a wider one."""

    def as_multiplied(self, x: Tensor) -> Tensor:
        """Return the exact numbers that a product multiplies for inputs x [n, columns]: rounded, in some formats."""
        return x

    def why_unusable(self) -> str | None:
        """Return why its tensors, now that they are filled, cannot be multiplied by; None where they can."""
        return None

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Return views of successive rows: the parts that a checkpoint keeps apart."""
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [self.rows(start, size) for start, size in zip(starts, sizes, strict=True)]


def class_of(weight_format: WeightFormat) -> type[LinearWeight]:
    """Return the class of a format's weights: each class below `LinearWeight` is one. Raises ValueError without one."""
    # The latest first: a dataclass with slots takes the place of the class that it decorates, which may still be known.
    known = list(_below(LinearWeight))
    for found in reversed(known):
        if not isabstract(found) and found.format() == weight_format:
            return found
    raise ValueError(f"there are no weights of the format {weight_format.name!r}")


def _below(base: type) -> "Iterator[type[LinearWeight]]":
    found: type[LinearWeight]
    for found in base.__subclasses__():
        yield found
        yield from _below(found)


@dataclass(frozen=True, slots=True)
class PlainWeight(LinearWeight):
    """Numbers [rows, columns] in the dtype of the products' inputs, rows contiguous."""

    values: Tensor

    @classmethod
    def format(cls) -> WeightFormat:
        return PLAIN

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> "PlainWeight":
        return cls(torch.empty(rows, columns, dtype=dtype, device=device))

    @classmethod
    def of(cls, values: Tensor) -> "PlainWeight":
        return cls(values)

    @property
    def size(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def stored(self) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor(self.values)}

    def rows(self, first: int, count: int) -> "PlainWeight":
        return PlainWeight(self.values[first : first + count])

    def dequantized(self, rows: slice | Tensor = slice(None)) -> Tensor:
        return self.values[rows]
