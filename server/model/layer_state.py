"""The states of recurrent layers: slots of fixed size, one a sequence, beside the pages of layers that attend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.recurrence.calls import RecurrenceRows
from kernels.system.device import torch_dtype
from qualification.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of one recurrent layer: of each tensor that it keeps, [num_slots + 2, ...]."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StateCache:
    """A `LayerState` for each recurrent layer, in their order. A slot is the same sequence's in every layer.

    Two slots belong to no sequence: the last but one stays zero, padding rows write to the last.
    """

    layers: tuple[LayerState, ...]
    num_slots: int

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> "StateCache | None":
        """Allocate `num_slots` slots for sequences and snapshots; None for a model without recurrent layers.

        `dtype` of the weights, in which a recurrence may keep a part of its state.
        """
        if not config.recurrences:
            return None

        def layer(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> LayerState:
            return LayerState(
                tuple(torch.zeros(num_slots + 2, *shape, dtype=dtype, device=device) for shape, dtype in shapes)
            )

        kept = [
            [(it.shape, dtype if it.dtype is None else torch_dtype(it.dtype)) for it in recurrence.state]
            for recurrence in config.recurrences
        ]
        return cls(tuple(map(layer, kept)), num_slots)


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states of a forward pass: recurrent layer i reads and writes those in `cache.layers[i]`."""

    cache: StateCache
    rows: RecurrenceRows
