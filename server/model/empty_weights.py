"""Weights of a model in their shapes and formats, not yet filled."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.experts.few_bits.weights import CLASSES, AnyExperts, FewBitExperts
from kernels.experts.formats import FewBitFormat
from kernels.experts.kinds import MXFP4_BLOCK, ExpertFormat
from kernels.experts.ungated.weights import UngatedExperts, UngatedFewBitExperts
from kernels.experts.weights import ExpertWeights, Mxfp4Weights
from kernels.linear.shape import PLAIN, WeightFormat
from kernels.linear.weights import LinearWeight, PlainWeight, class_of
from qualification.model.config import (
    AttentionConfig,
    DenseConfig,
    EagerActivation,
    ExpertsConfig,
    LayerConfig,
    LinearFormats,
    ModelConfig,
    QKNorm,
    num_inner_of,
)
from qualification.model.gated_delta import GatedDeltaConfig
from qualification.model.latent import LatentAttentionConfig
from qualification.model.short_convolution import ShortConvolutionConfig
from server.model.layers import (
    ConvolutionTensors,
    DenseWeights,
    DraftWeights,
    GatedDeltaWeights,
    IndexerWeights,
    LatentWeights,
    LayerWeights,
    MixtureWeights,
    NormsApart,
    PerLayerGateWeights,
    PerLayerWeights,
    Weights,
    XieluWeights,
)
from server.model.linear import Linear


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Return weights of the right shapes, not yet filled."""
    make, hidden = _Maker(config.hidden_size, dtype, device), config.hidden_size
    embedding = make.tensor(config.vocab_size, hidden)
    if config.tie_embeddings:
        head: LinearWeight = PlainWeight(embedding)
    else:
        head = class_of(config.head_format).empty(config.vocab_size, hidden, dtype, device)
    layers, per_layer, draft = tuple(make.layer(it, config) for it in config.layers), None, None
    if config.per_layer is not None:
        size, width = config.num_layers * config.per_layer.width, config.per_layer.width
        table = make.tensor(config.per_layer.vocab_size, size)
        per_layer = PerLayerWeights(table, make.linear(hidden, size), make.tensor(width))
    if config.num_draft_layers:
        of_embedding, of_hidden, behind = (make.tensor(hidden) for _ in range(3))
        draft = DraftWeights(of_embedding, of_hidden, make.linear(2 * hidden, hidden), behind)
    bias = make.tensor(hidden) if config.norms_have_biases else None
    norm, head_bias = make.norm(config), make.tensor(config.vocab_size) if config.head_has_bias else None
    places = None if config.positions is None else make.tensor(config.positions.num_rows, hidden)
    return Weights(
        embedding,
        layers,
        norm,
        Linear(head),
        per_layer,
        draft,
        final_norm_bias=bias,
        head_bias=head_bias,
        positions=places,
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes tensors of a model whose residual has `hidden` numbers; what is not said is of `dtype` and plain."""

    hidden: int
    dtype: torch.dtype
    device: torch.device

    def tensor(self, *shape: int, of: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=of or self.dtype, device=self.device)

    def norm(self, model: ModelConfig) -> Tensor:
        """Return the weight of a norm of the hidden size: all 1 where the checkpoint has none, which nothing fills."""
        found = self.tensor(self.hidden)
        return found if model.norms_have_weights else found.fill_(1)

    def linear(
        self, size_in: int, size_out: int, weight_format: WeightFormat = PLAIN, *, has_bias: bool = False
    ) -> Linear:
        return Linear.empty(size_in, size_out, has_bias, weight_format, self.dtype, self.device)

    def layer(self, layer: LayerConfig, model: ModelConfig) -> LayerWeights:
        norms, mixer, feeds = layer.norms, layer.mixer, layer.feed_forward is not None
        has_attention_norm = norms.before and mixer is not None
        has_norm_before = feeds and not norms.is_shared and (norms.before or mixer is None)
        has_biases = model.norms_have_biases
        found = LayerWeights(
            attention_norm=self.norm(model) if has_attention_norm else None,
            qkv=None,
            q_norm=None,
            k_norm=None,
            output=None,
            feed_forward_norm=self.norm(model) if has_norm_before else None,
            feed_forward=self._feed_forward(layer),
            attention_norm_bias=self.tensor(self.hidden) if has_attention_norm and has_biases else None,
            feed_forward_norm_bias=self.tensor(self.hidden) if has_norm_before and has_biases else None,
        )
        if isinstance(mixer, GatedDeltaConfig):
            return self._recurrent(found, mixer, layer.formats)
        if isinstance(mixer, ShortConvolutionConfig):
            return self._convolving(found, mixer, layer.formats)
        if layer.of_beside is not None:
            found = replace(found, beside=self.layer(layer.of_beside, model))
        return found if mixer is None else self._attending(found, layer, model)

    def _recurrent(self, layer: LayerWeights, mixer: GatedDeltaConfig, formats: LinearFormats) -> LayerWeights:
        """Return a layer with the weights of a recurrence."""
        norms_heads = mixer.fixed is not None and mixer.fixed.norms_heads
        return replace(
            layer,
            qkv=self.linear(self.hidden, mixer.input_rows(formats)[0], formats.qkv),
            q_norm=self.tensor(mixer.sizes.key_dim) if norms_heads else None,
            k_norm=self.tensor(mixer.sizes.key_dim) if norms_heads else None,
            output=self.linear(mixer.value_size, self.hidden, formats.output),
            recurrence=self._gated_delta(mixer, formats),
        )

    def _gated_delta(self, mixer: GatedDeltaConfig, formats: LinearFormats) -> GatedDeltaWeights:
        sizes, heads, fp32 = mixer.sizes, mixer.sizes.num_value_heads, torch.float32
        if mixer.fixed is not None:
            slopes, none = torch.tensor(mixer.fixed.slopes, dtype=torch.float64), self.tensor(0, 1, 1)
            a_log = slopes.log().float().to(self.device)
            return GatedDeltaWeights(None, none, a_log, none.flatten(), self.tensor(mixer.norm_size, of=fp32))
        conv = self.tensor(sizes.conv_dim, 1, sizes.width)
        a_log, dt_bias, norm = (self.tensor(size, of=fp32) for size in (heads, mixer.num_decays, mixer.norm_size))
        num_gates = mixer.input_rows(formats)[1]
        gates = self.linear(self.hidden, num_gates, formats.gates) if num_gates else None
        if mixer.has_channel_decays:
            decays, output_gates = (self.linear(sizes.value_dim, it) for it in (mixer.num_decays, mixer.value_size))
            return GatedDeltaWeights(gates, conv, a_log, dt_bias, norm, decays=decays, output_gates=output_gates)
        if mixer.rule is None:
            return GatedDeltaWeights(gates, conv, a_log, dt_bias, norm)
        conv_bias, skip = self.tensor(sizes.conv_dim), self.tensor(heads, of=fp32)
        return GatedDeltaWeights(None, conv, a_log, dt_bias, norm, conv_bias, skip)

    def _convolving(self, layer: LayerWeights, mixer: ShortConvolutionConfig, formats: LinearFormats) -> LayerWeights:
        """Return a layer with the weights of a short convolution."""
        sizes, has_bias = mixer.sizes, mixer.sizes.has_bias
        weight = self.tensor(sizes.channels, 1, sizes.width)
        return replace(
            layer,
            qkv=self.linear(self.hidden, 3 * sizes.channels, formats.qkv, has_bias=has_bias),
            output=self.linear(sizes.channels, self.hidden, formats.output, has_bias=has_bias),
            convolution=ConvolutionTensors(weight, self.tensor(sizes.channels) if has_bias else None),
        )

    def _attending(self, weights: LayerWeights, layer: LayerConfig, model: ModelConfig) -> LayerWeights:
        """Return a layer with the weights of attention, and of what only layers that attend have."""
        attention, formats, norms, hidden = layer.attention, layer.formats, layer.norms, self.hidden
        has_own_gate = attention.gate is not None and not attention.gate.is_beside_queries
        size_q_norm, size_k_norm = {
            QKNorm.NONE: (0, 0),
            QKNorm.EACH_HEAD_UNWEIGHTED: (0, 0),
            QKNorm.EACH_HEAD: (attention.head_dim, attention.head_dim),
            QKNorm.EACH_HEAD_ROTATED: (attention.head_dim, attention.head_dim),
            QKNorm.ALL_HEADS: (attention.query_size, attention.kv_size),
        }[attention.qk_norm]
        per_layer = None
        if model.per_layer is not None:
            width = model.per_layer.width
            gate, out = self.linear(hidden, width), self.linear(width, hidden)
            per_layer = PerLayerGateWeights(gate, out, self.tensor(hidden))
        return replace(
            weights,
            qkv=self.linear(hidden, attention.projected_size, formats.qkv, has_bias=attention.has_bias),
            q_norm=self.tensor(size_q_norm) if size_q_norm else None,
            k_norm=self.tensor(size_k_norm) if size_k_norm and attention.has_own_keys else None,
            output=self.linear(attention.output_size, hidden, formats.output, has_bias=attention.has_output_bias),
            norm_after_attention=self.tensor(hidden) if norms.after else None,
            norm_after_feed_forward=self.tensor(hidden) if norms.after and layer.feed_forward is not None else None,
            sinks=self.tensor(attention.num_heads, of=torch.float32) if attention.has_sinks else None,
            attention_gate=self.linear(hidden, attention.gate_size) if has_own_gate else None,
            latent=self._latent(attention, formats),
            per_layer=per_layer,
            scale=self.tensor(1) if model.has_layer_scales else None,
        )

    def _latent(self, attention: AttentionConfig, formats: LinearFormats) -> LatentWeights | None:
        if not isinstance(attention, LatentAttentionConfig):
            return None
        sizes, heads, query_latent = attention.sizes, attention.num_heads, attention.sizes.query_latent
        indexer, own = None, attention.own_indexer
        if own is not None:
            assert query_latent is not None, "an indexer's queries are made of the query latent"
            indexer = IndexerWeights(
                self.linear(query_latent, own.num_heads * own.dim, formats.index_up),
                self.linear(self.hidden, own.dim, formats.index_key),
                self.tensor(own.dim),
                self.tensor(own.dim),
                self.linear(self.hidden, own.num_heads),
            )
        return LatentWeights(
            None if query_latent is None else self.tensor(query_latent),
            None if query_latent is None else self.linear(query_latent, heads * sizes.query, formats.query_up),
            self.tensor(sizes.latent),
            self.linear(sizes.latent, heads * (sizes.plain + sizes.value), formats.kv_up),
            indexer,
        )

    def _feed_forward(self, layer: LayerConfig) -> DenseWeights | MixtureWeights | None:
        config, formats, hidden, fp32 = layer.feed_forward, layer.formats, self.hidden, torch.float32
        if config is None:
            return None
        if isinstance(config, DenseConfig):
            dense = self._dense(config.width, config.num_inner, formats, has_bias=config.has_bias)
            if config.activation is not EagerActivation.XIELU:
                return dense
            return replace(dense, xielu=XieluWeights(self.tensor(1), self.tensor(1), self.tensor(), self.tensor()))
        count, rows, latent = config.num_experts, config.router_rows, config.latent
        router = self.linear(hidden, rows, has_bias=config.has_router_bias)
        router.weight.rows(count, rows - count).stored["weight"].values.zero_()
        shared, of_shared = None if config.shared_is_expert else config.shared, None
        if shared is not None:
            of_shared = self._dense(shared.width, num_inner_of(config.shared_activation), formats)
        return MixtureWeights(
            router,
            self._experts(config),
            self.tensor(count, of=fp32) if config.has_correction_bias else None,
            of_shared,
            self.tensor(1, hidden) if shared is not None and shared.is_gated else None,
            self.tensor(count, of=fp32) if config.has_expert_scales else None,
            NormsApart(*self.tensor(4, hidden)) if config.norms_apart else None,
            None if latent is None else self.linear(hidden, latent, formats.to_latent),
            None if latent is None else self.linear(latent, hidden, formats.from_latent),
        )

    def _dense(self, width: int, num_inner: int, formats: LinearFormats, *, has_bias: bool = False) -> DenseWeights:
        return DenseWeights(
            self.linear(self.hidden, num_inner * width, formats.gate_up, has_bias=has_bias),
            self.linear(width, self.hidden, formats.down, has_bias=has_bias),
        )

    def _experts(self, config: ExpertsConfig) -> AnyExperts:
        count, size, width = config.num_experts_computed, config.read_size(self.hidden), config.width
        if isinstance(config.format, FewBitFormat):
            kind, of = CLASSES[config.format], UngatedFewBitExperts if config.num_inner == 1 else FewBitExperts
            sizes = (count * config.num_inner * width, size), (count * size, width)
            return of(*(kind.empty(*it, self.dtype, self.device) for it in sizes))
        if config.num_inner == 1:
            assert config.format is ExpertFormat.PLAIN, "experts without a gate are not interleaved"
            return UngatedExperts(self.tensor(count, width, size), self.tensor(count, size, width))
        gate_up_bias = self.tensor(count, 2 * width) if config.has_bias else None
        down_bias = self.tensor(count, size) if config.has_bias else None
        if config.format is ExpertFormat.PLAIN:
            gate_up, down = self.tensor(count, 2 * width, size), self.tensor(count, size, width)
            return ExpertWeights(gate_up, down, gate_up_bias, down_bias)

        def packed(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            blocks = count, rows, columns // MXFP4_BLOCK
            return self.tensor(*blocks, MXFP4_BLOCK // 2, of=torch.uint8), self.tensor(*blocks, of=torch.uint8)

        codes = *packed(2 * width, size), *packed(size, width)
        return Mxfp4Weights(*codes, gate_up_bias=gate_up_bias, down_bias=down_bias)
