"""The weights of a decoder, merged as its matmuls want them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.experts.bit_order import order_
from kernels.experts.kinds import MXFP4_BLOCK, ExpertFormat
from kernels.experts.weights import AnyExpertWeights, ExpertWeights, Mxfp4Weights
from kernels.linear.autotune import Autotuner
from kernels.linear.tuned import TunedProduct
from qualification.model.config import (
    DenseConfig,
    ExpertsConfig,
    FeedForward,
    LayerConfig,
    ModelConfig,
    QKNorm,
)
from server.model.linear import Dense, Tuned

_NUM_MEASURED = 8  # layers whose weights algorithms are measured with
_LEAST_CHOSEN = 2**20  # numbers of a weight: smaller products take the host longer than the GPU
_MOST_SAMPLED = 512  # rows of the head


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A feed-forward that all tokens visit."""

    gate_up: Dense  # gate, then up
    down: Dense


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """A feed-forward of experts.

    router           [experts, hidden]
    correction_bias  [experts] fp32 or None
    shared           what all tokens visit beside their experts, or None
    shared_gate      [1, hidden], or None where `shared` is not gated
    """

    router: Dense
    experts: AnyExpertWeights
    correction_bias: Tensor | None = None
    shared: DenseWeights | None = None
    shared_gate: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer. A norm is [hidden], as the checkpoint has it, or None where the layer has none.

    q_norm, k_norm   [head_dim], or as many numbers as all heads have
    sinks            [heads] fp32: a logit for each head that joins the softmax and has no value
    """

    attention_norm: Tensor | None
    qkv: Dense  # query heads, then key heads, then value heads
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Dense
    feed_forward_norm: Tensor | None
    feed_forward: DenseWeights | MixtureWeights
    norm_after_attention: Tensor | None = None
    norm_after_feed_forward: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def linears(self) -> dict[str, Dense]:
        """Return the products that all tokens visit, in the order in which they are computed.

        One name stands for the same sizes in all layers.
        """
        match self.feed_forward:
            case DenseWeights(gate_up, down):
                fed = {"gate_up": gate_up, "down": down}
            case MixtureWeights(shared=DenseWeights(gate_up, down)):
                fed = {"shared_gate_up": gate_up, "shared_down": down}
            case MixtureWeights():
                fed = {}
        return {"qkv": self.qkv, "output": self.output, **fed}

    def with_tuned(self, products: Mapping[str, TunedProduct]) -> "LayerWeights":
        """The same weights, those in `products` (by the names of `linears`) tuned."""

        def tuned(name: str, linear: Dense) -> Dense:
            return Tuned(linear.weight, None, products[name]) if name in products else linear

        return self.with_linears(tuned)

    def with_linears(self, change: Callable[[str, Dense], Dense]) -> "LayerWeights":
        """The same weights, each product changed by its name in `linears`, a router as "router"."""
        fed = self.feed_forward
        if isinstance(fed, DenseWeights):
            fed = DenseWeights(change("gate_up", fed.gate_up), change("down", fed.down))
        else:
            fed = replace(fed, router=change("router", fed.router))
            if fed.shared is not None:
                gate_up, down = fed.shared.gate_up, fed.shared.down
                shared = DenseWeights(change("shared_gate_up", gate_up), change("shared_down", down))
                fed = replace(fed, shared=shared)
        return replace(self, qkv=change("qkv", self.qkv), output=change("output", self.output), feed_forward=fed)


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself where they are tied
    chosen_head: TunedProduct | None = None

    def with_tuned(self, autotuner: Autotuner, sizes: Sequence[int]) -> "Weights":
        """The same for computing `sizes` rows on a GPU: no weight may change any more. Raises CublasLtError."""
        products, linears = {}, [layer.linears for layer in self.layers]
        for name in dict.fromkeys(name for layer in linears for name in layer):
            measured = [layer[name] for layer in linears if name in layer][:_NUM_MEASURED]
            first = measured[0]
            if first.bias is None and _is_tuned(first.weight):
                products[name] = autotuner.product([it.weight for it in measured], first.weight.dtype, sizes)
        head, sampled = self.chosen_head, [size for size in sizes if size <= _MOST_SAMPLED]
        if _is_tuned(self.head) and sampled:
            head = autotuner.product([self.head], torch.float32, sampled)
        return replace(self, layers=tuple(layer.with_tuned(products) for layer in self.layers), chosen_head=head)

    def order_codes_(self) -> None:
        """Put the blocks of mixtures in mxfp4, as a checkpoint has them, into the order of `Mxfp4Weights`, in place."""
        for layer in self.layers:
            if isinstance(layer.feed_forward, MixtureWeights) and isinstance(layer.feed_forward.experts, Mxfp4Weights):
                order_(layer.feed_forward.experts.gate_up_blocks)
                order_(layer.feed_forward.experts.down_blocks)

    def inspected(self) -> "Weights":
        """The same, mixtures in mxfp4 with what their scales allow, those of all layers alike: they share kernels.

        No weight may change any more. Waits for the device.
        """
        mixtures = [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MixtureWeights)]
        codes = [it.experts for it in mixtures if isinstance(it.experts, Mxfp4Weights)]
        large = any(it.inspected().has_large_scales for it in codes)

        def known(layer: LayerWeights) -> LayerWeights:
            fed = layer.feed_forward
            if not isinstance(fed, MixtureWeights) or not isinstance(fed.experts, Mxfp4Weights):
                return layer
            return replace(layer, feed_forward=replace(fed, experts=replace(fed.experts, has_large_scales=large)))

        return replace(self, layers=tuple(map(known, self.layers)))


def _is_tuned(weight: Tensor) -> bool:
    return weight.dtype in (torch.float16, torch.bfloat16) and weight.numel() >= _LEAST_CHOSEN


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Weights of the right shapes, not yet filled."""
    hidden = config.hidden_size

    def vector(size: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=of, device=device)

    def layer(config: LayerConfig) -> LayerWeights:
        attention, fed, norms = config.attention, config.feed_forward, config.norms
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
            feed_forward=_empty_feed_forward(fed, hidden, dtype, device),
            norm_after_feed_forward=vector(hidden) if norms.after else None,
            sinks=vector(attention.num_heads, torch.float32) if attention.has_sinks else None,
        )

    embedding = torch.empty(config.vocab_size, hidden, dtype=dtype, device=device)
    head = embedding if config.tie_embeddings else torch.empty_like(embedding)
    return Weights(embedding, tuple(layer(it) for it in config.layers), vector(hidden), head)


