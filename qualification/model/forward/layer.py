"""One layer, from its family's sentence, a LayerConfig and the checkpoint's own tensors.

A layer is computed in sections, from a tensor that a served model hands out to the next: the norm of what attention
reads; queries, keys and values; attention; the residual behind it; the norm of what the feed-forward reads; the
residual behind that. Each is Bounded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from qualification.model.config import (
    AttentionConfig,
    DenseConfig,
    EagerActivation,
    ExpertsConfig,
    LayerConfig,
    ModelConfig,
)
from qualification.model.forward.attention import Attends, attend
from qualification.model.forward.bounded import (
    Bounded,
    Precision,
    U,
    function_of,
    in_fp32,
    layer_norm,
    rms_norm,
    sum_over_ranks,
)
from qualification.model.forward.checkpoint import CheckpointError, Reading
from qualification.model.forward.convolution import convolve
from qualification.model.forward.latent import absorbed, beside, expanded
from qualification.model.forward.lightning import mix_lightning, slopes_of
from qualification.model.forward.matrix import Inputs, Matrix
from qualification.model.forward.mixture import Gate, GatedWeights, feed, gate_of, mixed, route, unpack_mxfp4, xielu_of
from qualification.model.forward.packed import is_packed, numbers_of
from qualification.model.forward.recurrence import Rule, mix
from qualification.model.forward.rotation import rotate
from qualification.model.forward.sentences import HeadGate, MixtureSentence, NormOrder, Scoring, Sentence
from qualification.model.forward.state_space import SpaceRule, mix_space
from qualification.model.gated_delta import GatedDeltaConfig, StateSpaceRule
from qualification.model.latent import IndexerConfig, LatentAttentionConfig, LatentSizes
from qualification.model.short_convolution import ShortConvolutionConfig

GATES: Mapping[HeadGate, Callable[[Tensor], Tensor]] = {
    HeadGate.SIGMOID: torch.sigmoid,
    HeadGate.SOFTPLUS: torch.nn.functional.softplus,
}
LATENT_EPS = 1e-6  # of both norms of latent attention, in every published class
_BLOCK = 128  # rows and columns of a weight of 8 bits that share a scale
INDEX_EPS = 1e-6  # of the norm of an indexer's keys, likewise
_INDEXER = "self_attn.indexer"
_SCALES = ("weight_scale", "weight_scale_inv")  # both are multiplied by, whatever they are called


@dataclass(frozen=True, slots=True)
class Fed:
    """The residual behind a feed-forward.

    is_judged  [T]: tokens whose experts no right router may choose otherwise
    """

    residual: Bounded
    is_judged: Tensor


@dataclass(frozen=True, slots=True)
class LayerReference:
    """tensors: of this layer, by their names within it. context: positions that are served. ranks: that share sums."""

    model: ModelConfig
    config: LayerConfig
    sentence: Sentence
    tensors: Mapping[str, Reading]
    precision: Precision
    context: int
    ranks: int

    @property
    def attention(self) -> AttentionConfig:
        return self.config.attention

    @property
    def beside(self) -> "LayerReference | None":
        """Return the layer as one of what is beside its attention alone; None where nothing is."""
        own = self.config.of_beside
        return None if own is None else replace(self, config=own)

    def attention_read(self, residual: Bounded) -> Bounded:
        """Return what attention reads, of the residual [T, hidden]."""
        if self._order is NormOrder.AFTER:
            return residual
        return self._norm(residual, self.sentence.before_attention)

    @property
    def _order(self) -> NormOrder:
        """Return where the layer norms, as its family does, or as config.json says where the family has more ways."""
        if self.sentence.order is not NormOrder.AS_CONFIGURED:
            return self.sentence.order
        if self.config.norms.is_shared:
            return NormOrder.PARALLEL
        return NormOrder.PARALLEL_APART if self.config.norms.is_parallel else NormOrder.BEFORE

    def feed_forward_read(self, before: Bounded, residual: Bounded) -> Bounded:
        """Return what the feed-forward reads, of the residuals before attention and behind it.

        That is the residual itself where its parts norm it each by themselves.
        """
        if self._order is NormOrder.PARALLEL:
            return self.attention_read(before)
        if self._order is NormOrder.PARALLEL_APART:
            return self._norm(before, self.sentence.between)
        if self._order is NormOrder.AFTER or self._norms_apart:
            return residual
        is_sandwich = self._order is NormOrder.SANDWICH
        return self._norm(residual, self.sentence.before_feed_forward if is_sandwich else self.sentence.between)

    @property
    def _norms_apart(self) -> bool:
        fed, mixture = self.config.feed_forward, self.sentence.mixture
        return isinstance(fed, ExpertsConfig) and mixture is not None and mixture.norms_apart

    def queries(self, read: Bounded, positions: Tensor) -> Bounded:
        """Return q [T, heads, d], normed and rotated, of a layer that reads the keys of an earlier one."""
        q = self._linear(read, "self_attn.q_proj", Inputs(self.config.formats.qkv.name))
        return self._rotated(self._heads_normed(self.precision.rounded(q), self.sentence.q_norm), positions)

    def heads(self, read: Bounded, positions: Tensor) -> tuple[Bounded, Bounded, Bounded]:
        """Return q [T, heads, d], k and v [T, kv_heads, d], queries and keys normed and rotated, or the other way.

        Of pairs that are neighbours in the checkpoint the first ones come before the second ones, as served.
        """
        attention, inputs = self.attention, Inputs.of(self.config.formats.qkv.name)
        if isinstance(attention, LatentAttentionConfig):
            return self._latent_heads(read, positions, attention.sizes)
        if self.sentence.qkv is not None and self.sentence.qkv_is_by_head:
            parts = self._by_head(self._linear(read, self.sentence.qkv, inputs))
        elif self.sentence.qkv is not None:
            merged = self._linear(read, self.sentence.qkv, inputs)
            ends = attention.query_size, attention.query_size + attention.kv_size
            parts = [merged.columns(own) for own in (slice(ends[0]), slice(*ends), slice(ends[1], None))]
        elif attention.qkv_shards is not None:
            parts = [it.product(read, None, self.precision) for it in self._of_shards(attention.qkv_shards)]
        else:
            has_values = "self_attn.v_proj.weight" in self.tensors or not self.sentence.norms_values
            parts = [
                self._linear(read, f"{self.sentence.attention}.{name}_proj", inputs)
                for name in ("qkv" if has_values else "qkk")
            ]
        if self.sentence.gates_in_queries:
            parts[0] = parts[0].changed(self._first_halves)
        q, k, v = (self.precision.rounded(part) for part in parts)
        if self.sentence.scales_values:
            v = self.precision.rounded(v.times(attention.value_scale))
        v = v.changed(lambda it: it.reshape(it.shape[0], attention.num_kv_heads, -1))
        if self.sentence.norms_values:
            ones = torch.ones(attention.head_dim, dtype=torch.float64, device=v.truth.device)
            v = rms_norm(v, ones, self.model.norm_eps, self.precision)
        if self.sentence.norms_rotated:
            q, k = self._normed_behind(*(self._rotated(it.changed(self._in_heads), positions) for it in (q, k)))
            return q, k, v
        if self.sentence.norms_rotating_layers:
            q, k = (self._unit_normed(self._rotated(it.changed(self._in_heads), positions)) for it in (q, k))
            return self._grown(q, positions), k, v
        names = self.sentence.q_norm, self.sentence.k_norm
        q, k = (self._rotated(self._heads_normed(it, name), positions) for it, name in zip((q, k), names, strict=True))
        return self._grown(q, positions), k, v

    def _by_head(self, merged: Bounded) -> list[Bounded]:
        """Return queries, keys and values, of a product that has of each KV head its queries, its key and its value."""
        attention = self.attention
        in_group = attention.num_heads // attention.num_kv_heads
        groups = merged.changed(lambda it: it.view(it.shape[0], attention.num_kv_heads, in_group + 2, -1))
        own = (slice(in_group), slice(in_group, in_group + 1), slice(in_group + 1, None))
        return [groups.changed(lambda it, of=of: it[:, :, of].flatten(1)) for of in own]  # type: ignore[misc]

    def _of_shards(self, num_shards: int) -> list[Matrix]:
        """Return what makes queries, keys and values, of a tensor that has them shard after shard, in blocks of 128."""
        name = f"{self.sentence.attention}.qkv_proj"
        codes, scales = self.stored(f"{name}.weight"), self.stored(f"{name}.weight_scale_inv")
        rows, blocks = codes.shape[0] // num_shards, scales.shape[0] // num_shards
        row = torch.arange(codes.shape[0], device=codes.device)
        block = row // rows * blocks + row % rows // _BLOCK
        column = torch.arange(codes.shape[1], device=codes.device) // _BLOCK
        numbers = codes.float() * scales.float()[block][:, column]  # fp32, then rounded to what is served
        ends = [0, *accumulate(it // num_shards for it in self.attention.part_sizes)]
        within = row % rows
        own = [(within >= first) & (within < last) for first, last in pairwise(ends)]
        return [Matrix(numbers[it].to(self.precision.dtype)) for it in own]

    def _latent_heads(self, read: Bounded, positions: Tensor, sizes: LatentSizes) -> tuple[Bounded, Bounded, Bounded]:
        """Return absorbed queries [T, heads, latent + rotated], the same numbers of each key, and its latent."""
        inputs, formats = Inputs.of(self.config.formats.qkv.name), self.config.formats
        if sizes.query_latent is None:
            q = self._linear(read, f"{self.sentence.attention}.q_proj", inputs)
        else:
            normed = self._query_latent(read)
            q = self._linear(normed, f"{self.sentence.attention}.q_b_proj", Inputs.of(formats.query_up.name))
        heads = self.precision.rounded(q).changed(lambda it: it.view(len(it), -1, sizes.query))
        plain = absorbed(heads.columns(slice(sizes.plain)), self._kv_up(), sizes, self.precision)
        queries = beside(plain, self._rotated(heads.columns(slice(sizes.plain, None)), positions))
        of_keys = self.precision.rounded(self._linear(read, f"{self.sentence.attention}.kv_a_proj_with_mqa", inputs))
        of_keys = of_keys.changed(lambda it: it[:, None])
        weight = self._vector(f"{self.sentence.attention}.kv_a_layernorm.weight")
        latent = rms_norm(of_keys.columns(slice(sizes.latent)), weight, LATENT_EPS, self.precision)
        keys = beside(latent, self._rotated(of_keys.columns(slice(sizes.latent, None)), positions))
        if self.indexer is not None:
            keys = beside(keys, self._index_keys(read, positions))
        return self._grown(queries, positions), keys, latent

    @property
    def indexer(self) -> IndexerConfig | None:
        """Return what chooses the keys of the layer by itself; None where nothing does."""
        attention = self.attention
        return attention.own_indexer if isinstance(attention, LatentAttentionConfig) else None

    def index(self, read: Bounded, positions: Tensor) -> tuple[Bounded, Bounded]:
        """Return the queries [T, heads, dim], rotated, and the weights [T, heads] of the layer's indexer."""
        assert self.indexer is not None, "the layer has an indexer"
        dim, latent = self.indexer.dim, self._query_latent(read)
        made = self._linear(latent, f"{_INDEXER}.wq_b", Inputs.of(self.config.formats.index_up.name))
        heads = self.precision.rounded(made).changed(lambda it: it.view(len(it), -1, dim))
        return self._index_rotated(heads, positions), self._linear(read, f"{_INDEXER}.weights_proj")

    def _index_keys(self, read: Bounded, positions: Tensor) -> Bounded:
        """Return an indexer's keys [T, 1, dim]: a LayerNorm with a bias, then rotated."""
        made = self._linear(read, f"{_INDEXER}.wk", Inputs.of(self.config.formats.index_key.name))
        weight, bias = (self._vector(f"{_INDEXER}.k_norm.{name}") for name in ("weight", "bias"))
        moved = layer_norm(self.precision.rounded(made), weight, INDEX_EPS, self.precision, bias)
        return self._index_rotated(moved.changed(lambda it: it[:, None]), positions)

    def _index_rotated(self, heads: Bounded, positions: Tensor) -> Bounded:
        """Return vectors of which the first numbers are rotated, as many as of attention's."""
        neighbours, rotated = self.sentence.index_neighbours, self.attention.rotary_dim
        assert neighbours is not None, "the family has indexers"
        first = rotate(
            heads.columns(slice(rotated)), positions, self.attention.rope, self.context, self.precision,
            neighbours=neighbours,
        )  # fmt: skip
        return beside(first, heads.columns(slice(rotated, None)))

    def _query_latent(self, read: Bounded) -> Bounded:
        """Return what queries are made of, normed [T, query latent]."""
        own = self.precision.rounded(
            self._linear(read, f"{self.sentence.attention}.q_a_proj", Inputs.of(self.config.formats.qkv.name))
        )
        return rms_norm(
            own, self._vector(f"{self.sentence.attention}.q_a_layernorm.weight"), LATENT_EPS, self.precision
        )

    def _kv_up(self) -> Tensor:
        """Return what makes keys and values of a latent: in the dtype that it is served in, of 8 bits too."""
        inputs = Inputs.of(self.config.formats.kv_up.name)
        return self.matrix(f"{self.sentence.attention}.kv_b_proj", inputs).numbers().to(self.precision.dtype)

    def _rotated(self, heads: Bounded, positions: Tensor) -> Bounded:
        rope, neighbours = self.attention.rope, self.sentence.rotates_neighbours
        return rotate(heads, positions, rope, self.context, self.precision, neighbours=neighbours)

    def _unit_normed(self, heads: Bounded) -> Bounded:
        """Return heads, normed without a weight where the layer's attention has such norms."""
        if self.attention.qk_norm.name != "EACH_HEAD_UNWEIGHTED":
            return heads
        ones = torch.ones(self.attention.head_dim, dtype=torch.float64, device=heads.truth.device)
        return rms_norm(heads, ones, self.model.norm_eps, self.precision)

    def _normed_behind(self, q: Bounded, k: Bounded) -> tuple[Bounded, Bounded]:
        """Return rotated heads, normed. Queries have the weights of keys, too, as served: scores are the same."""
        weights = [self._vector(f"{name}.weight") for name in (self.sentence.q_norm, self.sentence.k_norm)]
        ones, eps = torch.ones_like(weights[0]), self.model.norm_eps
        unit = [rms_norm(it, ones, eps, self.precision) for it in (q, k)]
        return self.precision.rounded(unit[0].times(weights[0] * weights[1])), unit[1]

    def _grown(self, q: Bounded, positions: Tensor) -> Bounded:
        """Return queries [T, heads, d], larger the farther out they are, where the family's grow."""
        scaling = self.attention.query_scaling
        if scaling is None or not self.sentence.queries_grow:
            return q
        spans = (positions.double() + scaling.first) / scaling.span
        grown = q.times((1 + scaling.rate * torch.log1p(spans.floor()))[:, None, None])
        of_logarithm = 4 * U * grown.truth.abs()
        return self.precision.rounded(Bounded(grown.truth, grown.most + of_logarithm, grown.deviation))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spans: tuple[tuple[int, int], ...] = (),
        *,
        chosen: Tensor | None = None,
    ) -> Bounded:
        """Return [T, heads, d] of one sequence's last T tokens' q and all its keys and values, as they are stored.

        spans   of positions, whose tokens see each other both ways in layers of that kind
        chosen  [T, n] bool: the keys that each token attends to, where an indexer chooses them
        """
        attention = self.attention
        spans = spans if attention.sees_spans else ()
        name = self.sentence.sinks
        sinks = self._vector(name, torch.float32) if name is not None and name in self.tensors else None
        limits = attention.scale, attention.window, attention.chunk, attention.softcap
        attends = Attends(*limits, sinks, spans=spans, chosen=chosen)
        return attend(q, k[..., : q.shape[2]], v, attends, self.precision)

    def after_attention(self, residual: Bounded, out: Bounded, read: Bounded) -> Bounded:
        """Return the residual behind attention: of the one before, the heads [T, heads, d] and what attention read."""
        if isinstance(self.attention, LatentAttentionConfig):
            out = expanded(out, self._kv_up(), self.attention.sizes, self.precision)
        return self._behind(residual, self._attended(out, read))

    def after_both(self, residual: Bounded, out: Bounded, read: Bounded, mixed: Bounded, projected: Bounded) -> Bounded:
        """Return the residual behind attention and a recurrence beside it: of what each has made, as for one alone."""
        beside = self.beside
        assert beside is not None, "the layer has both"
        pairs = zip(self._attended(out, read), beside._recurred(mixed, projected), strict=True)
        return self._behind(residual, [self.precision.rounded(one.plus(other)) for one, other in pairs])

    def _attended(self, out: Bounded, read: Bounded) -> list[Bounded]:
        """Return what each rank adds, of the heads [T, heads, d] and what attention read."""
        flat = self._gated_heads(out, read).changed(lambda it: it.flatten(1))
        return self._projected(flat, self.sentence.attention_output)

    @property
    def convolves(self) -> bool:
        """Return whether the mixer is a short convolution of which a definition is written."""
        return isinstance(self.config.mixer, ShortConvolutionConfig) and self.sentence.convolution is not None

    def convolution_read(self, read: Bounded) -> Bounded:
        """Return the gates of inputs, those of results, and the inputs of a short convolution, [T, 3 * channels]."""
        inputs = Inputs.of(self.config.formats.qkv.name)
        return self.precision.rounded(self._linear(read, f"{self.sentence.convolution}.in_proj", inputs))

    def convolve(self, projected: Tensor) -> Bounded:
        """Return the results [T, channels] of one sequence from its first token on, of what it projects."""
        own = f"{self.sentence.convolution}.conv"
        return convolve(projected, self._vector(f"{own}.weight")[:, 0], self._bias(own), self.precision)

    def after_convolution(self, residual: Bounded, out: Bounded) -> Bounded:
        """Return the residual behind a short convolution, of its results [T, channels]."""
        return self._behind(residual, self._projected(out, f"{self.sentence.convolution}.out_proj"))

    @property
    def recurrence(self) -> GatedDeltaConfig:
        """Return the mixer of a layer that does not attend. Raises CheckpointError for one of another kind."""
        mixer = self.config.mixer
        if not isinstance(mixer, GatedDeltaConfig) or self.sentence.recurrence is None:
            raise CheckpointError(f"no definition of a layer of {self.model.family} that does not attend is written")
        return mixer

    def recurrent_input(self, read: Bounded, positions: Tensor) -> tuple[Bounded, Bounded]:
        """Return queries, keys, values and the gates of the result [T, ...], and the gates of writing and decay.

        Of lightning attention the first two are normed and rotated, and there are none of the last two: [T, 0].
        """
        sentence, formats = self.sentence.recurrence, self.config.formats
        inputs, of_gates = Inputs.of(formats.qkv.name), Inputs.of(formats.gates.name)
        sizes, heads = self.recurrence.sizes, self.recurrence.sizes.num_value_heads
        assert sentence is not None, "the layer is recurrent"
        if sentence.is_kimi:
            return self._kimi_input(read, sentence.prefix)
        if sentence.is_lightning:
            return self._lightning_input(read, sentence.prefix, positions)
        if sentence.is_space:
            ends = self.recurrence.value_size, sizes.num_key_heads * sizes.key_dim
            by_part = (ends[0], ends[0], ends[1], ends[1], heads)
            whole = self.precision.rounded(self._linear(read, f"{sentence.prefix}.in_proj", inputs))
            whole = self._with_parts_scaled(whole, by_part)
            return whole.changed(partial(_turned, sizes=by_part)), whole.columns(slice(-heads, None))
        if sentence.is_fused:
            group = heads // sizes.num_key_heads
            values = group * sizes.value_dim
            whole = self._linear(read, f"{sentence.prefix}.in_proj_qkvz", inputs)
            gates = self._linear(read, f"{sentence.prefix}.in_proj_ba", of_gates)
            parts = whole.changed(partial(_ungrouped, sizes=(sizes.key_dim, sizes.key_dim, values, values)))
            gates = gates.changed(partial(_ungrouped, sizes=(group, group)))
        else:
            parts, gates = (
                _side_by_side([self._linear(read, f"{sentence.prefix}.in_proj_{name}", how) for name in names])
                for names, how in ((("qkv", "z"), inputs), (("b", "a"), of_gates))
            )
        return self.precision.rounded(parts), self.precision.rounded(gates)

    def _with_parts_scaled(self, whole: Bounded, sizes: tuple[int, ...]) -> Bounded:
        """Return gates, x, B, C and steps of a state space [T, ...], each multiplied by a number of config.json."""
        assert self.recurrence.rule is not None, "the layer is of a state space"
        c, b, x, gates, steps = self.recurrence.rule.input_scales
        if c == b == x == gates == steps == 1:
            return whole
        pairs = zip(sizes, (gates, x, b, c, steps), strict=True)
        factors = torch.cat([torch.full((size,), in_fp32(it), dtype=torch.float64) for size, it in pairs])
        return self.precision.rounded(whole.times(factors.to(whole.truth.device)))

    def _kimi_input(self, read: Bounded, prefix: str) -> tuple[Bounded, Bounded]:
        """Return the same of Kimi Delta Attention, whose decays are of each channel of a key."""
        inputs = Inputs.of(self.config.formats.qkv.name)
        parts = [self.precision.rounded(self._linear(read, f"{prefix}.{it}_proj", inputs)) for it in "qkv"]
        output, decay = (
            self.precision.rounded(
                self._linear(
                    self.precision.rounded(self._linear(read, f"{prefix}.{it}_a_proj")), f"{prefix}.{it}_b_proj"
                )
            )
            for it in "gf"
        )
        writing = self.precision.rounded(self._linear(read, f"{prefix}.b_proj"))
        return _side_by_side([*parts, output]), _side_by_side([writing, decay])

    def _lightning_input(self, read: Bounded, prefix: str, positions: Tensor) -> tuple[Bounded, Bounded]:
        sizes, fixed = self.recurrence.sizes, self.recurrence.fixed
        assert fixed is not None, "the layer is of lightning attention"
        inputs, width = Inputs.of(self.config.formats.qkv.name), sizes.num_key_heads * sizes.key_dim
        whole = self.precision.rounded(self._linear(read, f"{prefix}.query_key_value", inputs))
        parts = []
        for index, name in enumerate((self.sentence.q_norm, self.sentence.k_norm)):
            own = whole.columns(slice(index * width, (index + 1) * width))
            own = own.changed(lambda it: it.reshape(len(it), -1, sizes.key_dim))
            if f"{name}.weight" in self.tensors:
                own = rms_norm(own, self._vector(f"{name}.weight"), self.model.norm_eps, self.precision)
            rotated = rotate(own, positions, fixed.rope, self.context, self.precision, neighbours=False)
            parts.append(rotated.changed(lambda it: it.flatten(1)))
        values = whole.columns(slice(2 * width, None))
        gates = self.precision.rounded(self._linear(read, f"{prefix}.g_proj", inputs))
        return _side_by_side([*parts, values, gates]), gates.columns(slice(0))

    def mix(self, projected: Tensor, gates: Tensor) -> Bounded:
        """Return the results [T, heads, d] of one sequence from its first token on, of what `recurrent_input` gives."""
        sizes = self.recurrence.sizes
        heads, prefix = sizes.num_value_heads, self._recurrence_prefix
        if self.recurrence.rule is not None:
            return self._mix_space(projected, gates, self.recurrence.rule)
        state_unit = 2.0**-9 if self.recurrence.state_dtype.value == "bf16" else 0.0
        if self.recurrence.fixed is not None:
            slopes = slopes_of(heads, self.model.layers.index(self.config), self.model.num_layers).to(projected.device)
            return mix_lightning(projected[:, : sizes.conv_dim], slopes, sizes.key_dim, self.precision, state_unit)
        sentence = self.sentence.recurrence
        names = ("q_", "k_", "v_") if sentence is not None and sentence.is_kimi else ("",)
        rule = Rule(
            torch.cat([self._vector(f"{prefix}.{it}conv1d.weight")[:, 0] for it in names]),
            self._vector(f"{prefix}.A_log", torch.float32).flatten(),
            self._vector(f"{prefix}.dt_bias", torch.float32),
            sizes.num_key_heads,
            sizes.key_dim,
            sizes.value_dim,
            state_unit,
        )
        qkv = projected[:, : rule.conv.shape[0]]
        return mix(qkv, gates[:, :heads], gates[:, heads:], rule, self.precision)

    def _mix_space(self, projected: Tensor, steps: Tensor, rule: StateSpaceRule) -> Bounded:
        sizes, prefix = self.recurrence.sizes, self._recurrence_prefix
        keys, values = sizes.num_key_heads * sizes.key_dim, self.recurrence.value_size

        def turned(name: str) -> Tensor:
            x, b, c = self._vector(name).split_with_sizes((values, keys, keys))
            return torch.cat([c, b, x])

        of_heads = (self._vector(f"{prefix}.{name}", torch.float32) for name in ("A_log", "dt_bias", "D"))
        a_log, dt_bias, skip = of_heads
        own = SpaceRule(
            turned(f"{prefix}.conv1d.weight")[:, 0],
            turned(f"{prefix}.conv1d.bias"),
            a_log,
            dt_bias,
            skip,
            sizes.num_key_heads,
            sizes.key_dim,
            sizes.value_dim,
            rule.least_step,
            rule.most_step,
            2.0**-9 if self.recurrence.state_dtype.value == "bf16" else 0.0,
        )
        return mix_space(projected[:, : sizes.conv_dim], steps, own, self.precision)

    def after_recurrence(self, residual: Bounded, out: Bounded, projected: Bounded) -> Bounded:
        """Return the residual behind a recurrence, of its results [T, heads, d] and what `recurrent_input` gives."""
        return self._behind(residual, self._recurred(out, projected))

    def _recurred(self, out: Bounded, projected: Bounded) -> list[Bounded]:
        """Return what each rank adds, of the same."""
        if self.recurrence.rule is not None:
            return self._of_space(out, projected, self.recurrence.rule)
        if self.recurrence.fixed is not None:
            return self._of_lightning(out, projected, self.recurrence.fixed.num_groups)
        num_heads, size = out.truth.shape[1:]
        sentence = self.sentence.recurrence
        is_kimi = sentence is not None and sentence.is_kimi
        norm, output = ("o_norm", "o_proj") if is_kimi else ("norm", "out_proj")
        weight = self._vector(f"{self._recurrence_prefix}.{norm}.weight", torch.float32)
        normed = rms_norm(out, weight, self.model.norm_eps, self.precision).changed(lambda it: it.flatten(1))
        gate = projected.columns(slice(-num_heads * size, None))
        gated = function_of(
            (gate, normed),
            lambda one, other: (torch.sigmoid(one) if is_kimi else one * torch.sigmoid(one)) * other,
            self.precision,
        )
        return self._projected(gated, f"{self._recurrence_prefix}.{output}")

    def _of_space(self, out: Bounded, projected: Bounded, rule: StateSpaceRule) -> list[Bounded]:
        """Return the same of a state space, whose results are gated and then, if at all, normed group by group."""
        gate = projected.columns(slice(-self.recurrence.value_size, None))
        flat = out.changed(lambda it: it.flatten(1))

        def gating(one: Tensor, other: Tensor) -> Tensor:
            return one * torch.sigmoid(one) * other

        output = f"{self._recurrence_prefix}.out_proj"
        if not rule.norms_result:
            return self._projected(function_of((gate, flat), gating, self.precision), output)
        gated = function_of((gate, flat), gating, Precision(torch.float32))
        groups = self.recurrence.sizes.num_key_heads
        weight = self._vector(f"{self._recurrence_prefix}.norm.weight", torch.float32).view(groups, -1)
        in_groups = gated.changed(lambda it: it.reshape(it.shape[0], groups, -1))
        normed = rms_norm(in_groups, weight, self.model.norm_eps, self.precision).changed(lambda it: it.flatten(1))
        return self._projected(normed, output)

    def _of_lightning(self, out: Bounded, projected: Bounded, num_groups: int) -> list[Bounded]:
        """Return the same of lightning attention, whose groups of results are normed and then gated."""
        weight = self._vector(f"{self._recurrence_prefix}.g_norm.weight", torch.float32).view(num_groups, -1)
        scaled = out.times(self.recurrence.sizes.key_dim**-0.5)
        in_groups = scaled.changed(lambda it: it.reshape(it.shape[0], num_groups, -1))
        normed = rms_norm(in_groups, weight, self.model.norm_eps, self.precision).changed(lambda it: it.flatten(1))
        gate = projected.columns(slice(-self.recurrence.value_size, None))
        gated = function_of((gate, normed), lambda one, other: torch.sigmoid(one) * other, self.precision)
        return self._projected(gated, self.sentence.attention_output)

    @property
    def _recurrence_prefix(self) -> str:
        assert self.sentence.recurrence is not None, "the layer is recurrent"
        return self.sentence.recurrence.prefix

    def _behind(self, residual: Bounded, parts: list[Bounded]) -> Bounded:
        """Return the residual behind a layer's mixers, of what each rank adds."""
        return self._added(residual, sum_over_ranks(parts, self.precision), self.sentence.after_attention)

    def _projected(self, flat: Bounded, output: str) -> list[Bounded]:
        """Return what each rank adds of a mixer's results [T, ...]; output: the name of what projects them."""
        assert self.config.mixer is not None, "the layer has a mixer"
        scale = self.config.mixer.output_scale
        weight = self.matrix(output, Inputs.of(self.config.formats.output.name))
        size = flat.truth.shape[1] // self.ranks
        parts = []
        for rank in range(self.ranks):
            own = slice(rank * size, (rank + 1) * size)
            bias = self._bias(output) if rank == 0 else None
            part = self.precision.rounded(weight.columns(own).product(flat.columns(own), bias, self.precision))
            parts.append(part if scale == 1 else self.precision.rounded(part.times(in_fp32(scale))))
        return parts

    def _gated_heads(self, out: Bounded, read: Bounded) -> Bounded:
        """Return [T, heads, d], multiplied by a function of the gate's product: a number of each head, or dimension."""
        function = self.sentence.head_gate
        if function is None:
            return out
        if self.sentence.gates_in_queries:
            inputs = Inputs.of(self.config.formats.qkv.name)
            gate = self._linear(read, "self_attn.q_proj", inputs).changed(self._second_halves)
        else:
            gate = self._linear(read, self.sentence.gate)
        gate = self.precision.rounded(gate)
        num_tokens, num_heads, head_dim = out.truth.shape
        share = gate.changed(lambda it: it.view(num_tokens, num_heads, -1).expand(num_tokens, num_heads, head_dim))
        return function_of((share, out), lambda one, other: GATES[function](one) * other, self.precision)

    def after_feed_forward(self, residual: Bounded, read: Bounded) -> Fed:
        """Return the residual behind the feed-forward, of the one before it and what the feed-forward reads."""
        fed = self.config.feed_forward
        assert fed is not None, "the layer has a feed-forward"
        is_judged = torch.ones(read.truth.shape[0], dtype=torch.bool, device=read.truth.device)
        if self._norms_apart and isinstance(fed, ExpertsConfig):
            added, is_judged = self._apart(read, fed)
            return Fed(self._added(residual, added, self.sentence.after_feed_forward), is_judged)
        if isinstance(fed, ExpertsConfig):
            parts, is_judged = self._mixture(read, fed)
        else:
            weights, gated = self._gated(self.sentence.feed_forward, self.sentence.dense_joined), self._gate_of(fed)
            own = [weights.part(rank, self.ranks) for rank in range(self.ranks)]
            parts = [feed(read, part, gated, self.precision, gate_scale=fed.gate_scale) for part in own]
            if fed.output_scale != 1:
                parts = [self.precision.rounded(part.times(in_fp32(fed.output_scale))) for part in parts]
        added = sum_over_ranks(parts, self.precision)
        return Fed(self._added(residual, added, self.sentence.after_feed_forward), is_judged)

    def _gate_of(self, fed: DenseConfig) -> Gate:
        if fed.activation is not EagerActivation.XIELU:
            return gate_of(fed.activation)
        own = f"{self.sentence.feed_forward}.act_fn"
        return xielu_of(*(self._vector(f"{own}.{it}") for it in ("alpha_p", "alpha_n", "beta", "eps")))

    def finished(self, residual: Bounded, per_layer: Bounded | None) -> Bounded:
        """Return the residual behind the layer, of the one behind its feed-forward.

        per_layer  [T, width], what the tokens give to this layer; None for a model that has no such embeddings
        """
        if per_layer is not None:
            assert self.model.per_layer is not None, "such a model says how wide they are"
            gate = self.precision.rounded(self._linear(residual, "per_layer_input_gate"))
            inner = function_of((gate, per_layer), gate_of(self.model.per_layer.activation), self.precision)
            added = self.precision.rounded(self._linear(self.precision.rounded(inner), "per_layer_projection"))
            normed = self._norm(added, "post_per_layer_input_norm")
            residual = self.precision.rounded(residual.plus(normed))
        if self.sentence.scale is None:
            return residual
        return self.precision.rounded(residual.times(self._vector(self.sentence.scale)))

    def _apart(self, residual: Bounded, config: ExpertsConfig) -> tuple[Bounded, Tensor]:
        """Return what experts and the dense feed-forward beside them add, each normed, and the tokens to be judged."""
        sentence = self.sentence.mixture
        assert sentence is not None
        assert sentence.shared is not None
        scale = self._vector("router.scale") * self.model.hidden_size**-0.5
        logits = self._linear(rms_norm(residual, scale, self.model.norm_eps, self.precision), sentence.router)
        routes, gated = route(logits, config, sentence.scores or Scoring.SOFTMAX, None), gate_of(config.activation)
        if sentence.expert_scales is not None:
            own = self._vector(sentence.expert_scales)[routes.experts]
            routes = replace(routes, shares=routes.shares.times(own))
        of_experts = self._norm(residual, f"{self.sentence.before_feed_forward}_2")
        of_shared, weights = (
            self._norm(residual, self.sentence.before_feed_forward),
            self._gated(sentence.shared, sentence.shared_joined),
        )
        experts, parts, fed = _Experts(self, sentence), [], []
        for rank in range(self.ranks):
            parts.append(mixed(of_experts, routes, partial(experts.of, rank), gated, self.precision))
            fed.append(feed(of_shared, weights.part(rank, self.ranks), gated, self.precision))
        name = self.sentence.after_feed_forward
        first = self._norm(sum_over_ranks(fed, self.precision), f"{name}_1")
        second = self._norm(sum_over_ranks(parts, self.precision), f"{name}_2")
        return self.precision.rounded(first.plus(second)), routes.is_clear

    def _mixture(self, read: Bounded, config: ExpertsConfig) -> tuple[list[Bounded], Tensor]:
        sentence = self.sentence.mixture
        if sentence is None:
            raise CheckpointError(f"the definition of {self.model.family} has no mixture of experts")
        if sentence.has_image_experts:
            router = self.stored(f"{sentence.router}.weight").T.to(self.precision.dtype)
            logits = Matrix(router).product(read, None, self.precision)
        else:
            logits = self._linear(read, sentence.router)
        correction = None
        name = sentence.correction or f"{sentence.router}.e_score_correction_bias"
        if name in self.tensors:
            correction = self._vector(name, torch.float32).flatten()[: config.num_experts]
        scoring = sentence.scores or _scoring_of(config)
        routes, gated = route(logits, config, scoring, correction), gate_of(config.activation)
        experts, latent, by_experts = _Experts(self, sentence), sentence.latent, read
        formats = self.config.formats
        if latent is not None and f"{latent[0]}.weight" not in self.tensors:
            latent = None
        if latent is not None:
            by_experts = self.precision.rounded(self._linear(read, latent[0], Inputs.of(formats.to_latent.name)))
        parts = []
        for rank in range(self.ranks):
            own = partial(experts.of, rank)
            part = mixed(by_experts, routes, own, gated, self.precision, weighs_inputs=sentence.weighs_inputs)
            if latent is not None:  # of a rank's part: the ranks' sum is that of all experts, which no rank has
                part = self.precision.rounded(self._linear(part, latent[1], Inputs.of(formats.from_latent.name)))
            if sentence.shared is not None and any(name.startswith(f"{sentence.shared}.") for name in self.tensors):
                shared = self._shared(read, sentence, sentence.shared, rank, config)
                assert config.shared is not None, "the checkpoint has its tensors"
                shared = shared.times(config.shared.scale)
                part = self.precision.rounded(part.plus(shared))
            parts.append(part)
        return parts, routes.is_clear

    def _shared(self, read: Bounded, sentence: MixtureSentence, name: str, rank: int, config: ExpertsConfig) -> Bounded:
        fed = feed(
            read,
            self._gated(name, sentence.shared_joined).part(rank, self.ranks),
            gate_of(config.shared_activation),
            self.precision,
        )
        if sentence.shared_gate is None:
            return fed
        gate = self.precision.rounded(self._linear(read, sentence.shared_gate))
        shared = function_of((gate, fed), lambda one, other: torch.sigmoid(one) * other, self.precision)
        return self.precision.rounded(shared)  # the sigmoid may be rounded, too

    def _added(self, residual: Bounded, added: Bounded, norm: str) -> Bounded:
        """Return residual + what a sublayer adds, normed where the family norms behind, scaled where it scales."""
        if self._order in (NormOrder.SANDWICH, NormOrder.AFTER):
            added = self._norm(added, norm, self.model.eps_after)
        if self.model.residual_scale != 1:
            added = self.precision.rounded(added.times(self.model.residual_scale))
        return self.precision.rounded(residual.plus(added))

    def _norm(self, x: Bounded, name: str, eps: float | None = None) -> Bounded:
        if self.sentence.norms_have_weights:
            weight = self._vector(f"{name}.weight") + self.sentence.norm_offset
        else:
            weight = torch.ones(self.model.hidden_size, dtype=torch.float64, device=x.truth.device)
        eps = self.model.norm_eps if eps is None else eps
        if not self.sentence.subtracts_mean(config_says=self.model.norms_subtract_mean):
            return rms_norm(x, weight, eps, self.precision)
        bias = self._vector(f"{name}.bias") if self.sentence.norms_add_biases else None
        return layer_norm(x, weight, eps, self.precision, bias)

    def _heads_normed(self, part: Bounded, name: str) -> Bounded:
        """Return [T, heads, d], normed: by a weight of all heads together or of each, or without one where it is so."""
        if f"{name}.weight" not in self.tensors:
            return self._unit_normed(part.changed(self._in_heads))
        weight = self._vector(f"{name}.weight") + self.sentence.norm_offset
        if weight.shape[0] == part.truth.shape[1] and weight.shape[0] != self.attention.head_dim:
            return rms_norm(part, weight, self.model.norm_eps, self.precision).changed(self._in_heads)
        return rms_norm(part.changed(self._in_heads), weight, self.model.norm_eps, self.precision)

    def _in_heads(self, it: Tensor) -> Tensor:
        return it.reshape(it.shape[0], -1, self.attention.head_dim)

    def _first_halves(self, it: Tensor) -> Tensor:
        """Return of each head the first half of its numbers, [T, heads * d] of [T, heads * 2 d]."""
        return it.view(it.shape[0], -1, 2, self.attention.head_dim)[:, :, 0].flatten(1)

    def _second_halves(self, it: Tensor) -> Tensor:
        return it.view(it.shape[0], -1, 2, self.attention.head_dim)[:, :, 1].flatten(1)

    def _linear(self, x: Bounded, name: str, inputs: Inputs = Inputs.AS_THEY_ARE) -> Bounded:
        return self.matrix(name, inputs).product(x, self._bias(name), self.precision)

    def _gated(self, name: str, joined: tuple[str, str] | None) -> GatedWeights:
        """`joined`: the names of the product of gate and up, and of the last one, where the first two are one."""
        inputs, of_down = (Inputs.of(it.name) for it in (self.config.formats.gate_up, self.config.formats.down))
        prefix = f"{name}." if name else ""
        of_gate, of_up, last = (f"{prefix}{it}" for it in self.sentence.dense)
        down = self.matrix(last if joined is None else f"{prefix}{joined[1]}", of_down)
        if joined is not None:
            both = self.matrix(f"{prefix}{joined[0]}", inputs)
            half = both.num_rows // 2
            return GatedWeights(both.rows(slice(half)), both.rows(slice(half, None)), down)
        if self.sentence.feeds_ungated:  # relu(up) * up, or up's share of a GELU or ReLU * up
            up, bias = self.matrix(of_up, inputs), self._bias(of_up)
            return GatedWeights(up, up, down, bias, bias, self._bias(last))
        gate, up = (self.matrix(part, inputs) for part in (of_gate, of_up))
        return GatedWeights(gate, up, down, *map(self._bias, (of_gate, of_up, last)))

    def matrix(self, name: str, inputs: Inputs) -> Matrix:
        """Return a product's weight, in the dtype that it is served in, or of 8 or 4 bits."""
        packing = self.model.packing
        if packing is not None and is_packed(packing, name, self.tensors):
            own = inputs if packing.is_reencoded else Inputs.AS_THEY_ARE
            return Matrix(numbers_of(packing, name, self.stored), own)
        values = self.stored(f"{name}.weight")
        if self.sentence.products_are_turned:
            values = values.T
        if inputs is Inputs.AS_THEY_ARE:
            return Matrix(values.to(self.precision.dtype))
        if self.model.rounds_at_load:
            return Matrix(values.to(self.precision.dtype), inputs, rounds=True)
        scale = next((it for it in _SCALES if f"{name}.{it}" in self.tensors), _SCALES[0])
        input_scale = self.stored(f"{name}.input_scale") if inputs is Inputs.ALL else None
        found = Matrix.of_file(values, self.stored(f"{name}.{scale}"), inputs, input_scale)
        return replace(found, input_bound=self.model.input_bound)

    def stored(self, name: str) -> Tensor:
        """Return a tensor as the checkpoint has it. Raises CheckpointError."""
        if name not in self.tensors:
            raise CheckpointError(f"the layer has no tensor {name}, which the definition of {self.model.family} needs")
        return self.tensors[name].tensor()

    def _vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.stored(name).to(dtype or self.precision.dtype).double()

    def _bias(self, name: str) -> Tensor | None:
        return self._vector(f"{name}.bias") if f"{name}.bias" in self.tensors else None


