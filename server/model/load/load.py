"""A folder to a Decoder."""

import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.experts.few_bits.weights import FewBitExperts
from kernels.experts.formats import FewBitFormat
from qualification.model.config import ExpertsConfig, LayerConfig, LinearFormats, ModelConfig
from qualification.model.draft_head import PREFIX, PRODUCT, name_in_model
from qualification.model.families.family import Family, TensorNames
from qualification.model.families.image_models import text_names
from qualification.model.families.quantization import as_stored
from qualification.model.families.quantization_config import (
    CONFIG_KEY,
    check_modelopt_beside,
    from_file_beside,
    read_quantization,
)
from qualification.model.families.quantization_keys import check_file_beside
from qualification.model.families.reader import check_whole, read_as, text_part, unknown_keys
from qualification.model.families.registry import family_named
from qualification.model.families.served import served_family
from qualification.model.fields import Fields, ModelConfigError
from qualification.model.shard import Shard, shard_of
from server.errors import ModelError
from server.model.decoder import Decoder
from server.model.empty_weights import empty_weights
from server.model.layers import MixtureWeights, Weights
from server.model.load.checkpoint import (
    INVERSE,
    SCALE,
    TensorEntry,
    Wanted,
    are_equal,
    check_entries,
    copy_pieces,
    has_weights,
    listed,
    named_anew,
    read_entries,
    tenths,
)
from server.model.load.folder import CONFIG_FILE
from server.model.load.image_experts import without_image_experts
from server.model.load.interleaved import interleaved_pieces, interleaved_tensors
from server.model.load.joined import as_saved, each_apart, joined_pieces, joined_tensors
from server.model.load.json_file import read_object
from server.model.load.packed import copy_packed, packed_entries
from server.model.load.reencoded import reencoded_entries
from server.model.load.rounded import copy_rounded
from server.model.load.scales import check_scales
from server.model.load.sharded_qkv import with_qkv_apart
from server.model.load.shards import empty_shard, pieces_of
from server.model.load.tokenizer_files import end_token_ids
from server.model.tensor_views import checkpoint_views
from server.settings import LoadFormat

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Files beside config.json in which tools say how the weights are quantised: NVIDIA's ModelOpt; AutoGPTQ, AutoAWQ.
_MODELOPT_FILE = "hf_quant_config.json"
_QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")
# Ends of names of tensors that a quantised checkpoint may hold without need: scales of a cache in 8 bits.
_OF_QUANTIZED = (".k_scale", ".v_scale", ".kv_scale")
_OF_KEYS = ("k_proj.", "v_proj.", "k_norm.")
_DUMMY_RANGE = 1e-3
_DUMMY_SCALE = 127 - 12  # of blocks of mxfp4: within 6 * 2 ** -12, which is 1.5e-3
_DUMMY_ZERO = 8  # of codes from 0 to 15


def load_config(folder: Path) -> ModelConfig:
    """The model's architecture from config.json, its end tokens from the union of the folder's files.

    Those are also generation_config.json, tokenizer_config.json and special_tokens_map.json: a fine-tuned chat model
    often has its real end token in one of them alone.

    Where config.json ties the head to the embedding and the checkpoint has one with other numbers, that one is used, as
    in transformers 5: fine-tuning leaves such files.

    Raises ModelError that names the file, the field, and what is expected or supported.
    """
    path = folder / CONFIG_FILE
    values = read_object(path)
    try:
        config = _read_config(folder, path, values)
    except ModelConfigError as error:
        raise ModelError(str(error)) from error
    return replace(config, tie_embeddings=False) if _has_other_head(folder, config) else config


def _read_config(folder: Path, path: Path, values: dict[str, object]) -> ModelConfig:
    family = served_family(values, str(path))
    quantization = text_part(values).get(CONFIG_KEY)
    for file in (folder / name for name in _QUANTIZATION_FILES if (folder / name).is_file()):
        if not isinstance(quantization, dict):
            raise ModelConfigError(
                f"{file}: the checkpoint is quantised, and {path} has no {CONFIG_KEY}: write into it what this file "
                f"says, with its quant_method, or serve the checkpoint that it was made from"
            )
        check_file_beside(quantization, read_object(file), str(file))
    if (file := folder / _MODELOPT_FILE).is_file():
        beside = from_file_beside(read_object(file))
        if quantization is None:
            read_quantization(Fields(beside, str(file)))  # what is wrong is named with that file
            values = {**values, CONFIG_KEY: beside}
        elif isinstance(quantization, dict):
            check_modelopt_beside(quantization, beside, str(file))
    whole, values = values, dict(text_part(values))
    check_whole(whole, str(path))
    generation = read_object(folder / GENERATION_FILE) if (folder / GENERATION_FILE).is_file() else {}
    if isinstance(vocab_size := values.get("vocab_size"), int):  # what is wrong is named with that file
        Fields(generation, str(folder / GENERATION_FILE)).token_ids("eos_token_id", vocab_size)
    ends = _all_end_tokens(values, generation, _end_tokens_of_tokenizer(folder, values))
    if ends or "eos_token_id" in values:  # else that of the family's class, where it has one
        values |= {"eos_token_id": ends}
    unknown = unknown_keys(whole, family)
    if unknown:
        logger.warning("%s: not known for %s, and not read: %s", path, values.get("model_type"), listed(unknown))
    return read_as(family, values, str(path))


