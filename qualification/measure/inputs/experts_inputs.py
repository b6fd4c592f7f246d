"""Inputs on which wrong experts go wrong: extreme shares, edges of tiles, large products, NaN that must not be read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.calls.processors import shared_bytes
from kernels.experts.few_bits.weights import CLASSES, AnyExperts, FewBitExperts, FewBitWeight
from kernels.experts.formats import FewBitFormat
from kernels.experts.kinds import MXFP4_BLOCK, ExpertFormat
from kernels.experts.shape import AnyExpertActivation, ExpertsShape
from kernels.experts.tiles import token_counts
from kernels.experts.ungated.weights import UngatedExperts, UngatedFewBitExperts
from kernels.experts.weights import ExpertWeights, Mxfp4Weights
from kernels.fused.ungated_kind import Ungated
from kernels.system.device import torch_dtype
from kernels.vocabulary.shape import Dtype
from qualification.measure.inputs.guard import GUARD_ROWS

_MOST_ROWS_CPU = 512  # tokens; on a CPU buckets are tested up to here, or just inside if they start beyond
_EDGE = 32  # rows of a tile in the interpreter; of 16, 64 and 128 on a GPU, which its multiples are edges of too


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """The arguments of `experts_eager`. Rows of NaN stand before and behind `hidden`, in its storage."""

    name: str
    seed: int
    hidden: Tensor
    experts: Tensor
    weights: Tensor
    expert_weights: AnyExperts
    activation: AnyExpertActivation


def tested_rows(shape: ExpertsShape, *, is_cpu: bool) -> int:
    """The most tokens that are tested: the bucket's upper edge (2x the lower without an end), on a CPU less."""
    most = 2 * shape.rows.lo if shape.rows.hi is None else shape.rows.hi
    return min(most, max(_MOST_ROWS_CPU, shape.rows.lo + 1)) if is_cpu else most


def experts_cases(mixture: ExpertsShape, device: torch.device, *, seed: int) -> Iterator[ExpertsCase]:
    """Every hostile input, with numbers of tokens in the shape's bucket, the fewest first.

    fewest          one token, or as few as the bucket has
    even            random experts, rows on no tile's edge
    all to one      every token visits expert 1, so that its share is extreme
    none to most    all tokens visit the same experts; the weights of all others are NaN
    edges           experts with 0, 1, and a tile's rows less one, exactly, and one more
    large           hidden states times 30: activations saturate, clamps cut
    unequal         one expert's results are 20 times the others', weights of 0 and of 1 among the tokens'
    border          the last number of tokens of one tile of the kernels, and the first of the next
    most            the most tokens, random experts
    """
    inputs = _Inputs(mixture, device, seed)
    num_experts, most = mixture.num_experts, tested_rows(mixture, is_cpu=device.type == "cpu")

    def rows(count: int) -> int:
        return min(mixture.rows.lo + count, most)

    yield inputs.case("fewest", inputs.experts(rows(1)))
    yield inputs.case("even", inputs.experts(rows(2 * _EDGE + 5)))
    same = inputs.experts(rows(_EDGE + 7))
    # Expert 1 takes the place of the first visit, and where it was visited already of none.
    same[:, 0] = torch.where((same == 1).any(1), same[:, 0], 1 % num_experts)
    yield inputs.case("all to one", same)
    few = inputs.experts(1)
    everywhere = few.expand(rows(_EDGE + 1), -1).contiguous()
    yield inputs.case("none to most", everywhere, weights=_unvisited_as_nan(inputs.expert_weights, few))
    yield inputs.case("edges", _edges(mixture, rows))
    yield inputs.case("large", inputs.experts(rows(_EDGE - 1)), factor=30.0)
    if num_experts > 1:
        experts = inputs.experts(rows(_EDGE + 3))
        yield inputs.case("unequal", experts, weights=_scaled(inputs.expert_weights, expert=1))
    sizes = mixture.dtype.num_bytes, shared_bytes(device)
    firsts = token_counts(num_experts, mixture.num_active, *sizes)
    # A number of tokens that is the last of one tile and the first of the next, as 3 is where 3 and 4 are borders, is
    # one input: two of one name would be compared with one reference.
    for num_rows in sorted({num_rows for first in firsts for num_rows in (first - 1, first)}):
        if mixture.rows.lo < num_rows < most:
            yield inputs.case(f"border {num_rows}", inputs.experts(num_rows))
    yield inputs.case("most", inputs.experts(most))


