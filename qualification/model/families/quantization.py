"""Models whose products are stored in 8 or 4 bits: the format of each product by its name in the checkpoint."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from kernels.experts.formats import AnyExpertFormat, FewBitFormat
from kernels.experts.kinds import ExpertFormat
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, PLAIN, WeightFormat
from qualification.model.config import (
    AttentionConfig,
    ExpertsConfig,
    FeedForward,
    LayerConfig,
    LinearFormats,
    ModelConfig,
    RecurrenceConfig,
    num_inner_of,
)
from qualification.model.draft_head import LAYER, PREFIX, last_attending
from qualification.model.families.family import ExpertLayout, Family, TensorNames, within
from qualification.model.fields import ModelConfigError
from qualification.model.gated_delta import GatedDeltaConfig
from qualification.model.latent import LatentAttentionConfig
from qualification.model.packing import Packing
from qualification.model.short_convolution import ShortConvolutionConfig

_PREFIX = "model."  # of names of layers
_NUMBER_OF_EXPERT = re.compile(r"experts\W+(\d+)")


@dataclass(frozen=True, slots=True)
class Entries:
    """A maker's list that names products.

    names    whether an entry names the product of a name: lists may have an entry for each matrix of each expert
    experts  numbers of experts that entries have
    """

    names: Callable[[str], bool]
    experts: frozenset[int] = frozenset()

    @classmethod
    def of(cls, listed: tuple[str, ...], rule: "Rule") -> "Entries":
        numbers = (int(it) for entry in listed for it in _NUMBER_OF_EXPERT.findall(entry))
        return cls(rule(listed), frozenset(numbers))


Rule = Callable[[tuple[str, ...]], Callable[[str], bool]]  # entries -> (the name of a product -> whether one names it)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The format of each product, by its name in the checkpoint.

    schemes  in their order: the first with an entry that names a product says its format
    written  beginnings of names in checkpoints of the family that stand for "model."
    plain    entries that name products which are stored as they are
    packing  of weights of 4 bits
    input_bound  where inputs are cut off before they are rounded
    caches_fp8   whether the checkpoint asks for a KV cache of 8 bits
    """

    source: str
    schemes: tuple[tuple[Entries, WeightFormat], ...]
    plain: Entries
    packing: Packing | None = None
    input_bound: float | None = None
    caches_fp8: bool = False
    written: tuple[str, ...] = ()

    def is_exception(self, name: str) -> bool:
        """Return whether the checkpoint lists a product as stored as it is."""
        return any(map(self.plain.names, self._aliases(name)))

    def format_of(self, name: str) -> WeightFormat:
        if self.is_exception(name):
            return PLAIN
        aliases = self._aliases(name)
        return next((it for entries, it in self.schemes if any(map(entries.names, aliases))), PLAIN)

    def format_of_all(self, names: list[str]) -> WeightFormat:
        """Return the format of products that are computed as one. Raises ModelConfigError where theirs differ."""
        formats = {name: self.format_of(name) for name in names}
        if len(set(formats.values())) > 1:
            each = ", ".join(f"{name} {it.name}" for name, it in formats.items())
            raise ModelConfigError(
                f"{self.source}: {each}: they are multiplied as one, and must all be listed or none: "
                "serve a checkpoint that lists them alike"
            )
        return next(iter(formats.values()))

    def _aliases(self, name: str) -> tuple[str, ...]:
        """Return the name, those that its family writes for it, and those where a model also sees images."""
        within = name.removeprefix(_PREFIX)
        names = [name, *(f"{it}{within}" for it in self.written if name.startswith(_PREFIX))]
        return (*names, *(f"language_model.{it}" for it in names), f"model.language_model.{within}")


