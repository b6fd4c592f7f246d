"""Linear layers: a small family, of which loading and tuning choose a member for each weight."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.activation import gated
from kernels.fused.activation_kind import Activation
from kernels.linear.matmul import compile_linear, linear, linear_swiglu
from kernels.linear.tuned import ChosenProduct
from kernels.row_buckets import LinearRows

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Dense:
    """x @ weight^T + bias. weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def empty(cls, size_in: int, size_out: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> "Dense":
        weight = torch.empty(size_out, size_in, dtype=dtype, device=device)
        return cls(weight, torch.empty(size_out, dtype=dtype, device=device) if has_bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def gated_by(self, activation: Activation) -> Product:
        """The product with a weight that is gate and up, then activation(gate) * up; one kernel where there is one."""
        if activation is Activation.SILU:
            return partial(linear_swiglu, gate_up=self.weight, bias=self.bias)
        return partial(_apart, self, activation)

    def compile(self, activation: Activation | None = None) -> None:
        """Compile every kernel that a call, or what `gated_by(activation)` returns, may launch."""
        has_bias = self.bias is not None
        is_fused = activation is Activation.SILU and not has_bias
        compile_linear(self.weight, parts=2 if is_fused else 1, has_bias=has_bias)

    def rows(self, *sizes: int) -> "list[Dense]":
        """Views of successive rows: the parts that the checkpoint keeps apart."""
        weights = torch.split(self.weight, list(sizes))
        biases = [None] * len(sizes) if self.bias is None else torch.split(self.bias, list(sizes))
        return [Dense(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@dataclass(frozen=True, slots=True)
class Tuned(Dense):
    """A `Dense` without bias whose products of many rows are multiplied as was fastest on this GPU."""

    products: ChosenProduct | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, chosen=self.products)

    def gated_by(self, activation: Activation) -> Product:
        if activation is Activation.SILU:
            return partial(linear_swiglu, gate_up=self.weight, chosen=self.products)
        return partial(_apart, self, activation)


@dataclass(frozen=True, slots=True)
class Limited(Dense):
    """A `Dense` of which PyTorch multiplies some numbers of rows, because nothing else is proven for them.

    others   what multiplies all other numbers of rows
    """

    others: Dense | None = None
    by_torch: frozenset[LinearRows] = frozenset()

    def __call__(self, x: Tensor) -> Tensor:
        assert self.others is not None
        return self._by_torch(x) if self.leaves(x.shape[0]) else self.others(x)

    def gated_by(self, activation: Activation) -> Product:
        assert self.others is not None
        others = self.others.gated_by(activation)
        return lambda x: gated(self._by_torch(x), activation) if self.leaves(x.shape[0]) else others(x)

    def leaves(self, num_rows: int) -> bool:
        """Return whether PyTorch multiplies so many rows."""
        return LinearRows.of(num_rows) in self.by_torch

    def _by_torch(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _apart(product: Product, activation: Activation, x: Tensor) -> Tensor:
    return gated(product(x), activation)
