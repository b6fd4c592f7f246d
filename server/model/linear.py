"""Products with weights: what a checkpoint has of one, and what computes it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.activation import gated
from kernels.fused.activation_kind import Activation
from kernels.fused.alike import activated_alike, gated_alike
from kernels.fused.capped import capped
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.ungated import activated
from kernels.fused.ungated_kind import Ungated
from kernels.linear.epilogue import Epilogue
from kernels.linear.first_path import multiply
from kernels.linear.rounded_input import Input, RoundedInput, unrounded
from kernels.linear.shape import WeightFormat
from kernels.linear.weights import LinearWeight, class_of
from qualification.model.config import EagerActivation
from server.model.step import Step


class WeightName(Enum):
    """A product of a layer, or of none: the heads, and what makes all layers' embeddings."""

    QKV = "qkv"
    QUERY_UP = "query_up"
    INDEX_QUERIES = "index_queries"
    INDEX_KEY = "index_key"
    INDEX_WEIGHTS = "index_weights"
    ATTENTION_GATE = "attention_gate"
    OUTPUT = "output"
    RECURRENT_INPUT = "recurrent_input"
    RECURRENT_GATES = "recurrent_gates"
    RECURRENT_DECAYS = "recurrent_decays"
    RECURRENT_OUTPUT_GATES = "recurrent_output_gates"
    RECURRENT_OUTPUT = "recurrent_output"
    GATE_UP = "gate_up"
    DOWN = "down"
    ROUTER = "router"
    SHARED_GATE_UP = "shared_gate_up"
    SHARED_DOWN = "shared_down"
    TO_LATENT = "to_latent"
    FROM_LATENT = "from_latent"
    PER_LAYER = "per_layer"
    PER_LAYER_GATE = "per_layer_gate"
    PER_LAYER_OUTPUT = "per_layer_output"
    DRAFT_INPUT = "draft_input"
    HEAD = "head"


