"""Inputs on which wrong experts go wrong: extreme shares, edges of tiles, large products, NaN that must not be read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kernels.device import torch_dtype
from kernels.experts.kinds import MXFP4_BLOCK, ExpertActivation
from kernels.experts.weights import AnyExpertWeights, ExpertWeights, Mxfp4Weights
from kernels.shape import Dtype
from qualification.measure.inputs import GUARD_ROWS

_EDGE = 32  # rows of a tile in the interpreter; of 16, 64 and 128 on a GPU, which its multiples are edges of too


class WeightLayout(Enum):
    """How the weights of experts are stored."""

    PLAIN = "plain"  # in the model's dtype
    MXFP4 = "mxfp4"  # blocks of 32 numbers of 4 bits, with a scale each


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sizes and kinds of a mixture of experts that select a kernel."""

    dtype: Dtype
    layout: WeightLayout
    hidden: int
    width: int
    num_experts: int
    num_active: int
    activation: ExpertActivation
    has_bias: bool


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """The arguments of `experts_eager`. Rows of NaN stand before and behind `hidden`, in its storage."""

    name: str
    seed: int
    hidden: Tensor
    experts: Tensor
    weights: Tensor
    expert_weights: AnyExpertWeights
    activation: ExpertActivation


def experts_cases(mixture: Mixture, device: torch.device, *, seed: int) -> Iterator[ExpertsCase]:
    """Every hostile input, the smallest first.

    one token       alone
    even            random experts, rows on no tile's edge
    all to one      every token visits expert 1, so that its share is extreme
    none to most    all tokens visit the same experts; the weights of all others are NaN
    edges           experts with 0, 1, and a tile's rows less one, exactly, and one more
    large           hidden states times 30: activations saturate, clamps cut
    unequal         one expert's results are 20 times the others', weights of 0 and of 1 among the tokens'
    """
    random = torch.Generator().manual_seed(seed)
    num_experts, num_active = mixture.num_experts, mixture.num_active
    of_experts = expert_weights_of(mixture, random, device)

    def case(name: str, experts: Tensor, weights: AnyExpertWeights = of_experts, factor: float = 1.0) -> ExpertsCase:
        num_tokens = experts.shape[0]
        shares = torch.rand(num_tokens, num_active, generator=random) + 0.05
        shares = shares / shares.sum(1, keepdim=True)
        if name == "unequal":
            shares[::3, 0], shares[1::3, -1] = 0.0, 1.0
        hidden = _between_nan(torch.randn(num_tokens, mixture.hidden, generator=random) * factor, mixture.dtype, device)
        return ExpertsCase(name, seed, hidden, experts.int().to(device), shares.to(device), weights, mixture.activation)

    yield case("one token", _random_experts(1, mixture, random))
    yield case("even", _random_experts(2 * _EDGE + 5, mixture, random))
    same = _random_experts(_EDGE + 7, mixture, random)
    # Expert 1 takes the place of the first visit, and where it was visited already of none.
    same[:, 0] = torch.where((same == 1).any(1), same[:, 0], 1)
    yield case("all to one", same)
    few = _random_experts(1, mixture, random)
    yield case("none to most", few.expand(_EDGE + 1, -1).contiguous(), _unvisited_as_nan(of_experts, few))
    yield case("edges", _edges(mixture))
    yield case("large", _random_experts(_EDGE - 1, mixture, random), factor=30.0)
    if num_experts > 1:
        yield case("unequal", _random_experts(_EDGE + 3, mixture, random), _scaled(of_experts, expert=1))


