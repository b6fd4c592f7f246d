"""Linear layers: a small family, of which loading and tuning choose a member for each weight."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.fused.activation import gated
from kernels.fused.activation_kind import Activation
from kernels.linear.matmul import compile_linear, linear, linear_swiglu
from kernels.linear.tuned import TunedProduct

Product = Callable[[Tensor], Tensor]
# (a product, x) -> its result, by the product itself or by what is decided to compute it in its place
Serve = Callable[[Product, Tensor], Tensor]


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

    products: TunedProduct | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, chosen=self.products)

    def gated_by(self, activation: Activation) -> Product:
        if activation is Activation.SILU:
            return partial(linear_swiglu, gate_up=self.weight, chosen=self.products)
        return partial(_apart, self, activation)


@dataclass(frozen=True, slots=True)
class Served(Dense):
    """A `Dense` of an engine, whose decisions may have another path multiply some numbers of rows.

    others  what multiplies where nothing else is decided
    """

    others: Dense | None = None
    serve: Serve | None = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self.others is not None
        assert self.serve is not None
        return self.serve(self.others, x)

    def gated_by(self, activation: Activation) -> Product:
        assert self.others is not None
        if activation is Activation.SILU and self.bias is None:
            assert self.serve is not None
            return partial(self.serve, self.others.gated_by(activation))
        return partial(_apart, self, activation)


def _apart(product: Product, activation: Activation, x: Tensor) -> Tensor:
    return gated(product(x), activation)
