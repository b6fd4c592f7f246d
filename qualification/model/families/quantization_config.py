"""quantization_config of config.json: how each product of a checkpoint is stored.

Read are the words of `fp8` (DeepSeek, Qwen, Mistral), `fbgemm_fp8` (Meta), compressed-tensors (llm-compressor),
ModelOpt (NVIDIA), whose hf_quant_config.json says the same in other words, AWQ and GPTQ. What a list of exceptions
names stays as it is: each maker has its own rule for what an entry names.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from kernels.linear.formats.int4_formats import INT4_32, INT4_64, INT4_128
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, WeightFormat
from qualification.model.families.quantization import Entries, Quantization
from qualification.model.families.quantization_keys import GROUP, NUMBERS, OF_METHOD, check_keys
from qualification.model.fields import Fields
from qualification.model.packing import Packing

CONFIG_KEY = "quantization_config"
_BLOCK = [128, 128]
_OF_GROUPS = {32: INT4_32, 64: INT4_64, 128: INT4_128}
_NVFP4_GROUP, _MXFP4_GROUP = 16, 32  # numbers of a row that share a scale
_INT4, _NVFP4, _MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_HEAD, _LINEAR = "lm_head", "Linear"
_ALL = Entries(lambda _: True)  # every product
_LARGEST_OF_FP16 = 65504.0
_BITS_OF_BF16 = 8  # of a number's digits: fewer than fp16 has


def read_quantization(fields: Fields) -> Quantization:
    """Read quantization_config. Raises ModelConfigError that names the method, or the field, that is not supported."""
    return replace(_of_products(fields), caches_fp8=_caches_fp8(fields))


def _caches_fp8(fields: Fields) -> bool:
    """Return whether the KV cache is to be e4m3: compressed-tensors' kv_cache_scheme, or ModelOpt's words.

    So is "static" of files of `fp8`, which says that scales were measured. A cache of another format is left as it is.
    """
    if fields.given("quant_method") == "fp8" and fields.has("kv_cache_scheme"):
        return fields.choice("kv_cache_scheme", ("static", "dynamic")) == "static"
    for part in (fields, fields.section("quantization") or fields):
        words = [part.given("kv_cache_quant_algo")]
        if fields.given("quant_method") == "modelopt" and isinstance(part.given("kv_cache_scheme"), str):
            words.append(part.given("kv_cache_scheme"))  # of earlier versions: the same word
        elif (scheme := part.section("kv_cache_scheme")) is not None:
            check_keys(scheme, NUMBERS, "kv_cache_scheme")
            if scheme.given("num_bits") == 8 and scheme.given("type") == "float":
                return True
        if any(isinstance(it, str) and it.upper() == "FP8" for it in words):
            return True
    return False


def _of_products(fields: Fields) -> Quantization:
    is_modelopt = not fields.has("quant_method") and (fields.has("quant_algo") or fields.has("quantization"))
    supported = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "awq", "gptq")
    method = "modelopt" if is_modelopt else fields.choice("quant_method", supported)
    for part in (fields, fields.section("quantization") if method == "modelopt" else None):
        if part is not None:
            check_keys(part, OF_METHOD[method], f"a file of {method}")
    match method:
        case "fp8":
            return _of_fp8(fields)
        case "fbgemm_fp8":
            return _of_fbgemm(fields)
        case "compressed-tensors":
            return _of_compressed_tensors(fields)
        case "awq":
            return _of_awq(fields)
        case "gptq":
            return _of_gptq(fields)
        case _:
            return _of_modelopt(fields.section("quantization") or fields)


def _of_fp8(fields: Fields) -> Quantization:
    """DeepSeek's: entries are whole names, or parts of names between dots."""
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    scheme = fields.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    block = _sizes(fields, "weight_block_size")
    if block is not None and block != _BLOCK:
        fields.refuse("weight_block_size", f"{_BLOCK}")
    if block is not None and scheme == "static":
        fields.refuse("activation_scheme", "dynamic, of blocks")
    listed = _given_name(fields, "ignored_layers", "modules_to_not_convert")
    found = FP8_BLOCKS if block is not None else FP8_STATIC if scheme == "static" else FP8_ROWS
    # A head is no layer of the decoder, which transformers never converts.
    plain = Entries.of((*_entries(fields, listed), _HEAD), _at_dots)
    return Quantization(fields.source, ((_ALL, found),), plain)