def expert_weights_of(mixture: Mixture, random: torch.Generator, device: torch.device) -> AnyExpertWeights:
    """Random weights whose products keep the size of their inputs."""
    experts, hidden, width = mixture.num_experts, mixture.hidden, mixture.width
    dtype = torch_dtype(mixture.dtype)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    biases = [randn(experts, size).to(device, dtype) if mixture.has_bias else None for size in (2 * width, hidden)]
    if mixture.layout is WeightLayout.PLAIN:
        gate_up, down = randn(experts, 2 * width, hidden) / hidden**0.5, randn(experts, hidden, width) / width**0.5
        return ExpertWeights(gate_up.to(device, dtype), down.to(device, dtype), *biases)

    def packed(rows: int, size: int) -> tuple[Tensor, Tensor]:
        blocks = torch.randint(256, (experts, rows, size // MXFP4_BLOCK, 16), generator=random, dtype=torch.uint8)
        largest = 127 - round(torch.tensor(9.0 * size).log2().item() / 2)  # a code's mean square is 9
        scales = torch.randint(largest - 4, largest + 1, blocks.shape[:-1], generator=random, dtype=torch.uint8)
        return blocks.to(device), scales.to(device)

    return Mxfp4Weights(*packed(2 * width, hidden), *packed(hidden, width), *biases)


def _random_experts(num_tokens: int, mixture: Mixture, random: torch.Generator) -> Tensor:
    """[num_tokens, num_active] int64, a token's all different."""
    return torch.rand(num_tokens, mixture.num_experts, generator=random).argsort(1)[:, : mixture.num_active]


def _edges(mixture: Mixture) -> Tensor:
    """Expert e is visited first by 0, 1, 31, 32 or 33 tokens in turn; further visits go to the experts after it."""
    counts = (0, 1, _EDGE - 1, _EDGE, _EDGE + 1)
    first = [expert for expert in range(mixture.num_experts) for _ in range(counts[expert % len(counts)])][: 5 * _EDGE]
    places = torch.arange(mixture.num_active)
    return (torch.tensor(first or [0])[:, None] + places[None, :]) % mixture.num_experts


def _between_nan(values: Tensor, dtype: Dtype, device: torch.device) -> Tensor:
    edge = torch.full((GUARD_ROWS, values.shape[1]), torch.nan)
    whole = torch.cat([edge, values, edge]).to(device, torch_dtype(dtype))
    return whole[GUARD_ROWS : GUARD_ROWS + values.shape[0]]


def _unvisited_as_nan(weights: AnyExpertWeights, visited: Tensor) -> AnyExpertWeights:
    """A copy in which the experts that nobody visits are NaN; of mxfp4 the scales and the biases."""
    nobody = torch.ones(weights.num_experts, dtype=torch.bool)
    nobody[visited.flatten()] = False

    def spoiled(part: Tensor) -> Tensor:
        part = part.clone()
        part[nobody.to(part.device)] = torch.nan if part.is_floating_point() else 255
        return part

    return _changed(weights, spoiled, spoiled)


def _scaled(weights: AnyExpertWeights, *, expert: int) -> AnyExpertWeights:
    """A copy in which the last product of one expert is larger: 16 times for mxfp4, whose scales are powers of two."""

    def scaled(part: Tensor) -> Tensor:
        part = part.clone()
        part[expert] = part[expert] * 20 if part.is_floating_point() else part[expert] + 4
        return part

    return _changed(weights, scaled, None)


def _changed(
    weights: AnyExpertWeights, of_down: Callable[[Tensor], Tensor], of_others: Callable[[Tensor], Tensor] | None
) -> AnyExpertWeights:
    """The weights with the numbers of `down` (of mxfp4 its scales) changed, and where asked for all others."""

    def other(part: Tensor) -> Tensor:
        return part if of_others is None else of_others(part)

    biases = [None if bias is None else other(bias) for bias in (weights.gate_up_bias, weights.down_bias)]
    if isinstance(weights, ExpertWeights):
        return ExpertWeights(other(weights.gate_up), of_down(weights.down), *biases)
    scales = other(weights.gate_up_scales), of_down(weights.down_scales)
    return Mxfp4Weights(weights.gate_up_blocks, scales[0], weights.down_blocks, scales[1], *biases)
