"""A state space (Mamba2) of one sequence, token by token in fp64, with the limits of docs/limits.md ("Layers").

Source: Dao and Gu 2024 (Mamba-2), equation 16: S = exp(step A) S + B (step x)^T; y = S^T C + D x.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qualification.model.forward.bounded import Bounded, Precision, U

_HOEFFDING = 8.5
CHUNK = 64  # tokens that a server may sum together


@dataclass(frozen=True, slots=True)
class SpaceRule:
    """conv     [channels, width] fp64: C, B and x, the factor of the newest token last; conv_bias [channels]
    a_log    [heads] fp64, as dt_bias and skip (D) are
    groups, state_dim, head_dim   sizes; a group's B and C serve as many heads as there are for each
    least_step, most_step   that steps are held between
    state_unit   share that a number of a state is off when a server stores it, every 64 tokens
    """

    conv: Tensor
    conv_bias: Tensor
    a_log: Tensor
    dt_bias: Tensor
    skip: Tensor
    groups: int
    state_dim: int
    head_dim: int
    least_step: float
    most_step: float
    state_unit: float = 0.0


def mix_space(given: Tensor, steps: Tensor, rule: SpaceRule, precision: Precision) -> Bounded:
    """Return the results [T, heads, head_dim] of a sequence from its first token on.

    given [T, channels], steps [T, heads]: as a server hands them out
    """
    width, heads, dims = rule.conv.shape[1], rule.a_log.shape[0], rule.state_dim
    unit = torch.finfo(precision.dtype).eps / 2 if precision.is_narrow else 0.0
    terms = F.pad(given.double(), (0, 0, width - 1, 0)).unfold(0, width, 1) * rule.conv
    sums = terms.sum(dim=-1) + rule.conv_bias
    mixed = sums * torch.sigmoid(sums)
    # The slope of x sigmoid(x) is below 1.1; its own exponential, quotient and product come to it.
    variance = 1.21 * (1 + width / 6) * (terms.square().sum(dim=-1) + rule.conv_bias.square())
    variance = variance + ((4 + sums.abs()) * mixed) ** 2
    size = rule.groups * dims

    def of_heads(part: slice) -> tuple[Tensor, Tensor]:
        both = (it[:, part].reshape(-1, rule.groups, dims) for it in (mixed, variance))
        first, second = (it.repeat_interleave(heads // rule.groups, 1) for it in both)
        return first, second

    (queries, query_errors), (keys, key_errors) = of_heads(slice(size)), of_heads(slice(size, 2 * size))
    values, value_errors = (it[:, 2 * size :].reshape(-1, heads, rule.head_dim) for it in (mixed, variance))
    raw = steps.double() + rule.dt_bias
    step = F.softplus(raw, threshold=1e9).clamp(rule.least_step, rule.most_step)[..., None]
    step_error = (12 * step + (torch.sigmoid(raw) * (raw.abs() + 1))[..., None]) ** 2
    factor = rule.a_log.exp()
    logs = -factor * step[..., 0]
    log_errors = (4 + 14 * logs.abs() + factor * torch.sigmoid(raw) * (raw.abs() + 1)) ** 2
    state = given.new_zeros(heads, dims, rule.head_dim, dtype=torch.float64)
    # Errors of a column of the state, each by its length: squares of roundings, their sum, and fp32's variance / U^2.
    squares, worst, off = (state.new_zeros(heads, rule.head_dim) for _ in range(3))
    found = []
    for token in range(given.shape[0]):
        kept, key = logs[token].exp()[:, None], keys[token][:, :, None]
        added, length = step[token] * values[token], key.square().sum(dim=1)
        state = kept[..., None] * state
        off = kept**2 * off + (log_errors[token][:, None] + 4) * state.square().sum(dim=1)
        state = state + key * added[:, None]
        square = 6 * unit**2 * length * added.square()
        squares, worst = kept**2 * squares + square, kept * worst + 2 * square.sqrt()
        of_added = step[token].square() * value_errors[token] + values[token].square() * step_error[token]
        off = off + length * (of_added + (20 + dims / 6 + CHUNK / 6) * added.square())
        off = off + key_errors[token].sum(dim=1, keepdim=True) * added.square()
        if (token + 1) % CHUNK == 0:
            square = rule.state_unit**2 * state.square().sum(dim=1)
            squares, worst = squares + square, worst + square.sqrt()
        found.append(result_of(state, queries[token], query_errors[token], squares, worst, off, unit))
    read = Bounded(*(torch.stack(it) for it in zip(*found, strict=True)))
    skipped = rule.skip[:, None] * values
    most = read.most + unit * skipped.abs()
    deviation = (read.deviation**2 + U**2 * (rule.skip[:, None] ** 2 * value_errors + 4 * skipped**2)).sqrt()
    return precision.rounded(Bounded(read.truth + skipped, most, deviation))


def result_of(
    state: Tensor, query: Tensor, query_error: Tensor, squares: Tensor, worst: Tensor, off: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (truth, most, deviation) [heads, head_dim] of C times the state of one token."""
    products = query[:, :, None].square() * state.square()
    length = query.square().sum(dim=1, keepdim=True)
    square = 4 * unit**2 * products.sum(dim=1)
    most = torch.minimum(
        length.sqrt() * worst + 4 * square.sqrt(), _HOEFFDING * ((length * squares + square) / 3).sqrt()
    )
    variance = length * off + (20 + state.shape[1] / 6 + CHUNK / 6) * products.sum(dim=1)
    variance = variance + (query_error[:, :, None] * state.square()).sum(dim=1)
    return (query[:, :, None] * state).sum(dim=1), most, U * variance.sqrt()