def _of_fbgemm(fields: Fields) -> Quantization:
    """Meta's: entries are whole names, or parts of names between dots.

    A row of inputs is rounded with min(its largest, the bound) / 448, and what is beyond 448 then is cut off. That is
    the row cut off at the bound and rounded by its largest, where the inputs' dtype has the bound.
    """
    bound = fields.number("activation_scale_ub")
    digits = math.ldexp(math.frexp(bound)[0], _BITS_OF_BF16)
    if not 1 <= bound <= _LARGEST_OF_FP16 or digits != int(digits):
        fields.refuse("activation_scale_ub", "a number from 1 to 65504 that bf16 has, such as 1200")
    plain = (*_entries(fields, "modules_to_not_convert"), _HEAD)
    return Quantization(fields.source, ((_ALL, FP8_ROWS),), Entries.of(plain, _at_dots), input_bound=bound)


def _of_compressed_tensors(fields: Fields) -> Quantization:
    """Entries are whole names or, behind "re:", regular expressions of their beginnings; "Linear" is every product."""
    _check_nothing_else_is_done(fields)
    fields.choice("quantization_status", ("compressed", "frozen"), "compressed")
    groups = fields.section("config_groups")
    if groups is None:
        fields.refuse("config_groups", "an object of groups")
    schemes: list[tuple[tuple[str, ...], WeightFormat]] = []
    packings: set[Packing | None] = set()
    formats = ("float-quantized", _INT4, _NVFP4, _MXFP4)
    of_all = fields.choice("format", (*formats, "mixed-precision"), formats[0])
    for name in groups.names:
        group = groups.section(name)
        if group is None:
            groups.refuse(name, "an object")
        if group.section("output_activations") is not None:
            group.refuse("output_activations", "null (results of products are not rounded)")
        found, packing = _scheme_of(group, group.choice("format", formats, of_all))
        schemes.append((_entries(group, "targets"), found))
        packings.add(packing)
    if len(packings) > 1:
        fields.refuse("config_groups", "groups of 8 bits, or of 4 bits that are all packed alike")
    ignored = Entries.of(_entries(fields, "ignore"), _by_expression)
    return Quantization(fields.source, _most_exact_first(schemes), ignored, packings.pop() if packings else None)


def _most_exact_first(
    groups: list[tuple[tuple[str, ...], WeightFormat]],
) -> tuple[tuple[Entries, WeightFormat], ...]:
    """Return the groups' targets with their formats: whole names, then expressions, then "Linear".

    A product that one group names is of that group, wherever another one that has all products stands.
    Source: match_targets of compressed-tensors.
    """
    kinds: tuple[Callable[[str], bool], ...] = (
        lambda it: it != _LINEAR and not it.startswith("re:"),
        lambda it: it.startswith("re:"),
        lambda it: it == _LINEAR,
    )
    return tuple(
        (Entries.of(own, _by_expression), scheme)
        for is_of_kind in kinds
        for targets, scheme in groups
        if (own := tuple(filter(is_of_kind, targets)))
    )


def _check_nothing_else_is_done(fields: Fields) -> None:
    """Raise ModelConfigError for weights of which zeros are left out, or which are turned by matrices."""
    sparsity, transform = fields.section("sparsity_config"), fields.section("transform_config")
    if sparsity is not None and not sparsity.is_empty and sparsity.given("format") != "dense":
        fields.refuse("sparsity_config", "absent, empty or dense (zeros that are left out are not supported)")
    if transform is not None and any(transform.given(name) for name in transform.names):
        fields.refuse("transform_config", "absent or empty (what it asks for is not supported)")


