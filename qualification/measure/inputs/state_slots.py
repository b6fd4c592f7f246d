"""Calls of an operator on parts of sequences: their tokens between NaN, their states in slots of NaN."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kernels.convolution.calls import ConvolutionState, ConvolutionWeights
from kernels.convolution.shape import ConvolutionShape
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import CHUNK
from kernels.system.device import torch_dtype
from kernels.vocabulary.shape import Dtype, Phase
from qualification.measure.inputs.guard import GUARD_MARK, GUARD_ROWS, guarded
from qualification.measure.inputs.sequence_inputs import Tokens

_APART = 8  # numbers between rows of tokens
State = TypeVar("State", bound=RecurrenceState | ConvolutionState)
Run = Callable[..., None]  # of a path: tokens, weights, rows, state, results


@dataclass(frozen=True, slots=True)
class Part:
    """A row of a call: what it reads of the tokens from `first` on, each [n, ...], and slots.

    folded  tokens that a recurrence's state in the source slot is folded up to; None: the last border before `first`
    writes  (tokens of the sequence, slot): slots that get the state behind so many tokens
    """

    tokens: Tokens
    first: int
    source: int
    target: int
    folded: int | None = None
    writes: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.tokens[0].shape[0]


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a call but for states and results; lengths: of its parts."""

    tokens: Tokens
    rows: RecurrenceRows
    lengths: tuple[int, ...]


class Slots(Generic[State]):
    """The states of sequences that calls of one path compute.

    tensors    of the state, NaN where nothing was written; behind the slots of sequences the one that is zero, and
               that of padding
    num_stray  values outside of what a call may write that have changed
    """

    def __init__(
        self,
        make_state: Callable[..., State],
        kept: Sequence[tuple[tuple[int, ...], Dtype]],
        num_slots: int,
        device: torch.device,
        *,
        weights: object,
        phase: Phase,
        result: tuple[int, ...],
    ) -> None:
        """kept: shape and dtype of each tensor of a sequence's state; result: shape of a token's."""
        self._weights, self._phase, self._result, self._device = weights, phase, result, device
        self.zero, self.padding, self.num_stray = num_slots, num_slots + 1, 0
        self.tensors = [
            torch.full((num_slots + 2, *sizes), math.nan, dtype=torch_dtype(dtype), device=device)
            for sizes, dtype in kept
        ]
        for tensor in self.tensors:
            tensor[self.zero] = 0
        self.state = make_state(*self.tensors)

    def call(self, run: Run, parts: Sequence[Part]) -> list[Tensor]:
        """Compute the parts as rows of one call, and return the results of each, [n, ...]; NaN where none is."""
        given = self.given(parts)
        like = given.tokens[0].new_empty(0, *self._result)
        storage, out = guarded(given.tokens[0].shape[0], like, math.nan, GUARD_MARK)
        run(*given.tokens, self._weights, given.rows, self.state, out)
        edges = (storage[:GUARD_ROWS], storage[GUARD_ROWS + out.shape[0] :])
        self.num_stray += sum(int((edge != GUARD_MARK).sum()) for edge in edges)
        self.num_stray += sum(int((it[self.zero] != 0).sum()) for it in self.tensors)
        return list(out[: sum(given.lengths)].split(list(given.lengths)))  # type: ignore[no-untyped-call]

    def repeatable(self, run: Run, parts: Sequence[Part]) -> Callable[[], None]:
        """Return a call of the parts as rows, whose arguments are made once."""
        given = self.given(parts)
        out = given.tokens[0].new_empty(given.tokens[0].shape[0], *self._result)
        return lambda: run(*given.tokens, self._weights, given.rows, self.state, out)

    def given(self, parts: Sequence[Part]) -> Given:
        """Return the arguments of a call. Two rows behind the others are padding, of no token and of one."""
        tokens = tuple(_between_nan(torch.cat(each)) for each in zip(*(part.tokens for part in parts), strict=True))
        rows, end = [], 0
        writes: list[tuple[int, int]] = []
        for part in parts:
            start, end = end, end + part.num_tokens
            folded = part.first // CHUNK * CHUNK if part.folded is None else part.folded
            rows.append((start, end, part.first, folded, part.source, part.target))
            writes += [(start + num_tokens - part.first - 1, slot) for num_tokens, slot in part.writes]
        rows += [(0, 0, 0, 0, self.zero, self.padding), (end, end + 1, 0, 0, self.zero, self.padding)]
        columns = [torch.tensor(column, device=self._device) for column in zip(*rows, strict=True)]
        write_tokens, write_slots = (
            torch.tensor([it[place] for it in writes], dtype=torch.int64, device=self._device) for place in range(2)
        )
        of_call = RecurrenceRows(
            columns[0].int(), columns[1].int(), columns[2].int(), columns[3].int(), columns[4], columns[5],
            write_tokens, write_slots, longest=max(part.num_tokens for part in parts), phase=self._phase,
        )  # fmt: skip
        return Given(tokens, of_call, tuple(part.num_tokens for part in parts))


def recurrence_slots(
    shape: RecurrenceShape, weights: RecurrenceWeights, num_slots: int, num_drafted: int, device: torch.device
) -> Slots[RecurrenceState]:
    """Return slots of a recurrence, whose calls make [n, value_heads, value_dim]."""
    result = shape.num_value_heads, shape.value_dim
    return Slots(
        RecurrenceState, shape.state_tensors(num_drafted), num_slots, device,
        weights=weights, phase=shape.phase, result=result,
    )  # fmt: skip


def convolution_slots(
    shape: ConvolutionShape, weights: ConvolutionWeights, num_slots: int, num_drafted: int, device: torch.device
) -> Slots[ConvolutionState]:
    """Return slots of a convolution, whose calls make [n, channels]."""
    return Slots(
        ConvolutionState, shape.sizes.state_tensors(shape.dtype, num_drafted), num_slots, device,
        weights=weights, phase=shape.phase, result=(shape.channels,),
    )  # fmt: skip


def _between_nan(tokens: Tensor) -> Tensor:
    """The tokens and one of NaN, in a storage of NaN, whose rows are further apart than they are long."""
    num_rows, columns = tokens.shape
    storage = tokens.new_full((num_rows + 1 + 2 * GUARD_ROWS, columns + _APART), math.nan)
    storage[GUARD_ROWS : GUARD_ROWS + num_rows, :columns] = tokens
    return storage[GUARD_ROWS : GUARD_ROWS + num_rows + 1, :columns]
