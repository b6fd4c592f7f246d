"""Checkpoints whose products are stored in 8 bits: what config.json says of them, by the name of each product.

Read are the words of four makers: `fp8` (DeepSeek, Qwen, Mistral), compressed-tensors (llm-compressor), and ModelOpt
(NVIDIA), whose hf_quant_config.json says the same in other words. What a list of exceptions names stays as it is: each
maker has its own rule for what an entry names.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from kernels.experts.kinds import ExpertFormat
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, PLAIN, WeightFormat
from qualification.model.config import DenseConfig, ExpertsConfig, LayerConfig, LinearFormats, ModelConfig
from qualification.model.families.family import TensorNames
from qualification.model.fields import Fields, ModelConfigError

CONFIG_KEY = "quantization_config"
_BLOCK = [128, 128]
_Matches = Callable[[str, str], bool]  # (an entry of a list, the name of a product) -> whether it names that


@dataclass(frozen=True, slots=True)
class Quantization:
    """The format of each product, by its name in the checkpoint.

    schemes  (entries, format) in their order: the first with an entry that names a product says its format
    plain    entries that name products which are stored as they are
    """

    source: str
    schemes: tuple[tuple[tuple[str, ...], WeightFormat], ...]
    plain: tuple[str, ...]
    matches: _Matches

    def format_of(self, name: str) -> WeightFormat:
        if self._names(self.plain, name):
            return PLAIN
        return next((it for entries, it in self.schemes if self._names(entries, name)), PLAIN)

    def _names(self, entries: tuple[str, ...], name: str) -> bool:
        return any(self.matches(entry, alias) for entry in entries for alias in _aliases(name))

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
    layers = tuple(
        replace(layer, formats=_formats_of(f"model.layers.{index}", layer, quantization, names))
        for index, layer in enumerate(model.layers)
    )
    head = quantization.format_of("lm_head")
    if head != PLAIN and not model.tie_embeddings:
        raise ModelConfigError(f"{quantization.source}: a head (lm_head) in {head.name} is not supported")
    return replace(model, layers=layers)


def rounded_at_load(model: ModelConfig) -> ModelConfig:
    """Return the same model, its dense products rounded to 8 bits when it is loaded: a scale a row, and one a token.

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
    return replace(model, rounds_at_load=True, layers=tuple(_all_rounded(layer) for layer in model.layers))


def as_stored(model: ModelConfig) -> ModelConfig:
    """Return the same model as its checkpoint has it."""
    if not model.rounds_at_load:
        return model
    layers = tuple(replace(layer, formats=LinearFormats()) for layer in model.layers)
    return replace(model, rounds_at_load=False, layers=layers)


def _each(formats: LinearFormats) -> tuple[WeightFormat, ...]:
    return formats.qkv, formats.output, formats.gate_up, formats.down


def _all_rounded(layer: LayerConfig) -> LayerConfig:
    fed = layer.feed_forward
    of_dense = FP8_ROWS if isinstance(fed, DenseConfig) or fed.shared is not None else PLAIN
    return replace(layer, formats=LinearFormats(FP8_ROWS, FP8_ROWS, of_dense, of_dense))


def _formats_of(prefix: str, layer: LayerConfig, quantization: Quantization, names: TensorNames) -> LinearFormats:
    def format_of(*products: str) -> WeightFormat:
        return quantization.format_of_all([f"{prefix}.{product}" for product in products])

    qkv = ("self_attn.qkv_proj",) if names.merged else tuple(f"self_attn.{it}_proj" for it in "qkv")
    fed = "mlp"
    if not isinstance(layer.feed_forward, DenseConfig):
        assert names.experts is not None, "the family has mixtures"
        experts = names.experts
        of_experts = format_of(*(f"{experts.experts}.0.{it}" for it in (experts.gate, experts.up, experts.down)))
        if of_experts != PLAIN:
            raise ModelConfigError(f"{quantization.source}: experts in {of_experts.name} are not supported")
        if (of_router := format_of(experts.router)) != PLAIN:
            raise ModelConfigError(f"{quantization.source}: a router in {of_router.name} is not supported")
        fed = experts.shared
    gate_up = (f"{fed}.gate_up_proj",) if names.merged else (f"{fed}.gate_proj", f"{fed}.up_proj")
    return LinearFormats(
        qkv=format_of(*qkv),
        output=format_of("self_attn.o_proj"),
        gate_up=format_of(*gate_up),
        down=format_of(f"{fed}.down_proj"),
    )


def read_quantization(fields: Fields) -> Quantization:
    """Read quantization_config. Raises ModelConfigError that names the method, or the field, that is not supported."""
    if not fields.has("quant_method") and (fields.has("quant_algo") or fields.has("quantization")):
        return _read_modelopt(fields.section("quantization") or fields)
    method = fields.choice("quant_method", ("fp8", "compressed-tensors", "modelopt"))
    match method:
        case "fp8":
            return _read_fp8(fields)
        case "compressed-tensors":
            return _read_compressed_tensors(fields)
        case _:
            return _read_modelopt(fields.section("quantization") or fields)


