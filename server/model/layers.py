"""The weights of a decoder, merged as its matmuls want them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.linear.autotune import Chooser
from kernels.linear.matmul import linear, linear_swiglu
from kernels.linear.tuned import ChosenProduct
from qualification.model.config import DenseConfig, LayerConfig, ModelConfig, QKNorm

_NUM_MEASURED = 8  # layers whose weights algorithms are measured with
_LEAST_CHOSEN = 2**20  # numbers of a weight: smaller products take the host longer than the GPU
_MOST_SAMPLED = 512  # rows of the head


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], bias [out] or None.

    chosen  on a GPU perhaps how many rows are multiplied, the same for all layers
    """

    weight: Tensor
    bias: Tensor | None
    chosen: ChosenProduct | None = None

    @classmethod
    def empty(cls, size_in: int, size_out: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> "Linear":
        weight = torch.empty(size_out, size_in, dtype=dtype, device=device)
        return cls(weight, torch.empty(size_out, dtype=dtype, device=device) if has_bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.chosen)

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(gate) * up of a weight that is both."""
        return linear_swiglu(x, self.weight, self.bias, self.chosen)

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
    chosen_head: ChosenProduct | None = None

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
    hidden = config.hidden_size

    def vector(size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def layer(config: LayerConfig) -> LayerWeights:
        attention, fed = config.attention, dense(config)
        size_q, size_kv = attention.query_size, attention.kv_size
        has_norms = attention.qk_norm is QKNorm.EACH_HEAD
        return LayerWeights(
            attention_norm=vector(hidden),
            qkv=Linear.empty(hidden, size_q + 2 * size_kv, attention.has_bias, dtype, device),
            q_norm=vector(attention.head_dim) if has_norms else None,
            k_norm=vector(attention.head_dim) if has_norms else None,
            output=Linear.empty(size_q, hidden, attention.has_output_bias, dtype, device),
            feed_forward_norm=vector(hidden),
            gate_up=Linear.empty(hidden, 2 * fed.width, fed.has_bias, dtype, device),
            down=Linear.empty(fed.width, hidden, fed.has_bias, dtype, device),
        )

    embedding = torch.empty(config.vocab_size, hidden, dtype=dtype, device=device)
    head = embedding if config.tie_embeddings else torch.empty_like(embedding)
    return Weights(embedding, tuple(layer(it) for it in config.layers), vector(hidden), head)


def dense(config: LayerConfig) -> DenseConfig:
    """The feed-forward of a layer of a family that is served."""
    assert isinstance(config.feed_forward, DenseConfig), "no family of experts is served"
    return config.feed_forward
