"""The transformer: flattened tokens to hidden states to logits. One class for all families."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.convolution.calls import ConvolutionWeights, RunConvolution
from kernels.convolution.eager_path import run_convolution_eager
from kernels.fused.activation_kind import Activation
from kernels.fused.add_norms import Addend
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.layer_norm import layer_norm
from kernels.fused.norm import rms_norm
from kernels.fused.ungated_kind import Ungated
from kernels.linear.epilogue import Epilogue
from kernels.linear.shape import PLAIN
from kernels.linear.weights import PlainWeight
from kernels.recurrence.calls import RecurrenceWeights, RunRecurrence
from kernels.recurrence.channel_delta.eager import run_channel_delta_eager
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from kernels.recurrence.eager_path import run_recurrence_eager
from kernels.recurrence.fixed_decay.eager import run_fixed_decay_eager
from kernels.recurrence.fixed_decay.weights import FixedDecayWeights
from kernels.recurrence.state_space.eager import run_state_space_eager
from kernels.recurrence.state_space.weights import StateSpaceWeights
from kernels.vocabulary.recurrence_form import RecurrenceForm
from qualification.model.config import (
    AttentionConfig,
    DenseActivation,
    DenseConfig,
    EagerActivation,
    ExpertsConfig,
    LayerConfig,
    ModelConfig,
    QKNorm,
    RecurrenceConfig,
)
from qualification.model.gated_delta import FixedDecayRule, GatedDeltaConfig, StateSpaceRule
from qualification.model.latent import LatentAttentionConfig
from qualification.model.shard import sums_at_norms, vocabulary_rows
from qualification.model.short_convolution import ShortConvolutionConfig
from server.errors import ModelError
from server.model.block import (
    Added,
    AddLayerNorm,
    AddNorm,
    AnyBlock,
    AsymmetricAttention,
    Attention,
    Beside,
    Block,
    BorrowingAttention,
    EmptyBlock,
    Entry,
    FeedForward,
    Finish,
    GatedAttention,
    HeadGate,
    NormAfter,
    NormedValuesAttention,
    ParallelBlock,
    PerLayerGate,
    RoundingNorm,
    RowNormedAttention,
    ScaleAfter,
    SecondRead,
    SingleBlock,
    Sublayer,
    SumNorm,
    add,
    add_norm_bias_,
    same_read,
    sole_reader,
    total,
)
from server.model.channel_delta import ChannelDelta
from server.model.experts import AddNormsApart, Experts, ExpertsApart, ProductsOf, Shared, products_of
from server.model.gated_delta import GatedDelta, WithGates
from server.model.latent_attention import Indexer, LatentAttention
from server.model.layers import (
    DenseWeights,
    IndexerWeights,
    LayerWeights,
    MixtureWeights,
    NormsApart,
    PerLayerWeights,
    Weights,
    XieluWeights,
)
from server.model.lightning import Lightning
from server.model.linear import (
    Activated,
    Capped,
    CutOff,
    EagerActivated,
    Gated,
    GatedAlike,
    Linear,
    Product,
    ProductOf,
    Scaled,
    WeightName,
    XieluActivated,
    unplanned,
)
from server.model.per_layer import PerLayerInputs
from server.model.positions import AddPositions, no_positions
from server.model.ranks import ALONE, Ranks
from server.model.rope import RotaryTables
from server.model.short_convolution import ShortConvolution
from server.model.state_space import StateSpace
from server.model.step import Step, added_behind, with_embeddings

# (place among the recurrent layers, what it is, its layer's weights) -> its mixer, whose states are those of that place
# in `step.states.cache`; of several ranks it gives this one's part of a sum.
RecurrenceOf = Callable[[int, RecurrenceConfig, LayerWeights], Sublayer]
# (its sizes, place among the recurrent layers) -> what computes the gated delta rule of a layer.
GatedDeltaOf = Callable[[GatedDeltaConfig, int], RunRecurrence]
# Likewise of a layer of a short convolution.
ConvolutionOf = Callable[[ShortConvolutionConfig, int], RunConvolution]


class LayerObserver(Protocol):
    """Is handed what each layer of a step reads, before it is computed further: who keeps it must copy it."""

    def on_attention(self, layer: int, read: Tensor, residual: Tensor) -> None:
        """Take what a layer's mixer reads [T, hidden], and the residual [T, hidden] there."""

    def on_feed_forward(self, layer: int, read: Tensor, residual: Tensor) -> None:
        """Take what a layer's feed-forward reads, and the residual behind its mixer."""

    def on_recurrence(self, layer: int, projected: Tensor, gates: Tensor, out: Tensor) -> None:
        """Take what a recurrent layer projects, its gates, and its results [T, heads, d] before they are normed."""

    def on_convolution(self, layer: int, projected: Tensor, out: Tensor) -> None:
        """Take what a layer of a short convolution projects, and its gated results [T, channels]."""

    def on_finish(self, layer: int, residual: Tensor) -> None:
        """Take the residual behind a layer's feed-forward, where the layer still changes it."""