def _weights_of(group: Fields) -> Fields:
    """Return what is said of weights. Raises ModelConfigError for keys that are unknown, there and of inputs."""
    check_keys(group, GROUP, "a group")
    weights, inputs = group.section("weights"), group.section("input_activations")
    if weights is None:
        group.refuse("weights", "an object")
    for part in (weights, inputs):
        if part is not None:
            check_keys(part, NUMBERS, "a group")
    if weights.flag("dynamic", False):
        weights.refuse("dynamic", "false, of weights")
    if weights.has("actorder"):  # both keep the columns' order in the file; "group" does not
        weights.choice("actorder", ("static", "weight"))
    return weights


def _scheme_of(group: Fields, name: str) -> tuple[WeightFormat, Packing | None]:
    """Return the format and the packing of one group of compressed-tensors, by the name of its layout."""
    if name == _INT4:
        return _packed_scheme(group)
    if name == _NVFP4:
        return _float_scheme(group, "tensor_group", _NVFP4_GROUP), Packing.NVFP4_COMPRESSED
    if name == _MXFP4:
        return _float_scheme(group, "group", _MXFP4_GROUP), Packing.MXFP4_COMPRESSED
    return _scheme(group), None


def _float_scheme(group: Fields, strategy: str, size: int) -> WeightFormat:
    """Return what weights of 4 bits with exponents become; how their maker rounds inputs is not done."""
    weights = _weights_of(group)
    weights.choice("type", ("float",))
    if weights.integer("num_bits") != 4:
        weights.refuse("num_bits", "4")
    if not weights.flag("symmetric", True):
        weights.refuse("symmetric", "true")
    weights.choice("strategy", (strategy,))
    if weights.integer("group_size") != size:
        weights.refuse("group_size", f"{size}")
    return FP8_BLOCKS


def _packed_scheme(group: Fields) -> tuple[WeightFormat, Packing]:
    """Return the format and the packing of one group of compressed-tensors in 4 bits."""
    weights = _weights_of(group)
    if group.section("input_activations") is not None:
        group.refuse("input_activations", "null, of weights of 4 bits")
    weights.choice("type", ("int",))
    if weights.integer("num_bits") != 4:
        weights.refuse("num_bits", "4")
    weights.choice("strategy", ("group",))
    is_symmetric = weights.flag("symmetric", True)
    return _of_group_size(weights, "group_size"), Packing.COMPRESSED_SYMMETRIC if is_symmetric else Packing.COMPRESSED


def _scheme(group: Fields) -> WeightFormat:
    """Return the format of one group of compressed-tensors in 8 bits."""
    weights, inputs = _weights_of(group), group.section("input_activations")
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
    if weights.given("group_size") not in (None, -1):
        weights.refuse("group_size", f"absent or -1, of weights with a scale by {strategy}")
    weights.absent("block_structure", f"a scale by {strategy} has none")
    if inputs.flag("dynamic", False):
        inputs.choice("strategy", ("token",))
        return FP8_ROWS
    inputs.choice("strategy", ("tensor",))
    return FP8_STATIC


def _of_modelopt(fields: Fields) -> Quantization:
    """NVIDIA's: entries are whole names or their beginnings at a dot, with wildcards."""
    algorithms = {"FP8": FP8_STATIC, "FP8_PER_CHANNEL_PER_TOKEN": FP8_ROWS, "NVFP4": FP8_BLOCKS}
    supported = (*algorithms, *(name.lower() for name in algorithms))
    algorithm = fields.choice("quant_algo", supported).upper()
    packing = Packing.NVFP4 if algorithm == "NVFP4" else None
    if packing is not None and fields.has("group_size") and fields.integer("group_size") != _NVFP4_GROUP:
        fields.refuse("group_size", f"{_NVFP4_GROUP}")
    _check_modelopt_groups(fields, algorithm)
    listed = _given_name(fields, "exclude_modules", "ignore")
    plain = Entries.of(_entries(fields, listed), _by_wildcard)
    return Quantization(fields.source, ((_ALL, algorithms[algorithm]),), plain, packing)


