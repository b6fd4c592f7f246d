"""Rows of a call of a recurrence by PyTorch: what their slots have is read, and what new tokens leave is written."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.recurrence.calls import RecurrenceRows, RecurrenceState
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.vocabulary.shape import Phase

LEAST_DECAY = -256.0  # its logarithm: e^-256 is 0 in fp32, and differences of sums in fp64 stay exact enough


class Row(Protocol):
    """The tokens of one sequence in a call."""

    def append(self, given: Tensor, gates: tuple[Tensor, ...], out: Tensor, /) -> None:
        """Compute the row's tokens: given [n, conv_dim], gates [n, ...], out [n, value_heads, value_dim]."""

    def store(self, slot: int, num_tokens: int, border: int, /) -> None:
        """Write the state behind so many tokens of the sequence to a slot, folded up to the border."""


def compute_rows(
    row_of: Callable[[int, int, int], Row], qkv: Tensor, gates: tuple[Tensor, ...], rows: RecurrenceRows, out: Tensor
) -> None:
    """Compute each row of one token or more, and store what is asked for of it, its own slot last.

    out     [T, value_heads, value_dim], filled: 0 of tokens without a row
    row_of  (position of the row's first token, border up to which its slot is folded, slot) -> the row
    """
    out.zero_()
    writes = list(zip(rows.write_tokens.tolist(), rows.write_slots.tolist(), strict=True))
    names = ("starts", "stops", "firsts", "folded", "sources", "targets")
    for start, stop, first, folded, source, target in zip(*(getattr(rows, it).tolist() for it in names), strict=True):
        if start == stop:
            continue
        row, own = row_of(first, folded, source), slice(start, stop)
        row.append(qkv[own], tuple(it[own] for it in gates), out[own])
        for token, slot in writes:
            if start <= token < stop:
                num_tokens = first + token + 1 - start
                row.store(slot, num_tokens, num_tokens // CHUNK * CHUNK)
        last = first + stop - start
        row.store(target, last, first // CHUNK * CHUNK if rows.phase is Phase.VERIFY else last // CHUNK * CHUNK)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of a sequence, fp32, zero where a token is not computed; each [tokens, ...] as in its ring.

    added   what each adds to the state
    decays  their logarithms
    """

    keys: Tensor
    added: Tensor
    decays: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.keys, self.added, self.decays


class PartRow(ABC):
    """The tokens of one sequence in a call by parts of `size` tokens, and what its slot has of those before them.

    size  a divisor of 64; parts begin at its multiples
    """

    def __init__(
        self, sizes: RecurrenceSizes, state: RecurrenceState, size: int, first: int, folded: int, source: int
    ) -> None:
        self._sizes, self._state, self._size = sizes, state, size
        self._first, self._folded, self._source = first, folded, source
        begun = state.states[source].float()
        self._states = {folded: begun if first else torch.zeros_like(begun)}  # by border
        self._parts: dict[int, Part] = {}  # by the position of their first token
        for begin in range(folded, first, size):
            positions = range(begin, min(first, begin + size))
            for mine, ring in zip(self._part(begin).tensors, self._rings, strict=True):
                mine[: len(positions)] = ring[source, [it % ring.shape[1] for it in positions]].float()
        self._inputs_first = max(0, first - sizes.width + 1)
        places = [it % state.inputs.shape[1] for it in range(self._inputs_first, first)]
        self._inputs = state.inputs[source, places].float()

    @abstractmethod
    def computed(
        self, part: Part, begin: int, new: range, gates: tuple[Tensor, ...], state: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Add new tokens to a part, and return results [size, value_heads, value_dim] fp32; others mean nothing.

        new    positions
        gates  of the new tokens; state [value_heads, key_dim, value_dim] fp32: before the part's first token
        """

    @abstractmethod
    def behind(self, part: Part, state: Tensor) -> Tensor:
        """Return the state behind a part whose tokens are all computed, of the state before it."""

    def append(self, given: Tensor, gates: tuple[Tensor, ...], out: Tensor) -> None:
        first, last = self._first, self._first + given.shape[0]
        self._inputs = torch.cat([self._inputs, given.float()])
        state = self._states[self._folded]
        for begin in range(self._folded, last, self._size):
            end, part = begin + self._size, self._part(begin)
            new = range(max(first, begin), min(last, end))
            if len(new) > 0:
                own = slice(new.start - first, new.stop - first)
                found = self.computed(part, begin, new, tuple(it[own] for it in gates), state, given.dtype)
                out[own] = found[new.start - begin : new.stop - begin].to(out.dtype)
            if last >= end:
                state = self.behind(part, state)
                if end % CHUNK == 0:
                    state = state.to(self._state.states.dtype).float()
                    self._states[end] = state

    def store(self, slot: int, num_tokens: int, border: int) -> None:
        state, is_own = self._state, slot == self._source
        if not (is_own and border == self._folded and self._first):
            state.states[slot] = self._states[border].to(state.states.dtype)
        for begin in range(border, num_tokens, self._size):
            positions = range(max(begin, self._first) if is_own else begin, min(num_tokens, begin + self._size))
            for ring, tokens in zip(self._rings, self._parts[begin].tensors, strict=True):
                write(ring[slot], tokens, begin, positions)
        latest = range(max(self._inputs_first, num_tokens - state.inputs.shape[1]), num_tokens)
        write(state.inputs[slot], self._inputs, self._inputs_first, latest)

    def window(self, begin: int, stop: int) -> Tensor:
        """Return inputs [width - 1 + size, conv_dim] of a part and those before it; zero where none is given."""
        wide = self._sizes.width - 1
        window = self._inputs.new_zeros(wide + self._size, self._inputs.shape[1])
        lo = max(self._inputs_first, begin - wide)
        given = self._inputs[lo - self._inputs_first : stop - self._inputs_first]
        window[lo - begin + wide : stop - begin + wide] = given
        return window

    def by_value_head(self, heads: Tensor) -> Tensor:
        """[size, key_heads, key_dim] as [value_heads, size, key_dim]."""
        return heads.transpose(0, 1).repeat_interleave(self._sizes.group, dim=0).contiguous()

    @property
    def _rings(self) -> tuple[Tensor, Tensor, Tensor]:
        """[slots, places, ...]."""
        return self._state.keys, self._state.values, self._state.decays

    def _part(self, begin: int) -> Part:
        if begin not in self._parts:
            device = self._state.states.device
            shapes = (it.shape[2:] for it in self._rings)
            self._parts[begin] = Part(
                *(torch.zeros(self._size, *it, dtype=torch.float32, device=device) for it in shapes)
            )
        return self._parts[begin]


def write(ring: Tensor, tokens: Tensor, begin: int, positions: range) -> None:
    """Write the tokens at these positions, of those from position `begin` on, to their places in a ring."""
    if len(positions) > 0:
        places = [position % ring.shape[0] for position in positions]
        ring[places] = tokens[positions.start - begin : positions.stop - begin].to(ring.dtype)
