"""The check of paths with a state of each sequence that claim an order: whole, cut anywhere, decoded, beside others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from kernels.recurrence.sizes import CHUNK
from kernels.vocabulary.shape import Phase
from qualification.evidence.evidence import Invariance
from qualification.measure.checks.sequence_checks import replaced_behind
from qualification.measure.inputs.sequence_inputs import NUM_DRAFTED, Tokens
from qualification.measure.inputs.state_slots import Part, Run, Slots
from qualification.measure.orders.first_bits import FirstBits

MOST_NEIGHBOURS = {"cpu": 5, "cuda": 64}


@dataclass(frozen=True, slots=True)
class Pool:
    """Inputs that an operator is checked on.

    sequences   by their names, of as many tokens each
    others      of neighbours, to which those of NaN are added
    neighbours  tokens of neighbours, in turn
    most        neighbours at once
    cuts        tokens of calls, in turn
    """

    sequences: Mapping[str, Tokens]
    others: Sequence[Tokens]
    neighbours: Sequence[int]
    most: int
    cuts: Sequence[tuple[int, ...]]

    @property
    def num_slots(self) -> int:
        return len(self.sequences) + self.most

    @property
    def length(self) -> int:
        return len(next(iter(self.sequences.values()))[0])


@dataclass(frozen=True, slots=True)
class _Step:
    """Tokens of each sequence that one call computes, and how many neighbours are beside it.

    taken_back  tokens behind them that are computed as well, and are others than the sequence's
    """

    num_tokens: int
    num_neighbours: int
    taken_back: int = 0


def check_sequences(
    run: Run, pool: Pool, phase: Phase, slots_of: Callable[[int], Slots[Any]], *, order: str, ends_early: bool
) -> Invariance:
    """Return what was seen of a path. Errors of a call are not caught.

    Each sequence is computed several times from its first token on, by calls of the phase.

    slots_of  slots for so many sequences
    """
    names, length = list(pool.sequences), pool.length
    nan = tuple(torch.full_like(it, torch.nan) for it in pool.others[0])
    others, bits = [*pool.others, nan], FirstBits(ends_early=ends_early)
    every = torch.arange(length, device=nan[0].device)
    for name, steps in _ways(pool, phase):
        slots, first, folded, turn = slots_of(pool.num_slots), 0, 0, 0
        for step in steps:
            if bits.is_ended:
                break
            stop = min(first + step.num_tokens + step.taken_back, length)
            kept = min(first + step.num_tokens, stop)
            parts = []
            for slot, tokens in enumerate(pool.sequences.values()):
                own = tuple(replaced_behind(it[first:stop], kept - first) for it in tokens)
                parts.append(Part(own, first, slot if first else slots.zero, slot, folded))
            for index in range(step.num_neighbours):
                turn += 1
                size = 1 if phase is Phase.DECODE else pool.neighbours[turn % len(pool.neighbours)]
                other = tuple(it[:size] for it in others[turn % len(others)])
                parts.insert((turn * 7) % (len(parts) + 1), Part(other, 0, slots.zero, len(names) + index))
            for part, found in zip(parts, slots.call(run, parts), strict=True):
                if part.target < len(names):
                    where = f"{name}, {len(parts)} sequences, from token {first} on"
                    bits.meet(names[part.target], length, every[first:kept], found[: kept - first], where)
            folded = (first if phase is Phase.VERIFY else kept) // CHUNK * CHUNK
            first = kept
    return bits.result(order, dict.fromkeys(names, every))


def _ways(pool: Pool, phase: Phase) -> Iterator[tuple[str, list[_Step]]]:
    """Yield ways to compute the sequences of the pool: names, and steps."""
    length, most = pool.length, pool.most
    if phase is Phase.EXTEND:
        yield "whole", [_Step(length, 0)]
        yield "whole", [_Step(length, most)]
        for cuts in pool.cuts:
            yield f"calls of {cuts} tokens", _cut(cuts, length, most)
    elif phase is Phase.DECODE:
        for turn in range(2):
            yield "token by token", [_Step(1, (place * 3 + turn) % (most + 1) * turn) for place in range(length)]
    else:
        for kept in (1, 2, 1 + NUM_DRAFTED):
            steps = -(-length // kept)
            taken = 1 + NUM_DRAFTED - kept
            yield f"{kept} tokens of {kept + taken}", [_Step(kept, place % 3, taken) for place in range(steps)]


def _cut(cuts: tuple[int, ...], length: int, most: int) -> list[_Step]:
    steps, left = [], length
    for turn, size in enumerate(cycle(cuts)):
        steps.append(_Step(min(size, left), turn % (most + 1)))
        left -= steps[-1].num_tokens
        if left == 0:
            return steps
    return steps