def quantized(model: ModelConfig, quantization: Quantization, family: Family) -> ModelConfig:
    """Return the same model, each product in its format. Raises ModelConfigError for what is not served so."""
    names = family.tensors
    assert names is not None, "the family is served"
    quantization = replace(quantization, written=tuple(old for old, new in family.renamed.items() if new == _PREFIX))
    layers = tuple(
        _quantized_layer(f"model.layers.{index}", layer, quantization, names)
        for index, layer in enumerate(model.layers)
    )
    head = PLAIN if model.tie_embeddings else quantization.format_of("lm_head")
    if head != PLAIN and quantization.packing is not None:
        raise ModelConfigError(
            f"{quantization.source}: a head (lm_head) of 4 bits ({quantization.packing.value}) is not supported"
        )
    draft_layer = last_attending(model) if PREFIX in family.not_read else None
    if draft_layer is not None:
        draft_layer = _quantized_layer(LAYER, draft_layer, quantization, names)
    return replace(
        model,
        layers=layers,
        draft_layer=draft_layer,
        head_format=head,
        packing=quantization.packing,
        input_bound=quantization.input_bound,
        caches_fp8=quantization.caches_fp8,
    )


def rounded_at_load(model: ModelConfig, *, with_experts: bool = True) -> ModelConfig:
    """Return the same model, its products rounded to 8 bits when it is loaded: a scale a row, and one a token.

    with_experts  whether those of mixtures are; experts with biases never are, whose kernels take no 8 bits

    Of latent attention those that make queries, keys and values of latents stay as they are, of the gated delta rule
    those that make gates of writing and decay, and of a mixture those that make and read latents.

    Raises ModelConfigError for a model that is quantised already.
    """
    formats = {it for layer in model.layers for it in _each(layer.formats)} - {PLAIN}
    names = sorted(it.name for it in formats)
    for layer in model.layers:
        if isinstance(layer.feed_forward, ExpertsConfig) and layer.feed_forward.format is not ExpertFormat.PLAIN:
            names = [layer.feed_forward.format.value]
    if names:
        raise ModelConfigError(
            f"--quantization fp8 rounds weights of 16 bits or more, and the checkpoint has {', '.join(names)} already: "
            "leave the flag out"
        )
    layers = tuple(_all_rounded(layer, with_experts=with_experts) for layer in model.layers)
    return replace(model, rounds_at_load=True, layers=layers)


def has_plain_experts(model: ModelConfig) -> bool:
    """Return whether a layer's experts have the dtype of the model."""
    fed = (layer.feed_forward for layer in model.layers)
    return any(isinstance(it, ExpertsConfig) and it.format is ExpertFormat.PLAIN for it in fed)


def as_stored(model: ModelConfig) -> ModelConfig:
    """Return the same model as its checkpoint has it."""
    if not model.rounds_at_load:
        return model
    layers = tuple(
        _in_formats(layer, LinearFormats(), _with_experts(layer.feed_forward, ExpertFormat.PLAIN))
        for layer in model.layers
    )
    return replace(model, rounds_at_load=False, layers=layers)


def _each(formats: LinearFormats) -> tuple[WeightFormat, ...]:
    return tuple(getattr(formats, it.name) for it in fields(formats))


def _all_rounded(layer: LayerConfig, *, with_experts: bool) -> LayerConfig:
    fed = layer.feed_forward
    dense = fed.shared if isinstance(fed, ExpertsConfig) else fed
    of_mixer, of_dense = (PLAIN if it is None else FP8_ROWS for it in (layer.mixer, dense))
    if with_experts and not (isinstance(fed, ExpertsConfig) and fed.has_bias):
        fed = _with_experts(fed, FewBitFormat.FP8_ROWS)
    return _in_formats(layer, LinearFormats(of_mixer, of_mixer, of_dense, of_dense), fed)


def _in_formats(layer: LayerConfig, formats: LinearFormats, fed: FeedForward | None) -> LayerConfig:
    """Return a layer whose products have these formats, and its experts that of `fed`."""
    if isinstance(fed, ExpertsConfig) and fed.shared is not None:
        of_experts = fed.format.of_weights if isinstance(fed.format, FewBitFormat) else PLAIN
        is_alike = formats.gate_up == formats.down == of_experts
        fed = replace(fed, shared=replace(fed.shared, is_stored_alike=is_alike))
    return replace(layer, formats=formats, feed_forward=fed)


def _with_experts(fed: FeedForward | None, found: AnyExpertFormat) -> FeedForward | None:
    """Return a feed-forward, its experts in another format where it has some."""
    return replace(fed, format=found) if isinstance(fed, ExpertsConfig) else fed


