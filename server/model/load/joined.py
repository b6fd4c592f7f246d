"""Experts in a checkpoint that has all of a layer as one tensor: gate's numbers before those of up, or each apart.

    mlp.experts.gate_up_proj  [E, H, 2 * I], down_proj [E, I, H]  Qwen 3 VL's, as published
    mlp.experts.gate_up_proj  [E, 2 * I, H], down_proj [E, H, I]  as transformers 5 saves them; Granite's
    moe.gate_proj.weight, up_proj.weight [E, I, H], down_proj.weight [E, H, I]   Step 3.5's
    mixer.experts.up_proj [E, I, H], down_proj [E, H, I]          without a gate, as transformers 5 can save them
    mlp.experts.gate_up_proj_scale_inv, down_proj_scale_inv       of 8 bits in blocks: the same dims, each by 128
    block_sparse_moe.input_linear.weight_scale [E, 2 * I, 1], output_linear.weight_scale [E, H, 1]   of 8 bits by rows

Transformers 5 can save the experts of families so that are published with a tensor for each matrix of each expert.
Which of them a layer has, its shapes say. A rank has columns of every expert, hence a piece of each expert's part.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.experts.few_bits.weights import AnyExperts, FewBitExperts
from kernels.experts.formats import FewBitFormat
from kernels.experts.kinds import ExpertFormat
from kernels.experts.ungated.weights import UngatedExperts
from kernels.experts.weights import ExpertWeights
from kernels.linear.formats.fp8_weights import BLOCK, E4M3, Fp8BlocksWeight, Fp8RowsWeight
from qualification.model.config import ExpertsConfig, ModelConfig
from qualification.model.families.family import ExpertLayout, TensorNames
from qualification.model.shard import Shard
from server.errors import ModelError
from server.model.layers import LayerWeights, MixtureWeights, Weights
from server.model.load.checkpoint import Piece, TensorEntry, Wanted

_IN_8_BITS = (FewBitFormat.FP8_BLOCKS, FewBitFormat.FP8_ROWS)
_SCALE = "weight_scale"  # of an object of weights
_SCALES = "_scale"  # behind a tensor's name; DeepSeek's "_inv" behind it is left out where a checkpoint is read


def as_saved(names: TensorNames, entries: Mapping[str, TensorEntry]) -> TensorNames:
    """Return the names of a checkpoint: the family's, with the layout of experts that its tensors have."""
    own = names.experts
    if own is None or own.layout is not ExpertLayout.EACH:
        return names
    suffixes = tuple(f".{own.experts}.{it}" for it in (own.joined_gate_up, own.up))  # of experts without a gate
    if not any(name.endswith(suffixes) for name in entries):
        return names
    return replace(names, experts=replace(own, layout=ExpertLayout.HALVES))


def each_apart(names: TensorNames) -> TensorNames:
    """Return the names of a checkpoint that has a tensor for each matrix of each expert, where it may be so."""
    own = names.experts
    if own is None or own.layout is ExpertLayout.INTERLEAVED:
        return names
    return replace(names, experts=replace(own, layout=ExpertLayout.EACH))


