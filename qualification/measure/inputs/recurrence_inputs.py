"""Inputs on which wrong recurrences go wrong: gates that keep or forget all, equal keys, borders of chunks, slots."""

from collections.abc import Iterator
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from kernels.recurrence.calls import RecurrenceWeights
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from kernels.recurrence.fixed_decay.weights import FixedDecayWeights
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import CHUNK
from kernels.recurrence.state_space.weights import StateSpaceWeights
from kernels.system.device import torch_dtype
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.shape import Phase
from qualification.measure.inputs.sequence_inputs import (
    SequenceCase,
    TestedSequence,
    decoded,
    fitting_cases,
    generator_of,
    prompt,
    stacked,
    tested_rows,
)

_LONGEST = {"cpu": 130, "cuda": 330}  # tokens of a sequence: of each the reference takes some 120 small launches
_OPEN = 60.0  # of a and b: gates are open or closed in every dtype
_SLOW = 1 / 512  # decay's logarithm of a state that must change by less than half a step of bf16
_FAST = 80.0  # decay's logarithm of a channel: 16 tokens of it are e^-1280, and the inverse is no number of fp32
_WRITTEN = 3  # tokens that write, of sequences whose others do not
_STEPS = (2.0**-10, 96.0)  # that those of a state space are held between


class Content(Enum):
    """Kinds of tokens that a sequence has; a state space has steps in place of beta, and no norms.

    Lightning attention has no gates: its heads keep and forget as their slopes say, whatever the content.
    """

    PLAIN = "plain"
    KEEPS = "keeps"  # no decay
    FORGETS = "forgets"  # each seventh token decays the state to nothing, the others keep it
    CLOSED = "closed"  # beta is 0 behind the first tokens
    OPEN = "open"  # beta is 1
    EQUAL_KEYS = "equal keys"  # beta is 1 and nothing decays: each token takes away what the one before it wrote
    SLOW = "slow"  # beta is 0 behind the first tokens, and the state decays by 1/512 a token
    LARGE = "large"  # times 30; of a state space x alone, of lightning attention values
    TINY = "tiny"  # queries and keys times 1/4096: the epsilon of the norms shows
    UNLIKE = "unlike"  # of channels each second one decays by e^-80 a token, the others keep; else as PLAIN


class RecurrenceCase(SequenceCase[RecurrenceShape, Content, RecurrenceWeights]):
    """Case of a recurrence, whose tokens are qkv [D, T, conv_dim], a and b [D, T, value_heads].

    Of channels a is [D, T, value_heads * key_dim].
    """

    __slots__ = ()

    @property
    def borders(self) -> Tensor:
        """[D]: tokens that the state of each sequence is folded up to behind its last call."""
        last = [it.segments[-1] for it in self.sequences]
        of_state = [it.first if self.shape.phase is Phase.VERIFY else it.stop for it in last]
        return torch.tensor(of_state, device=self.tokens[0].device) // CHUNK * CHUNK


def recurrence_cases(shape: RecurrenceShape, device: torch.device, *, seed: int) -> Iterator[RecurrenceCase]:
    """Every hostile input, with numbers of tokens in the shape's bucket. Each is at least two calls.

    fewest   as few tokens as the bucket has
    short    lengths of 1 to 4, from the first token on and about a border; a snapshot behind the first of more tokens
             than inputs are kept
    borders  lengths of a chunk, one less and one more, and of two; snapshots before, on and behind a border
    hostile  one sequence of each content, across a border
    unequal  one long sequence and many of one token
    most     as many tokens as are tested
    """
    least, most = shape.rows.lo + 1, tested_rows(shape, is_cpu=device.type == "cpu")
    longest = min(_LONGEST[device.type], most)
    lists = _prompt_lists(longest, least, most) if shape.phase is Phase.EXTEND else _decode_lists(shape.phase)
    for name, sequences, rows in fitting_cases(lists, least, most):
        generator = generator_of(name, seed)
        weights = drawn_weights(shape, generator, device)
        tokens = [drawn_tokens(shape, it.content, it.num_tokens, weights, generator) for it in sequences]
        yield RecurrenceCase(name, seed, shape, sequences, rows, weights, stacked(tokens))


