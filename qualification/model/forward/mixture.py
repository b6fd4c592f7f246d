"""A feed-forward, dense or a mixture of experts, from its definition.

Sources: Shazeer et al. 2017 (gated mixtures); DeepSeek-V3, section 2.1.2 (sigmoids, groups, correction bias); OCP
Microscaling Formats 1.0 (mxfp4: E2M1 numbers, E8M0 scales of 32 of them).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from qualification.model.config import ExpertsConfig
from qualification.model.forward.bounded import (
    Bounded,
    Precision,
    U,
    function_of,
    in_fp32,
)
from qualification.model.forward.matrix import Matrix
from qualification.model.forward.sentences import Scoring

Gate = Callable[[Tensor, Tensor], Tensor]
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """down(activation(gate) * up): gate and up [I, H], down [H, I], each with a bias or None (fp64)."""

    gate: Matrix
    up: Matrix
    down: Matrix
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def part(self, rank: int, world: int) -> "GatedWeights":
        """Return the columns of one of `world` ranks; the bias behind them is added once."""
        size = self.gate.num_rows // world
        own = slice(rank * size, (rank + 1) * size)

        def cut(bias: Tensor | None) -> Tensor | None:
            return None if bias is None else bias[own]

        bias = self.down_bias if rank == 0 else None
        gate, up, down = self.gate.rows(own), self.up.rows(own), self.down.columns(own)
        return GatedWeights(gate, up, down, cut(self.gate_bias), cut(self.up_bias), bias)


def gate_of(activation: object) -> Gate:
    """Return activation(gate) * up of a config's activation, named as config.json names it."""
    if isinstance(activation, Enum):
        return gate_named(activation.value)
    limit: float = activation.limit  # type: ignore[attr-defined]
    alpha: float | None = getattr(activation, "alpha", None)  # gpt-oss's has a slope and a limit, Step 3.5's a limit
    return _capped(limit) if alpha is None else _clamped(alpha, limit)


def gate_named(name: str) -> Gate:
    """Return activation(gate) * up of an activation as config.json names it."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": lambda x: x * torch.sigmoid(x),
        "relu2": lambda x: x.clamp(min=0),  # of gate and up that are the same
        # Of gate and up that are the same, too: gelu(x), or relu(x), is a share of x times x.
        "ungated gelu": lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "ungated gelu by tanh": lambda x: 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "ungated relu": lambda x: (x > 0).to(x.dtype),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_pytorch_tanh": lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    }
    function = functions[name]
    return lambda gate, up: function(gate) * up


def xielu_of(alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Gate:
    """Return an xIELU of up, which stands twice, by the numbers of a checkpoint, fp64."""
    of_p, of_n = torch.nn.functional.softplus(alpha_p), beta + torch.nn.functional.softplus(alpha_n)

    def gated(gate: Tensor, _: Tensor) -> Tensor:
        below = of_n * (torch.expm1(torch.minimum(gate, eps)) - gate)
        return torch.where(gate > 0, of_p * gate**2, below) + beta * gate

    return gated


def _clamped(alpha: float, limit: float) -> Gate:
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    return gated


def _capped(limit: float) -> Gate:
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return (gate * torch.sigmoid(gate)).clamp(max=limit) * up.clamp(-limit, limit)

    return gated


def feed(x: Bounded, weights: GatedWeights, gated: Gate, precision: Precision, *, gate_scale: float = 1.0) -> Bounded:
    """Return down(activation(gate * gate_scale) * up), rounded; gate and up may be rounded before."""
    gate, up = (
        precision.rounded(weight.product(x, bias, precision))
        for weight, bias in ((weights.gate, weights.gate_bias), (weights.up, weights.up_bias))
    )
    if gate_scale != 1:
        gate = precision.rounded(gate.times(in_fp32(gate_scale)))
    inner = function_of((gate, up), gated, precision)
    return precision.rounded(weights.down.product(inner, weights.down_bias, precision))


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each token and their weights.

    experts   [T, k]
    shares    Bounded [T, k]
    is_clear  [T]: no other expert may be chosen by a right router, whose logits are off by their limits
    """

    experts: Tensor
    shares: Bounded
    is_clear: Tensor


