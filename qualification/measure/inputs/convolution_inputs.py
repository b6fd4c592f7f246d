"""Inputs on which wrong convolutions go wrong: closed gates, sums that cancel, short rows, borders of slots."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kernels.convolution.calls import ConvolutionWeights
from kernels.convolution.shape import ConvolutionShape
from kernels.system.device import torch_dtype
from kernels.vocabulary.shape import Phase
from qualification.measure.inputs.recurrence_inputs import NUM_DRAFTED, Segment, fitting_rows

_LONGEST = {"cpu": 70, "cuda": 1100}  # tokens of a sequence
_MOST_ROWS_CPU = 512  # tokens of a call; on a CPU buckets are tested up to here, or just inside if they start beyond


class Content(Enum):
    """Kinds of tokens that a sequence has."""

    PLAIN = "plain"
    CLOSED = "closed"  # each other result's gate is 0, and each third input's
    CANCELS = "cancels"  # equal inputs, whose taps add up to almost nothing
    OUTLIER = "outlier"  # one token is 100 times as large
    LARGE = "large"  # times 6
    TINY = "tiny"  # times 1/512: products of fp16 become subnormal


@dataclass(frozen=True, slots=True)
class TestedSequence:
    """One sequence, and the calls that compute its tokens; those before the first call are given by a state."""

    content: Content
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return max(it.stop for it in self.segments)


@dataclass(frozen=True, slots=True)
class ConvolutionCase:
    """Sequences that several calls compute, each a row of every call.

    sequences  that differ
    rows       which of them each row is
    projected  [D, T, 3 * channels]: of the sequences, zero behind their ends
    """

    name: str
    seed: int
    shape: ConvolutionShape
    sequences: tuple[TestedSequence, ...]
    rows: tuple[int, ...]
    weights: ConvolutionWeights
    projected: Tensor


def tested_rows(shape: ConvolutionShape, *, is_cpu: bool) -> int:
    """The most tokens of a call: the bucket's upper edge (2x the lower without an end), on a CPU less."""
    most = 2 * shape.rows.lo if shape.rows.hi is None else shape.rows.hi
    return min(most, max(_MOST_ROWS_CPU, shape.rows.lo + 1)) if is_cpu else most


def convolution_cases(shape: ConvolutionShape, device: torch.device, *, seed: int) -> Iterator[ConvolutionCase]:
    """Every hostile input, with numbers of tokens in the shape's bucket. Each is at least two calls.

    fewest   as few tokens as the bucket has
    short    lengths of 1 to 4, from the first token on and behind as few
    borders  lengths of a tile, one less and one more; snapshots behind the first tokens of a call, and amid it
    hostile  one sequence of each content
    unequal  one long sequence and many of one token
    most     as many tokens as are tested
    """
    least, most = shape.rows.lo + 1, tested_rows(shape, is_cpu=device.type == "cpu")
    longest = min(_LONGEST[device.type], most)
    if shape.phase is Phase.EXTEND:
        lists = _prompt_lists(longest, least, most)
    else:
        lists = _decode_lists(shape.phase)
    for name, sequences in lists.items():
        sizes = [it.segments[0].stop - it.segments[0].first for it in sequences]
        rows = fitting_rows(sizes, least, least if name == "fewest" else most, is_full=name == "most")
        if rows:
            used = sorted(set(rows))
            of_rows = tuple(used.index(it) for it in rows)
            yield _case(name, shape, tuple(sequences[it] for it in used), of_rows, device, seed=seed)


def _prompt(
    length: int, before: int = 0, content: Content = Content.PLAIN, snapshot: int | None = None
) -> TestedSequence:
    stop = before + length
    again = stop if snapshot is None else snapshot
    return TestedSequence(content, (Segment(before, stop, stop, snapshot), Segment(again, stop + 2, stop + 2)))


