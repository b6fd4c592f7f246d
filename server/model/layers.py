"""The weights of a decoder, merged as its matmuls want them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.linear.autotune import Chooser
from kernels.linear.tuned import ChosenProduct
from qualification.model.config import DenseConfig, LayerConfig, ModelConfig, QKNorm
from server.model.linear import Dense, Tuned

_NUM_MEASURED = 8  # layers whose weights algorithms are measured with
_LEAST_CHOSEN = 2**20  # numbers of a weight: smaller products take the host longer than the GPU
_MOST_SAMPLED = 512  # rows of the head


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer. A norm is [hidden], as the checkpoint has it, or None where the layer has none.

    q_norm, k_norm   [head_dim], or as many numbers as all heads have
    """

    attention_norm: Tensor | None
    qkv: Dense  # query heads, then key heads, then value heads
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Dense
    feed_forward_norm: Tensor | None
    gate_up: Dense  # gate, then up
    down: Dense
    norm_after_attention: Tensor | None = None
    norm_after_feed_forward: Tensor | None = None

    @property
    def linears(self) -> dict[str, Dense]:
        """Return the products by the names of their fields, in the order in which they are computed."""
        return {"qkv": self.qkv, "output": self.output, "gate_up": self.gate_up, "down": self.down}

    def with_chosen(self, products: Mapping[str, ChosenProduct]) -> "LayerWeights":
        """The same weights, those in `products` (by the names of `linears`) tuned."""
        tuned: dict[str, Any] = {name: Tuned(self.linears[name].weight, None, it) for name, it in products.items()}
        return replace(self, **tuned)


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
        attention, fed, norms = config.attention, dense(config), config.norms
        size_q, size_kv = attention.query_size, attention.kv_size
        size_q_norm, size_k_norm = {
            QKNorm.NONE: (0, 0),
            QKNorm.EACH_HEAD: (attention.head_dim, attention.head_dim),
            QKNorm.ALL_HEADS: (size_q, size_kv),
        }[attention.qk_norm]
        return LayerWeights(
            attention_norm=vector(hidden) if norms.before else None,
            qkv=Dense.empty(hidden, size_q + 2 * size_kv, attention.has_bias, dtype, device),
            q_norm=vector(size_q_norm) if size_q_norm else None,
            k_norm=vector(size_k_norm) if size_k_norm else None,
            output=Dense.empty(size_q, hidden, attention.has_output_bias, dtype, device),
            norm_after_attention=vector(hidden) if norms.after else None,
            feed_forward_norm=vector(hidden) if norms.before else None,
            gate_up=Dense.empty(hidden, 2 * fed.width, fed.has_bias, dtype, device),
            down=Dense.empty(fed.width, hidden, fed.has_bias, dtype, device),
            norm_after_feed_forward=vector(hidden) if norms.after else None,
        )

    embedding = torch.empty(config.vocab_size, hidden, dtype=dtype, device=device)
    head = embedding if config.tie_embeddings else torch.empty_like(embedding)
    return Weights(embedding, tuple(layer(it) for it in config.layers), vector(hidden), head)


def dense(config: LayerConfig) -> DenseConfig:
    """The feed-forward of a layer of a family that is served."""
    assert isinstance(config.feed_forward, DenseConfig), "no family of experts is served"
    return config.feed_forward
