"""Queries, keys and values that are one tensor of 8 bits, in shards that are each quantised by itself: MiMo V2.5's.

    qkv_proj.weight           [rows, K] e4m3: of each shard its heads' queries, then their keys, then their values
    qkv_proj.weight_scale_inv [shards * ceil(rows / shards / 128), ceil(K / 128)]: of each shard its own blocks

A block may have rows of keys and of values, so that no order of blocks is that of the weight in memory, which has all
queries, all keys and all values: its numbers are multiplied out, once, when they are loaded.
Source: SGLang's loader of MiMo V2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.linear.formats.fp8_weights import BLOCK
from qualification.model.config import AttentionConfig, ModelConfig
from server.errors import ModelError
from server.model.load.checkpoint import INVERSE, SCALE, TensorEntry, read_whole
from server.model.load.packed import PackedEntry

_PARTS = ("q_proj", "k_proj", "v_proj")
_CODES, _SCALES = "F8_E4M3", ("F32", "BF16")


@dataclass(frozen=True, slots=True)
class _Shards:
    """The tensors of one layer. sizes: rows of queries, of keys and of values, of all shards together."""

    product: str
    codes: TensorEntry
    scales: TensorEntry
    num_shards: int
    sizes: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Return the rows of one shard."""
        return sum(self.sizes) // self.num_shards

    def unpacked(self) -> dict[str, Tensor]:
        """Return queries, keys and values apart, [rows, K] fp32."""
        codes, scales = read_whole(self.codes), read_whole(self.scales).float()
        found: list[list[Tensor]] = [[] for _ in _PARTS]
        for own, of_blocks in zip(codes.chunk(self.num_shards), scales.chunk(self.num_shards), strict=True):
            spread = of_blocks.repeat_interleave(BLOCK, 0)[: own.shape[0]].repeat_interleave(BLOCK, 1)
            numbers = own.float() * spread[:, : own.shape[1]]
            for part, rows in zip(
                found, torch.split(numbers, [it // self.num_shards for it in self.sizes]), strict=True
            ):
                part.append(rows)
        return {name: torch.cat(part) for name, part in zip(_PARTS, found, strict=True)}


def with_qkv_apart(folder: Path, entries: Mapping[str, TensorEntry], config: ModelConfig) -> dict[str, TensorEntry]:
    """Return a checkpoint's tensors with queries, keys and values apart. Raises ModelError for other shapes."""
    found = dict(entries)
    for index, layer in enumerate(config.layers):
        mixer = layer.mixer
        if not isinstance(mixer, AttentionConfig) or mixer.qkv_shards is None:
            continue
        prefix = f"model.layers.{index}.self_attn"
        product = f"{prefix}.qkv_proj"
        missing = [name for name in (f"{product}.weight", f"{product}.weight_scale") if name not in entries]
        if missing:
            in_file = [name + INVERSE if name.endswith(SCALE) else name for name in missing]
            raise ModelError(f"{folder}: {', '.join(in_file)} missing: fetch the checkpoint again")
        codes, scales = found.pop(f"{product}.weight"), found.pop(f"{product}.weight_scale")
        shards = _Shards(product, codes, scales, mixer.qkv_shards, mixer.part_sizes)
        _check(shards)
        for name, size in zip(_PARTS, shards.sizes, strict=True):
            shape = (size, *codes.shape[1:])
            made = f"{prefix}.{name}.weight"
            found[made] = PackedEntry(codes.file, shape, "F32", codes.offset, made, name, shards)
    return found


def _check(shards: _Shards) -> None:
    """Raise ModelError for tensors that are not of so many shards."""
    codes, scales = shards.codes, shards.scales
    columns = codes.shape[-1] if codes.shape else 0
    due = (sum(shards.sizes), columns)
    if codes.dtype != _CODES or codes.shape != due:
        raise ModelError(
            f"{codes.name} in {codes.file.name}: {_CODES} {due} was expected, found {codes.dtype} {codes.shape}"
        )
    of_scales = (shards.num_shards * -(-shards.rows // BLOCK), -(-columns // BLOCK))
    if scales.dtype not in _SCALES or scales.shape != of_scales:
        raise ModelError(
            f"{scales.name} in {scales.file.name}: of {shards.num_shards} shards of {shards.rows} "
            f"rows, {' or '.join(_SCALES)} {of_scales} was expected, found {scales.dtype} {scales.shape}"
        )
