"""Inputs on which wrong recurrences go wrong: gates that keep or forget all, equal keys, borders of chunks, slots."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kernels.recurrence.calls import RecurrenceWeights
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import CHUNK
from kernels.recurrence.state_space.weights import StateSpaceWeights
from kernels.system.device import torch_dtype
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.shape import Phase

NUM_DRAFTED = 3  # tokens that a step of `VERIFY` takes back at most
_LONGEST = {"cpu": 130, "cuda": 330}  # tokens of a sequence: of each the reference takes some 120 small launches
_MOST_ROWS_CPU = 512  # tokens of a call; on a CPU buckets are tested up to here, or just inside if they start beyond
_OPEN = 60.0  # of a and b: gates are open or closed in every dtype
_SLOW = 1 / 512  # decay's logarithm of a state that must change by less than half a step of bf16
_WRITTEN = 3  # tokens that write, of sequences whose others do not
_STEPS = (2.0**-10, 96.0)  # that those of a state space are held between


class Content(Enum):
    """Kinds of tokens that a sequence has; a state space has steps in place of beta, and no norms."""

    PLAIN = "plain"
    KEEPS = "keeps"  # no decay
    FORGETS = "forgets"  # each seventh token decays the state to nothing, the others keep it
    CLOSED = "closed"  # beta is 0 behind the first tokens
    OPEN = "open"  # beta is 1
    EQUAL_KEYS = "equal keys"  # beta is 1 and nothing decays: each token takes away what the one before it wrote
    SLOW = "slow"  # beta is 0 behind the first tokens, and the state decays by 1/512 a token
    LARGE = "large"  # times 30; of a state space x alone
    TINY = "tiny"  # queries and keys times 1/4096: the epsilon of the norms shows


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
class TestedSequence:
    """One sequence, and the calls that compute its tokens; those before the first call are given by a state."""

    content: Content
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return max(it.stop for it in self.segments)


@dataclass(frozen=True, slots=True)
class RecurrenceCase:
    """Sequences that several calls compute, each a row of every call.

    sequences  that differ
    rows       which of them each row is
    qkv [D, T, conv_dim], a, b [D, T, value_heads]: of the sequences, zero behind their ends
    """

    name: str
    seed: int
    shape: RecurrenceShape
    sequences: tuple[TestedSequence, ...]
    rows: tuple[int, ...]
    weights: RecurrenceWeights
    qkv: Tensor
    a: Tensor
    b: Tensor

    @property
    def borders(self) -> Tensor:
        """[D]: tokens that the state of each sequence is folded up to behind its last call."""
        last = [it.segments[-1] for it in self.sequences]
        of_state = [it.first if self.shape.phase is Phase.VERIFY else it.stop for it in last]
        return torch.tensor(of_state, device=self.qkv.device) // CHUNK * CHUNK


def tested_rows(shape: RecurrenceShape, *, is_cpu: bool) -> int:
    """The most tokens of a call: the bucket's upper edge (2x the lower without an end), on a CPU less."""
    most = 2 * shape.rows.lo if shape.rows.hi is None else shape.rows.hi
    return min(most, max(_MOST_ROWS_CPU, shape.rows.lo + 1)) if is_cpu else most


