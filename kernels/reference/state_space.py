"""The truth of a state space in fp64, token by token, and what a right path may err there (docs/limits.md derives it).

A right path computes in fp32, in any order of sums within a chunk of 64 tokens. It rounds to the dtype of the tokens:
C, B and x behind the convolution, what a token adds to the state (step * x), and, where it multiplies by matrix units
of 16 bits, decays times products of B and C. It reads the state as it is, or as two numbers of 16 bits, and rounds it
at borders to its dtype. The result is linear in each of these, so that each error is followed to each result by itself.

Lightning attention is the same with steps of 1 and without x in the result. Its queries, keys and values are given as
the rule takes them, so that none of them is rounded.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrence.calls import RecurrenceState, RecurrenceWeights
from kernels.recurrence.fixed_decay.weights import FixedDecayWeights
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.recurrence.state_space.weights import StateSpaceWeights
from kernels.reference.compare import Reference
from kernels.reference.experts import Rounding, rounding_of
from kernels.reference.recurrent_errors import (
    LEAST,
    OF_SUM,
    TWO_PARTS,
    U32,
    Z_FP32,
    RecurrenceReference,
    RecurrentErrors,
    TrueStates,
    TrueTokens,
    begun_state,
    by_value_head,
    reference_of_heads,
    tokens_from,
    with_kept_inputs,
    with_known,
)


def true_fixed_tokens(given: Tensor, weights: FixedDecayWeights, sizes: RecurrenceSizes) -> TrueTokens:
    """Return queries, keys and values [B, T, conv_dim] of lightning attention as they are given, betas 1."""
    size = sizes.num_key_heads * sizes.key_dim
    queries, keys = (by_value_head(given[..., part : part + size].double(), sizes) for part in (0, size))
    values = given[..., 2 * size :].double().reshape(*given.shape[:2], sizes.num_value_heads, sizes.value_dim)
    decays = -weights.a_log.double().exp().expand(*given.shape[:2], -1)
    one, no_key = torch.ones_like(decays), torch.zeros_like(keys)
    error = (4 + 4 * decays.abs()) ** 2  # of the exponentials of the slope and of what is summed
    return TrueTokens(
        queries, keys, values, decays.clamp(min=-1e30), one, no_key, no_key, torch.zeros_like(values), error, 0 * one
    )  # fmt: skip


def true_space_tokens(given: Tensor, steps: Tensor, weights: StateSpaceWeights, sizes: RecurrenceSizes) -> TrueTokens:
    """Convolution and steps of sequences from their first token on: queries are C, keys B, values x, betas the steps.

    given [B, T, conv_dim]; steps [B, T, Hv]
    """
    padded, taps = F.pad(given.double(), (0, 0, sizes.width - 1, 0)), weights.conv.double()
    terms, bias = padded.unfold(1, sizes.width, 1), weights.conv_bias.double()
    sums = (terms * taps).sum(dim=-1) + bias
    mixed = F.silu(sums)
    # silu's slope is at most 1.1; then its own exponential, quotient and product.
    squared = 1.21 * (1 + sizes.width / 6) * ((terms.square() * taps.square()).sum(dim=-1) + bias.square())
    squared = squared + (4 + sums.abs()) ** 2 * mixed.square()
    size = sizes.num_key_heads * sizes.key_dim
    queries, query_error = (by_value_head(part[..., :size], sizes) for part in (mixed, squared))
    keys, key_error = (by_value_head(part[..., size : 2 * size], sizes) for part in (mixed, squared))
    of_values = (*mixed.shape[:2], sizes.num_value_heads, sizes.value_dim)
    values, value_error = (part[..., 2 * size :].reshape(of_values) for part in (mixed, squared))
    x = steps.double() + weights.dt_bias.double()
    step = F.softplus(x, threshold=1e9).clamp(weights.least_step, weights.most_step)
    factor, by_x = weights.a_log.double().exp(), torch.sigmoid(x) * (x.abs() + 1)
    decays = -factor * step
    return TrueTokens(
        queries, keys, values, decays.clamp(min=-1e30), step, query_error, key_error, value_error,
        (4 + 14 * decays.abs() + factor * by_x) ** 2, (12 * step + by_x) ** 2,
    )  # fmt: skip


def true_spaces(
    tokens: TrueTokens,
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype = torch.float64,
    begun: Tensor | None = None,
) -> tuple[Tensor, TrueStates]:
    """Return what is read of the state [B, T, Hv, Dv], and what tokens add and is kept, rounded as a right path does.

    Arguments as of `recurrence.true_states`.
    """
    tokens = replace(tokens, keys=tokens.keys.to(dtype).double(), values=tokens.values.to(dtype).double())
    added = (tokens.betas[..., None] * tokens.values).to(dtype).double()
    shape = tokens.keys.shape[0], tokens.keys.shape[2], tokens.keys.shape[3], tokens.values.shape[-1]
    state = tokens.keys.new_zeros(shape) if begun is None else begun
    out, borders = torch.empty_like(tokens.values), [state]
    for token in range(tokens.keys.shape[1]):
        state = _next(state, tokens, added, token)
        out[:, token] = (tokens.queries[:, token, :, :, None] * state).sum(dim=2)
        if (token + 1) % CHUNK == 0:
            state = state.to(state_dtype).double()
            borders.append(state)
    return out, TrueStates(added, torch.stack(borders, dim=1), tokens)


def _next(state: Tensor, tokens: TrueTokens, added: Tensor, token: int) -> Tensor:
    decayed = tokens.decays[:, token].exp()[..., None, None] * state
    return decayed + tokens.keys[:, token, :, :, None] * added[:, token, :, None]


def state_space_reference(
    given: Tensor,
    steps: Tensor,
    unread: Tensor,
    weights: RecurrenceWeights,
    sizes: RecurrenceSizes,
    borders: Tensor,
    state_dtype: torch.dtype,
) -> RecurrenceReference:
    """Return the expected results and states of sequences from their first token on, and what a right path may err.

    given    [B, T, conv_dim] and steps [B, T, Hv], zero behind a sequence's end; lightning attention has no steps
    unread   not of these forms
    borders  [B] int: multiples of 64 at which states are judged, at most T
    """
    del unread
    tokens = _tokens_of(given, steps, weights, sizes)
    out, states = true_spaces(tokens)
    limit = _errors(out, states, weights, given.dtype, borders).followed(state_dtype)
    num_tokens = out.shape[1]
    results = _results(out, limit[:, :, :num_tokens].transpose(1, 2), tokens, weights, given.dtype)
    at_border = states.borders[torch.arange(len(borders), device=out.device), borders // CHUNK]
    return RecurrenceReference(
        reference_of_heads(*results),
        reference_of_heads(at_border, limit[:, :, num_tokens:] + LEAST),
        true_spaces(tokens, given.dtype, state_dtype)[1],
    )


def state_space_reference_from(
    kept: RecurrenceState, num_known: int, given: Tensor, steps: Tensor, weights: RecurrenceWeights, first: int
) -> Reference:
    """Return the expected results [n, 1, Dv] of tokens behind a kept state, of one value head and its key head.

    Arguments as of `recurrence.recurrence_reference_from`.
    """
    key_dim, value_dim = kept.states.shape[-2:]
    sizes = RecurrenceSizes(1, 1, key_dim, value_dim, weights.conv.shape[1])
    inputs = with_kept_inputs(kept, given, first, sizes.width)
    before = inputs.shape[0] - given.shape[0]
    all_steps = F.pad(steps, (0, 0, before, 0))
    new = tokens_from(_tokens_of(inputs[None], all_steps[None], weights, sizes), before)
    tokens = _after_known(new, kept, range(first - num_known, first))
    out, states = true_spaces(tokens, begun=begun_state(kept, first))
    errors = _errors(out, states, weights, given.dtype, torch.tensor([-1], device=out.device))
    limit = errors.followed(kept.states.dtype)[:, :, num_known : out.shape[1]].transpose(1, 2)
    truth, most = _results(out[:, num_known:], limit, new, weights, given.dtype)
    return reference_of_heads(truth, most)


def _tokens_of(given: Tensor, steps: Tensor, weights: RecurrenceWeights, sizes: RecurrenceSizes) -> TrueTokens:
    if isinstance(weights, FixedDecayWeights):
        return true_fixed_tokens(given, weights, sizes)
    assert isinstance(weights, StateSpaceWeights), "a shape of the form state-space has such weights"
    return true_space_tokens(given, steps, weights, sizes)


def _errors(
    out: Tensor, states: TrueStates, weights: RecurrenceWeights, dtype: torch.dtype, borders: Tensor
) -> "_Errors":
    is_given = isinstance(weights, FixedDecayWeights)
    return _Errors(
        out, states, rounding_of(dtype), borders, of_inputs=rounding_of(torch.float32 if is_given else dtype)
    )


def _after_known(tokens: TrueTokens, kept: RecurrenceState, known: range) -> TrueTokens:
    """Return the tokens with those before them that a slot keeps, which add what they have added, without an error."""
    if len(known) == 0:
        return tokens
    places = [position % kept.keys.shape[0] for position in known]
    keys, added, decays = (it[places].double()[None] for it in (kept.keys, kept.values, kept.decays))
    return with_known(keys, added, decays, tokens)


def _results(
    out: Tensor, limit: Tensor, tokens: TrueTokens, weights: RecurrenceWeights, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return results [B, T, Hv, Dv] with x times its factor, and their limits, the rounding of the result included."""
    rounding = rounding_of(dtype)
    if not isinstance(weights, StateSpaceWeights):
        return out, limit + rounding.of(out) + LEAST
    skip = weights.skip.double()[:, None]
    truth = out + skip * tokens.values
    of_skip = skip.abs() * (rounding.of(tokens.values) + Z_FP32 * U32 * tokens.value_error.sqrt())
    of_sum = Z_FP32 * U32 * ((skip * tokens.values).abs() + out.abs())
    return truth, limit + of_skip + of_sum + rounding.of(truth) + LEAST


