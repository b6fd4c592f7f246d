"""The transformer: flattened tokens to hidden states to logits. One class for all families."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.collective.peers import RunCollective
from kernels.fused.activation_kind import Activation
from kernels.fused.norm import rms_norm
from kernels.linear.autotune import Autotuner
from kernels.linear.epilogue import Epilogue
from kernels.linear.matmul import compile_linear, linear, linear_fp32
from qualification.model.config import (
    AttentionConfig,
    DenseConfig,
    ExpertsConfig,
    LayerConfig,
    ModelConfig,
    QKNorm,
    RecurrenceConfig,
)
from qualification.model.shard import sums_at_norms, vocabulary_rows
from server.errors import ModelError
from server.model.block import (
    AddNorm,
    Attention,
    Block,
    Entry,
    FeedForward,
    NormAfter,
    RowNormedAttention,
    ScaleAfter,
    Sublayer,
    SumNorm,
    add,
)
from server.model.experts import Experts, ProductsOf, Shared, products_of
from server.model.layers import DenseWeights, LayerWeights, MixtureWeights, Weights
from server.model.linear import Dense, Product, Serve, Served
from server.model.ranks import ALONE, Ranks
from server.model.rope import RotaryTables
from server.model.step import Step, with_embeddings

# (layer, or None for the head; name of the weight in it; its product; epilogue) -> what serves it
ServeOf = Callable[[int | None, str, Dense, Epilogue], Serve]


# (place among the recurrent layers, what it is, its layer's weights) -> its mixer, whose states are those of that place
# in `step.states.cache`; of several ranks it gives this one's part of a sum.
RecurrenceOf = Callable[[int, RecurrenceConfig, LayerWeights], Sublayer]


def no_recurrence(_: int, config: RecurrenceConfig, __: LayerWeights) -> Sublayer:
    """Make no mixer: no kind of recurrence can be computed. Raises ModelError."""
    raise ModelError(f"no kernel computes layers of {config.name}: serve a model whose layers all attend")


def head_sizes(vocab_size: int, world: int) -> list[int]:
    """Return the columns of the logits that each rank computes."""
    return [len(vocabulary_rows(vocab_size, rank, world)) for rank in range(world)]


class Decoder:
    """A decoder-only transformer. Holds weights and rotary tables; keeps nothing of a batch."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ranks: Ranks = ALONE, recurrence: RecurrenceOf = no_recurrence
    ) -> None:
        """`ranks`: those that compute the model together; `config` and `weights` are then one rank's part of it.

        `recurrence`: makes the mixers of the layers that do not attend.
        """
        self.config = config
        self.weights = weights
        self.ranks = ranks
        self._head_sizes = head_sizes(config.vocab_size, ranks.world)
        self._ropes = RotaryTables(config, weights.embedding.device)
        self._embed = _embedding(config, weights.embedding)
        self._finish_logits = _after_head(config)
        self._final_norm = self._norm_weight(weights.final_norm)
        self._products_of: ProductsOf = products_of
        self._recurrence = recurrence
        self._serve_head: Serve | None = None
        # Whether a sublayer's result is this rank's part of it, which the next one's norm sums up on its way in.
        self._sums_at_norms = ranks.world > 1 and sums_at_norms(config)
        self._blocks = self._build_blocks()
        _compile_matmuls(config, weights)

    def choose_products(self, autotuner: Autotuner, sizes: Sequence[int]) -> None:
        """Multiply `sizes` rows, and what they stand for, as is fastest on this GPU. Raises CublasLtError."""
        self.weights = self.weights.with_tuned(autotuner, sizes)
        self._blocks = self._build_blocks()

    def serve_experts(self, products: ProductsOf, borders: Sequence[int]) -> None:
        """Compute the products of experts by `products`, and compile what a layer of each mixture launches.

        borders  numbers of tokens from which another path may serve
        """
        self._products_of = products
        self.weights = self.weights.inspected()
        self._blocks = self._build_blocks()
        pairs = zip(self.config.layers, self.weights.layers, strict=False)
        of_mixture = {layer.feed_forward: weights.feed_forward for layer, weights in pairs}
        for mixture, weights in of_mixture.items():
            if isinstance(mixture, ExpertsConfig) and isinstance(weights, MixtureWeights):
                _experts(mixture, weights, products).compile(borders)

    def serve_sums(self, run: RunCollective) -> None:
        """Sum over the ranks as is decided."""
        self.ranks = replace(self.ranks, run=run)
        self._blocks = self._build_blocks()

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Return hidden states [T, hidden] before the final norm, which logits() applies to the rows it is given."""
        step = self._ropes.turned(step)
        hidden, residual = with_embeddings(self._embed(step.token_ids), step), None
        for block in self._blocks:
            hidden, residual = block(hidden, residual, step)
        if residual is None:
            return hidden
        return residual.add_(self.ranks.sum(hidden) if self._sums_at_norms else hidden)

    @torch.inference_mode()
    def normed(self, hidden_rows: Tensor) -> Tensor:
        """Return hidden states [R, hidden] behind the final norm, as transformers' last_hidden_state."""
        return rms_norm(hidden_rows, self._final_norm, self.config.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden_rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [R, vocab] fp32 of hidden states [R, hidden], in `out` where it is given."""
        normed = self.normed(hidden_rows)
        if self.ranks.world == 1:
            logits = self._head(normed, out)
        else:
            logits = self.ranks.joined(self._head(normed, None), self._head_sizes, out)
        for change in self._finish_logits:
            change(logits)
        return logits

    def serve_products(self, serve_of: ServeOf) -> None:
        """Multiply with each weight as is decided for it."""

        def served(index: int, layer: LayerConfig, name: str, linear: Dense) -> Dense:
            others = linear.others if isinstance(linear, Served) and linear.others is not None else linear
            serve = serve_of(index, name, others, _epilogue(layer, name, others))
            return Served(others.weight, others.bias, others, serve)

        pairs = enumerate(zip(self.config.layers, self.weights.layers, strict=False))
        layers = tuple(of.with_linears(partial(served, index, layer)) for index, (layer, of) in pairs)
        self.weights = replace(self.weights, layers=layers)
        self._serve_head = serve_of(None, "head", Dense(self.weights.head), Epilogue.FP32)
        self._blocks = self._build_blocks()

    def _head(self, normed: Tensor, out: Tensor | None) -> Tensor:
        """Logits [R, vocab] fp32, of this rank's rows of the head."""
        head, chosen = self.weights.head, self.weights.chosen_head
        if self._serve_head is None:
            return linear_fp32(normed, head, out, chosen)
        if normed.is_cuda:
            found = self._serve_head(lambda x: linear_fp32(x, head, out, chosen), normed)
        else:
            found = self._serve_head(lambda x: linear(x, head), normed).float()
        return found if out is None or found is out else out.copy_(found)

    def _build_blocks(self) -> tuple[Block, ...]:
        layers = enumerate(zip(self.config.layers, self.weights.layers, strict=False))
        return tuple(self._block(index, config, weights) for index, (config, weights) in layers)

    def _block(self, index: int, config: LayerConfig, weights: LayerWeights) -> Block:
        return Block(
            self._entry(weights.attention_norm),
            self._finished(self._mixer(index, config, weights), weights.norm_after_attention),
            self._entry(weights.feed_forward_norm),
            self._finished(self._feed_forward(config, weights), weights.norm_after_feed_forward),
        )

    def _feed_forward(self, config: LayerConfig, weights: LayerWeights) -> Sublayer:
        match config.feed_forward, weights.feed_forward:
            case DenseConfig(activation=activation), DenseWeights(gate_up, down):
                return FeedForward(gate_up.gated_by(activation), self._summed(down))
            case ExpertsConfig() as mixture, MixtureWeights() as weights_of_mixture:
                experts, ranks = _experts(mixture, weights_of_mixture, self._products_of), self.ranks
                if ranks.world == 1 or self._sums_at_norms:
                    return experts
                return lambda x, step: ranks.sum(experts(x, step))
        raise AssertionError("weights are of the kind that the configuration says")

    def _mixer(self, index: int, config: LayerConfig, weights: LayerWeights) -> Sublayer:
        if isinstance(config.mixer, AttentionConfig):
            return self._attention(self.config.attention_layers.index(index), config.mixer, weights)
        place = sum(not layer.attends for layer in self.config.layers[:index])
        recurrence, ranks = self._recurrence(place, config.mixer, weights), self.ranks
        if ranks.world == 1 or self._sums_at_norms:
            return recurrence
        return lambda x, step: ranks.sum(recurrence(x, step))

    def _attention(self, index: int, attention: AttentionConfig, weights: LayerWeights) -> Attention:
        """`index`: of the layer among those that attend."""
        eps = self.config.norm_eps
        rope, cos_sin = self._ropes.of(attention)
        splits = attention.num_heads, attention.num_kv_heads, attention.num_kv_heads
        output = self._summed(weights.output)
        given = (index, (sum(splits), attention.head_dim), splits, weights.qkv, output, rope, cos_sin, eps)
        if weights.q_norm is None or weights.k_norm is None:
            return Attention(*given)
        q_norm, k_norm = self._norm_weight(weights.q_norm), self._norm_weight(weights.k_norm)
        if attention.qk_norm is QKNorm.ALL_HEADS:
            return RowNormedAttention(*given, q_row_norm=q_norm, k_row_norm=k_norm)
        return Attention(*given, q_norm, k_norm)

    def _summed(self, product: Product) -> Product:
        """The projection whose columns the ranks share; itself with one rank, or where the next norm sums it up."""
        return product if self.ranks.world == 1 or self._sums_at_norms else self.ranks.summed(product)

    def _entry(self, norm: Tensor | None) -> Entry:
        if norm is None:
            return add
        weight, eps = self._norm_weight(norm), self.config.norm_eps
        return SumNorm(weight, eps, self.ranks) if self._sums_at_norms else AddNorm(weight, eps)

    def _finished(self, sublayer: Sublayer, norm: Tensor | None) -> Sublayer:
        """Wrap a sublayer with what the model does to its result before the residual is added."""
        if norm is not None:
            sublayer = NormAfter(sublayer, self._norm_weight(norm), self.config.norm_eps)
        return sublayer if self.config.residual_scale == 1 else ScaleAfter(sublayer, self.config.residual_scale)

    def _norm_weight(self, weight: Tensor) -> Tensor:
        """Return the factors of a norm: in fp32 where the checkpoint has them less one, which 16 bits would round."""
        return weight.float() + 1 if self.config.zero_centred_norms else weight


def _epilogue(layer: LayerConfig, name: str, linear: Dense) -> Epilogue:
    if name == "router":
        return Epilogue.FP32
    is_gated = name.endswith("gate_up") and layer.feed_forward.activation is Activation.SILU
    return Epilogue.SWIGLU if is_gated and linear.bias is None else Epilogue.NONE


def _experts(config: ExpertsConfig, weights: MixtureWeights, products_of: ProductsOf) -> Experts:
    shared = None
    if weights.shared is not None:
        assert isinstance(config.activation, Activation), "a feed-forward for all tokens has a plain activation"
        gated, down = weights.shared.gate_up.gated_by(config.activation), weights.shared.down
        shared = Shared(lambda x: down(gated(x)), weights.shared_gate)
    products = products_of(config, weights.experts)
    return Experts(weights.router, config.routing, products, weights.correction_bias, shared)


def _embedding(config: ModelConfig, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """token_ids [T] int64 -> a new tensor [T, hidden]."""
    scale = config.embedding_scale
    if config.rounds_embedding_scale:
        scale = float(torch.tensor(scale, dtype=weight.dtype))
    if scale == 1:
        return lambda token_ids: F.embedding(token_ids, weight)
    return lambda token_ids: F.embedding(token_ids, weight).mul_(scale)


def _after_head(config: ModelConfig) -> tuple[Callable[[Tensor], object], ...]:
    """Scale and cap logits [R, vocab] fp32, in place."""
    changes: list[Callable[[Tensor], object]] = []
    if config.logits_divisor != 1:
        changes.append(lambda logits: logits.div_(config.logits_divisor))
    if config.logits_softcap is not None:
        cap = config.logits_softcap
        changes.append(lambda logits: logits.div_(cap).tanh_().mul_(cap))
    return tuple(changes)


def _compile_matmuls(config: ModelConfig, weights: Weights) -> None:
    """Compile the products of a layer of each kind, of which all have the same shapes, and of the head."""
    pairs = zip(config.layers, weights.layers, strict=False)
    of_kind = {type(layer.feed_forward): (layer_config, layer) for layer_config, layer in pairs}
    for layer_config, layer in of_kind.values():
        activation = layer_config.feed_forward.activation
        for name, product in layer.linears.items():
            product.compile(activation if name.endswith("gate_up") and isinstance(activation, Activation) else None)
        if isinstance(layer.feed_forward, MixtureWeights):
            compile_linear(layer.feed_forward.router.weight, dtype_out=torch.float32)
    compile_linear(weights.head, dtype_out=torch.float32)