def _silent(_: str) -> None:
    """Report no progress."""


def load_decoder(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat,
    progress: Callable[[str], None] = _silent,
) -> Decoder:
    """The decoder of the whole model, as it computes outside of an engine: products by PyTorch. Raises ModelError."""
    whole = shard_of(config, 0, 1)
    return Decoder(
        config,
        load_shard(folder, config, whole, dtype=dtype, device=device, load_format=load_format, progress=progress),
    )


def load_shard(
    folder: Path,
    config: ModelConfig,
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = LoadFormat.AUTO,
    progress: Callable[[str], None] = _silent,
) -> Weights:
    """Return one rank's part of the folder's weights, for a decoder of `shard.local_config`. No other part is read.

    Dummy weights are uniform within about 1e-3, and the same on every start; what every rank has is the same on all.

    `progress` is called ten times while a large checkpoint is loaded, with a line that says how much of it is loaded.
    Raises ModelError before anything is copied when a tensor is missing, unknown or of another shape.
    """
    family = family_named(config.family, str(folder))
    entries = check_checkpoint(folder, config, load_format)
    names = as_saved(_names(family), entries)
    if config.rounds_at_load and load_format is LoadFormat.DUMMY:
        names = each_apart(names)  # experts of rows with scales have no tensors of all of them
    with torch.inference_mode():
        weights = empty_shard(shard, dtype, device)
        if config.rounds_at_load and load_format is not LoadFormat.DUMMY:
            copy_rounded(entries, weights, shard, names, tenths(progress))
            check_scales(folder, weights, shard, names, entries)
            return weights.inspected()
        pieces = pieces_of(weights, shard, names) + interleaved_pieces(weights, shard, names)
        pieces += joined_pieces(weights, shard, names, entries)
        if load_format is LoadFormat.DUMMY:
            for piece in pieces:
                seed = zlib.crc32(f"{piece.name} {piece.first_row} {piece.first_column}".encode())
                generator = torch.Generator(device).manual_seed(seed)
                _fill_dummy(piece.name, piece.target, generator)
        else:
            copy_pieces(entries, copy_packed(entries, pieces), tenths(progress))
            weights.order_codes_()
            check_scales(folder, weights, shard, names, entries)
            check_loaded(folder, weights)
        return weights.inspected()


def check_loaded(folder: Path, weights: Weights) -> None:
    """Raise ModelError for a product whose tensors, now that they are filled, cannot be multiplied by."""
    for index, layer in enumerate(weights.layers):
        fed = layer.feed_forward
        of_experts = fed.experts if isinstance(fed, MixtureWeights) else None
        if isinstance(of_experts, FewBitExperts) and (reason := of_experts.why_unusable()) is not None:
            raise ModelError(f"{folder}: layer {index}: {reason}")
        for name, linear in layer.linears.items():
            if (reason := linear.weight.why_unusable()) is not None:
                raise ModelError(f"{folder}: {name.value} of layer {index}: {reason}")


def check_checkpoint(folder: Path, config: ModelConfig, load_format: LoadFormat) -> dict[str, TensorEntry]:
    """The checkpoint's tensors by name, from the headers of its files; none where the weights are dummy ones.

    Raises ModelError when a file or tensor is missing, or a tensor is unknown or of another shape.
    """
    if load_format is LoadFormat.DUMMY:
        return {}
    config = as_stored(config)
    family, entries = family_named(config.family, str(folder)), _read_named(folder, config)
    if config.tie_embeddings and _HEAD in entries and _EMBEDDING not in entries:
        entries[_EMBEDDING] = entries.pop(_HEAD)
    entries = without_image_experts(entries, config, _names(family))
    names = as_saved(_names(family), entries)
    with torch.inference_mode():
        on_paper = checkpoint_views(empty_weights(config, torch.float32, torch.device("meta")), config, names)
    wanted = {
        name: Wanted(tuple(it.values.shape), it.values.dtype, is_scale=it.is_scale) for name, it in on_paper.items()
    }
    wanted |= interleaved_tensors(config, names) | joined_tensors(config, names, entries)
    attentions = zip(config.attention_layers, config.attentions, strict=True)
    borrowing = [index for index, attention in attentions if not attention.has_own_keys]
    if borrowing:  # published files may have what these layers would make keys and values of, which nothing reads
        unread = tuple(f"model.layers.{index}.self_attn.{it}" for index in borrowing for it in _OF_KEYS)
        entries = {name: entry for name, entry in entries.items() if not name.startswith(unread)}
    if family.not_read and not config.num_draft_layers:
        entries = {name: entry for name, entry in entries.items() if not name.startswith(family.not_read)}
    if family.has_more_layers:
        entries = {name: entry for name, entry in entries.items() if not _is_behind(name, config.num_layers)}
    tolerated = (*family.tolerated, _HEAD) if config.tie_embeddings else family.tolerated
    if any(layer.formats != LinearFormats() or _has_few_bit_experts(layer) for layer in config.layers):
        tolerated = (*tolerated, *_OF_QUANTIZED)
    check_entries(folder, entries, wanted, tolerated)
    return entries


