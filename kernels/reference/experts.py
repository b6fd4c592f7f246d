"""The truth of a mixture's products in fp64, and what a right path may err there (docs/limits.md derives it).

A right path sums in fp32, in any order and by any instructions, and rounds to hidden's dtype: gate and up (it need
not), the activated product, each expert's result, and the weighted sum, which is added up in fp32.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.experts.few_bits.weights import AnyExperts, FewBitExperts
from kernels.experts.kinds import ClampedSwiglu, RoutingConfig, Scores
from kernels.experts.shape import AnyExpertActivation
from kernels.fused.activation_kind import Activation
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.ungated_kind import Ungated
from kernels.linear.weights import LinearWeight
from kernels.reference.compare import Reference
from kernels.reference.rounded_inner import rounded_inner

_Z_ROUNDED = 8.5  # standard deviations, as in `compare.py`
_Z_FP32 = 10.0
_U32 = 2.0**-24
_LEAST = 1e-30  # limit of an element whose truth is 0
_SECOND_ORDER = 1.01  # of roundings of gate and up that meet: products of two of them are below 1%
_CLOSE_CALL = 1e-5  # two scores that fp32 may order either way
_WEIGHT_ULPS = 32  # of a router's weight: exp, sum, division; more for logits far from the largest


@dataclass(frozen=True, slots=True)
class Rounding:
    """Half an eps of the dtype and half of its smallest subnormal; both 0 for fp32, whose roundings are variances."""

    u: float
    subnormal: float

    def of(self, value: Tensor) -> Tensor:
        """The most that rounding a value errs."""
        return self.u * value.abs() + self.subnormal


def experts_reference(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: AnyExperts, activation: AnyExpertActivation
) -> Reference:
    """The expected [T, 1, H] fp64 of `kernels.experts.portable.eager.experts_eager`, and what a right path may err.

    Arguments as those of `experts_eager`; `errors_of(out[:, None], reference)` measures an output. The bias is not
    measured.
    """
    num_active = experts.shape[1]
    truth, worst, rounded, results, fp32, terms = hidden.new_zeros(6, *hidden.shape, dtype=torch.float64).unbind()
    rounding = rounding_of(hidden.dtype)
    for expert in sorted(set(experts.flatten().tolist())):
        tokens, places = (experts == expert).nonzero(as_tuple=True)
        w = weights[tokens, places].double()[:, None]
        judged = _judge_expert(hidden[tokens].double(), expert, expert_weights, activation, rounding, hidden.dtype)
        y, y_worst, y_rounded, y_fp32, y_moved = judged
        truth.index_add_(0, tokens, w * y)
        worst.index_add_(0, tokens, w.abs() * y_worst)
        rounded.index_add_(0, tokens, w.square() * y_rounded)
        results.index_add_(0, tokens, w.abs() * (rounding.of(y) + y_moved))
        fp32.index_add_(0, tokens, w.square() * y_fp32)
        terms.index_add_(0, tokens, (w * y).square())
    limit = _Z_FP32 * _U32 * (fp32 + (1 + num_active / 6) * terms).sqrt() + _LEAST
    if hidden.dtype is not torch.float32 or isinstance(expert_weights, FewBitExperts):
        inner = _SECOND_ORDER * torch.minimum(worst, _Z_ROUNDED * (rounded / 3).sqrt())
        limit = limit + rounding.of(truth) + results + inner
    return Reference(truth[:, None], limit[:, None], None, float("inf"))


def rounding_of(dtype: torch.dtype) -> Rounding:
    if dtype is torch.float32:
        return Rounding(0.0, 0.0)
    u = torch.finfo(dtype).eps / 2
    return Rounding(u, torch.finfo(dtype).smallest_normal * u)


def _judge_expert(
    x: Tensor,
    expert: int,
    expert_weights: AnyExperts,
    activation: AnyExpertActivation,
    rounding: Rounding,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return of x [n, H] fp64: result, most that roundings inside add, sum of their squares, variance in fp32 / u^2.

    Last, what scales of 8 bits that are off inside add. Each [n, H] fp64.
    """
    of_down: LinearWeight | None = None
    if isinstance(expert_weights, FewBitExperts):
        of_gate_up, of_down = expert_weights.weights_of(expert)
        x = of_gate_up.as_multiplied(x).double()
    gate_up, down = (weight.double() for weight in expert_weights.of(expert, dtype))
    bias, down_bias = (
        torch.zeros(size, dtype=torch.float64, device=x.device) if each is None else each[expert].double()
        for each, size in ((expert_weights.gate_up_bias, gate_up.shape[0]), (expert_weights.down_bias, down.shape[0]))
    )
    products = x @ gate_up.T + bias
    # A sum of n terms is rounded n times, by up to u of what it has come to (docs/limits.md); then bias and exponent.
    variance = (1 + x.shape[1] / 6) * (x.square() @ gate_up.square().T) + 4 * products.square() + 2 * bias.square()
    moved = rounding.of(products) + _Z_FP32 * _U32 * variance.sqrt() + _LEAST
    gate, up = gate_and_up(products, activation)
    gate_moved, up_moved = gate_and_up(moved, activation)
    inner = activated_fp64(gate, up, activation)
    # How much the product changes by steps either way: a clamp's edge counts. The product is one factor of gate and
    # one of up, so that what both steps change together is one change times the other.
    gate_ways, up_ways = (gate - gate_moved, gate + gate_moved), (up - up_moved, up + up_moved)
    of_gate = [activated_fp64(way, up, activation) - inner for way in gate_ways]
    of_up = [activated_fp64(gate, way, activation) - inner for way in up_ways]
    of_both = [
        activated_fp64(gate_ways[i], up_ways[j], activation) - inner - of_gate[i] - of_up[j]
        for i in range(2)
        for j in range(2)
    ]
    by_gate, by_up = _largest(of_gate) / gate_moved, _largest(of_up) / up_moved
    own = inner.square()
    if activation in (Activation.GELU, Activation.GELU_TANH):  # 1 + erf, or + tanh, errs by some u of 1
        own = own + (gate * up).square()
    gate_variance, up_variance = gate_and_up(variance, activation)
    fp32 = by_gate.square() * gate_variance + by_up.square() * up_variance + 16 * own
    fp32 += (_largest(of_both) / (_Z_FP32 * _U32)).square()
    gate_rounded, up_rounded = gate_and_up(rounding.of(products), activation)
    errors: tuple[Tensor, ...] = (by_gate * gate_rounded, by_up * up_rounded, rounding.of(inner))
    moved_down = torch.zeros(x.shape[0], down.shape[0], dtype=torch.float64, device=x.device)
    if of_down is not None:
        error = _largest(of_gate) + _largest(of_up) + _largest(of_both) + rounding.of(inner)
        error = error + 4 * _Z_FP32 * _U32 * own.sqrt() + _LEAST
        found = rounded_inner(inner, error, of_down, dtype)
        if found is not None:  # all that is off before is in what the codes are off by
            inner, errors, fp32 = found.truth, (found.reach,), 16 * found.truth.square()
            moved_down = found.moved(down)
    down_squared = down.square().T
    result = inner @ down.T + down_bias
    sums = (1 + inner.shape[1] / 6) * (inner.square() @ down_squared) + 4 * result.square() + 2 * down_bias.square()
    return (
        result,
        sum(errors, torch.zeros_like(inner)) @ down.abs().T,
        sum((error.square() for error in errors), torch.zeros_like(inner)) @ down_squared,
        fp32 @ down_squared + sums,
        moved_down,
    )


