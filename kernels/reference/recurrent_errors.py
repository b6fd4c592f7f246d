"""Tokens, states and errors followed to the results: shared by the references of all forms of a recurrence.

An error of what one token adds reaches a later result through the decays and updates between them, which are linear and
contract: `response` below. So each error is followed to each result, and squares of independent ones are summed up.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.recurrence.calls import RecurrenceState
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.reference.compare import Reference
from kernels.reference.experts import Rounding, rounding_of

Z_ROUNDED = 8.5  # standard deviations, as in `compare.py`
Z_FP32 = 10.0
U32 = 2.0**-24
TWO_PARTS = 2.0**-17  # of a number as a sum of two of bf16
LEAST = 1e-30  # limit of an element whose truth is 0
SECOND_ORDER = 1.02  # of roundings that meet
OF_SUM = 1 + CHUNK / 6  # roundings of a sum over a chunk: docs/limits.md


@dataclass(frozen=True, slots=True)
class RecurrenceReference:
    """out     [B * T, value_heads, value_dim]: of each token; of padding it means nothing
    states  [B * value_heads, key_dim, value_dim]: at each sequence's border
    kept    what a right path keeps: rounded where it rounds, each token behind the rounded ones before it
    """

    out: Reference
    states: Reference
    kept: "TrueStates"

    @property
    def num_bytes(self) -> int:
        tensors = (self.kept.added, self.kept.borders, self.kept.tokens.keys, self.kept.tokens.queries)
        return self.out.num_bytes + self.states.num_bytes + 3 * sum(it.nbytes for it in tensors)


@dataclass(frozen=True, slots=True)
class TrueTokens:
    """Tokens behind convolution, norms and gates, fp64.

    queries, keys [B, T, Hv, Dk]; values [B, T, Hv, Dv]; others [B, T, Hv], but decays of channels [B, T, Hv, Dk].

    decays are logarithms; `..._error` is the variance of what fp32 errs, / u^2. Of a state space queries are C, keys B,
    values x, betas the steps.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    betas: Tensor
    query_error: Tensor
    key_error: Tensor
    value_error: Tensor
    decay_error: Tensor
    beta_error: Tensor


@dataclass(frozen=True, slots=True)
class TrueStates:
    """added   [B, T, Hv, Dv]: beta * (value - what the state has of it), which the key's direction gets
    borders  [B, T // 64 + 1, Hv, Dk, Dv]: states at multiples of 64 tokens
    """

    added: Tensor
    borders: Tensor
    tokens: TrueTokens


def by_value_head(part: Tensor, sizes: RecurrenceSizes) -> Tensor:
    """Return key heads [B, T, Hk * Dk] as each value head reads them: [B, T, Hv, Dk]."""
    by_head = part.reshape(*part.shape[:2], sizes.num_key_heads, sizes.key_dim)
    return by_head.repeat_interleave(sizes.group, dim=2)


def with_kept_inputs(kept: RecurrenceState, given: Tensor, first: int, width: int) -> Tensor:
    """Return inputs [.., conv_dim] of tokens from position `first` on, behind those that their convolution reads.

    kept  of one slot; it has no inputs before the sequence's first token
    """
    places = [position % kept.inputs.shape[0] for position in range(max(0, first - width + 1), first)]
    return torch.cat([kept.inputs[places].to(given.dtype), given])


def begun_state(kept: RecurrenceState, first: int) -> Tensor:
    """Return the state [1, ...] fp64 of one slot before position `first`: zero before the first token."""
    state = kept.states.double()[None]
    return state if first else torch.zeros_like(state)


def tokens_from(tokens: TrueTokens, count: int) -> TrueTokens:
    """Return the tokens but for the first `count`."""
    return replace(tokens, **{name: getattr(tokens, name)[:, count:] for name in TrueTokens.__slots__})


def with_known(keys: Tensor, values: Tensor, decays: Tensor, tokens: TrueTokens) -> TrueTokens:
    """Return tokens behind known ones, [1, n, ...], whose share or step is 1 and whose numbers have no error."""
    one, no_key, no_value = torch.ones_like(keys[..., 0]), torch.zeros_like(keys), torch.zeros_like(values)
    known = TrueTokens(keys, keys, values, decays, one, no_key, no_key, no_value, torch.zeros_like(decays), 0 * one)
    return TrueTokens(
        **{name: torch.cat([getattr(known, name), getattr(tokens, name)], dim=1) for name in TrueTokens.__slots__}
    )


def factors(decays: Tensor) -> Tensor:
    """Return what states [B, Hv, Dk, Dv] are multiplied by, of logarithms [B, Hv] or [B, Hv, Dk] of decays."""
    return decays.exp().reshape(*decays.shape[:2], -1, 1)


