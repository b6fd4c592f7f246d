"""Qwen 3 VL's and Granite's experts in a checkpoint: all of a layer as one tensor, gate's numbers before those of up.

    mlp.experts.gate_up_proj  [E, H, 2 * I], down_proj [E, I, H]  as published
    mlp.experts.gate_up_proj  [E, 2 * I, H], down_proj [E, H, I]  as transformers 5 saves them; Granite's
    mlp.experts.gate_up_proj_scale_inv, down_proj_scale_inv       of 8 bits in blocks: the same dims, each by 128

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
from kernels.experts.weights import ExpertWeights
from kernels.linear.formats.fp8_weights import BLOCK, E4M3
from qualification.model.config import ExpertsConfig, ModelConfig
from qualification.model.families.family import ExpertLayout, TensorNames
from qualification.model.shard import Shard
from server.errors import ModelError
from server.model.layers import MixtureWeights, Weights
from server.model.load.checkpoint import Piece, TensorEntry, Wanted

_SCALES = "_scale"  # behind a tensor's name; DeepSeek's "_inv" behind it is left out where a checkpoint is read


def as_saved(names: TensorNames, entries: Mapping[str, TensorEntry]) -> TensorNames:
    """Return the names of a checkpoint: the family's, with the layout of experts that its tensors have."""
    own = names.experts
    if own is None or own.layout is not ExpertLayout.EACH:
        return names
    suffix = f".{own.experts}.{own.joined_gate_up}"
    if not any(name.endswith(suffix) for name in entries):
        return names
    return replace(names, experts=replace(own, layout=ExpertLayout.HALVES))


def joined_tensors(config: ModelConfig, names: TensorNames, entries: Mapping[str, TensorEntry]) -> dict[str, Wanted]:
    """The tensors of a checkpoint of the whole model, by name; none for a family with another layout."""
    found: dict[str, Wanted] = {}
    for index, layer in enumerate(config.layers):
        mixture, own = layer.feed_forward, _joined_names(index, names)
        if own is None or not isinstance(mixture, ExpertsConfig):
            continue
        is_in_blocks = mixture.format is FewBitFormat.FP8_BLOCKS
        if mixture.format is not ExpertFormat.PLAIN and not is_in_blocks:
            raise ModelError(f"{own.gate_up}: experts in {mixture.format.value} that share a tensor are not supported")
        count, width, hidden = mixture.num_experts, mixture.width, config.hidden_size
        is_saved_anew = _is_saved_anew(entries, own, hidden, width)
        gate_up, down = (
            ((2 * width, hidden), (hidden, width)) if is_saved_anew else ((hidden, 2 * width), (width, hidden))
        )
        for name, sizes in ((own.gate_up, gate_up), (own.down, down)):
            found[name] = Wanted((count, *sizes), E4M3 if is_in_blocks else torch.float32)
            if is_in_blocks:
                found[f"{name}{_SCALES}"] = Wanted((count, *(size // BLOCK for size in sizes)), is_scale=True)
    return found


def joined_pieces(
    weights: Weights, shard: Shard, names: TensorNames, entries: Mapping[str, TensorEntry]
) -> list[Piece]:
    """The blocks that fill a rank's experts; none for a family with another layout."""
    found: list[Piece] = []
    for index, (layer, part) in enumerate(zip(weights.layers, shard.layers, strict=True)):
        own = _joined_names(index, names)
        mixture = part.whole.feed_forward
        if own is None or not isinstance(layer.feed_forward, MixtureWeights) or mixture is None:
            continue
        start, whole = part.width.start, mixture.width
        for stacked, names_of, by in _stacked(layer.feed_forward.experts, own):
            is_saved_anew = _is_saved_anew(entries, own, by * stacked.gate_up.shape[2], whole)
            pieces = _saved_anew if is_saved_anew else _as_published
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
    assert isinstance(experts, FewBitExperts), "these experts are plain or in blocks"
    of = experts.gate_up, experts.down
    yield _Stacked(*(it.codes.view(experts.num_experts, -1, it.codes.shape[1]) for it in of)), names, 1
    scales = _Stacked(*(it.scales.view(experts.num_experts, -1, it.scales.shape[1]) for it in of))
    yield scales, _Joined(f"{names.gate_up}{_SCALES}", f"{names.down}{_SCALES}"), BLOCK


@dataclass(frozen=True, slots=True)
class _Joined:
    """The names of a layer's two tensors."""

    gate_up: str
    down: str


def _joined_names(layer: int, names: TensorNames) -> _Joined | None:
    own = names.experts
    if own is None or own.layout is not ExpertLayout.HALVES:
        return None
    prefix = f"model.layers.{layer}.{own.experts}"
    return _Joined(f"{prefix}.{own.joined_gate_up}", f"{prefix}.{own.joined_down}")


def _is_saved_anew(entries: Mapping[str, TensorEntry], names: _Joined, hidden: int, width: int) -> bool:
    """Where both shapes of one of the tensors are the same, those of the other differ."""
    name, shape = (names.down, (hidden, width)) if hidden != width else (names.gate_up, (2 * width, hidden))
    entry = entries.get(name)
    return entry is not None and tuple(entry.shape[1:]) == shape


def _as_published(experts: _Stacked, names: _Joined, start: int, whole: int) -> Iterator[Piece]:
    """start: of the columns of a rank, of `whole`."""
    for expert in range(experts.down.shape[0]):
        gate_up, down = experts.gate_up[expert], experts.down[expert]
        hidden = gate_up.shape[1]
        for half, first_column in zip(gate_up.chunk(2), (start, whole + start), strict=True):
            yield Piece(
                names.gate_up,
                half.t(),
                first_row=expert * hidden,
                first_column=first_column,
                row_size=2 * whole,
            )
        yield Piece(names.down, down.t(), first_row=expert * whole + start, row_size=hidden)


def _saved_anew(experts: _Stacked, names: _Joined, start: int, whole: int) -> Iterator[Piece]:
    for expert in range(experts.down.shape[0]):
        gate_up, down = experts.gate_up[expert], experts.down[expert]
        hidden = gate_up.shape[1]
        for index, half in enumerate(gate_up.chunk(2)):
            first_row = (2 * expert + index) * whole + start
            yield Piece(names.gate_up, half, first_row=first_row, row_size=hidden)
        yield Piece(names.down, down, first_row=expert * hidden, first_column=start, row_size=whole)