class _Errors(RecurrentErrors):
    """Errors of a state space, followed token by token; of_inputs: the rounding of C, B and x."""

    def __init__(
        self, out: Tensor, states: TrueStates, rounding: Rounding, borders: Tensor, *, of_inputs: Rounding
    ) -> None:
        super().__init__(out, states, rounding, borders)
        self._of_inputs = of_inputs

    def followed(self, state_dtype: torch.dtype) -> Tensor:
        """Return the limits [B, Hv, rows, Dv] of what is not the rounding of the result."""
        self._of_queries()
        of_state = None if state_dtype is torch.float32 else rounding_of(state_dtype)
        for token in reversed(range(self._num_tokens)):
            if (token + 1) % CHUNK == 0:
                self._at_border(token + 1, of_state)
            self._of_token(token)
        self._at_border(0, of_state)
        return self.limit()

    def _of_queries(self) -> None:
        """Follow the errors of what reads the states: C, and the sums over its dims."""
        tokens, key_dim = self._tokens, self._tokens.keys.shape[-1]
        state = self._states.borders[:, 0]
        for token in range(self._num_tokens):
            state = _next(state, tokens, self._states.added, token)
            query, squared = tokens.queries[:, token, :, None], state.square()
            most = self._of_inputs.of(query)
            of_sum = (4 + key_dim / 6) * query.square() + tokens.query_error[:, token, :, None]
            self._fp32[:, :, token] += (of_sum @ squared)[..., 0, :]
            if self._rounding.u:
                self._rounded[:, :, token] += (most.square() @ squared)[..., 0, :]
                self._worst[:, :, token] += (most @ state.abs())[..., 0, :]
        self._fp32[:, :, : self._num_tokens] += 16 * self._past[:, :, : self._num_tokens].square()

    def _at_border(self, border: int, rounding: Rounding | None) -> None:
        """Follow the rounding of the state at a border, and how it is read; begin with it where it is judged."""
        state = self._states.borders[:, border // CHUNK]
        is_border = (self._borders == border)[:, None, None, None]
        own = slice(self._num_tokens, None)
        unit = torch.eye(state.shape[2], dtype=state.dtype, device=state.device)
        self._response[:, :, own] = torch.where(is_border, unit, self._response[:, :, own])
        self._past[:, :, own] = torch.where(is_border, state, self._past[:, :, own])
        self._fp32[:, :, own] += torch.where(is_border, 16 * state.square(), 0.0)
        squared = self._response.square() @ state.square()
        self._fp32 += (4 + state.shape[2] / 6) * squared
        if self._rounding.u:
            self._rounded += TWO_PARTS**2 * squared
            self._worst += TWO_PARTS * (self._response.abs() @ state.abs())
        if rounding is not None:
            most = rounding.of(state)
            self._rounded += self._response.square() @ most.square()
            self._worst += self._response.abs() @ most

    def _of_token(self, token: int) -> None:
        """Follow the errors of what one token adds, and of its decay."""
        tokens, rounding, of_inputs = self._tokens, self._rounding, self._of_inputs
        key, added, value = tokens.keys[:, token], self._states.added[:, token], tokens.values[:, token]
        step = tokens.betas[:, token][..., None]
        rows = slice(token, None)
        response, past = self._response[:, :, rows], self._past[:, :, rows]
        unit, added = response @ key[..., None], added[:, :, None]  # [B, Hv, rows, 1], [B, Hv, 1, Dv]
        past -= unit * added
        squared = response.square()
        of_added = (
            step.square() * tokens.value_error[:, token] + value.square() * tokens.beta_error[:, token][..., None]
        )
        of_key = squared @ (tokens.key_error[:, token] + (4 + key.shape[-1] / 6) * key.square())[..., None]
        of_sums = (20 + OF_SUM) * (unit * added).square()
        self._fp32[:, :, rows] += unit.square() * of_added[:, :, None] + of_key * added.square() + of_sums
        self._fp32[:, :, rows] += tokens.decay_error[:, token][..., None, None] * past.square()
        if rounding.u:
            # What a token adds is rounded, and once more times its decay where it is added to the state.
            most_key, most_added = of_inputs.of(key)[..., None], rounding.of(added)
            most_value, of_unit = (step * of_inputs.of(value))[:, :, None], rounding.of(unit) * (unit != 0)
            self._rounded[:, :, rows] += unit.square() * (most_value.square() + 2 * most_added.square())
            self._rounded[:, :, rows] += (of_unit.square() + squared @ most_key.square()) * added.square()
            self._worst[:, :, rows] += unit.abs() * (most_value + 2 * most_added)
            self._worst[:, :, rows] += (of_unit + response.abs() @ most_key) * added.abs()
        response *= tokens.decays[:, token].exp()[..., None, None]