def _prompt_lists(longest: int, least: int, most: int) -> dict[str, list[TestedSequence]]:
    """The last sequence of each list comes again where a call has too few tokens for its bucket."""
    long, more = max(1, min(longest, most // 2)), min(longest, least)
    short = [_prompt(length, before) for before in (0, 1, 2, 5) for length in (1, 2, 3, 4)]
    return {
        "fewest": [_prompt(more)],
        "short": [*short[: 4 if most <= 16 else None], _prompt(more)],
        "borders": [
            _prompt(16, 5, snapshot=6), _prompt(15, 7), _prompt(17, snapshot=1), _prompt(9, 64, snapshot=66),
            _prompt(12, 31, snapshot=43), _prompt(more),
        ],
        "hostile": [*(_prompt(5 if most > len(Content) * 5 else 1, 4, it) for it in Content), _prompt(more, 4)],
        "unequal": [_prompt(long, 3, snapshot=3 + long // 2 or None), *[_prompt(1)] * 7, _prompt(more)],
        "most": [_prompt(longest), _prompt(min(20, most), 5), _prompt(1, 30), _prompt(3)],
    }  # fmt: skip


def _decode_lists(phase: Phase) -> dict[str, list[TestedSequence]]:
    def decoded(before: int, content: Content = Content.PLAIN) -> TestedSequence:
        if phase is Phase.DECODE:
            return TestedSequence(content, tuple(Segment(it, it + 1, it + 1) for it in range(before, before + 3)))
        kept = before + 2
        again = Segment(kept, kept + 1 + NUM_DRAFTED, kept + 1 + NUM_DRAFTED)
        return TestedSequence(content, (Segment(before, before + 1 + NUM_DRAFTED, kept), again))

    return {
        "fewest": [decoded(6)],
        "short": [decoded(it) for it in (0, 1, 2, 3)],
        "borders": [decoded(it) for it in (4, 5, 6, 7, 8, 15, 16, 17)],
        "hostile": [decoded(9, it) for it in Content],
        "most": [decoded(it) for it in (15, 0, 12, 1, 5, 30, 7)],
    }


def _case(
    name: str,
    shape: ConvolutionShape,
    sequences: tuple[TestedSequence, ...],
    rows: tuple[int, ...],
    device: torch.device,
    *,
    seed: int,
) -> ConvolutionCase:
    generator = torch.Generator().manual_seed(seed + len(name) * 1009)
    weights = drawn_factors(shape, generator, device)
    longest = max(it.num_tokens for it in sequences)
    tokens = [drawn_projected(shape, it.content, it.num_tokens, generator, device) for it in sequences]
    projected = torch.stack([torch.cat([it, it.new_zeros(longest - len(it), it.shape[1])]) for it in tokens])
    return ConvolutionCase(name, seed, shape, sequences, rows, weights, projected)


def drawn_factors(shape: ConvolutionShape, generator: torch.Generator, device: torch.device) -> ConvolutionWeights:
    """Draw factors of which those of every fourth channel add up to almost nothing."""
    taps = 0.5 * torch.randn(shape.channels, shape.width, generator=generator)
    taps[::4, -1] = -taps[::4, :-1].sum(dim=1) + 2.0**-7
    bias = 0.5 * torch.randn(shape.channels, generator=generator)
    kind = torch_dtype(shape.dtype)
    return ConvolutionWeights(taps.to(device, kind), bias.to(device, kind) if shape.has_bias else None)


def drawn_projected(
    shape: ConvolutionShape, content: Content, num_tokens: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Return [T, 3 * channels]."""
    projected = torch.randn(num_tokens, 3 * shape.channels, generator=generator)
    input_gates, result_gates, values = projected.chunk(3, dim=1)
    if content is Content.CLOSED:
        result_gates[::2] = 0
        input_gates[::3] = 0
    if content is Content.CANCELS:
        input_gates[:], values[:] = input_gates[:1].clone(), values[:1].clone()
    if content is Content.OUTLIER:
        values[num_tokens // 2] *= 100
    if content is Content.LARGE:
        projected *= 6
    if content is Content.TINY:
        projected /= 512
    return projected.to(device, torch_dtype(shape.dtype))
