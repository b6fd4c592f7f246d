"""The gated delta rule of one sequence, token by token in fp64, with the limits of docs/limits.md ("Layers").

Source: Yang et al. 2024 (Gated Delta Networks), equation 10: S = decay S; S += k (beta (v - S^T k))^T; o = S^T q. In
Kimi Delta Attention (Kimi Team 2025) each channel of a key, a row of S, has a decay of its own.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qualification.model.forward.bounded import Bounded, Precision, U

_EPS = 1e-6  # within the root of the lengths of queries and keys
_HOEFFDING = 8.5
_CHUNK = 64  # tokens that a server may sum together


@dataclass(frozen=True, slots=True)
class Rule:
    """conv     [channels, width] fp64: queries, keys and values, the factor of the newest token last
    a_log    [value heads] fp64; dt_bias likewise, or of Kimi Delta Attention [value heads * key_dim]
    key_heads, key_dim, value_dim   sizes; a key head serves as many value heads as there are for each
    state_unit   share that a number of a state is off when a server stores it, every 64 tokens
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    key_heads: int
    key_dim: int
    value_dim: int
    state_unit: float = 0.0


def mix(qkv: Tensor, writing: Tensor, decay: Tensor, rule: Rule, precision: Precision) -> Bounded:
    """Return the results [T, heads, value_dim] of a sequence from its first token on.

    qkv [T, channels], writing [T, heads] and decay [T, numbers of dt_bias]: as a server hands them out
    """
    tokens = _tokens(qkv.double(), writing.double(), decay.double(), rule)
    unit = torch.finfo(precision.dtype).eps / 2 if precision.is_narrow else 0.0
    num_tokens, num_heads, key_dim = tokens.keys.shape
    state = qkv.new_zeros(num_heads, key_dim, rule.value_dim, dtype=torch.float64)
    sums = _Sums(*(torch.zeros(num_heads, rule.value_dim, dtype=torch.float64, device=qkv.device) for _ in range(4)))
    truths, mosts, deviations = [], [], []
    for token in range(num_tokens):
        key, query = tokens.keys[token], tokens.queries[token]
        share, kept = tokens.writing[token][:, None], tokens.logs[token].exp()
        state = kept[..., None] * state
        sums.decay(kept.amax(dim=1, keepdim=True), tokens.log_errors[token], state)
        value = tokens.values[token]
        added = share * (value - (key[:, :, None] * state).sum(dim=1))
        sums.add(_Addition(value, share, added, state, *(it[token] for it in tokens.errors)), unit, key_dim)
        state = state + key[:, :, None] * added[:, None]
        if (token + 1) % _CHUNK == 0:
            sums.store(state, rule.state_unit)
        most, deviation = sums.of_result(state, tokens.query_errors[token], unit, key_dim)
        truths.append((query[:, :, None] * state).sum(dim=1))
        mosts.append(most)
        deviations.append(deviation)
    scale = key_dim**-0.5
    found = Bounded(torch.stack(truths), torch.stack(mosts), torch.stack(deviations)).times(scale)
    return precision.rounded(found)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Inputs of the rule: queries, keys [T, heads, key_dim] of length one, values, gates.

    logs      [T, heads, 1 or key_dim]: logarithms of the decays
    errors    variances in units of U^2: of keys as shares of their length, of values, and of `writing` as a share
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    writing: Tensor
    logs: Tensor
    query_errors: Tensor
    log_errors: Tensor
    errors: tuple[Tensor, Tensor, Tensor]


