"""Calls of a convolution on parts of sequences: their tokens between NaN, their states in slots of NaN."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.convolution.calls import ConvolutionState, ConvolutionWeights, RunConvolution
from kernels.convolution.shape import ConvolutionShape
from kernels.recurrence.calls import RecurrenceRows
from kernels.system.device import torch_dtype
from kernels.vocabulary.shape import Phase
from qualification.measure.inputs.guard import GUARD_MARK, GUARD_ROWS, guarded

_APART = 8  # numbers between rows of tokens


@dataclass(frozen=True, slots=True)
class ConvolutionPart:
    """A row of a call: projected [n, 3 * channels] of the tokens from `first` on, and slots.

    writes  (tokens of the sequence, slot): slots that get the state behind so many tokens
    """

    projected: Tensor
    first: int
    source: int
    target: int
    writes: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.projected.shape[0]


class ConvolutionSlots:
    """The states of sequences that calls of one path compute.

    state      NaN where nothing was written; behind the slots of sequences the one that is zero, and that of padding
    num_stray  values outside of what a call may write that have changed
    """

    def __init__(
        self,
        shape: ConvolutionShape,
        weights: ConvolutionWeights,
        num_slots: int,
        num_drafted: int,
        device: torch.device,
    ) -> None:
        self._shape, self._weights, self._device = shape, weights, device
        self.zero, self.padding, self.num_stray = num_slots, num_slots + 1, 0
        [(sizes, dtype)] = shape.sizes.state_tensors(shape.dtype, num_drafted)
        inputs = torch.full((num_slots + 2, *sizes), math.nan, dtype=torch_dtype(dtype), device=device)
        inputs[num_slots] = 0
        self.state = ConvolutionState(inputs)

    def call(
        self, run: RunConvolution, parts: Sequence[ConvolutionPart], *, phase: Phase | None = None
    ) -> list[Tensor]:
        """Compute the parts as rows of one call, and return the results of each, [n, channels]."""
        projected, rows = self.given(parts, phase=phase)
        storage, out = guarded(projected.shape[0], projected.new_empty(0, self._shape.channels), math.nan, GUARD_MARK)
        run(projected, self._weights, rows, self.state, out)
        edges = (storage[:GUARD_ROWS], storage[GUARD_ROWS + out.shape[0] :])
        self.num_stray += sum(int((edge != GUARD_MARK).sum()) for edge in edges)
        self.num_stray += int((self.state.inputs[self.zero] != 0).sum())
        lengths = [part.num_tokens for part in parts]
        return list(out[: sum(lengths)].split(lengths))  # type: ignore[no-untyped-call]

    def given(self, parts: Sequence[ConvolutionPart], *, phase: Phase | None = None) -> tuple[Tensor, RecurrenceRows]:
        """Return the tokens and rows of a call. Two rows behind the others are padding, of no token and of one."""
        projected = self._between_nan(torch.cat([part.projected for part in parts]))
        rows, end = [], 0
        writes: list[tuple[int, int]] = []
        for part in parts:
            start, end = end, end + part.num_tokens
            rows.append((start, end, part.first, part.source, part.target))
            writes += [(start + num_tokens - part.first - 1, slot) for num_tokens, slot in part.writes]
        rows += [(0, 0, 0, self.zero, self.padding), (end, end + 1, 0, self.zero, self.padding)]
        starts, stops, firsts, sources, targets = (
            torch.tensor(column, device=self._device) for column in zip(*rows, strict=True)
        )
        tokens, slots = (
            torch.tensor([it[place] for it in writes], dtype=torch.int64, device=self._device) for place in range(2)
        )
        return projected, RecurrenceRows(
            starts.int(), stops.int(), firsts.int(), firsts.int(), sources, targets, tokens, slots,
            longest=max(part.num_tokens for part in parts), phase=self._shape.phase if phase is None else phase,
        )  # fmt: skip

    def _between_nan(self, tokens: Tensor) -> Tensor:
        """The tokens and one of NaN, in a storage of NaN, whose rows are further apart than they are long."""
        num_rows, columns = tokens.shape
        storage = tokens.new_full((num_rows + 1 + 2 * GUARD_ROWS, columns + _APART), math.nan)
        storage[GUARD_ROWS : GUARD_ROWS + num_rows, :columns] = tokens
        return storage[GUARD_ROWS : GUARD_ROWS + num_rows + 1, :columns]