def even_case(mixture: ExpertsShape, device: torch.device, *, seed: int) -> ExpertsCase:
    """The most tokens, which visit experts in turn: every one that so many tokens can visit."""
    inputs = _Inputs(mixture, device, seed)
    visits = torch.arange(tested_rows(mixture, is_cpu=device.type == "cpu") * mixture.num_active, device=device)
    return inputs.case("in turn", (visits % mixture.num_experts).view(-1, mixture.num_active))


class _Inputs:
    """Random inputs of one mixture, drawn on the device: of a large one a CPU would draw for seconds."""

    def __init__(self, mixture: ExpertsShape, device: torch.device, seed: int) -> None:
        self._mixture = mixture
        self._device = device
        self._seed = seed
        self._random = torch.Generator(device).manual_seed(seed)
        self.expert_weights = expert_weights_of(mixture, self._random, device)

    def experts(self, num_tokens: int) -> Tensor:
        """[num_tokens, num_active] int64, a token's all different."""
        draws = torch.rand(num_tokens, self._mixture.num_experts, generator=self._random, device=self._device)
        return draws.argsort(1)[:, : self._mixture.num_active]

    def case(
        self, name: str, experts: Tensor, *, weights: AnyExperts | None = None, factor: float = 1.0
    ) -> ExpertsCase:
        random, device, mixture = self._random, self._device, self._mixture
        num_tokens = experts.shape[0]
        shares = torch.rand(num_tokens, mixture.num_active, generator=random, device=device) + 0.05
        shares = shares / shares.sum(1, keepdim=True)
        if name == "unequal":
            shares[::3, 0], shares[1::3, -1] = 0.0, 1.0
        values = torch.randn(num_tokens, mixture.hidden, generator=random, device=device) * factor
        hidden = _between_nan(values, mixture.dtype, device)
        chosen = experts.to(device, torch.int32).contiguous()
        return ExpertsCase(name, self._seed, hidden, chosen, shares, weights or self.expert_weights, mixture.activation)