def state_behind(
    state: Tensor, tokens: TrueTokens, token: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return (state behind a token, what the token added, rounded to the dtype) of a delta rule."""
    key = tokens.keys[:, token, :, :, None]
    state = factors(tokens.decays[:, token]) * state
    added = tokens.betas[:, token, :, None] * (tokens.values[:, token] - (key * state).sum(dim=2))
    added = added.to(dtype).double()
    return state + key * added[:, :, None], added


def reference_of_heads(truth: Tensor, limit: Tensor) -> Reference:
    """Return truth and limits [A, B, n, D] as a reference of [A * B, n, D]."""
    return Reference(truth.flatten(0, 1).contiguous(), limit.flatten(0, 1).contiguous(), None, float("inf"))


class RecurrentErrors:
    """Errors of all tokens as they reach results and states, followed from the last token to the first.

    Rows are results of the T tokens and, behind them, key_dim rows of the state at the border, all [B, Hv, rows, ...].
    response  [.., Dk]: of a row to the state behind a token
    past      [.., Dv]: the row's part that comes from the tokens before
    fp32, rounded, worst  [.., Dv]: variance / u^2; sum of squares of roundings; sum of the most that they are
    """

    def __init__(self, out: Tensor, states: TrueStates, rounding: Rounding, borders: Tensor) -> None:
        tokens = states.tokens
        self._tokens, self._states, self._rounding, self._borders = tokens, states, rounding, borders
        num_sequences, self._num_tokens, num_heads, key_dim = tokens.keys.shape
        rows = (num_sequences, num_heads, self._num_tokens + key_dim)
        self._response = out.new_zeros(*rows, key_dim)
        self._response[:, :, : self._num_tokens] = tokens.queries.transpose(1, 2)
        self._past = out.new_zeros(*rows, out.shape[-1])
        self._past[:, :, : self._num_tokens] = out.transpose(1, 2)
        self._fp32, self._rounded, self._worst = (torch.zeros_like(self._past) for _ in range(3))

    def limit(self) -> Tensor:
        """Return the limits [B, Hv, rows, Dv] of what is not the rounding of the result, of errors followed so far."""
        rounded = SECOND_ORDER * torch.minimum(self._worst, Z_ROUNDED * (self._rounded / 3).sqrt())
        return rounded + Z_FP32 * U32 * self._fp32.sqrt()

    def _begin_states(self, last: int, state: Tensor, rounding: Rounding | None) -> None:
        """Judge the state behind token `last` - 1 where that is a sequence's border."""
        is_border = (self._borders == last)[:, None, None, None]
        own = slice(self._num_tokens, None)
        unit = torch.eye(state.shape[2], dtype=state.dtype, device=state.device)
        self._response[:, :, own] = torch.where(is_border, unit, self._response[:, :, own])
        self._past[:, :, own] = torch.where(is_border, state, self._past[:, :, own])
        self._fp32[:, :, own] += torch.where(is_border, 16 * state.square(), 0.0)
        if rounding is not None:
            most = torch.where(is_border, rounding.of(state), 0.0)
            self._add(own, torch.zeros_like(most), most.square(), most)

    def _stored(self, chunk: int, rounding: Rounding | None) -> None:
        """Follow the rounding of the state at the chunk's first border to the rows behind it."""
        if rounding is not None:
            rows = slice(chunk * CHUNK, None)
            most, response = rounding.of(self._states.borders[:, chunk]), self._response[:, :, rows]
            none = torch.zeros_like(self._past[:, :, rows])
            self._add(rows, none, response.square() @ most.square(), response.abs() @ most)

    def _add(self, rows: slice, fp32: Tensor, rounded: Tensor, worst: Tensor) -> None:
        self._fp32[:, :, rows] += fp32
        self._rounded[:, :, rows] += rounded
        self._worst[:, :, rows] += worst


class DeltaErrors(RecurrentErrors, ABC):
    """Errors of a delta rule, followed chunk by chunk."""

    def followed(self, state_dtype: torch.dtype) -> Tensor:
        """Return the limits [B, Hv, rows, Dv] of what is not the rounding of the result."""
        rounding = None if state_dtype is torch.float32 else rounding_of(state_dtype)
        for chunk in reversed(range(-(-self._num_tokens // CHUNK))):
            self._of_chunk(chunk, rounding)
        return self.limit()

    @abstractmethod
    def _of_chunk(self, chunk: int, state_rounding: Rounding | None) -> None:
        """Follow the errors of the tokens of a chunk."""