def _prompt_lists(longest: int, least: int, most: int) -> dict[str, list[TestedSequence[Content]]]:
    """The last sequence of each list comes again where a call has too few tokens for its bucket."""
    plain = partial(prompt, Content.PLAIN)
    long = max(1, min(longest, most // 2))
    more = min(longest, least)
    short = [plain(length) for length in (1, 2, 3, 4)]
    return {
        "fewest": [plain(more)],
        "short": [
            *short, plain(2, 62), plain(20, 63, snapshot=64), plain(2, 63), plain(1, 63), plain(1, 64), plain(more),
        ],
        "borders": [
            plain(65, snapshot=64), plain(63), plain(64, snapshot=63), plain(127), plain(129, snapshot=65),
            plain(more),
        ],
        "hostile": [*(prompt(it, 6 if most > len(Content) * 6 else 1, 60) for it in Content), plain(more, 60)],
        "unequal": [prompt(Content.KEEPS, long, snapshot=long // 2 or None), *[plain(1)] * 7, plain(more)],
        "most": [plain(longest), plain(min(70, most), 5), plain(1, 30), plain(3)],
    }  # fmt: skip


def _decode_lists(phase: Phase) -> dict[str, list[TestedSequence[Content]]]:
    plain = partial(decoded, phase, content=Content.PLAIN)
    return {
        "fewest": [plain(62)],
        "short": [plain(it) for it in (0, 1, 2, 3, 61)],
        "borders": [plain(it) for it in (61, 62, 63, 64, 65, 127, 128)],
        "hostile": [decoded(phase, 62, it) for it in Content],
        "most": [plain(it) for it in (63, 0, 60, 17, 64, 100, 33)],
    }


def drawn_weights(shape: RecurrenceShape, generator: torch.Generator, device: torch.device) -> RecurrenceWeights:
    sizes, heads = shape.sizes, shape.num_value_heads
    conv = 0.5 * torch.randn(sizes.conv_dim, sizes.width, generator=generator)
    a_log, dt_bias = torch.randn(heads, generator=generator), 2 * torch.randn(_decays(shape), generator=generator) - 2
    conv, a_log, dt_bias = conv.to(device, torch_dtype(shape.dtype)), a_log.to(device), dt_bias.to(device)
    if shape.form is RecurrenceForm.FIXED_DECAY:
        slopes = a_log.exp()
        slopes[0] = _SLOW
        slopes[1::3] = _FAST
        return FixedDecayWeights.of(slopes.log(), sizes.conv_dim)
    if shape.form is RecurrenceForm.CHANNEL_DELTA:
        return ChannelDeltaWeights(conv, a_log, dt_bias)
    if shape.form is RecurrenceForm.GATED_DELTA:
        return RecurrenceWeights(conv, a_log, dt_bias)
    bias = 0.5 * torch.randn(sizes.conv_dim, generator=generator)
    skip = torch.randn(heads, generator=generator).to(device)
    return StateSpaceWeights(conv, a_log, dt_bias, bias.to(device, conv.dtype), skip, *_STEPS)


def _decays(shape: RecurrenceShape) -> int:
    """Return the decays of a token: of each value head, or of each channel of each."""
    return shape.num_value_heads * (shape.key_dim if shape.form is RecurrenceForm.CHANNEL_DELTA else 1)


def drawn_tokens(
    shape: RecurrenceShape, content: Content, num_tokens: int, weights: RecurrenceWeights, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return qkv [T, conv_dim], a [T, value_heads], of channels [T, value_heads * key_dim], and b [T, value_heads]."""
    sizes, heads = shape.sizes, shape.num_value_heads
    qkv = torch.randn(num_tokens, sizes.conv_dim, generator=generator)
    a, b = (torch.randn(num_tokens, columns, generator=generator) for columns in (_decays(shape), heads))
    # Of a state space and of lightning attention results are products of queries, keys and values: one is made large.
    has_values = shape.form in (RecurrenceForm.STATE_SPACE, RecurrenceForm.FIXED_DECAY)
    factors = weights.a_log.exp().repeat_interleave(_decays(shape) // heads)
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
        a[:] = torch.log(torch.expm1(_SLOW / factors)).cpu() - weights.dt_bias.cpu()
        if shape.form is RecurrenceForm.STATE_SPACE:  # whose first tokens write by large steps
            a[:_WRITTEN] = 3 - weights.dt_bias.cpu()
        if has_values:
            qkv[_WRITTEN:, 2 * sizes.num_key_heads * sizes.key_dim :] = 0
    if content is Content.LARGE:
        qkv[:, 2 * sizes.num_key_heads * sizes.key_dim * has_values :] *= 30
    if content is Content.TINY:
        qkv[:, : 2 * sizes.num_key_heads * sizes.key_dim] /= 4096
    if content is Content.UNLIKE and shape.form is RecurrenceForm.CHANNEL_DELTA:
        a[:, 1::2], a[:, ::2] = (_FAST / factors).cpu()[1::2], -_OPEN
    kind, device = torch_dtype(shape.dtype), weights.conv.device
    return qkv.to(device, kind), a.to(device, kind), b.to(device, kind)