def _tokens(qkv: Tensor, writing: Tensor, decay: Tensor, rule: Rule) -> _Tokens:
    width, heads = rule.conv.shape[1], rule.a_log.shape[0]
    terms = F.pad(qkv, (0, 0, width - 1, 0)).unfold(0, width, 1) * rule.conv
    sums = terms.sum(dim=-1)
    mixed = sums * torch.sigmoid(sums)
    # The slope of x sigmoid(x) is below 1.1; its own exponential, quotient and product come to it.
    variance = 1.21 * (1 + width / 6) * terms.square().sum(dim=-1) + ((4 + sums.abs()) * mixed) ** 2
    size = rule.key_heads * rule.key_dim

    def normed(part: slice) -> tuple[Tensor, Tensor]:
        own, error = (it[:, part].reshape(-1, rule.key_heads, rule.key_dim) for it in (mixed, variance))
        square = own.square().sum(dim=-1, keepdim=True) + _EPS
        of_length = 2 * error.sum(dim=-1) / square[..., 0] + 4 + rule.key_dim / 6
        repeats = heads // rule.key_heads
        return (own / square.sqrt()).repeat_interleave(repeats, 1), of_length.repeat_interleave(repeats, 1)

    queries, query_errors = normed(slice(size))
    keys, key_errors = normed(slice(size, 2 * size))
    values, value_errors = (it[:, 2 * size :].reshape(-1, heads, rule.value_dim) for it in (mixed, variance))
    x = (decay + rule.dt_bias).view(decay.shape[0], heads, -1)
    factor = rule.a_log.exp()[:, None]
    logs = -factor * F.softplus(x)
    log_errors = (4 + 12 * logs.abs() + factor * torch.sigmoid(x) * (x.abs() + 1)) ** 2
    return _Tokens(
        queries, keys, values, torch.sigmoid(writing), logs, query_errors, log_errors,
        (key_errors, value_errors, (4 + writing.abs()) ** 2),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Addition:
    """An addition to the state by one token: [heads, value_dim], share [heads, 1], state before it, and variances."""

    value: Tensor
    share: Tensor
    added: Tensor
    state: Tensor
    key_error: Tensor
    value_error: Tensor
    share_error: Tensor


@dataclass(slots=True)
class _Sums:
    """Errors of the columns of the state, each by its length [heads, value_dim]: no step makes one longer.

    For keys are of length one at most, `beta` is between 0 and 1, and so is the decay.

    squares   of roundings to the dtype; worst: their sum
    variance  of sums in fp32, in units of U^2
    added     squares of what tokens added, decayed
    """

    squares: Tensor
    worst: Tensor
    variance: Tensor
    added: Tensor

    def decay(self, kept: Tensor, log_error: Tensor, state: Tensor) -> None:
        """Follow the errors through a decay; `state` is decayed already.

        kept  [heads, 1]: of channels the largest one; log_error [heads, 1 or key_dim]
        """
        self.worst = kept * self.worst
        self.squares, self.added = kept**2 * self.squares, kept**2 * self.added
        self.variance = kept**2 * self.variance + ((log_error[..., None] + 4) * state.square()).sum(dim=1)

    def add(self, it: _Addition, unit: float, key_dim: int) -> None:
        """Follow the errors of what a token reads and adds: keys, values, products and sums are rounded."""
        length = it.state.square().sum(dim=1)
        read = (it.share * length.sqrt()) ** 2
        square = 6 * read + 4 * it.share**2 * self.added + 2 * (it.share * it.value) ** 2 + 6 * it.added**2
        self.squares = self.squares + unit**2 * square
        self.worst = self.worst + 4 * unit * square.sqrt()
        key_error = it.key_error[:, None]
        self.variance = self.variance + (1 + key_dim / 6 + _CHUNK / 6) * (read + it.share**2 * self.added)
        self.variance = self.variance + it.share**2 * (it.value_error + 8 * it.value**2)
        self.variance = self.variance + (16 + it.share_error[:, None] + 2 * key_error) * it.added**2 + key_error * read
        self.added = self.added + it.added**2

    def store(self, state: Tensor, unit: float) -> None:
        """Follow the errors of a state that is stored."""
        square = unit**2 * state.square().sum(dim=1)
        self.squares, self.worst = self.squares + square, self.worst + square.sqrt()

    def of_result(self, state: Tensor, query_error: Tensor, unit: float, key_dim: int) -> tuple[Tensor, Tensor]:
        """Return (most, deviation) of a query of length one times the state."""
        length = state.square().sum(dim=1)
        square = unit**2 * (6 * length + 4 * self.added)
        most = torch.minimum(self.worst + 4 * square.sqrt(), _HOEFFDING * ((self.squares + square) / 3).sqrt())
        variance = self.variance + (20 + key_dim / 6 + _CHUNK / 6 + query_error[:, None]) * length
        variance = variance + (1 + _CHUNK / 6) * self.added
        return most, U * variance.sqrt()