def expert_weights_of(mixture: ExpertsShape, random: torch.Generator, device: torch.device) -> AnyExperts:
    """Random weights whose products keep the size of their inputs."""
    experts, hidden, width = mixture.num_experts, mixture.hidden, mixture.width
    dtype = torch_dtype(mixture.dtype)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=random, device=device, dtype=dtype).mul_(scale)

    is_ungated = isinstance(mixture.activation, Ungated)
    if is_ungated and mixture.format is ExpertFormat.PLAIN:
        up = randn(experts, width, hidden, scale=hidden**-0.5)
        return UngatedExperts(up, randn(experts, hidden, width, scale=width**-0.5))
    if isinstance(mixture.format, FewBitFormat):
        kind = CLASSES[mixture.format]
        of = UngatedFewBitExperts if is_ungated else FewBitExperts
        sizes = (experts * (mixture.num_products - 1) * width, hidden), (experts * hidden, width)
        return of(*(kind.of(randn(*size, scale=size[1] ** -0.5)) for size in sizes))
    biases = [randn(experts, size) if mixture.has_bias else None for size in (2 * width, hidden)]
    if mixture.format is ExpertFormat.PLAIN:
        gate_up = randn(experts, 2 * width, hidden, scale=hidden**-0.5)
        return ExpertWeights(gate_up, randn(experts, hidden, width, scale=width**-0.5), *biases)

    def packed(rows: int, size: int) -> tuple[Tensor, Tensor]:
        shape = (experts, rows, size // MXFP4_BLOCK)
        blocks = torch.randint(256, (*shape, 16), generator=random, dtype=torch.uint8, device=device)
        largest = 127 - round(torch.tensor(9.0 * size).log2().item() / 2)  # a code's mean square is 9
        scales = torch.randint(largest - 4, largest + 1, shape, generator=random, dtype=torch.uint8, device=device)
        return blocks, scales

    codes = *packed(2 * width, hidden), *packed(hidden, width)
    return Mxfp4Weights(*codes, gate_up_bias=biases[0], down_bias=biases[1]).inspected()


def _edges(mixture: ExpertsShape, rows: Callable[[int], int]) -> Tensor:
    """Expert e is visited first by 0, 1, 31, 32 or 33 tokens in turn; further visits go to the experts after it.

    What is left of the bucket's fewest tokens goes to the last expert.
    """
    counts = (0, 1, _EDGE - 1, _EDGE, _EDGE + 1)
    first = [expert for expert in range(mixture.num_experts) for _ in range(counts[expert % len(counts)])][: 5 * _EDGE]
    first = first or [0]
    num_rows = rows(len(first))
    first = [mixture.num_experts - 1] * (num_rows - len(first)) + first[:num_rows]
    places = torch.arange(mixture.num_active)
    return (torch.tensor(first)[:, None] + places[None, :]) % mixture.num_experts


def _between_nan(values: Tensor, dtype: Dtype, device: torch.device) -> Tensor:
    edge = torch.full((GUARD_ROWS, values.shape[1]), torch.nan, device=device)
    whole = torch.cat([edge, values, edge]).to(torch_dtype(dtype))
    return whole[GUARD_ROWS : GUARD_ROWS + values.shape[0]]


def _unvisited_as_nan(weights: AnyExperts, visited: Tensor) -> AnyExperts:
    """A copy in which the experts that no token visits are NaN; of mxfp4 scales (large ones) and biases."""
    unvisited = torch.ones(weights.num_experts, dtype=torch.bool)
    unvisited[visited.flatten().cpu()] = False
    if isinstance(weights, FewBitExperts):
        scales = {True: torch.nan, False: 1.0}
        return _scaled_by(weights, [scales[bool(it)] for it in unvisited], both=True)

    def spoiled(part: Tensor) -> Tensor:
        part = part.clone()
        part[unvisited.to(part.device)] = torch.nan if part.is_floating_point() else 255
        return part

    return _changed(weights, spoiled, spoiled)


def _scaled(weights: AnyExperts, *, expert: int) -> AnyExperts:
    """A copy in which the last product of one expert is larger: 16 times for mxfp4, whose scales are powers of two."""
    if isinstance(weights, FewBitExperts):
        return _scaled_by(weights, [20.0 if it == expert else 1.0 for it in range(weights.num_experts)], both=False)

    def scaled(part: Tensor) -> Tensor:
        part = part.clone()
        part[expert] = part[expert] * 20 if part.is_floating_point() else part[expert] + 4
        return part

    return _changed(weights, scaled, None)


def _scaled_by(weights: FewBitExperts, factors: list[float], *, both: bool) -> FewBitExperts:
    """Return a copy whose experts' scales are multiplied by these: of the last product, or of both."""
    parts = {"gate_up": weights.gate_up, "down": weights.down} if both else {"down": weights.down}
    return replace(weights, **{name: _rescaled(part, factors) for name, part in parts.items()})


def _rescaled(weight: FewBitWeight, factors: list[float]) -> FewBitWeight:
    of_experts = torch.tensor(factors, device=weight.device)
    of_rows = of_experts.repeat_interleave(weight.scales.shape[0] // len(factors))
    return replace(weight, scales=weight.scales * of_rows[:, None])


def _changed(
    weights: AnyExperts, of_down: Callable[[Tensor], Tensor], of_others: Callable[[Tensor], Tensor] | None
) -> AnyExperts:
    """The weights with the numbers of `down` (of mxfp4 its scales) changed, and where asked for all others."""

    def other(part: Tensor) -> Tensor:
        return part if of_others is None else of_others(part)

    biases = [None if bias is None else other(bias) for bias in (weights.gate_up_bias, weights.down_bias)]
    assert not isinstance(weights, FewBitExperts), "theirs are scaled"
    if isinstance(weights, ExpertWeights):
        return type(weights)(other(weights.gate_up), of_down(weights.down), *biases)
    return replace(
        weights,
        gate_up_scales=other(weights.gate_up_scales),
        down_scales=of_down(weights.down_scales),
        gate_up_bias=biases[0],
        down_bias=biases[1],
    ).inspected()