def _check_modelopt_groups(fields: Fields, algorithm: str) -> None:
    """Raise ModelConfigError where config_groups, which says the same again, says something else."""
    bits = 4 if algorithm == "NVFP4" else 8
    groups = fields.section("config_groups") or Fields({}, fields.source)
    for name in groups.names:
        group = groups.section(name)
        if group is None:
            groups.refuse(name, "an object")
        if _entries(group, "targets") not in ((), (_LINEAR,)):
            group.refuse("targets", f"Linear alone, of {algorithm}")
        weights = _weights_of(group)
        if weights.integer("num_bits", bits) != bits:
            weights.refuse("num_bits", f"{bits}, of {algorithm}")
        weights.choice("type", ("float",), "float")
        if bits == 4 and weights.integer("group_size", _NVFP4_GROUP) != _NVFP4_GROUP:
            weights.refuse("group_size", f"{_NVFP4_GROUP}, of {algorithm}")


def _of_awq(fields: Fields) -> Quantization:
    """AutoAWQ's: an entry is a part of a name."""
    bits, size = _given_name(fields, "bits", "w_bit"), _given_name(fields, "group_size", "q_group_size")
    if fields.integer(bits) != 4:
        fields.refuse(bits, "4")
    if not fields.flag("zero_point", True):
        fields.refuse("zero_point", "true")
    fields.choice(_given_name(fields, "version", "format"), ("gemm", "GEMM"), "gemm")
    if fields.given("backend") == "llm-awq":
        fields.refuse("backend", "absent or autoawq (llm-awq packs otherwise, which is not supported)")
    plain = (*_entries(fields, "modules_to_not_convert"), _HEAD)
    scheme = _ALL, _of_group_size(fields, size)
    return Quantization(fields.source, (scheme,), Entries.of(plain, _within), Packing.AWQ)


def _of_gptq(fields: Fields) -> Quantization:
    """GPTQ's: what stays as it is has a key of `dynamic` that begins with "-:", a regular expression."""
    if fields.integer("bits") != 4:
        fields.refuse("bits", "4")
    if fields.flag("desc_act", False):
        fields.refuse("desc_act", "false (columns in another order are not supported)")
    if fields.flag("lm_head", False):
        fields.refuse("lm_head", "false (a head of 4 bits is not supported)")
    word = _given_name(fields, "checkpoint_format", "format")
    is_second = fields.choice(word, ("gptq", "gptq_v2"), "gptq") == "gptq_v2"
    is_symmetric = fields.flag("sym", True)
    packing = Packing.GPTQ_SYMMETRIC if is_symmetric else Packing.GPTQ_V2 if is_second else Packing.GPTQ
    rules = fields.section("dynamic") or Fields({}, fields.source)
    plain = [_HEAD]
    for rule in rules.names:
        if not rule.startswith("-:") or not _is_expression(rule.removeprefix("-:")):
            rules.refuse(rule, 'absent: only regular expressions behind "-:" are supported')
        plain.append(f"re:{rule.removeprefix('-:')}")
    scheme = _in_blocks(fields), _of_group_size(fields, "group_size")
    return Quantization(fields.source, (scheme,), Entries.of(tuple(plain), _by_expression), packing)


def _in_blocks(fields: Fields) -> Entries:
    """Return what of a layer is quantised: modules_in_block_to_quantize, lists of ends of names; all without it."""
    listed = fields.given("modules_in_block_to_quantize")
    if not listed:
        return _ALL
    lists: list[Any] = listed if isinstance(listed, list) else [listed]
    flat: list[str] = [name for it in lists for name in (it if isinstance(it, list) else [it])]
    if not all(isinstance(name, str) and name for name in flat):
        fields.refuse("modules_in_block_to_quantize", "a list of lists of names")
    return Entries.of(tuple(flat), lambda ends: lambda name: any(name.endswith(f".{end}") for end in ends))


