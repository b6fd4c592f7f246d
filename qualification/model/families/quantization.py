"""Models whose products are stored in 8 or 4 bits: the format of each product by its name in the checkpoint."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from kernels.experts.formats import AnyExpertFormat, FewBitFormat
from kernels.experts.kinds import ExpertFormat
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, PLAIN, WeightFormat
from qualification.model.config import ExpertsConfig, FeedForward, LayerConfig, LinearFormats, ModelConfig
from qualification.model.families.family import ExpertLayout, TensorNames
from qualification.model.fields import ModelConfigError
from qualification.model.latent import LatentAttentionConfig
from qualification.model.packing import Packing

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

    def is_exception(self, name: str) -> bool:
        """Return whether the checkpoint lists a product as stored as it is."""
        return any(map(self.plain.names, _aliases(name)))

    def format_of(self, name: str) -> WeightFormat:
        if self.is_exception(name):
            return PLAIN
        aliases = _aliases(name)
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


def quantized(model: ModelConfig, quantization: Quantization, names: TensorNames) -> ModelConfig:
    """Return the same model, each product in its format. Raises ModelConfigError for what is not served so."""
    _check_attends(model, quantization.source)
    layers = tuple(
        _quantized_layer(f"model.layers.{index}", layer, quantization, names)
        for index, layer in enumerate(model.layers)
    )
    head = PLAIN if model.tie_embeddings else quantization.format_of("lm_head")
    if head != PLAIN and quantization.packing is not None:
        raise ModelConfigError(
            f"{quantization.source}: a head (lm_head) of 4 bits ({quantization.packing.value}) is not supported"
        )
    return replace(
        model,
        layers=layers,
        head_format=head,
        packing=quantization.packing,
        input_bound=quantization.input_bound,
        caches_fp8=quantization.caches_fp8,
    )


def rounded_at_load(model: ModelConfig, *, with_experts: bool = True) -> ModelConfig:
    """Return the same model, its products rounded to 8 bits when it is loaded: a scale a row, and one a token.

    with_experts  whether those of mixtures are; experts with biases, or without a gate, never are, whose kernels take
                  no 8 bits

    Of latent attention those that make queries, keys and values of latents stay as they are.

    Raises ModelConfigError for a model that is quantised already, or has a recurrence.
    """
    _check_attends(model, "--quantization fp8")
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


def _check_attends(model: ModelConfig, source: str) -> None:
    """Raise ModelConfigError for a model with layers that keep a state, whose products have no format."""
    if model.recurrences:
        raise ModelConfigError(
            f"{source}: {model.family} has layers that keep a state, whose products are served in 16 bits or more "
            "alone: serve its weights of 16 bits as they are"
        )


def as_stored(model: ModelConfig) -> ModelConfig:
    """Return the same model as its checkpoint has it."""
    if not model.rounds_at_load:
        return model
    layers = tuple(
        replace(layer, formats=LinearFormats(), feed_forward=_with_experts(layer.feed_forward, ExpertFormat.PLAIN))
        for layer in model.layers
    )
    return replace(model, rounds_at_load=False, layers=layers)


def _each(formats: LinearFormats) -> tuple[WeightFormat, ...]:
    return formats.qkv, formats.output, formats.gate_up, formats.down, formats.query_up, formats.kv_up


def _all_rounded(layer: LayerConfig, *, with_experts: bool) -> LayerConfig:
    fed = layer.feed_forward
    dense = fed.shared if isinstance(fed, ExpertsConfig) else fed
    of_mixer, of_dense = (PLAIN if it is None else FP8_ROWS for it in (layer.mixer, dense))
    if with_experts and not (isinstance(fed, ExpertsConfig) and (fed.has_bias or fed.num_inner == 1)):
        fed = _with_experts(fed, FewBitFormat.FP8_ROWS)
    return replace(layer, formats=LinearFormats(of_mixer, of_mixer, of_dense, of_dense), feed_forward=fed)


def _with_experts(fed: FeedForward | None, found: AnyExpertFormat) -> FeedForward | None:
    """Return a feed-forward, its experts in another format where it has some."""
    return replace(fed, format=found) if isinstance(fed, ExpertsConfig) else fed


def _quantized_layer(prefix: str, layer: LayerConfig, quantization: Quantization, names: TensorNames) -> LayerConfig:
    formats = _formats_of(prefix, layer, quantization, names)
    fed = layer.feed_forward
    if isinstance(fed, ExpertsConfig) and (found := _format_of_experts(prefix, fed, quantization, names)) != PLAIN:
        fed = replace(fed, format=FewBitFormat(found.name))
    return replace(layer, formats=formats, feed_forward=fed)


def _format_of_experts(
    prefix: str, mixture: ExpertsConfig, quantization: Quantization, names: TensorNames
) -> WeightFormat:
    """Return the format of all experts of a layer, which are listed alike. Raises ModelConfigError."""
    own = names.experts
    assert own is not None, "the family has mixtures"
    # Entries are of all experts, also by the tensors that these share, or name some by their numbers.
    joined = (it.removesuffix(".weight") for it in (own.joined_gate_up, own.joined_down))
    if all(quantization.is_exception(f"{prefix}.{own.experts}.{it}") for it in joined):
        return PLAIN
    experts = sorted({0} | {it for it in quantization.plain.experts if it < mixture.num_experts})
    of_each = [own.experts] if own.layout is ExpertLayout.STACKED else [f"{own.experts}.{it}" for it in experts]
    products = (own.gate, own.up, own.down)
    found = quantization.format_of_all([f"{prefix}.{it}.{each}" for it in of_each for each in products])
    is_apart = own.layout is ExpertLayout.EACH or (own.layout is not ExpertLayout.INTERLEAVED and found == FP8_BLOCKS)
    if found != PLAIN and (not is_apart or mixture.has_bias):
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

    latent = layer.mixer if isinstance(layer.mixer, LatentAttentionConfig) else None
    made = "qkv"[: len(layer.attention.head_splits)] if layer.attends else "qkv"
    qkv = (
        tuple(f"{names.attention}.{it}_proj" for it in made)
        if names.qkv is None
        else (f"{names.attention}.{names.qkv}",)
    )
    query_up = kv_up = PLAIN
    if latent is not None:
        has_query_latent = latent.sizes.query_latent is not None
        of_queries = "self_attn.q_a_proj" if has_query_latent else "self_attn.q_proj"
        qkv = (of_queries, "self_attn.kv_a_proj_with_mqa")
        query_up = format_of("self_attn.q_b_proj") if has_query_latent else PLAIN
        kv_up = format_of("self_attn.kv_b_proj")
    if layer.attends and layer.attention.gate is not None and (of_gate := format_of(names.attention_gate)) != PLAIN:
        raise ModelConfigError(f"{quantization.source}: a gate of attention in {of_gate.name} is not supported")
    fed, joined = names.feed_forward, names.dense_joined
    if isinstance(layer.feed_forward, ExpertsConfig):
        assert names.experts is not None, "the family has mixtures"
        experts = names.experts
        if not experts.router_is_plain and (of_router := format_of(experts.router)) != PLAIN:
            raise ModelConfigError(f"{quantization.source}: a router in {of_router.name} is not supported")
        fed, joined = experts.shared, None
    gate_up = (f"{fed}.gate_proj", f"{fed}.up_proj") if joined is None else (f"{fed}.{joined[0]}",)
    return LinearFormats(
        qkv=format_of(*qkv),
        output=format_of(names.attention_output),
        gate_up=format_of(*gate_up),
        down=format_of(f"{fed}.down_proj"),
        query_up=query_up,
        kv_up=kv_up,
    )


def _aliases(name: str) -> tuple[str, ...]:
    """Return the name, and those that it has where a model also sees images."""
    return name, f"language_model.{name}", f"model.language_model.{name.removeprefix('model.')}"