def joined_tensors(config: ModelConfig, names: TensorNames, entries: Mapping[str, TensorEntry]) -> dict[str, Wanted]:
    """The tensors of a checkpoint of the whole model, by name; none for a family with another layout."""
    found: dict[str, Wanted] = {}
    for index, layer in enumerate(config.layers):
        mixture = layer.feed_forward
        if not isinstance(mixture, ExpertsConfig) or (own := _joined_names(index, names, mixture)) is None:
            continue
        is_in_blocks, in_8_bits = mixture.format is FewBitFormat.FP8_BLOCKS, mixture.format in _IN_8_BITS
        if mixture.format is not ExpertFormat.PLAIN and (mixture.num_inner == 1 or not in_8_bits):
            raise ModelError(f"{own.gate}: experts in {mixture.format.value} that share a tensor are not supported")
        count, width, hidden = mixture.num_experts, mixture.width, mixture.read_size(config.hidden_size)
        rows = width if own.is_apart else mixture.num_inner * width
        shapes = {own.gate: (rows, hidden), own.up: (rows, hidden), own.down: (hidden, width)}
        if not (mixture.num_inner == 1 or _has_rows(entries, own, hidden, width)):
            if mixture.format is FewBitFormat.FP8_ROWS:
                raise ModelError(f"{own.gate}: experts in {mixture.format.value} must have a row for each number made")
            shapes = {name: (columns, rows) for name, (rows, columns) in shapes.items()}
        for name, sizes in shapes.items():
            found[name] = Wanted((count, *sizes), E4M3 if in_8_bits else torch.float32)
            if in_8_bits:
                of_scales = tuple(size // BLOCK for size in sizes) if is_in_blocks else (sizes[0], 1)
                found[f"{name}{_SCALES}"] = Wanted((count, *of_scales), is_scale=True)
    return found


def joined_pieces(
    weights: Weights, shard: Shard, names: TensorNames, entries: Mapping[str, TensorEntry]
) -> list[Piece]:
    """The blocks that fill a rank's experts; none for a family with another layout."""
    found: list[Piece] = []
    for index, layer in enumerate(weights.layers):
        found += joined_pieces_of(index, layer, shard, names, entries)
    return found


def joined_pieces_of(
    index: int, layer: LayerWeights, shard: Shard, names: TensorNames, entries: Mapping[str, TensorEntry]
) -> list[Piece]:
    """The blocks that fill a rank's experts of one layer; none for a family with another layout."""
    part = shard.layers[index]
    layer, mixture = layer.as_published(part.whole), part.whole.feed_forward
    if not isinstance(layer.feed_forward, MixtureWeights) or not isinstance(mixture, ExpertsConfig):
        return []
    if (own := _joined_names(index, names, mixture)) is None:
        return []
    start, whole = part.width.start, mixture.width
    if isinstance(layer.feed_forward.experts, UngatedExperts):
        return list(_of_up(layer.feed_forward.experts, own, start, whole))
    found: list[Piece] = []
    experts = layer.feed_forward.experts
    if isinstance(experts, FewBitExperts) and isinstance(experts.gate_up, Fp8RowsWeight):
        scales = _Stacked(*(it.stored[_SCALE].values for it in (experts.gate_up, experts.down)))
        found += _scales_of_rows(scales, own, experts.num_experts, start, whole)
    for stacked, names_of, by in _stacked(layer.feed_forward.experts, own):
        has_rows = _has_rows(entries, own, by * stacked.gate_up.shape[2], whole)
        pieces = _of_rows if has_rows else _transposed
        found += pieces(stacked, names_of, start // by, whole // by)
    return found


class _Stacked(NamedTuple):
    """gate_up [E, 2 * I, H] and down [E, H, I], or what blocks of these have, of a rank."""

    gate_up: Tensor
    down: Tensor


def _stacked(experts: AnyExperts, names: "_Joined") -> Iterator[tuple[_Stacked, "_Joined", int]]:
    """Yield what a layer's tensors fill, their names, and the rows and columns that a number of them stands for."""
    if isinstance(experts, ExpertWeights):
        yield _Stacked(experts.gate_up, experts.down), names, 1
        return
    assert isinstance(experts, FewBitExperts), "these experts are plain or have 8 bits"
    of = experts.gate_up, experts.down
    yield _Stacked(*(it.codes.view(experts.num_experts, -1, it.codes.shape[1]) for it in of)), names, 1
    if not isinstance(experts.gate_up, Fp8BlocksWeight):
        return
    scales = _Stacked(*(it.scales.view(experts.num_experts, -1, it.scales.shape[1]) for it in of))
    yield scales, _Joined(*(f"{name}{_SCALES}" for name in (names.gate, names.up, names.down))), BLOCK


@dataclass(frozen=True, slots=True)
class _Joined:
    """The names of a layer's tensors; gate and up may be one."""

    gate: str
    up: str
    down: str

    @property
    def is_apart(self) -> bool:
        return self.gate != self.up


def _joined_names(layer: int, names: TensorNames, mixture: ExpertsConfig) -> _Joined | None:
    own = names.experts
    if own is None or own.layout not in (ExpertLayout.HALVES, ExpertLayout.STACKED):
        return None
    prefix = f"model.layers.{layer}.{own.experts}"
    if own.layout is ExpertLayout.STACKED:
        return _Joined(*(f"{prefix}.{name}.weight" for name in (own.gate, own.up, own.down)))
    gate_up = f"{prefix}.{own.up if mixture.num_inner == 1 else own.joined_gate_up}"
    return _Joined(gate_up, gate_up, f"{prefix}.{own.joined_down}")


def _has_rows(entries: Mapping[str, TensorEntry], names: _Joined, hidden: int, width: int) -> bool:
    """Return whether an expert's matrices have a row for each number that they make.

    Where both shapes of one of the tensors are the same, those of the other differ.
    """
    if names.is_apart:
        return True
    name, shape = (names.down, (hidden, width)) if hidden != width else (names.gate, (2 * width, hidden))
    entry = entries.get(name)
    return entry is not None and tuple(entry.shape[1:]) == shape


def _transposed(experts: _Stacked, names: _Joined, start: int, whole: int) -> Iterator[Piece]:
    """start: of the columns of a rank, of `whole`."""
    for expert in range(experts.down.shape[0]):
        gate_up, down = experts.gate_up[expert], experts.down[expert]
        hidden = gate_up.shape[1]
        for half, first_column in zip(gate_up.chunk(2), (start, whole + start), strict=True):
            yield Piece(
                names.gate,
                half.t(),
                first_row=expert * hidden,
                first_column=first_column,
                row_size=2 * whole,
            )
        yield Piece(names.down, down.t(), first_row=expert * whole + start, row_size=hidden)


def _of_rows(experts: _Stacked, names: _Joined, start: int, whole: int) -> Iterator[Piece]:
    for expert in range(experts.down.shape[0]):
        gate_up, down = experts.gate_up[expert], experts.down[expert]
        hidden = gate_up.shape[1]
        firsts = (expert, expert) if names.is_apart else (2 * expert, 2 * expert + 1)
        for name, first, half in zip((names.gate, names.up), firsts, gate_up.chunk(2), strict=True):
            yield Piece(name, half, first_row=first * whole + start, row_size=hidden)
        yield Piece(names.down, down, first_row=expert * hidden, first_column=start, row_size=whole)


def _scales_of_rows(scales: _Stacked, names: _Joined, count: int, start: int, whole: int) -> Iterator[Piece]:
    """Yield the blocks of the scales of rows [E, 2 * I, 1] and [E, H, 1]: `start` of the columns of a rank."""
    gate_up, down = (it.view(count, -1, 1) for it in scales)
    for expert in range(count):
        firsts = (expert, expert) if names.is_apart else (2 * expert, 2 * expert + 1)
        for name, first, half in zip((names.gate, names.up), firsts, gate_up[expert].chunk(2), strict=True):
            yield Piece(f"{name}{_SCALES}", half, first_row=first * whole + start, row_size=1)
        yield Piece(f"{names.down}{_SCALES}", down[expert], first_row=expert * down.shape[1], row_size=1)


def _of_up(experts: UngatedExperts, names: _Joined, start: int, whole: int) -> Iterator[Piece]:
    """Likewise of experts without a gate, always with a row for each number that a matrix makes."""
    hidden = experts.down.shape[1]
    for expert, (up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        yield Piece(names.gate, up, first_row=expert * whole + start, row_size=hidden)
        yield Piece(names.down, down, first_row=expert * hidden, first_column=start, row_size=whole)