def _of_group_size(fields: Fields, name: str) -> WeightFormat:
    size = fields.given(name)
    if type(size) is not int or size not in _OF_GROUPS:
        fields.refuse(name, f"one of {', '.join(map(str, _OF_GROUPS))}")
    return _OF_GROUPS[size]


def _given_name(fields: Fields, first: str, second: str) -> str:
    """Return the name of the field that is there: the first one where both are, or none is.

    Raises ModelConfigError where both are and differ.
    """
    if fields.has(first) and fields.has(second) and fields.given(first) != fields.given(second):
        fields.refuse(second, f"absent or the same as {first}")
    return second if fields.has(second) and not fields.has(first) else first


def _within(entries: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: any(entry in name for entry in entries)


def _at_dots(entries: tuple[str, ...]) -> Callable[[str], bool]:
    found = frozenset(entries)

    def names(name: str) -> bool:
        words = name.split(".")
        ends = range(1, len(words) + 1)
        return any(".".join(words[start:end]) in found for end in ends for start in range(end))

    return names


def _by_expression(entries: tuple[str, ...]) -> Callable[[str], bool]:
    expressions = [re.compile(it.removeprefix("re:")) for it in entries if it.startswith("re:")]
    whole = frozenset(it for it in entries if not it.startswith("re:"))
    if _LINEAR in whole:
        return _ALL.names
    return lambda name: name in whole or any(it.match(name) for it in expressions)


def _by_wildcard(entries: tuple[str, ...]) -> Callable[[str], bool]:
    wild = [it for it in entries if any(character in it for character in "*?[")]
    whole = frozenset(entries) - frozenset(wild)

    def names(name: str) -> bool:
        words = name.split(".")
        if any(".".join(words[:end]) in whole for end in range(1, len(words) + 1)):
            return True
        return any(fnmatchcase(name, it) or fnmatchcase(name, f"{it}.*") for it in wild)

    return names


def _entries(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.given(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        fields.refuse(name, "a list of names")
    for item in value:
        if item.startswith("re:") and not _is_expression(item.removeprefix("re:")):
            fields.refuse(name, f"a list of names and regular expressions, and {item!r} is none")
    return tuple(value)


def _is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _sizes(fields: Fields, name: str) -> list[int] | None:
    value = fields.given(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        fields.refuse(name, "a list of integers")
    return value


def check_modelopt_beside(says: Mapping[str, object], beside: Mapping[str, object], source: str) -> None:
    """Raise ModelConfigError where hf_quant_config.json has another algorithm or cache than ModelOpt's words.

    says    quantization_config of config.json, which is read; what it leaves open of a cache stays open
    beside  as `from_file_beside` returns it; `source` is its file
    """
    if says.get("quant_method") != "modelopt":
        return
    own, other = Fields(says, CONFIG_KEY), Fields(beside, source)
    part = other.section("quantization") or other
    algorithm = own.given("quant_algo")
    if str(part.given("quant_algo")).upper() != str(algorithm).upper():
        part.refuse("quant_algo", f"{algorithm!r}, as {CONFIG_KEY} of config.json has it")
    caches_fp8, has_cache = _caches_fp8(own), own.has("kv_cache_scheme") or own.has("kv_cache_quant_algo")
    if has_cache and caches_fp8 != _caches_fp8(other):
        wanted = "FP8" if caches_fp8 else "not FP8"
        part.refuse("kv_cache_quant_algo", f"{wanted}, as kv_cache_scheme of {CONFIG_KEY} in config.json has it")


def from_file_beside(content: Mapping[str, object]) -> Mapping[str, object]:
    """Return what hf_quant_config.json says, as quantization_config would."""
    return {**content, "quant_method": "modelopt"}
