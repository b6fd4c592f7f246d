"""The check of a path of recurrences that claims an order: a sequence whole, cut anywhere, decoded, beside others."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import torch

from kernels.recurrence.calls import RunRecurrence
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import CHUNK
from kernels.vocabulary.shape import Phase
from qualification.evidence.evidence import Invariance
from qualification.measure.inputs.recurrence_inputs import NUM_DRAFTED, Content, drawn_tokens, drawn_weights
from qualification.measure.inputs.recurrence_slots import Part, Slots
from qualification.measure.orders.first_bits import FirstBits

_SEED = 109
_POOL = (Content.PLAIN, Content.KEEPS, Content.FORGETS)
_LENGTH = {"cpu": 72, "cuda": 136}  # tokens of each sequence of the pool: one chunk or two, and a part of the next
_TRIED_BY = "cpu"  # whose sizes show each fault: wrong paths are PyTorch's, of some 150 small launches a row
_CUTS = ((1, 62, 2), (64,), (63, 1, 1), (17, 5, 31, 3), (130, 1))  # tokens of calls, in turn
_NEIGHBOURS = (1, 3, 16, 65)  # tokens of neighbours, in turn
_MOST = {"cpu": 5, "cuda": 64}  # neighbours


@dataclass(frozen=True, slots=True)
class _Step:
    """Tokens of each sequence that one call computes, and how many neighbours are beside it.

    taken_back  tokens behind them that are computed as well, and are others than the sequence's
    phase       None: that of the shape
    """

    num_tokens: int
    num_neighbours: int
    taken_back: int = 0
    phase: Phase | None = None


def check_recurrence_order(
    run: RunRecurrence,
    shape: RecurrenceShape,
    device: torch.device,
    *,
    seed: int,
    order: str,
    ends_early: bool = False,
    is_trial: bool = False,
) -> Invariance:
    """Return what was seen of a path. Errors of a call are not caught. `is_trial`: of one that the check is tried on.

    The sequences of the pool are the same for all shapes of a class, and so are the digests. Each is computed several
    times from its first token on, by calls of the shape's phase.
    """
    sizes = _TRIED_BY if is_trial else device.type
    length, most = _LENGTH[sizes], _MOST[sizes]
    generator = torch.Generator().manual_seed(seed + _SEED)
    weights = drawn_weights(shape, generator, device)
    pool = [drawn_tokens(shape, content, length, weights, generator) for content in _POOL]
    others = [drawn_tokens(shape, content, max(_NEIGHBOURS), weights, generator) for content in Content]
    others.append(tuple(torch.full_like(it, torch.nan) for it in others[0]))  # type: ignore[arg-type]
    bits = FirstBits(ends_early=ends_early)
    for name, steps in _ways(shape, length, most):
        slots = Slots(shape, weights, len(pool) + most, NUM_DRAFTED, device)
        first, folded, turn = 0, 0, 0
        for step in steps:
            if bits.is_ended:
                break
            stop = min(first + step.num_tokens + step.taken_back, length)
            kept = min(first + step.num_tokens, stop)
            parts = []
            for slot, tokens in enumerate(pool):
                own = [it[first:stop].clone() for it in tokens]
                for each in own:
                    each[kept - first :] = 0.5 - each[kept - first :]
                source = slot if first else slots.zero
                parts.append(Part(own[0], own[1], own[2], first, source, slot, folded))
            for index in range(step.num_neighbours):
                turn += 1
                size = 1 if shape.phase is Phase.DECODE else _NEIGHBOURS[turn % len(_NEIGHBOURS)]
                tokens = others[turn % len(others)]
                part = Part(tokens[0][:size], tokens[1][:size], tokens[2][:size], 0, slots.zero, len(pool) + index)
                parts.insert((turn * 7) % (len(parts) + 1), part)
            places = {id(part): place for place, part in enumerate(parts)}
            found = slots.call(run, parts, phase=step.phase)
            mine = [part for part in parts if part.target < len(pool)]
            for part in mine:
                rows = torch.arange(first, kept, device=device)
                where = f"{name}, {len(parts)} sequences, from token {first} on"
                bits.meet(_POOL[part.target].value, length, rows, found[places[id(part)]][: kept - first], where)
            folded = (first if (step.phase or shape.phase) is Phase.VERIFY else kept) // CHUNK * CHUNK
            first = kept
    every = torch.arange(length, device=device)
    return bits.result(order, {content.value: every for content in _POOL})


def _ways(shape: RecurrenceShape, length: int, most: int) -> Iterator[tuple[str, list[_Step]]]:
    """Yield ways to compute the sequences of the pool: names, and steps."""
    if shape.phase is Phase.EXTEND:
        yield "whole", [_Step(length, 0)]
        yield "whole", [_Step(length, most)]
        for cuts in _CUTS:
            yield f"calls of {cuts} tokens", _cut(cuts, length, most)
        return
    if shape.phase is Phase.DECODE:
        for turn in range(2):
            yield "token by token", [_Step(1, (place * 3 + turn) % (most + 1) * turn) for place in range(length)]
        return
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