def no_recurrence(_: int, config: RecurrenceConfig, __: LayerWeights) -> Sublayer:
    """Make no mixer: no kind of recurrence can be computed. Raises ModelError."""
    raise ModelError(f"no kernel computes layers of {config.name}: serve a model whose layers all attend")


def unplanned_gated_delta(config: GatedDeltaConfig, _: int) -> RunRecurrence:
    """Return the gated delta rule by PyTorch, for a decoder without a plan."""
    return {
        RecurrenceForm.GATED_DELTA: run_recurrence_eager,
        RecurrenceForm.STATE_SPACE: run_state_space_eager,
        RecurrenceForm.FIXED_DECAY: run_fixed_decay_eager,
        RecurrenceForm.CHANNEL_DELTA: run_channel_delta_eager,
    }[config.form]


def unplanned_convolution(_: ShortConvolutionConfig, __: int) -> RunConvolution:
    """Return the short convolution by PyTorch, for a decoder without a plan."""
    return run_convolution_eager


@dataclass(frozen=True, slots=True)
class Operators:
    """Computes the heavy work of a model's layers beside attention: by the tables of an engine, or without a plan.

    expert_borders  numbers of tokens from which another path may serve a mixture
    gated_delta     gives what computes the gated delta rule of a layer; convolution: the short one of a layer
    recurrence      makes the mixers of other layers that do not attend
    is_reproducible  whether no row's bits may depend on the other rows: for what is beside these operators
    """

    product: ProductOf = unplanned
    experts: ProductsOf = products_of
    expert_borders: tuple[int, ...] = ()
    gated_delta: GatedDeltaOf = unplanned_gated_delta
    convolution: ConvolutionOf = unplanned_convolution
    recurrence: RecurrenceOf = no_recurrence
    is_reproducible: bool = False


def head_sizes(vocab_size: int, world: int) -> list[int]:
    """Return the columns of the logits that each rank computes."""
    return [len(vocabulary_rows(vocab_size, rank, world)) for rank in range(world)]