def _largest(changes: Iterable[Tensor]) -> Tensor:
    return reduce(torch.maximum, (change.abs() for change in changes))


def gate_and_up(products: Tensor, activation: AnyExpertActivation) -> tuple[Tensor, Tensor]:
    """Return both halves of the columns; without a gate all columns twice, of which the first alone count."""
    if isinstance(activation, Ungated):
        return products, products
    gate, up = products.chunk(2, dim=-1)
    return gate, up


def activated_fp64(gate: Tensor, up: Tensor, activation: AnyExpertActivation) -> Tensor:
    """activation(gate) * up, in fp64; without a gate activation(gate), of what `gate_and_up` gives."""
    if isinstance(activation, Ungated):
        return gate.clamp(min=0).square()
    if isinstance(activation, ClampedSwiglu):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    if isinstance(activation, CappedSilu):
        return F.silu(gate).clamp(max=activation.limit) * up.clamp(-activation.limit, activation.limit)
    if activation is Activation.SILU:
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation is Activation.GELU_TANH else "none") * up


def num_wrong_routes(
    logits: Tensor, config: RoutingConfig, correction_bias: Tensor | None, weights: Tensor, experts: Tensor
) -> int:
    """Count tokens routed wrongly: to other experts than fp64's, in another order, or by a weight beyond fp32's errors.

    Arguments and results of `route` in `kernels/experts/routing/route_torch.py`. Where fp64 finds two candidates closer
    than 1e-5 either may be chosen; the weights are then those of the experts that were.
    """
    logits = logits.double()
    scores = torch.softmax(logits, 1) if config.scores is Scores.SOFTMAX else torch.sigmoid(logits)
    by_order_alone = correction_bias is None and config.num_groups == 1
    choice = logits if by_order_alone else scores
    if correction_bias is not None:
        choice = choice + correction_bias.double()
    is_close = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    if config.num_groups > 1:
        groups = choice.view(choice.shape[0], config.num_groups, -1)
        of_group = groups.topk(2, dim=2).values.sum(dim=2)
        best, is_close = _best(of_group, config.num_active_groups)
        is_open = torch.zeros_like(of_group).scatter_(1, best, 1.0).bool()
        choice = groups.masked_fill(~is_open[:, :, None], float("-inf")).flatten(1)
    expected, is_closer = _best(choice, config.num_active)
    if not by_order_alone:
        is_close = is_close | is_closer
    chosen = experts.long().clamp(0, config.num_experts - 1)
    is_wrong = (experts != expected).any(1) & ~is_close
    is_wrong |= (chosen != experts).any(1) | (chosen.sort(1).values.diff(dim=1) == 0).any(1)
    right = scores.gather(1, chosen)
    if config.renormalizes:
        right = right / right.sum(1, keepdim=True).clamp(min=1e-20)
    right = right * config.scale
    far = (logits.amax(1, keepdim=True) - logits.gather(1, chosen)).clamp(max=100.0)
    limit = _U32 * (_WEIGHT_ULPS + 4 * far) * right + 1e-37
    is_wrong |= ~((weights.double() - right).abs() <= limit).all(1)  # True for NaN
    return int(is_wrong.sum())


def _best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(columns of the largest values, of equals the first; whether two of those that matter are a close call)."""
    ordered = values.sort(dim=1, descending=True, stable=True)
    gaps = -ordered.values[:, : count + 1].diff(dim=1)
    return ordered.indices[:, :count], (gaps < _CLOSE_CALL).any(1)