def _quantized_layer(prefix: str, layer: LayerConfig, quantization: Quantization, names: TensorNames) -> LayerConfig:
    formats = _formats_of(prefix, layer, quantization, names)
    if isinstance(layer.mixer, AttentionConfig) and layer.mixer.qkv_shards is not None:
        formats = replace(formats, qkv=PLAIN)  # blocks have rows of keys and of values: they are multiplied out
    fed = layer.feed_forward
    if isinstance(fed, ExpertsConfig) and (found := _format_of_experts(prefix, fed, quantization, names)) != PLAIN:
        fed = replace(fed, format=FewBitFormat(found.name))
    return _in_formats(layer, formats, fed)


def _format_of_experts(
    prefix: str, mixture: ExpertsConfig, quantization: Quantization, names: TensorNames
) -> WeightFormat:
    """Return the format of all experts of a layer, which are listed alike. Raises ModelConfigError."""
    own = names.experts
    assert own is not None, "the family has mixtures"
    # Entries are of all experts, also by the tensors that these share, or name some by their numbers.
    joined = (it.removesuffix(".weight") for it in (own.joined_gate_up, own.joined_down))
    listed = {
        f"{prefix}.{own.experts}.{it}": quantization.is_exception(f"{prefix}.{own.experts}.{it}") for it in joined
    }
    if all(listed.values()):
        return PLAIN
    if any(listed.values()) and own.layout is not ExpertLayout.EACH:
        raise ModelConfigError(
            f"{quantization.source}: {' and '.join(listed)}: they must both be listed or none: serve a checkpoint that "
            "lists them alike"
        )
    experts = sorted({0} | {it for it in quantization.plain.experts if it < mixture.num_experts})
    of_each = [own.experts] if own.layout is ExpertLayout.STACKED else [f"{own.experts}.{it}" for it in experts]
    products = (own.up, own.down) if mixture.num_inner == 1 else (own.gate, own.up, own.down)
    found = quantization.format_of_all([f"{prefix}.{it}.{each}" for it in of_each for each in products])
    of_joined = {ExpertLayout.HALVES: (FP8_BLOCKS, FP8_ROWS), ExpertLayout.STACKED: (FP8_BLOCKS,)}.get(own.layout, ())
    is_read = own.layout is ExpertLayout.EACH or found in of_joined
    if found != PLAIN and (not is_read or mixture.has_bias):
        raise ModelConfigError(
            f"{quantization.source}: experts in {found.name} that share a tensor or have biases are not supported"
        )
    if found != PLAIN and quantization.input_bound is not None:
        raise ModelConfigError(
            f"{quantization.source}: experts in {found.name} whose inputs are cut off at {quantization.input_bound:g} "
            "(activation_scale_ub) are not supported"
        )
    return found


def _formats_of(prefix: str, layer: LayerConfig, quantization: Quantization, names: TensorNames) -> LinearFormats:
    def format_of(*products: str) -> WeightFormat:
        return quantization.format_of_all([f"{prefix}.{product}" for product in products])

    of_mixer, of_feed_forward = _mixer_formats(layer, quantization, names, format_of), LinearFormats()
    fed = layer.feed_forward
    if isinstance(fed, ExpertsConfig):
        assert names.experts is not None, "the family has mixtures"
        experts = names.experts
        if not experts.router_is_plain and (of_router := format_of(experts.router)) != PLAIN:
            raise ModelConfigError(f"{quantization.source}: a router in {of_router.name} is not supported")
        if fed.latent is not None:
            of_feed_forward = replace(
                of_feed_forward, to_latent=format_of(experts.to_latent), from_latent=format_of(experts.from_latent)
            )
    if fed is not None and (products := _dense_products(fed, names)) is not None:
        gate_up, down = products
        of_feed_forward = replace(of_feed_forward, gate_up=format_of(*gate_up), down=format_of(down))
    return replace(
        of_mixer,
        gate_up=of_feed_forward.gate_up,
        down=of_feed_forward.down,
        to_latent=of_feed_forward.to_latent,
        from_latent=of_feed_forward.from_latent,
    )