class Decoder:
    """A decoder-only transformer. Holds weights and rotary tables; keeps nothing of a batch."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ranks: Ranks = ALONE,
        operators: Operators | None = None,
        *,
        ropes: RotaryTables | None = None,
    ) -> None:
        """Build the model once, from all that computes it. No weight may change any more.

        `ranks`: those that compute the model together; `config` and `weights` are then one rank's part of it.
        `ropes`: tables of another decoder, whose layers rotate as these do; None for its own.
        """
        self.config = config
        self.weights = weights
        self.ranks = ranks
        self._operators = Operators() if operators is None else operators
        self._head_sizes = head_sizes(config.vocab_size, ranks.world)
        self.ropes = RotaryTables(config, weights.embedding.device) if ropes is None else ropes
        self._embed = _embedding(config, weights.embedding)
        self._place = _learned_positions(config, weights.positions)
        self._per_layer = self._per_layer_inputs(config, weights.per_layer)
        self._has_borrowers = any(not it.has_own_keys for it in config.attentions)
        self._chooses = any(it.reads_choice for it in config.attentions)
        self._finish_logits = _after_head(config, weights.head_bias)
        own = config.zero_centred_final_norm
        self._final_norm = _norm_weight(weights.final_norm, config.zero_centred_norms if own is None else own)
        # Whether a sublayer's result is this rank's part of it, which the next one's norm sums up on its way in.
        self._sums_at_norms = ranks.world > 1 and sums_at_norms(config)
        head = self._operators.product(None, WeightName.HEAD, weights.head, self._in_fp32(weights.head))
        self._head = self._with_bound(weights.head, head)
        self._mixtures: dict[ExpertsConfig, Experts] = {}  # one layer's, of each that is not alike
        layers = enumerate(zip(config.layers, weights.layers, strict=False))
        self._blocks = tuple(self._block(index, layer, of_layer) for index, (layer, of_layer) in layers)
        dtype, device = weights.embedding.dtype, weights.embedding.device
        for experts in self._mixtures.values():
            experts.compile(config.hidden_size, dtype, device, self._operators.expert_borders)

    def with_layers_of_each_kind(self) -> "Decoder":
        """Return the decoder without layers that are like an earlier one, and that no layer left reads anything of.

        It launches each kernel that the whole decoder launches. What it computes means nothing.
        """
        kept = set[int]()
        for layer in dict.fromkeys(self.config.layers):
            index = self.config.layers.index(layer)
            kept.add(index)
            if isinstance(layer.mixer, AttentionConfig) and layer.mixer.reads_keys_of is not None:
                kept.add(layer.mixer.reads_keys_of)
            if isinstance(layer.mixer, AttentionConfig) and layer.mixer.reads_choice:
                kept.add(self.config.layer_that_chooses_for(index))
        found = copy(self)
        found._blocks = tuple(block for index, block in enumerate(self._blocks) if index in kept)
        return found

    @property
    def is_reproducible(self) -> bool:
        """Return whether no row's bits may depend on the other rows."""
        return self._operators.is_reproducible

    @torch.inference_mode()
    def forward(self, step: Step, observer: LayerObserver | None = None) -> Tensor:
        """Return hidden states [T, hidden] before the final norm, which logits() applies to the rows it is given.

        `observer`: who is handed what each layer reads, and the residual.
        """
        return self.through(self._place(with_embeddings(self._embed(step.token_ids), step), step), step, observer)

    @torch.inference_mode()
    def through(self, hidden: Tensor, step: Step, observer: LayerObserver | None = None) -> Tensor:
        """Return what `forward` does, of what the first layer reads [T, hidden] in place of the tokens' embeddings."""
        step = self.ropes.turned(step)
        added: Added = hidden
        residual = None
        if self._per_layer is not None:
            step = replace(step, per_layer=self._per_layer(hidden, step))
        if self._has_borrowers:
            step = replace(step, kept={})
        if self._chooses:
            step = replace(step, choices={})
        blocks = self._blocks if observer is None else self._observed(observer)
        for index, block in enumerate(blocks):
            added, residual = block(added, residual, step)
            own = None if step.embedding_rows is None else added_behind(index, self.config.hidden_size, step)
            if own is not None:  # goes to the residual, which all ranks have whole
                if isinstance(added, Addend):  # which may still multiply the residual
                    added, residual = total(added, residual), None
                (added if residual is None else residual).add_(own)
        if self._sums_at_norms and residual is not None:
            assert isinstance(added, Tensor), "what is normed before it is added is summed up before"
            added = self.ranks.sum(added)
        return total(added, residual)

    def _observed(self, observer: LayerObserver) -> list[AnyBlock]:
        entries = (observer.on_attention, observer.on_feed_forward, observer.on_finish)
        found = [block.observed(*(partial(it, index) for it in entries)) for index, block in enumerate(self._blocks)]
        for index, block in enumerate(found):
            if isinstance(block, Block | ParallelBlock):
                found[index] = replace(block, attention=_observed_mixer(block.attention, index, observer))
            elif isinstance(block, SingleBlock):
                found[index] = replace(block, sublayer=_observed_mixer(block.sublayer, index, observer))
        return found

    @torch.inference_mode()
    def normed(self, hidden_rows: Tensor) -> Tensor:
        """Return hidden states [R, hidden] behind the final norm, as transformers' last_hidden_state."""
        norm = layer_norm if self.config.norms_subtract_mean else rms_norm
        normed = norm(hidden_rows, self._final_norm, self.config.norm_eps)
        return add_norm_bias_(normed, self.weights.final_norm_bias)

    @torch.inference_mode()
    def logits(self, hidden_rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [R, vocab] fp32 of hidden states [R, hidden], in `out` where it is given."""
        normed = self.normed(hidden_rows)
        if self.ranks.world == 1:
            logits = self._own_logits(normed, out)
        else:
            logits = self.ranks.joined(self._own_logits(normed, None), self._head_sizes, out)
        for change in self._finish_logits:
            change(logits)
        return logits

    def _own_logits(self, normed: Tensor, out: Tensor | None) -> Tensor:
        """Logits [R, vocab] fp32, of this rank's rows of the head."""
        if normed.is_cuda or normed.dtype is torch.float32:
            return self._head(normed, None, out)
        found = self._head(normed, None).float()  # a CPU has no products of 16 bits that are stored in fp32
        return found if out is None else out.copy_(found)

    def _in_fp32(self, linear: Linear) -> Epilogue:
        """Return the epilogue of a product whose result is wanted in fp32."""
        is_narrow = linear.weight.device.type != "cpu" and linear.weight.dtype is not torch.float32
        return Epilogue.FP32 if is_narrow else Epilogue.NONE

    def _product(self, layer: int, name: WeightName, linear: Linear) -> Product:
        return self._with_bound(linear, self._operators.product(layer, name, linear, Epilogue.NONE))

    def _with_bound(self, linear: Linear, product: Product) -> Product:
        """Return the product with inputs that are cut off where the checkpoint says so, of weights of 8 bits."""
        bound = self.config.input_bound
        return product if bound is None or linear.weight.format() == PLAIN else CutOff(product, bound)

    def _gate_up(
        self, layer: int, name: WeightName, gate_up: Linear, activation: DenseActivation, gate_scale: float = 1.0
    ) -> Product:
        """Return the product with gate and up, then activation(gate) * up; one kernel where there may be one."""
        if isinstance(activation, CappedSilu):
            return Capped(self._product(layer, name, gate_up), activation)
        if isinstance(activation, EagerActivation):
            return EagerActivated(self._product(layer, name, gate_up), activation, self._is_alike(gate_up))
        if isinstance(activation, Ungated):
            return Activated(self._product(layer, name, gate_up), activation)
        if activation is Activation.SILU and gate_up.bias is None and gate_scale == 1:
            return self._with_bound(gate_up, self._operators.product(layer, name, gate_up, Epilogue.SWIGLU))
        halves = (gate_up.weight.size[0] // 2,) * 2
        product = self._scaled(self._product(layer, name, gate_up), (gate_scale, 1.0), halves)
        return (GatedAlike if self._is_alike(gate_up) else Gated)(product, activation)

    def _block(self, index: int, config: LayerConfig, weights: LayerWeights) -> AnyBlock:
        if config.feed_forward is None:
            if config.mixer is None:
                return EmptyBlock()
            mixer = self._finished(self._mixer(index, config, weights), weights.norm_after_attention)
            return SingleBlock(self._entry(weights.attention_norm, mixer, bias=weights.attention_norm_bias), mixer)
        if config.mixer is None:
            fed = self._finished(self._feed_forward(index, config, weights), weights.norm_after_feed_forward)
            return SingleBlock(self._entry(weights.feed_forward_norm, fed, bias=weights.feed_forward_norm_bias), fed)
        if config.norms.is_shared or config.norms.is_parallel:
            return ParallelBlock(
                self._entry(weights.attention_norm, bias=weights.attention_norm_bias),
                self._finished(self._mixer(index, config, weights), None),
                self._finished(self._feed_forward(index, config, weights), None),
                self._second_read(weights),
            )
        mixer = self._finished(self._mixer(index, config, weights), weights.norm_after_attention)
        made = self._feed_forward(index, config, weights)
        fed = self._finished(made, weights.norm_after_feed_forward)
        if isinstance(made, ExpertsApart):
            enter_feed_forward: Entry = self._entry_apart(weights)
        else:
            enter_feed_forward = self._entry(weights.feed_forward_norm, fed, bias=weights.feed_forward_norm_bias)
        return Block(
            self._entry(weights.attention_norm, mixer, bias=weights.attention_norm_bias),
            mixer,
            enter_feed_forward,
            fed,
            self._finish(index, weights),
        )

    def _finish(self, index: int, weights: LayerWeights) -> Finish | None:
        if weights.per_layer is None:
            return None if weights.scale is None else Finish(None, weights.scale)
        assert self.config.per_layer is not None
        gate = PerLayerGate(
            index,
            self._product(index, WeightName.PER_LAYER_GATE, weights.per_layer.gate),
            self.config.per_layer.activation,
            self._product(index, WeightName.PER_LAYER_OUTPUT, weights.per_layer.output),
            self._norm_weight(weights.per_layer.norm),
            self.config.norm_eps,
            is_alike=self._is_alike(weights.per_layer.gate),
        )
        return Finish(gate, weights.scale)

    def _per_layer_inputs(self, config: ModelConfig, weights: PerLayerWeights | None) -> PerLayerInputs | None:
        if weights is None or config.per_layer is None:
            return None
        product = self._operators.product(None, WeightName.PER_LAYER, weights.product, Epilogue.NONE)
        norm = self._norm_weight(weights.norm)
        return PerLayerInputs(
            weights.embedding, product, config.hidden_size, norm, config.norm_eps, config.per_layer.absent_token
        )

    def _is_alike(self, linear: Linear) -> bool:
        """Return whether activations behind a product must be those whose bits do not depend on their places."""
        return self._operators.is_reproducible and linear.weight.device.type == "cpu"

    def _feed_forward(self, index: int, config: LayerConfig, weights: LayerWeights) -> Sublayer:
        match config.feed_forward, weights.feed_forward:
            case DenseConfig() as dense, DenseWeights(gate_up, down, xielu):
                product = self._summed(self._product(index, WeightName.DOWN, down))
                if xielu is not None:
                    return FeedForward(_xielu(self._product(index, WeightName.GATE_UP, gate_up), xielu), product)
                gated = self._gate_up(index, WeightName.GATE_UP, gate_up, dense.activation, dense.gate_scale)
                return _scaled_after(FeedForward(gated, product), dense.output_scale)
            case ExpertsConfig() as mixture, MixtureWeights() as weights_of_mixture:
                experts, ranks = self._experts(index, mixture, weights_of_mixture), self.ranks
                if weights_of_mixture.norms is not None:
                    return self._apart(experts, weights_of_mixture.norms)
                if ranks.world == 1 or self._sums_at_norms:
                    return experts
                return lambda x, step: ranks.sum(experts(x, step))
        raise AssertionError("weights are of the kind that the configuration says")

    def _experts(self, index: int, config: ExpertsConfig, weights: MixtureWeights) -> Experts:
        shared = None
        if weights.shared is not None and config.shared is not None:
            gate_up, down = weights.shared.gate_up, weights.shared.down
            fed = FeedForward(
                self._gate_up(index, WeightName.SHARED_GATE_UP, gate_up, config.shared_activation),
                self._product(index, WeightName.SHARED_DOWN, down),
            )
            gate = None if weights.shared_gate is None else weights.shared_gate[0]
            shared = Shared(fed, gate, config.shared.scale)
        router = _widened(Linear(weights.router.weight))  # whose bias is added behind the product
        product = self._operators.product(index, WeightName.ROUTER, router, self._in_fp32(router))
        visited = self._operators.experts(config, weights.experts)
        latents = (WeightName.TO_LATENT, weights.to_latent), (WeightName.FROM_LATENT, weights.from_latent)
        to_latent, from_latent = (None if it is None else self._product(index, name, it) for name, it in latents)
        router_bias, correction_bias = weights.router.bias, weights.correction_bias
        found = Experts(
            product,
            config.routing,
            visited,
            router_bias,
            correction_bias,
            shared,
            weights.expert_scales,
            weighs_inputs=config.weighs_inputs,
            has_gate=config.shared_is_expert,
            to_latent=to_latent,
            from_latent=from_latent,
            jitter=config.jitter,
        )
        self._mixtures.setdefault(config, found)
        return found

    def _apart(self, experts: Experts, norms: NormsApart) -> ExpertsApart:
        assert experts.shared is not None
        ranks = self.ranks
        return ExpertsApart(
            replace(experts, shared=None),
            experts.shared.feed_forward,
            after_experts=self._norm_weight(norms.after_experts),
            after_shared=self._norm_weight(norms.after_shared),
            eps=self.config.norm_eps,
            sum=(lambda part: part) if ranks.world == 1 else ranks.sum,
        )

    def _mixer(self, index: int, config: LayerConfig, weights: LayerWeights) -> Sublayer:
        assert config.mixer is not None, "a layer without a mixer has none to make"
        mixer = _scaled_after(self._sole_mixer(index, config, weights), config.mixer.output_scale)
        if config.of_beside is None:
            return mixer
        assert weights.beside is not None, "weights are of the kind that the configuration says"
        return Beside(mixer, self._mixer(index, config.of_beside, weights.beside))

    def _sole_mixer(self, index: int, config: LayerConfig, weights: LayerWeights) -> Sublayer:
        """Return what mixes a layer's tokens, without what is beside it."""
        if isinstance(config.mixer, LatentAttentionConfig):
            return self._latent(index, config.mixer, weights)
        if isinstance(config.mixer, AttentionConfig):
            return self._attention(index, config.mixer, weights)
        assert config.mixer is not None, "a layer without a mixer has none to make"
        place = sum(len(layer.recurrences) for layer in self.config.layers[:index])
        if isinstance(config.mixer, GatedDeltaConfig):
            return self._gated_delta(index, place, config.mixer, weights)
        if isinstance(config.mixer, ShortConvolutionConfig):
            return self._short_convolution(index, place, config.mixer, weights)
        recurrence, ranks = self._operators.recurrence(place, config.mixer, weights), self.ranks
        if ranks.world == 1 or self._sums_at_norms:
            return recurrence
        return lambda x, step: ranks.sum(recurrence(x, step))

    def _gated_delta(
        self, index: int, place: int, config: GatedDeltaConfig, weights: LayerWeights
    ) -> GatedDelta | StateSpace | ChannelDelta | Lightning:
        own, sizes, (qkv, output) = weights.recurrence, config.sizes, weights.mixed_by
        assert own is not None, "weights are of the kind that the configuration says"
        if config.rule is not None:
            return self._state_space(index, place, config, config.rule, weights)
        if config.fixed is not None:
            return self._lightning(index, place, config, config.fixed, weights)
        gates = None if own.gates is None else self._product(index, WeightName.RECURRENT_GATES, own.gates)
        first = self._product(index, WeightName.RECURRENT_INPUT, qkv)
        projected = WithGates(config.projected_size, first, gates)
        if own.decays is not None and own.output_gates is not None:
            return ChannelDelta(
                place,
                (sizes.num_value_heads, sizes.value_dim),
                projected,
                self._product(index, WeightName.RECURRENT_DECAYS, own.decays),
                self._product(index, WeightName.RECURRENT_OUTPUT_GATES, own.output_gates),
                self._summed(self._product(index, WeightName.RECURRENT_OUTPUT, output)),
                ChannelDeltaWeights(own.conv[:, 0], own.a_log, own.dt_bias),
                own.norm,
                self.config.norm_eps,
                self._operators.gated_delta(config, place),
            )
        return GatedDelta(
            place,
            sizes.conv_dim,
            (sizes.num_value_heads, sizes.value_dim),
            projected,
            self._summed(self._product(index, WeightName.RECURRENT_OUTPUT, output)),
            RecurrenceWeights(own.conv[:, 0], own.a_log, own.dt_bias),
            own.norm,
            self.config.norm_eps,
            self._operators.gated_delta(config, place),
        )

    def _short_convolution(
        self, index: int, place: int, config: ShortConvolutionConfig, weights: LayerWeights
    ) -> ShortConvolution:
        own, (projected, output) = weights.convolution, weights.mixed_by
        assert own is not None, "weights are of the kind that the configuration says"
        return ShortConvolution(
            place,
            self._product(index, WeightName.RECURRENT_INPUT, projected),
            self._summed(self._product(index, WeightName.RECURRENT_OUTPUT, output)),
            ConvolutionWeights(own.taps[:, 0], own.bias),
            self._operators.convolution(config, place),
        )

    def _state_space(
        self, index: int, place: int, config: GatedDeltaConfig, rule: StateSpaceRule, weights: LayerWeights
    ) -> StateSpace:
        own, sizes, (projected, output) = weights.recurrence, config.sizes, weights.mixed_by
        assert own is not None, "weights are of the kind that the configuration says"
        assert own.conv_bias is not None, "weights are of the kind that the configuration says"
        assert own.skip is not None, "weights are of the kind that the configuration says"
        steps = rule.least_step, rule.most_step
        keys, values = sizes.num_key_heads * sizes.key_dim, config.value_size
        counts = keys, keys, values, values, sizes.num_value_heads
        product = self._product(index, WeightName.RECURRENT_INPUT, projected)
        return StateSpace(
            place,
            sizes.conv_dim,
            (sizes.num_value_heads, sizes.value_dim),
            self._scaled(product, rule.input_scales, counts),
            self._summed(self._product(index, WeightName.RECURRENT_OUTPUT, output)),
            StateSpaceWeights(own.conv[:, 0], own.a_log, own.dt_bias, own.conv_bias, own.skip, *steps),
            own.norm,
            sizes.num_key_heads,
            self.config.norm_eps,
            self._operators.gated_delta(config, place),
            is_alike=self._is_alike(projected),
        )

    def _lightning(
        self, index: int, place: int, config: GatedDeltaConfig, rule: FixedDecayRule, weights: LayerWeights
    ) -> Lightning:
        own, sizes, (projected, output) = weights.recurrence, config.sizes, weights.mixed_by
        assert own is not None, "weights are of the kind that the configuration says"
        norms = weights.q_norm, weights.k_norm
        rope, cos_sin = self.ropes.of_kind(rule.rope, sizes.key_dim)
        return Lightning(
            place,
            (sizes.num_value_heads, sizes.value_dim),
            self._product(index, WeightName.RECURRENT_INPUT, projected),
            self._summed(self._product(index, WeightName.RECURRENT_OUTPUT, output)),
            FixedDecayWeights.of(own.a_log, sizes.conv_dim),
            None if norms[0] is None or norms[1] is None else (norms[0], norms[1]),
            own.norm,
            rule.num_groups,
            self.config.norm_eps,
            rope,
            cos_sin,
            self._operators.gated_delta(config, place),
        )

    def _scaled(self, product: Product, scales: tuple[float, ...], counts: tuple[int, ...]) -> Product:
        """Return the product with parts of its results, `counts` of each, multiplied; itself where all scales are 1."""
        if all(it == 1 for it in scales):
            return product
        device = self.weights.embedding.device
        numbers = torch.tensor(scales, dtype=torch.float32, device=device)
        return Scaled(product, numbers.repeat_interleave(torch.tensor(counts, device=device), output_size=sum(counts)))

    def _latent(self, index: int, attention: LatentAttentionConfig, weights: LayerWeights) -> LatentAttention:
        own, sizes, (of_projected, of_output) = weights.latent, attention.sizes, weights.mixed_by
        assert own is not None, "weights are of the kind that the configuration says"
        up = own.kv_up.weight.dequantized().to(own.norm.dtype)  # itself where it is plain
        of_keys, of_values = up.view(attention.num_heads, -1, sizes.latent).split_with_sizes(
            (sizes.plain, sizes.value), dim=1
        )
        query_up = None if own.query_up is None else self._product(index, WeightName.QUERY_UP, own.query_up)
        rope, cos_sin = self.ropes.of(attention)
        indexer = self._indexer(index, attention, own.indexer)
        return LatentAttention(
            self.config.attention_layers.index(index),
            sizes,
            attention.num_heads,
            self._product(index, WeightName.QKV, of_projected),
            query_up,
            own.query_norm,
            own.norm,
            of_keys,
            of_values,
            self._summed(self._product(index, WeightName.OUTPUT, of_output)),
            rope,
            cos_sin,
            grows=attention.query_scaling is not None,
            indexer=indexer,
            choice_of=self._choice_of(index) if attention.reads_choice else None,
            is_alike=self._operators.is_reproducible,
        )

    def _indexer(self, index: int, attention: LatentAttentionConfig, weights: IndexerWeights | None) -> Indexer | None:
        if weights is None or attention.indexer is None:
            return None
        own, of_weights = attention.indexer, _widened(weights.weights)
        return Indexer(
            own.count,
            (own.num_heads, own.dim),
            self._product(index, WeightName.INDEX_QUERIES, weights.queries),
            self._product(index, WeightName.INDEX_KEY, weights.key),
            (weights.norm, weights.bias),
            self._operators.product(index, WeightName.INDEX_WEIGHTS, of_weights, self._in_fp32(of_weights)),
            own.neighbours,
        )

    def _choice_of(self, index: int) -> int:
        """Return the layer whose choice is read, by its place among the layers that attend."""
        return self.config.attention_layers.index(self.config.layer_that_chooses_for(index))

    def _attention(self, index: int, attention: AttentionConfig, weights: LayerWeights) -> Attention:
        place, eps = self.config.attention_layers.index(index), self.config.norm_eps
        rope, cos_sin = self.ropes.of(attention)
        splits, (of_qkv, of_output) = attention.head_splits, weights.mixed_by
        qkv = self._product(index, WeightName.QKV, of_qkv)
        output = self._summed(self._product(index, WeightName.OUTPUT, of_output))
        given = (place, (sum(splits), attention.head_dim), splits, qkv, output, rope, cos_sin, eps)
        grows, gate = attention.query_scaling is not None, self._head_gate(index, attention, weights)
        made: Callable[..., Attention] = partial(Attention, *given, grows=grows, gate=gate)
        if attention.gate is not None and attention.gate.is_beside_queries:
            made = partial(GatedAttention, *given, grows=grows, function=attention.gate.function)
        if attention.value_dim is not None:
            return AsymmetricAttention(*given, sizes=attention.part_sizes, value_scale=attention.value_scale)
        if attention.reads_keys_of is not None:
            source = self.config.attention_layers.index(attention.reads_keys_of)
            norm = None if weights.q_norm is None else self._norm_weight(weights.q_norm)
            return BorrowingAttention(*given, norm, source=source)
        if attention.qk_norm is QKNorm.EACH_HEAD_UNWEIGHTED:
            ones = torch.ones(attention.head_dim, dtype=cos_sin.dtype, device=cos_sin.device)
            return made(q_norm=ones, k_norm=ones)
        if weights.q_norm is None or weights.k_norm is None:
            return made()
        q_norm, k_norm = self._norm_weight(weights.q_norm), self._norm_weight(weights.k_norm)
        if attention.qk_norm is QKNorm.ALL_HEADS:
            return RowNormedAttention(
                *given, q_row_norm=q_norm, k_row_norm=k_norm, ranks=self.ranks, grows=grows, gate=gate
            )
        if attention.qk_norm is QKNorm.EACH_HEAD_ROTATED:
            # A score is a sum over q_i k_i: queries take the weights of both, and the kernel norms before it rotates.
            weight, plain = q_norm.float() * k_norm.float(), torch.ones_like(q_norm)
            return made(q_norm=plain, k_norm=plain, scaled=weight)
        if attention.norms_values:
            is_read_again = any(it.reads_keys_of == index for it in self.config.attentions)
            return NormedValuesAttention(*given, q_norm, k_norm, is_read_again=is_read_again)
        return made(q_norm=q_norm, k_norm=k_norm)

    def _head_gate(self, index: int, attention: AttentionConfig, weights: LayerWeights) -> HeadGate | None:
        if attention.gate is None or weights.attention_gate is None:
            return None
        product = self._product(index, WeightName.ATTENTION_GATE, weights.attention_gate)
        return HeadGate(product, attention.gate.function)

    def _summed(self, product: Product) -> Product:
        """The projection whose columns the ranks share; itself with one rank, or where the next norm sums it up."""
        return product if self.ranks.world == 1 or self._sums_at_norms else self.ranks.summed(product)

    def _entry(self, norm: Tensor | None, reader: Sublayer | None = None, *, bias: Tensor | None = None) -> Entry:
        """Return what adds to the residual on the way into sublayers, and norms it; None: as it is.

        reader  the one sublayer that reads the result; None: several do
        bias    that a LayerNorm adds behind its weight, or None
        """
        if norm is None:
            return add
        weight, eps = self._norm_weight(norm), self.config.norm_eps
        if self.config.norms_subtract_mean:
            return AddLayerNorm(weight, eps, bias)
        if self._sums_at_norms:
            return SumNorm(weight, eps, self.ranks)
        product = None if reader is None else sole_reader(reader)
        return AddNorm(weight, eps) if product is None else RoundingNorm(AddNorm(weight, eps), product)

    def _second_read(self, weights: LayerWeights) -> SecondRead:
        """Return what gives a feed-forward beside attention what it reads: by a norm of its own where it has one."""
        if weights.feed_forward_norm is None:
            return same_read
        entry = self._entry(weights.feed_forward_norm, bias=weights.feed_forward_norm_bias)
        return lambda _, residual: entry(residual, None)[0]

    def _entry_apart(self, weights: LayerWeights) -> AddNormsApart:
        """Return likewise what norms it for `ExpertsApart`."""
        assert isinstance(weights.feed_forward, MixtureWeights)
        norms = weights.feed_forward.norms
        assert norms is not None
        assert weights.feed_forward_norm is not None
        return AddNormsApart(
            router=self._norm_weight(norms.router).float() * self.config.hidden_size**-0.5,
            experts=self._norm_weight(norms.experts),
            shared=self._norm_weight(weights.feed_forward_norm),
            eps=self.config.norm_eps,
        )

    def _finished(self, sublayer: Sublayer, norm: Tensor | None) -> Sublayer:
        """Wrap a sublayer with what the model does to its result before the residual is added."""
        scale = self.config.residual_scale
        if norm is None:
            return _scaled_after(sublayer, scale)
        eps = self.config.norm_eps if self.config.eps_after is None else self.config.eps_after
        weight = self._norm_weight(norm)
        return NormAfter(sublayer, weight if scale == 1 else weight.float() * scale, eps)

    def _norm_weight(self, weight: Tensor) -> Tensor:
        return _norm_weight(weight, self.config.zero_centred_norms)


def _observed_mixer(sublayer: Sublayer, index: int, observer: LayerObserver) -> Sublayer:
    """Return the sublayer of a layer, observed within whatever finishes it; itself where it keeps no state."""
    if isinstance(sublayer, NormAfter | ScaleAfter):
        return replace(sublayer, sublayer=_observed_mixer(sublayer.sublayer, index, observer))
    if isinstance(sublayer, Beside):
        return replace(sublayer, recurrence=_observed_mixer(sublayer.recurrence, index, observer))
    if isinstance(sublayer, GatedDelta | StateSpace | ChannelDelta | Lightning):
        return replace(sublayer, observe=partial(observer.on_recurrence, index))
    if isinstance(sublayer, ShortConvolution):
        return replace(sublayer, observe=partial(observer.on_convolution, index))
    return sublayer


def _scaled_after(sublayer: Sublayer, scale: float) -> Sublayer:
    """Return the sublayer, its result multiplied by a number; itself where that is 1."""
    return sublayer if scale == 1 else ScaleAfter(sublayer, scale)


def _widened(linear: Linear) -> Linear:
    """Return a router as it is computed: on a CPU its numbers in fp32, for products of 16 bits are rounded there."""
    if linear.weight.device.type != "cpu" or linear.weight.dtype is torch.float32:
        return linear
    return Linear(PlainWeight(linear.weight.dequantized().float()))


def _xielu(up: Product, weights: XieluWeights) -> XieluActivated:
    beta, eps = (float(it) for it in (weights.beta, weights.eps))
    alpha_p, alpha_n = (float(F.softplus(it.double())) for it in (weights.alpha_p, weights.alpha_n))
    return XieluActivated(up, alpha_p, beta + alpha_n, beta, eps)


def _norm_weight(weight: Tensor, is_centred: bool) -> Tensor:
    """Return the factors of a norm: in fp32 where the checkpoint has them less one, which 16 bits would round."""
    return weight.float() + 1 if is_centred else weight


def _embedding(config: ModelConfig, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """token_ids [T] int64 -> a new tensor [T, hidden]."""
    if config.norms_embedding:
        ones = weight.new_ones(config.hidden_size)
        return lambda token_ids: rms_norm(F.embedding(token_ids, weight), ones, config.norm_eps)
    scale = config.embedding_scale
    if config.rounds_embedding_scale:
        scale = float(torch.tensor(scale, dtype=weight.dtype))
    if scale == 1:
        return lambda token_ids: F.embedding(token_ids, weight)
    return lambda token_ids: F.embedding(token_ids, weight).mul_(scale)


def _learned_positions(config: ModelConfig, table: Tensor | None) -> Callable[[Tensor, Step], Tensor]:
    """Return what adds to embeddings [T, hidden] those of the step's positions, where a model has learned some."""
    if config.positions is None:
        return no_positions
    assert table is not None, "weights are of the kind that the configuration says"
    return AddPositions(table[config.positions.first :])


def _after_head(config: ModelConfig, bias: Tensor | None) -> tuple[Callable[[Tensor], object], ...]:
    """Add the head's bias to logits [R, vocab] fp32, scale and cap them, in place."""
    changes: list[Callable[[Tensor], object]] = []
    if bias is not None:
        changes.append(lambda logits: logits.add_(bias))
    if config.logits_divisor != 1:
        changes.append(lambda logits: logits.div_(config.logits_divisor))
    if config.logits_softcap is not None:
        cap = config.logits_softcap
        changes.append(lambda logits: logits.div_(cap).tanh_().mul_(cap))
    return tuple(changes)