def _turned(it: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return [T, n], C, B, x and gates, of rows of gates, x, B, C and steps."""
    gates, x, b, c, _ = it.split_with_sizes(sizes, dim=1)
    return torch.cat([c, b, x, gates], dim=1)


def _side_by_side(parts: list[Bounded]) -> Bounded:
    return Bounded(*(torch.cat([getattr(it, name) for it in parts], dim=1) for name in ("truth", "most", "deviation")))


def _ungrouped(it: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return [T, n], each part of all groups before the next one, of rows that have all parts of a group together."""
    groups = it.view(it.shape[0], -1, sum(sizes)).split_with_sizes(sizes, dim=2)
    return torch.cat([part.flatten(1) for part in groups], dim=1)


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of a layer."""

    layer: LayerReference
    names: MixtureSentence

    def of(self, rank: int, expert: int) -> GatedWeights:
        """Return a rank's part of an expert, in the dtype that it is served in; those of mxfp4 in fp64."""
        return self._whole(expert).part(rank, self.layer.ranks)

    def _whole(self, expert: int) -> GatedWeights:
        names, dtype = self.names, self.layer.precision.dtype
        if f"{names.experts}.{names.joined[0]}" in self.layer.tensors and not names.is_interleaved:
            return self._joined(expert)
        if names.is_stacked:
            gate, up, down = (
                self._stacked(f"{names.experts}.{it}", expert) for it in (names.gate, names.up, names.down)
            )
            return GatedWeights(gate, up, down)
        if self.layer.sentence.feeds_ungated:  # relu(up) * up
            if f"{names.experts}.{names.up}" in self.layer.tensors:
                up, down = (
                    self._of_plain(self.layer.stored(f"{names.experts}.{it}")[expert]) for it in (names.up, names.down)
                )
                return GatedWeights(up, up, down)
            up, down = (
                self.layer.matrix(f"{names.experts}.{expert}.{it}", self._inputs) for it in (names.up, names.down)
            )
            return GatedWeights(up, up, down)
        if not names.is_interleaved:
            names_of = (f"{names.experts}.{expert}.{part}" for part in (names.gate, names.up, names.down))
            gate, up, down = (self.layer.matrix(name, self._inputs) for name in names_of)
            return GatedWeights(gate, up, down)
        gate_up, outward = (self._of_all(f"{names.experts}.{part}", expert) for part in ("gate_up_proj", "down_proj"))
        biases: list[Tensor | None] = [None, None]
        for index, part in enumerate(("gate_up_proj", "down_proj")):
            name = f"{names.experts}.{part}_bias"
            if name in self.layer.tensors:
                biases[index] = self.layer.stored(name)[expert].to(dtype).double()
        inner, outer = biases
        of_gate, of_up = (None, None) if inner is None else (inner[0::2], inner[1::2])
        gate, up, down = (Matrix(it) for it in (gate_up[0::2], gate_up[1::2], outward))
        return GatedWeights(gate, up, down, of_gate, of_up, outer)

    @property
    def _inputs(self) -> Inputs:
        fed = self.layer.config.feed_forward
        assert isinstance(fed, ExpertsConfig), "the layer has experts"
        return Inputs.of(fed.format.value)

    def _stacked(self, name: str, expert: int) -> Matrix:
        """Return one expert's matrix, of a tensor [E, out, in] of all of them and, in blocks, the same of scales."""
        values = self.layer.stored(f"{name}.weight")[expert]
        if self._inputs is Inputs.AS_THEY_ARE or self.layer.model.rounds_at_load:
            return self._of_plain(values)
        scales = self.layer.stored(f"{name}.weight_scale_inv")[expert]
        return Matrix.of_file(values, scales, self._inputs, None)

    def _joined(self, expert: int) -> GatedWeights:
        """Return an expert whose tensors are [hidden, 2 width] and [width, hidden], or both transposed."""
        names = [f"{self.names.experts}.{part}" for part in self.names.joined]
        gate_up, down = (self.layer.stored(name)[expert] for name in names)
        hidden = self.layer.model.hidden_size
        is_square = down.shape[0] == down.shape[1]
        is_transposed = gate_up.shape[0] == hidden if is_square else down.shape[1] == hidden
        if is_transposed:
            gate_up, down = gate_up.T, down.T
        if self._inputs is Inputs.AS_THEY_ARE or self.layer.model.rounds_at_load:
            gate, up = map(self._of_plain, gate_up.chunk(2))
            return GatedWeights(gate, up, self._of_plain(down))
        end = next((it for it in ("_scale", "_scale_inv") if f"{names[0]}{it}" in self.layer.tensors), "_scale_inv")
        scales = [self.layer.stored(f"{name}{end}")[expert] for name in names]
        of_gate_up, of_down = (it.T for it in scales) if is_transposed else scales
        both = Matrix.of_file(gate_up, of_gate_up, self._inputs, None)
        half = both.num_rows // 2
        outward = Matrix.of_file(down, of_down, self._inputs, None)
        return GatedWeights(both.rows(slice(half)), both.rows(slice(half, None)), outward)

    def _of_plain(self, values: Tensor) -> Matrix:
        """Return numbers of a file of 16 bits or more as they are, or as they are rounded when they are loaded."""
        return Matrix(
            values.to(self.layer.precision.dtype), self._inputs, rounds=self._inputs is not Inputs.AS_THEY_ARE
        )

    def _of_all(self, name: str, expert: int) -> Tensor:
        """Return one expert's matrix [out, in]: stored transposed, or in blocks of mxfp4."""
        if f"{name}_blocks" in self.layer.tensors:
            blocks, scales = (self.layer.stored(f"{name}_{kind}")[expert] for kind in ("blocks", "scales"))
            return unpack_mxfp4(blocks, scales)
        return self.layer.stored(name)[expert].to(self.layer.precision.dtype).T


def _scoring_of(config: ExpertsConfig) -> Scoring:
    """Return how logits become weights where it is config.json that says so."""
    if config.routing.scores.value == "sigmoid":
        return Scoring.SIGMOID
    return Scoring.SOFTMAX_OF_CHOSEN if config.routing.renormalizes else Scoring.SOFTMAX
