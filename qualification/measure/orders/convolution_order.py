"""The check of a path of convolutions that claims an order: a sequence whole, cut anywhere, decoded, beside others."""

from collections.abc import Iterator
from itertools import cycle

import torch

from kernels.convolution.calls import RunConvolution
from kernels.convolution.shape import ConvolutionShape
from kernels.vocabulary.shape import Phase
from qualification.evidence.evidence import Invariance
from qualification.measure.inputs.convolution_inputs import Content, drawn_factors, drawn_projected
from qualification.measure.inputs.convolution_slots import ConvolutionPart, ConvolutionSlots
from qualification.measure.inputs.recurrence_inputs import NUM_DRAFTED
from qualification.measure.orders.first_bits import FirstBits

_SEED = 113
_POOL = (Content.PLAIN, Content.CANCELS, Content.OUTLIER)
_LENGTH = 41  # tokens of each sequence of the pool: tiles of 16, and a part of one
_CUTS = ((1, 14, 2), (16,), (15, 1, 1), (7, 5, 11, 3))  # tokens of calls, in turn
_NEIGHBOURS = (1, 3, 16, 17)  # tokens of neighbours, in turn
_MOST = {"cpu": 5, "cuda": 64}  # neighbours


def check_convolution_order(
    run: RunConvolution,
    shape: ConvolutionShape,
    device: torch.device,
    *,
    seed: int,
    order: str,
    ends_early: bool = False,
) -> Invariance:
    """Return what was seen of a path. Errors of a call are not caught.

    The sequences of the pool are the same for all shapes of a class, and so are the digests. Each is computed several
    times from its first token on, by calls of the shape's phase.
    """
    most, generator = _MOST[device.type], torch.Generator().manual_seed(seed + _SEED)
    weights = drawn_factors(shape, generator, device)
    pool = [drawn_projected(shape, content, _LENGTH, generator, device) for content in _POOL]
    others = [drawn_projected(shape, content, max(_NEIGHBOURS), generator, device) for content in Content]
    others.append(torch.full_like(others[0], torch.nan))
    bits, turn = FirstBits(ends_early=ends_early), 0
    for name, steps in _ways(shape.phase, most):
        slots, first = ConvolutionSlots(shape, weights, len(pool) + most, NUM_DRAFTED, device), 0
        for num_tokens, num_neighbours, taken_back in steps:
            if bits.is_ended:
                break
            stop = min(first + num_tokens + taken_back, _LENGTH)
            kept = min(first + num_tokens, stop)
            parts = []
            for slot, tokens in enumerate(pool):
                own = tokens[first:stop].clone()
                own[kept - first :] = 0.5 - own[kept - first :]
                parts.append(ConvolutionPart(own, first, slot if first else slots.zero, slot))
            for index in range(num_neighbours):
                turn += 1
                size = 1 if shape.phase is Phase.DECODE else _NEIGHBOURS[turn % len(_NEIGHBOURS)]
                other = others[turn % len(others)][:size]
                part = ConvolutionPart(other, 0, slots.zero, len(pool) + index)
                parts.insert((turn * 7) % (len(parts) + 1), part)
            for part, found in zip(parts, slots.call(run, parts), strict=True):
                if part.target < len(pool):
                    rows = torch.arange(first, kept, device=device)
                    where = f"{name}, {len(parts)} sequences, from token {first} on"
                    bits.meet(_POOL[part.target].value, _LENGTH, rows, found[: kept - first], where)
            first = kept
    every = torch.arange(_LENGTH, device=device)
    return bits.result(order, {content.value: every for content in _POOL})


def _ways(phase: Phase, most: int) -> Iterator[tuple[str, list[tuple[int, int, int]]]]:
    """Yield ways to compute the sequences of the pool: a name, and of each call (tokens, neighbours, taken back)."""
    if phase is Phase.EXTEND:
        yield "whole", [(_LENGTH, 0, 0)]
        yield "whole", [(_LENGTH, most, 0)]
        for cuts in _CUTS:
            yield f"calls of {cuts} tokens", _cut(cuts, most)
    elif phase is Phase.DECODE:
        for turn in range(2):
            yield "token by token", [(1, (place * 3 + turn) % (most + 1) * turn, 0) for place in range(_LENGTH)]
    else:
        for kept in (1, 2, 1 + NUM_DRAFTED):
            taken = 1 + NUM_DRAFTED - kept
            steps = [(kept, place % 3, taken) for place in range(-(-_LENGTH // kept))]
            yield f"{kept} tokens of {kept + taken}", steps


def _cut(cuts: tuple[int, ...], most: int) -> list[tuple[int, int, int]]:
    steps, left = [], _LENGTH
    for turn, size in enumerate(cycle(cuts)):
        steps.append((min(size, left), turn % (most + 1), 0))
        left -= steps[-1][0]
        if left == 0:
            return steps
    return steps
