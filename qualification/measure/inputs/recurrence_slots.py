"""Calls of a recurrence on parts of sequences: their tokens between NaN, their states in slots of NaN."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights, RunRecurrence
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import CHUNK
from kernels.system.device import torch_dtype
from kernels.vocabulary.shape import Phase
from qualification.measure.inputs.guard import GUARD_MARK, GUARD_ROWS, guarded

_APART = 8  # numbers between rows of tokens


@dataclass(frozen=True, slots=True)
class Part:
    """A row of a call: qkv [n, conv_dim], a and b [n, value_heads] of the tokens from `first` on, and slots.

    writes  slots that get the state behind so many tokens of the sequence
    """

    qkv: Tensor
    a: Tensor
    b: Tensor
    first: int
    source: int
    target: int
    folded: int | None = None
    writes: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.qkv.shape[0]


class Slots:
    """The states of sequences that calls of one path compute.

    state      NaN where nothing was written; behind the slots of sequences the one that is zero, and that of padding
    num_stray  values outside of what a call may write that have changed
    """

    def __init__(
        self, shape: RecurrenceShape, weights: RecurrenceWeights, num_slots: int, num_drafted: int, device: torch.device
    ) -> None:
        self._shape, self._weights, self._device = shape, weights, device
        self.zero, self.padding, self.num_stray = num_slots, num_slots + 1, 0
        tensors = []
        for sizes, dtype in shape.state_tensors(num_drafted):
            tensors.append(torch.full((num_slots + 2, *sizes), math.nan, dtype=torch_dtype(dtype), device=device))
            tensors[-1][num_slots] = 0
        self.state = RecurrenceState(*tensors)

    def call(self, run: RunRecurrence, parts: Sequence[Part], *, phase: Phase | None = None) -> list[Tensor]:
        """Compute the parts as rows of one call, and return the results of each, [n, value_heads, value_dim]."""
        given = self.given(parts, phase=phase)
        return self.repeat(run, given)

    def given(self, parts: Sequence[Part], *, phase: Phase | None = None) -> "Given":
        """Return the arguments of a call. Two rows behind the others are padding, of no token and of one."""
        total = sum(part.num_tokens for part in parts)
        qkv, a, b = (
            self._between_nan(torch.cat([getattr(part, name) for part in parts])) for name in ("qkv", "a", "b")
        )
        rows, end = [], 0
        writes: list[tuple[int, int]] = []
        for part in parts:
            start, end = end, end + part.num_tokens
            folded = part.first // CHUNK * CHUNK if part.folded is None else part.folded
            rows.append((start, end, part.first, folded, part.source, part.target))
            writes += [(start + num_tokens - part.first - 1, slot) for num_tokens, slot in part.writes]
        rows += [(0, 0, 0, 0, self.zero, self.padding), (total, total + 1, 0, 0, self.zero, self.padding)]
        columns = [torch.tensor(column, device=self._device) for column in zip(*rows, strict=True)]
        tokens, slots = (
            torch.tensor([it[place] for it in writes], dtype=torch.int64, device=self._device) for place in range(2)
        )
        of_call = RecurrenceRows(
            columns[0].int(), columns[1].int(), columns[2].int(), columns[3].int(), columns[4], columns[5],
            tokens, slots, longest=max(part.num_tokens for part in parts),
            phase=self._shape.phase if phase is None else phase,
        )  # fmt: skip
        return Given(qkv, a, b, of_call, tuple(part.num_tokens for part in parts))

    def repeat(self, run: RunRecurrence, given: "Given") -> list[Tensor]:
        """Make a call, and return the results of each part; NaN where nothing was written."""
        shape = self._shape
        like = given.qkv.new_empty(0, shape.num_value_heads, shape.value_dim)
        storage, out = guarded(given.qkv.shape[0], like, math.nan, GUARD_MARK)
        run(given.qkv, given.a, given.b, self._weights, given.rows, self.state, out)
        edges = (storage[:GUARD_ROWS], storage[GUARD_ROWS + out.shape[0] :])
        self.num_stray += sum(int((edge != GUARD_MARK).sum()) for edge in edges)
        self.num_stray += sum(int((it[self.zero] != 0).sum()) for it in self.state.tensors)
        return list(out[: sum(given.lengths)].split(list(given.lengths)))  # type: ignore[no-untyped-call]

    def _between_nan(self, tokens: Tensor) -> Tensor:
        """The tokens and one of NaN, in a storage of NaN, whose rows are further apart than they are long."""
        num_rows, columns = tokens.shape
        storage = tokens.new_full((num_rows + 1 + 2 * GUARD_ROWS, columns + _APART), math.nan)
        storage[GUARD_ROWS : GUARD_ROWS + num_rows, :columns] = tokens
        return storage[GUARD_ROWS : GUARD_ROWS + num_rows + 1, :columns]


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a call but for states and results; lengths: of its parts."""

    qkv: Tensor
    a: Tensor
    b: Tensor
    rows: RecurrenceRows
    lengths: tuple[int, ...]