def _read_fp8(fields: Fields) -> Quantization:
    """DeepSeek's: entries are whole names, or parts of names between dots."""
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    scheme = fields.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    block = _sizes(fields, "weight_block_size")
    if block is not None and block != _BLOCK:
        fields.refuse("weight_block_size", f"{_BLOCK}")
    if block is not None and scheme == "static":
        fields.refuse("activation_scheme", "dynamic, of blocks")
    listed = "ignored_layers" if fields.has("ignored_layers") else "modules_to_not_convert"
    found = FP8_BLOCKS if block is not None else FP8_STATIC if scheme == "static" else FP8_ROWS
    # A head is no layer of the decoder, which transformers never converts.
    return Quantization(fields.source, ((("",), found),), (*_entries(fields, listed), "lm_head"), _at_dots)


def _read_compressed_tensors(fields: Fields) -> Quantization:
    """Entries are whole names or, behind "re:", regular expressions of their beginnings; "Linear" is every product."""
    for name in ("sparsity_config", "transform_config"):
        if (section := fields.section(name)) is not None and not section.is_empty:
            fields.refuse(name, "absent or empty (what it asks for is not supported)")
    fields.choice("quantization_status", ("compressed", "frozen"), "compressed")
    groups = fields.section("config_groups")
    if groups is None:
        fields.refuse("config_groups", "an object of groups")
    schemes = []
    for name in groups.names:
        group = groups.section(name)
        if group is None:
            groups.refuse(name, "an object")
        group.choice("format", ("float-quantized",), fields.choice("format", ("float-quantized",), "float-quantized"))
        schemes.append((_entries(group, "targets"), _scheme(group)))
    return Quantization(fields.source, tuple(schemes), _entries(fields, "ignore"), _by_expression)


def _scheme(group: Fields) -> WeightFormat:
    """Return the format of one group of compressed-tensors."""
    weights, inputs = group.section("weights"), group.section("input_activations")
    if weights is None:
        group.refuse("weights", "an object")
    if inputs is None:
        group.refuse("input_activations", "an object (weights of 8 bits for inputs of 16 are not supported)")
    for part in (weights, inputs):
        part.choice("type", ("float",))
        if part.integer("num_bits") != 8:
            part.refuse("num_bits", "8")
        if not part.flag("symmetric", True):
            part.refuse("symmetric", "true")
    strategy = weights.choice("strategy", ("tensor", "channel", "block"))
    if strategy == "block":
        if _sizes(weights, "block_structure") != _BLOCK:
            weights.refuse("block_structure", f"{_BLOCK}")
        inputs.choice("strategy", ("group",))
        if inputs.integer("group_size") != _BLOCK[0]:
            inputs.refuse("group_size", f"{_BLOCK[0]}")
        if not inputs.flag("dynamic", False):
            inputs.refuse("dynamic", "true, of groups")
        return FP8_BLOCKS
    if inputs.flag("dynamic", False):
        inputs.choice("strategy", ("token",))
        return FP8_ROWS
    inputs.choice("strategy", ("tensor",))
    return FP8_STATIC


def _read_modelopt(fields: Fields) -> Quantization:
    """NVIDIA's: entries are whole names or their beginnings at a dot, with wildcards."""
    algorithms = {"FP8": FP8_STATIC, "FP8_PER_CHANNEL_PER_TOKEN": FP8_ROWS}
    supported = (*algorithms, *(name.lower() for name in algorithms))
    found = algorithms[fields.choice("quant_algo", supported).upper()]
    listed = "exclude_modules" if fields.has("exclude_modules") else "ignore"
    return Quantization(fields.source, ((("*",), found),), _entries(fields, listed), _by_wildcard)


def _aliases(name: str) -> tuple[str, ...]:
    """Return the name, and those that it has where a model also sees images."""
    return name, f"language_model.{name}", f"model.language_model.{name.removeprefix('model.')}"


def _at_dots(entry: str, name: str) -> bool:
    return not entry or f".{entry}." in f".{name}."


def _by_expression(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return entry in (name, "Linear")


def _by_wildcard(entry: str, name: str) -> bool:
    return fnmatchcase(name, entry) or fnmatchcase(name, f"{entry}.*")


def _entries(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.given(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        fields.refuse(name, "a list of names")
    for item in value:
        try:
            re.compile(item.removeprefix("re:") if item.startswith("re:") else "")
        except re.error:
            fields.refuse(name, f"a list of names and regular expressions, and {item!r} is none")
    return tuple(value)


def _sizes(fields: Fields, name: str) -> list[int] | None:
    value = fields.given(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        fields.refuse(name, "a list of integers")
    return value


def from_file_beside(content: Mapping[str, object]) -> Mapping[str, object]:
    """Return what hf_quant_config.json says, as quantization_config would."""
    return {**content, "quant_method": "modelopt"}