def _empty_feed_forward(
    config: FeedForward, hidden: int, dtype: torch.dtype, device: torch.device
) -> DenseWeights | MixtureWeights:
    if isinstance(config, DenseConfig):
        return _empty_dense(hidden, config.width, config.has_bias, dtype, device)
    shared = config.shared
    return MixtureWeights(
        Dense.empty(hidden, config.num_experts, config.has_router_bias, dtype, device),
        _empty_experts(config, hidden, dtype, device),
        torch.empty(config.num_experts, device=device) if config.has_correction_bias else None,
        None if shared is None else _empty_dense(hidden, shared.width, False, dtype, device),
        torch.empty(1, hidden, dtype=dtype, device=device) if shared is not None and shared.is_gated else None,
    )


def _empty_dense(hidden: int, width: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> DenseWeights:
    gate_up = Dense.empty(hidden, 2 * width, has_bias, dtype, device)
    return DenseWeights(gate_up, Dense.empty(width, hidden, has_bias, dtype, device))


def _empty_experts(config: ExpertsConfig, hidden: int, dtype: torch.dtype, device: torch.device) -> AnyExpertWeights:
    count, width = config.num_experts, config.width

    def tensor(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(count, *shape, dtype=of, device=device)

    gate_up_bias, down_bias = (tensor(2 * width), tensor(hidden)) if config.has_bias else (None, None)
    if config.format is ExpertFormat.PLAIN:
        return ExpertWeights(tensor(2 * width, hidden), tensor(hidden, width), gate_up_bias, down_bias)

    def packed(rows: int, size: int) -> tuple[Tensor, Tensor]:
        blocks = size // MXFP4_BLOCK
        return tensor(rows, blocks, MXFP4_BLOCK // 2, of=torch.uint8), tensor(rows, blocks, of=torch.uint8)

    codes = *packed(2 * width, hidden), *packed(hidden, width)
    return Mxfp4Weights(*codes, gate_up_bias=gate_up_bias, down_bias=down_bias)