# Of several ranks these are each rank's part of a sum, which is the next that the ranks compute.
SUMMED = frozenset({WeightName.OUTPUT, WeightName.RECURRENT_OUTPUT, WeightName.DOWN})


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [out, in] and a bias [out] or None, as a checkpoint has them: nothing that computes."""

    weight: LinearWeight
    bias: Tensor | None = None

    @classmethod
    def empty(
        cls, size_in: int, size_out: int, has_bias: bool, weight_format: WeightFormat, dtype: torch.dtype,
        device: torch.device,
    ) -> "Linear":  # fmt: skip
        """Return one that is not yet filled; its bias is of `dtype`."""
        weight = class_of(weight_format).empty(size_out, size_in, dtype, device)
        return cls(weight, torch.empty(size_out, dtype=dtype, device=device) if has_bias else None)

    def split(self, *sizes: int) -> "list[Linear]":
        """Return views of successive rows: the parts that the checkpoint keeps apart."""
        biases = [None] * len(sizes) if self.bias is None else torch.split(self.bias, list(sizes))
        return [Linear(*pair) for pair in zip(self.weight.split(sizes), biases, strict=True)]


class Product(Protocol):
    """Computes the product with one weight."""

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
        """Return [rows, size_out] for x [rows, size_in], in `out` where it is given.

        `step`: the forward pass that this is part of; None outside of one, as for logits and when kernels are compiled.
        """


@runtime_checkable
class RoundsNorm(Protocol):
    """A product that the norm before it can be rounded for."""

    @property
    def rounds_inputs(self) -> bool:
        """Return whether the format of the weight says that inputs are rounded."""

    def normed(
        self, hidden: Tensor, residual: Tensor | None, norm: Tensor, eps: float
    ) -> tuple[RoundedInput, Tensor] | None:
        """Return the product's input and the residual, as `AddNorm` of `block.py` in one launch with the rounding.

        None, with nothing done, where the path of so many rows takes plain inputs.
        """


# (layer, or None outside of all; its name there; what the checkpoint has; epilogue) -> what computes it
ProductOf = Callable[[int | None, WeightName, Linear, Epilogue], Product]


@dataclass(frozen=True, slots=True)
class Scaled:
    """A product whose results are multiplied, each by a number of its own, and rounded: factors [size_out] fp32."""

    product: Product
    factors: Tensor

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
        return self.product(x, step, out).mul_(self.factors)


@dataclass(frozen=True, slots=True)
class Gated:
    """activation(gate) * up behind a product with a weight that is gate and up."""

    gate_up: Product
    activation: Activation

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
        return gated(self.gate_up(x, step), self.activation, out)


@dataclass(frozen=True, slots=True)
class GatedAlike:
    """The same on a CPU, with bits of a row that do not depend on the other rows."""

    gate_up: Product
    activation: Activation

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
        found = gated_alike(self.gate_up(x, step), self.activation)
        return found if out is None else out.copy_(found)


@dataclass(frozen=True, slots=True)
class Capped:
    """The same with a bounded activation, anywhere; the bits of a row do not depend on the other rows."""

    gate_up: Product
    activation: CappedSilu

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
        found = capped(self.gate_up(x, step), self.activation)
        return found if out is None else out.copy_(found)


@dataclass(frozen=True, slots=True)
class Activated:
    """A product and an activation without a gate; the bits of a row do not depend on the other rows."""

    up: Product
    activation: Ungated

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
        return activated(self.up(x, step), self.activation, out)


@dataclass(frozen=True, slots=True)
class EagerActivated:
    """A product and an activation without a gate, by PyTorch: computed in fp32, rounded once.

    is_alike  whether a row's bits may not depend on the other rows, on a CPU
    """

    up: Product
    activation: EagerActivation
    is_alike: bool

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
        found = self._activated(self.up(x, step))
        return found if out is None else out.copy_(found)

    def _activated(self, made: Tensor) -> Tensor:
        assert self.activation is not EagerActivation.XIELU, "it has numbers of its own"
        if self.activation is EagerActivation.RELU:
            return F.relu(made)
        is_tanh = self.activation is EagerActivation.GELU_TANH
        if self.is_alike:
            return activated_alike(made.float(), Activation.GELU_TANH if is_tanh else Activation.GELU).to(made.dtype)
        return F.gelu(made, approximate="tanh" if is_tanh else "none")


@dataclass(frozen=True, slots=True)
class XieluActivated:
    """A product and xIELU, by PyTorch: computed in fp32, rounded once; the bits of a row depend on that row alone.

    alpha_p x^2 + beta x above 0, alpha_n (exp(min(x, eps)) - 1 - x) + beta x elsewhere.
    """

    up: Product
    alpha_p: float
    alpha_n: float
    beta: float
    eps: float

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
        made = self.up(x, step)
        wide = made.float()
        half = (wide.clamp(max=self.eps) / 2).tanh()  # exp(2 y) - 1 is 2 t / (1 - t), of t = tanh(y)
        bent = torch.where(wide > 0, self.alpha_p * wide * wide, self.alpha_n * (2 * half / (1 - half) - wide))
        found = (bent + self.beta * wide).to(made.dtype)
        return found if out is None else out.copy_(found)


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A product outside of an engine, where no plan says what computes it: by the first path that can."""

    linear: Linear
    epilogue: Epilogue

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return multiply(unrounded(x), self.linear.weight, self.linear.bias, self.epilogue, out)


@dataclass(frozen=True, slots=True)
class CutOff:
    """A product with inputs of which those beyond a bound are cut off there, before they are rounded.

    bound  a number that the inputs' dtype has
    """

    product: Product
    bound: float

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
        return self.product(unrounded(x).clamp(-self.bound, self.bound), step, out)


def unplanned(_: int | None, __: WeightName, linear: Linear, epilogue: Epilogue) -> Product:
    return Unplanned(linear, epilogue)
