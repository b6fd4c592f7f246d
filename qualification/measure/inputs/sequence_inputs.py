"""Sequences that several calls compute, each a row of every call: inputs of operators that keep a state of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kernels.convolution.shape import ConvolutionShape
from kernels.recurrence.shape import RecurrenceShape
from kernels.vocabulary.shape import Phase

NUM_DRAFTED = 3  # tokens that a step of `VERIFY` takes back at most
_MOST_ROWS_CPU = 512  # tokens of a call; on a CPU buckets are tested up to here, or just inside if they start beyond

StateShape = RecurrenceShape | ConvolutionShape
Tokens = tuple[Tensor, ...]  # what a call reads of each token, each [T, ...]
Content = TypeVar("Content", bound=Enum)
Shape = TypeVar("Shape", bound=StateShape)
Weights = TypeVar("Weights")


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a sequence that one call computes: [first, stop), of which those from `kept` on are taken back.

    snapshot  the state behind so many tokens of the sequence is written to a slot, from which the next call begins
    """

    first: int
    stop: int
    kept: int
    snapshot: int | None = None

    @property
    def next_first(self) -> int:
        return self.kept if self.snapshot is None else self.snapshot


@dataclass(frozen=True, slots=True)
class TestedSequence(Generic[Content]):
    """One sequence, and the calls that compute its tokens; those before the first call are given by a state."""

    content: Content
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return max(it.stop for it in self.segments)


@dataclass(frozen=True, slots=True)
class SequenceCase(Generic[Shape, Content, Weights]):
    """Sequences that several calls compute, each a row of every call.

    sequences  that differ
    rows       which of them each row is
    tokens     each [D, T, ...]: of the sequences, zero behind their ends
    is_far     whether their slots lie past number 2**32 of the largest tensor of a state
    """

    name: str
    seed: int
    shape: Shape
    sequences: tuple[TestedSequence[Content], ...]
    rows: tuple[int, ...]
    weights: Weights
    tokens: Tokens
    is_far: bool = False


def tested_rows(shape: StateShape, *, is_cpu: bool) -> int:
    """The most tokens of a call: the bucket's upper edge (2x the lower without an end), on a CPU less."""
    most = 2 * shape.rows.lo if shape.rows.hi is None else shape.rows.hi
    return min(most, max(_MOST_ROWS_CPU, shape.rows.lo + 1)) if is_cpu else most


def prompt(content: Content, length: int, before: int = 0, snapshot: int | None = None) -> TestedSequence[Content]:
    """Return a sequence of which a call computes so many tokens behind others, and the next call two more."""
    stop = before + length
    again = stop if snapshot is None else snapshot
    return TestedSequence(content, (Segment(before, stop, stop, snapshot), Segment(again, stop + 2, stop + 2)))


def decoded(phase: Phase, before: int, content: Content) -> TestedSequence[Content]:
    """Return a sequence that is decoded behind so many tokens, or verified with some taken back in between."""
    if phase is Phase.DECODE:
        return TestedSequence(content, tuple(Segment(it, it + 1, it + 1) for it in range(before, before + 3)))
    kept = before + 2
    again = Segment(kept, kept + 1 + NUM_DRAFTED, kept + 1 + NUM_DRAFTED)
    return TestedSequence(content, (Segment(before, before + 1 + NUM_DRAFTED, kept), again))


def fitting_cases(
    lists: Mapping[str, Sequence[TestedSequence[Content]]], least: int, most: int
) -> Iterator[tuple[str, tuple[TestedSequence[Content], ...], tuple[int, ...]]]:
    """Yield name, sequences and rows of each case whose first call can have from `least` to `most` tokens."""
    for name, sequences in lists.items():
        sizes = [it.segments[0].stop - it.segments[0].first for it in sequences]
        rows = _fitting_rows(sizes, least, least if name == "fewest" else most, is_full=name == "most")
        if rows:
            used = sorted(set(rows))
            yield name, tuple(sequences[it] for it in used), tuple(used.index(it) for it in rows)


def _fitting_rows(sizes: Sequence[int], least: int, most: int, *, is_full: bool) -> tuple[int, ...]:
    """Return which sequence each row is: all that a call of so many tokens has room for, then the last one again.

    sizes    tokens of each sequence
    is_full  whether all come again until there is no room. Empty where too few fit.
    """
    rows: list[int] = []
    total = 0

    def has_added(index: int) -> bool:
        nonlocal total
        if total + sizes[index] > max(least, most):
            return False
        rows.append(index)
        total += sizes[index]
        return True

    for index in range(len(sizes)):
        has_added(index)
    again = range(len(sizes)) if is_full else (len(sizes) - 1, 0)
    while (is_full or total < least) and sum([has_added(index) for index in again]):
        pass
    return tuple(rows) if total >= least else ()


def generator_of(name: str, seed: int) -> torch.Generator:
    """Return what a case of this name is drawn from."""
    return torch.Generator().manual_seed(seed + len(name) * 1009)


def stacked(tokens: Sequence[Tokens]) -> Tokens:
    """Return the tokens of sequences, each [T, n], as [D, T, n], zero behind their ends."""
    longest = max(len(it[0]) for it in tokens)
    return tuple(
        torch.stack([torch.cat([it, it.new_zeros(longest - len(it), it.shape[1])]) for it in each])
        for each in zip(*tokens, strict=True)
    )