def route(logits: Bounded, config: ExpertsConfig, scoring: Scoring, correction: Tensor | None) -> Routes:
    """Choose each token's experts by its logits [T, experts]; `correction` [experts] is added for choosing only."""
    routing, limit = config.routing, logits.limit
    values = logits.truth
    if scoring is Scoring.SPARSE_MIXER:
        assert config.jitter is not None, "the family's mixtures have one"
        return _mixed_sparsely(values, limit.amax(dim=1, keepdim=True), config.jitter)
    is_sigmoid = scoring is Scoring.SIGMOID
    scores = torch.sigmoid(values) if is_sigmoid else torch.softmax(values, dim=1)
    by_score = correction is not None or routing.num_groups > 1
    choice, off = (scores, limit * scores + 4 * U) if by_score else (values, limit)
    if correction is not None:
        choice = choice + correction.double()
        off = off + 2 * U * choice.abs()
    worst = off.amax(dim=1)
    is_clear = torch.ones_like(worst, dtype=torch.bool)
    if routing.num_groups > 1:
        groups = choice.view(choice.shape[0], routing.num_groups, -1)
        of_group = groups.topk(2, dim=2).values.sum(dim=2)
        ranked = of_group.sort(dim=1, descending=True)
        if routing.num_active_groups < routing.num_groups:
            gap = ranked.values[:, routing.num_active_groups - 1] - ranked.values[:, routing.num_active_groups]
            is_clear &= gap > 4 * worst
        is_best = torch.zeros_like(of_group).scatter(1, ranked.indices[:, : routing.num_active_groups], 1.0).bool()
        choice = groups.masked_fill(~is_best[:, :, None], float("-inf")).flatten(1)
    ranked = choice.sort(dim=1, descending=True)
    if routing.num_active < routing.num_experts:
        gap = ranked.values[:, routing.num_active - 1] - ranked.values[:, routing.num_active]
        is_clear &= gap > 2 * worst
    experts = ranked.indices[:, : routing.num_active]
    if scoring is Scoring.SOFTMAX_OF_CHOSEN:
        shares = torch.softmax(values.gather(1, experts), dim=1)
    else:
        shares = scores.gather(1, experts)
        if is_sigmoid and routing.renormalizes:
            shares = shares / (shares.sum(dim=1, keepdim=True) + 1e-20)
    spread = values.amax(dim=1, keepdim=True) - values.gather(1, experts)
    most = shares * (2 * limit.amax(dim=1, keepdim=True) + U * (32 + 4 * spread))
    return Routes(experts, Bounded(shares, most, torch.zeros_like(most)).times(routing.scale), is_clear)


def _mixed_sparsely(values: Tensor, worst: Tensor, jitter: float) -> Routes:
    """Choose by logits [T, experts] that are off by `worst` [T, 1] at most."""
    left, is_clear = values, torch.ones_like(values[:, 0], dtype=torch.bool)
    experts, shares = [], []
    for _ in range(2):
        best, expert = left.max(dim=1, keepdim=True)
        beyond = (best - values) - 2 * jitter * torch.maximum(values.abs(), best)
        shares.append(torch.softmax(left.masked_fill(beyond > 0, float("-inf")), dim=1).gather(1, expert))
        experts.append(expert)
        left = left.scatter(1, expert, float("-inf"))
        is_clear &= ((best - left > 2 * worst) & ((beyond.abs() > 4 * worst) | left.isinf())).all(dim=1)
    share = torch.cat(shares, dim=1)
    most = share * (2 * worst + 32 * U)
    return Routes(torch.cat(experts, dim=1), Bounded(share, most, torch.zeros_like(most)), is_clear)


def mixed(
    x: Bounded,
    routes: Routes,
    weights_of: Callable[[int], GatedWeights],
    gated: Gate,
    precision: Precision,
    *,
    weighs_inputs: bool = False,
) -> Bounded:
    """Return the weighted sum of each token's experts, rounded.

    weighs_inputs   whether a token's one expert reads its weight times x instead
    """
    zeros = torch.zeros_like(x.truth)
    truth, most, variance = zeros.clone(), zeros.clone(), zeros.clone()
    for expert in sorted(set(routes.experts.flatten().tolist())):
        rows, places = (routes.experts == expert).nonzero(as_tuple=True)
        read = x.rows(rows)
        if weighs_inputs:
            read = function_of((_by_column(routes.shares, rows, places, x), read), torch.mul, precision)
        found = feed(read, weights_of(expert), gated, precision)
        if weighs_inputs:
            for total, added in ((truth, found.truth), (most, found.most), (variance, found.deviation**2)):
                total.index_add_(0, rows, added)
            continue
        share = routes.shares.truth[rows, places][:, None]
        off = routes.shares.most[rows, places][:, None]
        truth.index_add_(0, rows, share * found.truth)
        most.index_add_(0, rows, share.abs() * found.most + off * (found.truth.abs() + found.most))
        own = (share * found.deviation) ** 2 + (U * share * found.truth) ** 2 * (1 + routes.experts.shape[1] / 6)
        variance.index_add_(0, rows, own)
    return precision.rounded(Bounded(truth, most, variance.sqrt()))


def _by_column(shares: Bounded, rows: Tensor, places: Tensor, x: Bounded) -> Bounded:
    """Return the weights of some tokens [n, hidden], the same in all columns of x."""
    return shares.changed(lambda it: it[rows, places][:, None].expand(-1, x.truth.shape[1]))


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers fp64 [..., n * 32] of blocks uint8 [..., n, 16] and scales uint8 [..., n].

    A byte holds two numbers, the first in its low half: a sign bit and one of eight sizes. A scale s stands for
    2^(s - 127).
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    sizes = torch.tensor(_E2M1, dtype=torch.float64, device=blocks.device)
    numbers = torch.where(codes >= 8, -sizes[codes & 7], sizes[codes & 7])
    return torch.ldexp(numbers, (scales.long() - _SCALE_BIAS)[..., None]).flatten(-2)
