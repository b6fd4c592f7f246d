"""Operators of a tower: those that compute its attention and its products, given, or the first path that can."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.functional import AttentionPlan, plan_varlen
from kernels.linear.first_path import multiply
from kernels.linear.rounded_input import Input, unrounded
from server.model.linear import Linear, Product
from server.model.step import Step
from server.model.vision.weights import TowerWeight


class Attend(Protocol):
    """Attention of sequences of patches, planned for all layers."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [patches, heads, head_dim] for q, k, v of that shape."""


class TowerOperators(Protocol):
    """Computes a tower's attention and products."""

    def begin(self, num_patches: int, num_tokens: int, num_images: int) -> None:
        """Images of so many patches and tokens are about to be computed together."""

    def attend(self, ends: Tensor, longest: int) -> Attend:
        """Plan attention of sequences that end at `ends` [sequences + 1] int32: a patch sees all of its sequence."""

    def product(self, layer: int | None, name: TowerWeight, linear: Linear) -> Product:
        """Return what multiplies with a weight. Called once for each."""


@dataclass(frozen=True, slots=True)
class FirstPaths:
    """Computes by the first path of each operator that can, without a plan. `scale` of scores: None as of most."""

    scale: float | None = None

    def begin(self, num_patches: int, num_tokens: int, num_images: int) -> None:
        """Note nothing."""

    def attend(self, ends: Tensor, longest: int) -> Attend:
        return FirstPath(plan_varlen(ends, ends, longest, longest, softmax_scale=self.scale, causal=False))

    def product(self, layer: int | None, name: TowerWeight, linear: Linear) -> Product:  # noqa: ARG002
        return _FirstProduct(linear)


@dataclass(frozen=True, slots=True)
class FirstPath:
    """Attention as the library plans it."""

    plan: AttentionPlan

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return self.plan.run(q, k, v)


@dataclass(frozen=True, slots=True)
class _FirstProduct:
    linear: Linear

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return multiply(unrounded(x), self.linear.weight, self.linear.bias, out=out)


class BoundedProduct:
    """Bounds what a product reads, of each of its parts, and what it makes."""

    def __init__(self, product: Product, bounds: Tensor) -> None:
        """`bounds`: [parts, 4], of what a part reads and of what it makes, from least to most."""
        self._product = product
        self._bounds = [[float(it) for it in part] for part in bounds.tolist()]

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
        """Multiply once for all parts that read the same."""
        found = out
        for read in dict.fromkeys((it[0], it[1]) for it in self._bounds):
            made = self._product(unrounded(x).clamp(*read), step)
            found = torch.empty_like(made) if found is None else found
            parts = zip(self._bounds, found.chunk(len(self._bounds), 1), made.chunk(len(self._bounds), 1), strict=True)
            for (low, high, least, most), whole, own in parts:
                if (low, high) == read:
                    torch.clamp(own, least, most, out=whole)
        assert found is not None, "a product has a part"
        return found
