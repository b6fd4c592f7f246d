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
from qualification.measure.inputs.far_memory import FAR, far_memory
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
    first      slots of calls before those of `tensors`, whose numbers are from 0 on elsewhere
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
        is_far: bool = False,
    ) -> None:
        """kept: shape and dtype of each tensor of a sequence's state; result: shape of a token's.

        is_far  whether the slots lie so far into the largest tensor that an offset of 32 bits is that of a slot of NaN
        Raises MemoryError where there is no room for such a one.
        """
        self._weights, self._phase, self._result, self._device = weights, phase, result, device
        self.zero, self.padding, self.num_stray = num_slots, num_slots + 1, 0
        self.first = _num_before(kept) if is_far else 0
        given = [self._slots_of(sizes, torch_dtype(dtype)) for sizes, dtype in kept]
        self.tensors = [it[self.first :] for it in given]
        for tensor in self.tensors:
            tensor[self.zero] = 0
        self.state, self._given_state = make_state(*self.tensors), make_state(*given)

    def _slots_of(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of slots, NaN where calls may look for them and where offsets of 32 bits lead."""
        num_slots, size = self.padding + 1, math.prod(sizes)
        if not self.first or not size:
            return torch.full((self.first + num_slots, *sizes), math.nan, dtype=dtype, device=self._device)
        memory = far_memory((self.first + num_slots) * size * dtype.itemsize, self._device)
        if memory is None:
            raise MemoryError("no room for slots past 2**32 numbers")
        found = memory.view(dtype).view(self.first + num_slots, *sizes)
        found[: num_slots + 1], found[self.first :] = math.nan, math.nan
        return found

    def call(self, run: Run, parts: Sequence[Part]) -> list[Tensor]:
        """Compute the parts as rows of one call, and return the results of each, [n, ...]; NaN where none is."""
        given = self.given(parts)
        like = given.tokens[0].new_empty(0, *self._result)
        storage, out = guarded(given.tokens[0].shape[0], like, math.nan, GUARD_MARK)
        run(*given.tokens, self._weights, given.rows, self._given_state, out)
        edges = (storage[:GUARD_ROWS], storage[GUARD_ROWS + out.shape[0] :])
        self.num_stray += sum(int((edge != GUARD_MARK).sum()) for edge in edges)
        self.num_stray += sum(int((it[self.zero] != 0).sum()) for it in self.tensors)
        return list(out[: sum(given.lengths)].split(list(given.lengths)))  # type: ignore[no-untyped-call]

    def repeatable(self, run: Run, parts: Sequence[Part]) -> Callable[[], None]:
        """Return a call of the parts as rows, whose arguments are made once."""
        given = self.given(parts)
        out = given.tokens[0].new_empty(given.tokens[0].shape[0], *self._result)
        return lambda: run(*given.tokens, self._weights, given.rows, self._given_state, out)

    def given(self, parts: Sequence[Part]) -> Given:
        """Return the arguments of a call. Two rows behind the others are padding, of no token and of one."""
        tokens = tuple(_between_nan(torch.cat(each)) for each in zip(*(part.tokens for part in parts), strict=True))
        rows, end = [], 0
        writes: list[tuple[int, int]] = []
        for part in parts:
            start, end = end, end + part.num_tokens
            folded = part.first // CHUNK * CHUNK if part.folded is None else part.folded
            rows.append((start, end, part.first, folded, self.first + part.source, self.first + part.target))
            writes += [(start + num_tokens - part.first - 1, self.first + slot) for num_tokens, slot in part.writes]
        unused = 0, 0, self.first + self.zero, self.first + self.padding
        rows += [(0, 0, *unused), (end, end + 1, *unused)]
        columns = [torch.tensor(column, device=self._device) for column in zip(*rows, strict=True)]
        write_tokens, write_slots = (
            torch.tensor([it[place] for it in writes], dtype=torch.int64, device=self._device) for place in range(2)
        )
        of_call = RecurrenceRows(
            columns[0].int(), columns[1].int(), columns[2].int(), columns[3].int(), columns[4], columns[5],
            write_tokens, write_slots, longest=max(part.num_tokens for part in parts), phase=self._phase,
        )  # fmt: skip
        return Given(tokens, of_call, tuple(part.num_tokens for part in parts))


def _num_before(kept: Sequence[tuple[tuple[int, ...], Dtype]]) -> int:
    """Return the slots that take 2**32 numbers of the largest tensor of a state."""
    return -(-FAR // max(math.prod(sizes) for sizes, _ in kept))


def has_far_room(kept: Sequence[tuple[tuple[int, ...], Dtype]], device: torch.device) -> bool:
    """Return whether there is memory for slots behind 2**32 numbers, and some more; log where there is not."""
    bytes_of_slot = sum(math.prod(sizes) * torch_dtype(dtype).itemsize for sizes, dtype in kept)
    return far_memory(_num_before(kept) * bytes_of_slot * 9 // 8, device) is not None


def recurrence_slots(
    shape: RecurrenceShape,
    weights: RecurrenceWeights,
    num_slots: int,
    num_drafted: int,
    device: torch.device,
    *,
    is_far: bool = False,
) -> Slots[RecurrenceState]:
    """Return slots of a recurrence, whose calls make [n, value_heads, value_dim]."""
    result = shape.num_value_heads, shape.value_dim
    return Slots(
        RecurrenceState, shape.state_tensors(num_drafted), num_slots, device,
        weights=weights, phase=shape.phase, result=result, is_far=is_far,
    )  # fmt: skip


def convolution_slots(
    shape: ConvolutionShape,
    weights: ConvolutionWeights,
    num_slots: int,
    num_drafted: int,
    device: torch.device,
    *,
    is_far: bool = False,
) -> Slots[ConvolutionState]:
    """Return slots of a convolution, whose calls make [n, channels]."""
    return Slots(
        ConvolutionState, shape.sizes.state_tensors(shape.dtype, num_drafted), num_slots, device,
        weights=weights, phase=shape.phase, result=(shape.channels,),
        is_far=is_far,
    )  # fmt: skip


def _between_nan(tokens: Tensor) -> Tensor:
    """The tokens and one of NaN, in a storage of NaN, whose rows are further apart than they are long."""
    num_rows, columns = tokens.shape
    storage = tokens.new_full((num_rows + 1 + 2 * GUARD_ROWS, columns + _APART), math.nan)
    storage[GUARD_ROWS : GUARD_ROWS + num_rows, :columns] = tokens
    return storage[GUARD_ROWS : GUARD_ROWS + num_rows + 1, :columns]
