"""Inputs on which wrong convolutions go wrong: closed gates, sums that cancel, short rows, borders of slots."""

from collections.abc import Iterator
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from kernels.convolution.calls import ConvolutionWeights
from kernels.convolution.shape import ConvolutionShape
from kernels.system.device import torch_dtype
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

_LONGEST = {"cpu": 70, "cuda": 1100}  # tokens of a sequence


class Content(Enum):
    """Kinds of tokens that a sequence has."""

    PLAIN = "plain"
    CLOSED = "closed"  # each other result's gate is 0, and each third input's
    CANCELS = "cancels"  # equal inputs, whose taps add up to almost nothing
    OUTLIER = "outlier"  # one token is 100 times as large
    LARGE = "large"  # times 6
    TINY = "tiny"  # times 1/512: products of fp16 become subnormal


class ConvolutionCase(SequenceCase[ConvolutionShape, Content, ConvolutionWeights]):
    """Case of a convolution, whose tokens are projected [D, T, 3 * channels]."""

    __slots__ = ()


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
    lists = _prompt_lists(longest, least, most) if shape.phase is Phase.EXTEND else _decode_lists(shape.phase)
    for name, sequences, rows in fitting_cases(lists, least, most):
        generator = generator_of(name, seed)
        weights = drawn_weights(shape, generator, device)
        tokens = [drawn_tokens(shape, it.content, it.num_tokens, weights, generator) for it in sequences]
        yield ConvolutionCase(name, seed, shape, sequences, rows, weights, stacked(tokens))


def _prompt_lists(longest: int, least: int, most: int) -> dict[str, list[TestedSequence[Content]]]:
    """The last sequence of each list comes again where a call has too few tokens for its bucket."""
    plain = partial(prompt, Content.PLAIN)
    long, more = max(1, min(longest, most // 2)), min(longest, least)
    short = [plain(length, before) for before in (0, 1, 2, 5) for length in (1, 2, 3, 4)]
    return {
        "fewest": [plain(more)],
        "short": [*short[: 4 if most <= 16 else None], plain(more)],
        "borders": [
            plain(16, 5, snapshot=6), plain(15, 7), plain(17, snapshot=1), plain(9, 64, snapshot=66),
            plain(12, 31, snapshot=43), plain(more),
        ],
        "hostile": [*(prompt(it, 5 if most > len(Content) * 5 else 1, 4) for it in Content), plain(more, 4)],
        "unequal": [plain(long, 3, snapshot=3 + long // 2), *[plain(1)] * 7, plain(more)],
        "most": [plain(longest), plain(min(20, most), 5), plain(1, 30), plain(3)],
    }  # fmt: skip


def _decode_lists(phase: Phase) -> dict[str, list[TestedSequence[Content]]]:
    plain = partial(decoded, phase, content=Content.PLAIN)
    return {
        "fewest": [plain(6)],
        "short": [plain(it) for it in (0, 1, 2, 3)],
        "borders": [plain(it) for it in (4, 5, 6, 7, 8, 15, 16, 17)],
        "hostile": [decoded(phase, 9, it) for it in Content],
        "most": [plain(it) for it in (15, 0, 12, 1, 5, 30, 7)],
    }


def drawn_weights(shape: ConvolutionShape, generator: torch.Generator, device: torch.device) -> ConvolutionWeights:
    """Draw factors of which those of every fourth channel add up to almost nothing."""
    taps = 0.5 * torch.randn(shape.channels, shape.width, generator=generator)
    taps[::4, -1] = -taps[::4, :-1].sum(dim=1) + 2.0**-7
    bias = 0.5 * torch.randn(shape.channels, generator=generator)
    kind = torch_dtype(shape.dtype)
    return ConvolutionWeights(taps.to(device, kind), bias.to(device, kind) if shape.has_bias else None)


def drawn_tokens(
    shape: ConvolutionShape, content: Content, num_tokens: int, weights: ConvolutionWeights, generator: torch.Generator
) -> tuple[Tensor]:
    """Return what is projected, [T, 3 * channels]."""
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
    return (projected.to(weights.taps.device, weights.taps.dtype),)
