"""The weights of a decoder, merged as its matmuls want them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.linear.autotune import Chooser
from kernels.linear.matmul import linear, linear_swiglu
from kernels.linear.packed import PackedWeight, packed
from kernels.linear.tuned import ChosenProduct
from server.model.config import ModelConfig

_NUM_MEASURED = 8  # layers whose weights algorithms are measured with
_LEAST_CHOSEN = 2**20  # numbers of a weight: smaller products take the host longer than the GPU
_MOST_SAMPLED = 512  # rows of the head


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], bias [out] or None; on a CPU perhaps the weight once more, packed for few rows.

    chosen  on a GPU perhaps how many rows are multiplied, the same for all layers
    """

    weight: Tensor
    bias: Tensor | None
    packed: PackedWeight | None = None
    chosen: ChosenProduct | None = None

    @classmethod
    def empty(cls, size_in: int, size_out: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> "Linear":
        weight = torch.empty(size_out, size_in, dtype=dtype, device=device)
        return cls(weight, torch.empty(size_out, dtype=dtype, device=device) if has_bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.packed, self.chosen)

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(gate) * up of a weight that is both."""
        return linear_swiglu(x, self.weight, self.bias, self.packed, self.chosen)

    def with_packed(self) -> "Linear":
        """The same for computing: the weight must not change any more."""
        return replace(self, packed=packed(self.weight))

    def rows(self, *sizes: int) -> "list[Linear]":
        """Views of successive rows: the parts that the checkpoint keeps apart."""
        weights = torch.split(self.weight, list(sizes))
        biases = [None] * len(sizes) if self.bias is None else torch.split(self.bias, list(sizes))
        return [Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer. Norms are [hidden], those of heads [head_dim] or None."""

    attention_norm: Tensor
    qkv: Linear  # query heads, then key heads, then value heads
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    feed_forward_norm: Tensor
    gate_up: Linear  # gate, then up
    down: Linear

    @property
    def linears(self) -> dict[str, Linear]:
        """By the names of their fields, in the order in which they are computed."""
        return {"qkv": self.qkv, "output": self.output, "gate_up": self.gate_up, "down": self.down}

    def with_packed(self) -> "LayerWeights":
        packed: dict[str, Any] = {name: linear.with_packed() for name, linear in self.linears.items()}
        return replace(self, **packed)

    def with_chosen(self, products: Mapping[str, ChosenProduct]) -> "LayerWeights":
        """`products` by the name of the weight."""
        chosen: dict[str, Any] = {name: replace(self.linears[name], chosen=it) for name, it in products.items()}
        return replace(self, **chosen)


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself where they are tied
    packed_head: PackedWeight | None = None
    chosen_head: ChosenProduct | None = None

    def with_packed(self) -> "Weights":
        """The same for computing: no weight may change any more."""
        layers = tuple(layer.with_packed() for layer in self.layers)
        return replace(self, layers=layers, packed_head=packed(self.head))

    def with_chosen(self, chooser: Chooser, sizes: Sequence[int]) -> "Weights":
        """The same for computing `sizes` rows on a GPU: no weight may change any more. Raises CublasLtError."""
        measured, products = self.layers[:_NUM_MEASURED], {}
        for name, first in self.layers[0].linears.items() if self.layers else ():
            if first.bias is None and _is_chosen(first.weight):
                weights = [layer.linears[name].weight for layer in measured]
                products[name] = chooser.product(weights, first.weight.dtype, sizes)
        head, sampled = self.chosen_head, [size for size in sizes if size <= _MOST_SAMPLED]
        if _is_chosen(self.head) and sampled:
            head = chooser.product([self.head], torch.float32, sampled)
        return replace(self, layers=tuple(layer.with_chosen(products) for layer in self.layers), chosen_head=head)


def _is_chosen(weight: Tensor) -> bool:
    return weight.dtype in (torch.float16, torch.bfloat16) and weight.numel() >= _LEAST_CHOSEN


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Weights of the right shapes, not yet filled."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def vector(size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=vector(hidden),
            qkv=Linear.empty(hidden, heads + 2 * kv_heads, config.attention_bias, dtype, device),
            q_norm=vector(config.head_dim) if config.qk_norm else None,
            k_norm=vector(config.head_dim) if config.qk_norm else None,
            output=Linear.empty(heads, hidden, config.output_bias, dtype, device),
            feed_forward_norm=vector(hidden),
            gate_up=Linear.empty(hidden, 2 * inner, config.mlp_bias, dtype, device),
            down=Linear.empty(inner, hidden, config.mlp_bias, dtype, device),
        )

    embedding = torch.empty(config.vocab_size, hidden, dtype=dtype, device=device)
    head = embedding if config.tie_embeddings else torch.empty_like(embedding)
    return Weights(embedding, tuple(layer() for _ in range(config.num_layers)), vector(hidden), head)
