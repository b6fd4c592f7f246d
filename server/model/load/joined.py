"""Qwen 3 VL's and Granite's experts in a checkpoint: all of a layer as one tensor, gate's numbers before those of up.

    mlp.experts.gate_up_proj  [E, H, 2 * I], down_proj [E, I, H]  as published
    mlp.experts.gate_up_proj  [E, 2 * I, H], down_proj [E, H, I]  as transformers 5 saves them; Granite's

Transformers 5 can save the experts of families so that are published with a tensor for each matrix of each expert.
Which of them a layer has, its shapes say. A rank has columns of every expert, hence a piece of each expert's part.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kernels.experts.kinds import ExpertFormat
from kernels.experts.weights import ExpertWeights
from qualification.model.config import ExpertsConfig, ModelConfig
from qualification.model.families.family import ExpertLayout, TensorNames
from qualification.model.shard import Shard
from server.errors import ModelError
from server.model.layers import MixtureWeights, Weights
from server.model.load.checkpoint import Piece, TensorEntry, Wanted


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
        if mixture.format is not ExpertFormat.PLAIN:
            raise ModelError(f"{own.gate_up}: experts in {mixture.format.value} that share a tensor are not supported")
        count, width, hidden = mixture.num_experts, mixture.width, config.hidden_size
        is_saved_anew = _is_saved_anew(entries, own, hidden, width)
        gate_up, down = (
            ((2 * width, hidden), (hidden, width)) if is_saved_anew else ((hidden, 2 * width), (width, hidden))
        )
        found[own.gate_up] = Wanted((count, *gate_up))
        found[own.down] = Wanted((count, *down))
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
        experts, whole = layer.feed_forward.experts, mixture.width
        assert isinstance(experts, ExpertWeights), "these experts are plain"
        hidden = experts.gate_up.shape[2]
        pieces = _saved_anew if _is_saved_anew(entries, own, hidden, whole) else _as_published
        found += pieces(experts, own, part.width.start, whole)
    return found


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


def _as_published(experts: ExpertWeights, names: _Joined, start: int, whole: int) -> Iterator[Piece]:
    """start: of the columns of a rank, of `whole`."""
    for expert in range(experts.num_experts):
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


def _saved_anew(experts: ExpertWeights, names: _Joined, start: int, whole: int) -> Iterator[Piece]:
    for expert in range(experts.num_experts):
        gate_up, down = experts.gate_up[expert], experts.down[expert]
        hidden = gate_up.shape[1]
        for index, half in enumerate(gate_up.chunk(2)):
            first_row = (2 * expert + index) * whole + start
            yield Piece(names.gate_up, half, first_row=first_row, row_size=hidden)
        yield Piece(names.down, down, first_row=expert * hidden, first_column=start, row_size=whole)
