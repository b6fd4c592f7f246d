"""`torch.recurrence.cpu`: the recurrence by PyTorch, row by row and chunk by chunk."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.eager_chunk import Chunk, prepare
from kernels.recurrence.eager_rows import compute_rows, write
from kernels.recurrence.sizes import BLOCK, CHUNK


def run_recurrence_eager(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
) -> None:
    """Fill `out`, and the states of the rows: see `RunRecurrence`."""
    compute_rows(partial(_Row, weights, state), qkv, (a, b), rows, out)


@dataclass(slots=True)
class _Tokens:
    """Tensors of consecutive tokens of a sequence, fp32, each [tokens, ...]; `begin`: the position of the first."""

    begin: int
    tensors: tuple[Tensor, ...]


class _Row:
    """The tokens of one sequence in a call, and what its slot has of those before them."""

    def __init__(
        self, weights: RecurrenceWeights, state: RecurrenceState, first: int, folded: int, source: int
    ) -> None:
        sizes = self._sizes = state.sizes(weights)
        self._weights, self._state, self._first, self._folded, self._source = weights, state, first, folded, source
        begin = state.states[source].float()
        self._states: dict[int, Tensor] = {folded: begin if first else torch.zeros_like(begin)}  # by border
        self._behind = _Tokens(folded, self._read((state.keys, state.values, state.decays), range(folded, first)))
        before = range(max(0, first - sizes.width + 1), first)
        self._inputs = _Tokens(before.start, self._read((state.inputs,), before))

    def append(self, qkv: Tensor, gates: tuple[Tensor, ...], out: Tensor) -> None:
        sizes, first, last, dtype = self._sizes, self._first, self._first + qkv.shape[0], qkv.dtype
        self._inputs.tensors = (torch.cat([self._inputs.tensors[0], qkv.float()]),)
        chunk = Chunk(self._states[self._folded], sizes, dtype)
        found = [chunk.keys, chunk.values, chunk.decays]
        for mine, known in zip(found, self._behind.tensors, strict=True):
            mine[: first - self._folded] = known[:CHUNK]
        done: list[tuple[Tensor, ...]] = []
        border = self._folded
        while True:
            for begin in range(border, border + CHUNK, BLOCK):
                new = range(max(first, begin) - begin, min(last, begin + BLOCK) - begin)
                if len(new) > 0:
                    given = self._block(begin, new, gates)
                    mixed = chunk.compute((begin - border) // BLOCK, new, prepare(*given, self._weights, sizes, dtype))
                    own = slice(begin + new.start - first, begin + new.stop - first)
                    out[own] = mixed[new.start : new.stop].to(dtype)
            done.append((chunk.keys, chunk.values, chunk.decays))
            if last < border + CHUNK:
                break
            border += CHUNK
            self._states[border] = chunk.folded().to(self._state.states.dtype).float()
            chunk = Chunk(self._states[border], sizes, dtype)
            num_known = max(
                0, first - border
            )  # computed before, behind a chunk that was left unfolded since drafts were in it
            for mine, known in zip((chunk.keys, chunk.values, chunk.decays), self._behind.tensors, strict=True):
                mine[:num_known] = known[CHUNK : CHUNK + num_known]
        self._behind = _Tokens(self._folded, tuple(torch.cat(each) for each in zip(*done, strict=True)))

    def store(self, slot: int, num_tokens: int, border: int) -> None:
        state, is_own = self._state, slot == self._source
        if not (is_own and border == self._folded and self._first):
            state.states[slot] = self._states[border].to(state.states.dtype)
        begin = max(border, self._first) if is_own else border
        for kept, mine in zip((state.keys, state.values, state.decays), self._behind.tensors, strict=True):
            write(kept[slot], mine, self._behind.begin, range(begin, num_tokens))
        latest = range(max(self._inputs.begin, num_tokens - state.inputs.shape[1]), num_tokens)
        write(state.inputs[slot], self._inputs.tensors[0], self._inputs.begin, latest)

    def _read(self, rings: tuple[Tensor, ...], positions: range) -> tuple[Tensor, ...]:
        return tuple(ring[self._source, [position % ring.shape[1] for position in positions]].float() for ring in rings)

    def _block(self, begin: int, new: range, given_gates: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, a and b of a block, as `prepare` takes them; zero where a token is not of this call or before it."""
        wide, (inputs,) = self._sizes.width - 1, self._inputs.tensors
        block = inputs.new_zeros(wide + BLOCK, inputs.shape[1])
        lo = max(self._inputs.begin, begin - wide)
        hi = begin + new.stop
        block[lo - begin + wide : hi - begin + wide] = inputs[lo - self._inputs.begin : hi - self._inputs.begin]
        gates = [inputs.new_zeros(BLOCK, self._sizes.num_value_heads) for _ in range(2)]
        own = slice(begin + new.start - self._first, begin + new.stop - self._first)
        for mine, given in zip(gates, given_gates, strict=True):
            mine[new.start : new.stop] = given[own]
        return block, gates[0], gates[1]