def _mixer_formats(
    layer: LayerConfig, quantization: Quantization, names: TensorNames, format_of: Callable[..., WeightFormat]
) -> LinearFormats:
    """Return the formats of a mixer's products; format_of: (names within the layer) -> the format of all as one."""
    mixer = layer.mixer
    if mixer is None:
        return LinearFormats()
    if isinstance(mixer, RecurrenceConfig):
        first, gates, output = _recurrent_products(mixer, names)
        found = LinearFormats(format_of(*first), format_of(output), gates=format_of(*gates) if gates else PLAIN)
        if found.gates == FP8_BLOCKS:
            raise ModelConfigError(
                f"{quantization.source}: {' and '.join(gates)} in {found.gates.name} are not supported, whose rows are "
                "fewer than a block's: serve a checkpoint that lists them as exceptions"
            )
        return found
    if isinstance(mixer, LatentAttentionConfig):
        has_query_latent = mixer.sizes.query_latent is not None
        of_queries, own = "q_a_proj" if has_query_latent else "q_proj", names.attention
        found = LinearFormats(
            format_of(f"{own}.{of_queries}", f"{own}.kv_a_proj_with_mqa"),
            query_up=format_of(f"{own}.q_b_proj") if has_query_latent else PLAIN,
            kv_up=format_of(f"{own}.kv_b_proj"),
        )
        if mixer.own_indexer is not None:
            up, key = format_of("self_attn.indexer.wq_b"), format_of("self_attn.indexer.wk")
            found = replace(found, index_up=up, index_key=key)
    elif names.qkv is not None:
        found = LinearFormats(format_of(f"{names.attention}.{names.qkv}"))
    else:
        made = "qkv"[: len(layer.attention.head_splits)]
        found = LinearFormats(format_of(*(f"{names.attention}.{it}_proj" for it in made)))
    gate = layer.attention.gate
    has_own_gate = gate is not None and not gate.is_beside_queries
    if has_own_gate and (of_gate := format_of(names.attention_gate)) != PLAIN:
        raise ModelConfigError(f"{quantization.source}: a gate of attention in {of_gate.name} is not supported")
    return replace(found, output=format_of(names.attention_output))


def _recurrent_products(mixer: RecurrenceConfig, names: TensorNames) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the names of the parts of a recurrence's first product, of that of its gates, and of the last product."""
    if isinstance(mixer, ShortConvolutionConfig):
        return (f"{names.convolution}.in_proj",), (), f"{names.convolution}.out_proj"
    assert names.recurrence is not None, "the family has recurrent layers"
    prefix = names.recurrence.prefix
    if isinstance(mixer, GatedDeltaConfig) and mixer.fixed is not None:
        return (f"{prefix}.query_key_value", f"{prefix}.g_proj"), (), names.attention_output
    if isinstance(mixer, GatedDeltaConfig) and mixer.rule is not None:
        first, gates = ["in_proj"], []
    elif names.recurrence.is_fused:
        first, gates = ["in_proj_qkvz"], ["in_proj_ba"]
    else:
        first, gates = ["in_proj_qkv", "in_proj_z"], ["in_proj_b", "in_proj_a"]
    return tuple(f"{prefix}.{it}" for it in first), tuple(f"{prefix}.{it}" for it in gates), f"{prefix}.out_proj"


def _dense_products(fed: FeedForward, names: TensorNames) -> tuple[tuple[str, ...], str] | None:
    """Return the names of the parts of the first product that all tokens visit, and of the last; None without them."""
    if isinstance(fed, ExpertsConfig):
        assert names.experts is not None, "the family has mixtures"
        own, prefix, num_inner = names.experts, names.experts.shared, num_inner_of(fed.shared_activation)
        if fed.shared is None:
            return None
        if own.shared_gate_up is not None:
            return (f"{prefix}.{own.shared_gate_up}",), f"{prefix}.{own.shared_down}"
        gate, up, down = TensorNames().dense
    else:
        prefix, num_inner = names.feed_forward, fed.num_inner
        if names.dense_joined is not None:
            return (within(prefix, names.dense_joined[0]),), within(prefix, names.dense_joined[1])
        gate, up, down = names.dense
    inner = (up,) if num_inner == 1 else (gate, up)
    return tuple(within(prefix, it) for it in inner), within(prefix, down)