def recurrence_cases(shape: RecurrenceShape, device: torch.device, *, seed: int) -> Iterator[RecurrenceCase]:
    """Every hostile input, with numbers of tokens in the shape's bucket. Each is at least two calls.

    fewest   as few tokens as the bucket has
    short    lengths of 1 to 4, from the first token on and about a border
    borders  lengths of a chunk, one less and one more, and of two; snapshots before, on and behind a border
    hostile  one sequence of each content, across a border
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
    long = max(1, min(longest, most // 2))
    more = min(longest, least)
    short = [_prompt(length) for length in (1, 2, 3, 4)]
    return {
        "fewest": [_prompt(more)],
        "short": [*short, *(_prompt(*it) for it in ((2, 62), (2, 63), (1, 63), (1, 64))), _prompt(more)],
        "borders": [
            _prompt(65, snapshot=64), _prompt(63), _prompt(64, snapshot=63), _prompt(127), _prompt(129, snapshot=65),
            _prompt(more),
        ],
        "hostile": [*(_prompt(6 if most > len(Content) * 6 else 1, 60, it) for it in Content), _prompt(more, 60)],
        "unequal": [_prompt(long, content=Content.KEEPS, snapshot=long // 2 or None), *[_prompt(1)] * 7, _prompt(more)],
        "most": [_prompt(longest), _prompt(min(70, most), 5), _prompt(1, 30), _prompt(3)],
    }  # fmt: skip


def _decode_lists(phase: Phase) -> dict[str, list[TestedSequence]]:
    def decoded(before: int, content: Content = Content.PLAIN) -> TestedSequence:
        if phase is Phase.DECODE:
            return TestedSequence(content, tuple(Segment(it, it + 1, it + 1) for it in range(before, before + 3)))
        kept = before + 2
        again = Segment(kept, kept + 1 + NUM_DRAFTED, kept + 1 + NUM_DRAFTED)
        return TestedSequence(content, (Segment(before, before + 1 + NUM_DRAFTED, kept), again))

    return {
        "fewest": [decoded(62)],
        "short": [decoded(it) for it in (0, 1, 2, 3, 61)],
        "borders": [decoded(it) for it in (61, 62, 63, 64, 65, 127, 128)],
        "hostile": [decoded(62, it) for it in Content],
        "most": [decoded(it) for it in (63, 0, 60, 17, 64, 100, 33)],
    }


def fitting_rows(sizes: Sequence[int], least: int, most: int, *, is_full: bool) -> tuple[int, ...]:
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


def _case(
    name: str,
    shape: RecurrenceShape,
    sequences: tuple[TestedSequence, ...],
    rows: tuple[int, ...],
    device: torch.device,
    *,
    seed: int,
) -> RecurrenceCase:
    generator = torch.Generator().manual_seed(seed + len(name) * 1009)
    weights = drawn_weights(shape, generator, device)
    longest = max(it.num_tokens for it in sequences)
    tokens = [drawn_tokens(shape, it.content, it.num_tokens, weights, generator) for it in sequences]
    qkv, a, b = (
        torch.stack([torch.cat([it, it.new_zeros(longest - len(it), it.shape[1])]) for it in each])
        for each in zip(*tokens, strict=True)
    )
    return RecurrenceCase(name, seed, shape, sequences, rows, weights, qkv, a, b)


def drawn_weights(shape: RecurrenceShape, generator: torch.Generator, device: torch.device) -> RecurrenceWeights:
    sizes, heads = shape.sizes, shape.num_value_heads
    conv = 0.5 * torch.randn(sizes.conv_dim, sizes.width, generator=generator)
    a_log, dt_bias = torch.randn(heads, generator=generator), 2 * torch.randn(heads, generator=generator) - 2
    conv, a_log, dt_bias = conv.to(device, torch_dtype(shape.dtype)), a_log.to(device), dt_bias.to(device)
    if shape.form is RecurrenceForm.GATED_DELTA:
        return RecurrenceWeights(conv, a_log, dt_bias)
    bias = 0.5 * torch.randn(sizes.conv_dim, generator=generator)
    skip = torch.randn(heads, generator=generator).to(device)
    return StateSpaceWeights(conv, a_log, dt_bias, bias.to(device, conv.dtype), skip, *_STEPS)


def drawn_tokens(
    shape: RecurrenceShape, content: Content, num_tokens: int, weights: RecurrenceWeights, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return qkv [T, conv_dim], a and b [T, value_heads]."""
    sizes, heads = shape.sizes, shape.num_value_heads
    qkv = torch.randn(num_tokens, sizes.conv_dim, generator=generator)
    a, b = torch.randn(num_tokens, heads, generator=generator), torch.randn(num_tokens, heads, generator=generator)
    if content in (Content.KEEPS, Content.EQUAL_KEYS, Content.FORGETS):
        a.fill_(-_OPEN)
    if content in (Content.OPEN, Content.EQUAL_KEYS):
        b.fill_(_OPEN)
    if content in (Content.CLOSED, Content.SLOW):
        b[_WRITTEN:] = -_OPEN
    if content is Content.FORGETS:
        a[3::7] = 50 * _OPEN
    if content is Content.EQUAL_KEYS:
        size = sizes.num_key_heads * sizes.key_dim
        qkv[:, size : 2 * size] = qkv[:1, size : 2 * size]
    if content is Content.SLOW:
        a[:] = torch.log(torch.expm1(_SLOW / weights.a_log.exp())).cpu() - weights.dt_bias.cpu()
        if shape.form is RecurrenceForm.STATE_SPACE:  # whose first tokens write by large steps
            a[:_WRITTEN] = 3 - weights.dt_bias.cpu()
            qkv[_WRITTEN:, 2 * sizes.num_key_heads * sizes.key_dim :] = 0
    if content is Content.LARGE:
        is_space = shape.form is RecurrenceForm.STATE_SPACE  # in whose results B, C and x are factors
        qkv[:, 2 * sizes.num_key_heads * sizes.key_dim * is_space :] *= 30
    if content is Content.TINY:
        qkv[:, : 2 * sizes.num_key_heads * sizes.key_dim] /= 4096
    kind, device = torch_dtype(shape.dtype), weights.conv.device
    return qkv.to(device, kind), a.to(device, kind), b.to(device, kind)