def has_draft_head(folder: Path, config: ModelConfig) -> bool:
    """Return whether the checkpoint has the product of a draft head. Raises ModelError for files that are not read."""
    return PRODUCT in _read_named(folder, config)


def _has_few_bit_experts(layer: LayerConfig) -> bool:
    return isinstance(layer.feed_forward, ExpertsConfig) and isinstance(layer.feed_forward.format, FewBitFormat)


def _read_named(folder: Path, config: ModelConfig) -> dict[str, TensorEntry]:
    """Return the tensors of the text part, by their names in a checkpoint of text alone. Raises ModelError."""
    entries = read_entries(folder)
    named = text_names(entries, config.family)
    of_text = {name: entries[name] for name in named}
    renamed = family_named(config.family, str(folder)).renamed
    entries = named_anew(folder, of_text, lambda name: _renamed(name_in_model(named[name], config), renamed))
    if "embed_tokens.weight" in entries:  # saved without a head, hence without the whole's prefix
        own = ("lm_head", PREFIX, "model.")
        entries = named_anew(folder, entries, lambda name: name if name.startswith(own) else f"model.{name}")
    if config.packing is not None:
        from_file = reencoded_entries if config.packing.is_reencoded else packed_entries
        entries = from_file(folder, entries, config.packing)
    ending = f"{SCALE}{INVERSE}"
    entries = named_anew(folder, entries, lambda it: it.removesuffix(INVERSE) if it.endswith(ending) else it)
    return with_qkv_apart(folder, entries, config)


def _renamed(name: str, beginnings: Mapping[str, str]) -> str:
    old = next((it for it in beginnings if name.startswith(it)), "")
    return beginnings.get(old, "") + name.removeprefix(old)


def _has_other_head(folder: Path, config: ModelConfig) -> bool:
    """Return whether the head is tied to the embedding, and the checkpoint has one that differs from it."""
    if not config.tie_embeddings or not has_weights(folder):
        return False
    try:
        entries = _read_named(folder, config)
    except ModelError:  # `check_checkpoint` says what is wrong with these files, where they are to be loaded
        return False
    if _HEAD not in entries or _EMBEDDING not in entries or are_equal(entries[_HEAD], entries[_EMBEDDING]):
        return False
    logger.warning(
        "%s: tie_word_embeddings is true, or missing, and %s differs from %s: the head of the checkpoint is used, as "
        "in transformers; set it to false to end this warning",
        folder, _HEAD, _EMBEDDING,
    )  # fmt: skip
    return True


def _names(family: Family) -> TensorNames:
    assert family.tensors is not None, "the family is served"
    return family.tensors


def _is_behind(name: str, num_layers: int) -> bool:
    """Return whether a tensor is of a layer behind the model's last one."""
    prefix, _, rest = name.partition("model.layers.")
    number = rest.partition(".")[0]
    return not prefix and number.isdecimal() and int(number) >= num_layers


def _fill_dummy(name: str, target: Tensor, generator: torch.Generator) -> None:
    """Unsigned bytes are codes of 4 bits, scales of mxfp4, which are all the same, and zero points: in the middle."""
    if target.dtype is torch.int8:
        target.random_(-127, 128, generator=generator)
    elif target.dtype is torch.float8_e4m3fn:
        target.copy_(torch.rand(target.shape, generator=generator, device=target.device).mul_(2).sub_(1))
    elif target.dtype is not torch.uint8:
        target.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE, generator=generator)
    elif name.endswith(".weight_zero"):
        target.fill_(_DUMMY_ZERO)
    elif name.endswith("_scales"):
        target.fill_(_DUMMY_SCALE)
    else:
        target.random_(generator=generator)


def _end_tokens_of_tokenizer(folder: Path, config: dict[str, object]) -> list[int]:
    """Return the tokenizer's own end tokens, without those that the model has no row for and so cannot write."""
    vocab_size = config.get("vocab_size")
    ids = end_token_ids(folder)
    return [token_id for token_id in ids if token_id < vocab_size] if isinstance(vocab_size, int) else ids


def _all_end_tokens(config: dict[str, object], generation: dict[str, object], others: list[int]) -> list[object]:
    """Return the end tokens of both files and the others, in order, each once."""
    found: list[object] = []
    for value in (config.get("eos_token_id"), generation.get("eos_token_id"), others):
        found += value if isinstance(value, list) else [] if value is None else [value]
    return list(
        {repr(token): token for token in found}.values()
    )  # what is no id may have no hash, and is refused later
