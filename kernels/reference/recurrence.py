"""The truth of a recurrence in fp64, token by token, and what a right path may err there (docs/limits.md derives it).

A right path computes in fp32, in any order of sums within a chunk of 64 tokens. It rounds to the dtype of the tokens:
queries and keys behind their norms, values behind the convolution, what a token adds to the state; and, where it
multiplies by matrix units of 16 bits, decays times products of keys. It reads the state as it is, or as two numbers of
16 bits. It rounds the state at borders to the dtype of the state, and the result once.

An error of what one token adds reaches a later result through the decays and updates between them, which are linear and
contract: `response` below. So each error is followed to each result, and squares of independent ones are summed up.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrence.calls import RecurrenceState, RecurrenceWeights
from kernels.recurrence.sizes import BLOCK, CHUNK, RecurrenceSizes
from kernels.reference.compare import Reference
from kernels.reference.experts import Rounding, rounding_of

_NORM_EPS = 1e-6
_Z_ROUNDED = 8.5  # standard deviations, as in `compare.py`
_Z_FP32 = 10.0
_U32 = 2.0**-24
_TWO_PARTS = 2.0**-17  # of a number as a sum of two of bf16
_LEAST = 1e-30  # limit of an element whose truth is 0
_SECOND_ORDER = 1.02  # of roundings that meet
_OF_SUM = 1 + CHUNK / 6  # roundings of a sum over a chunk: docs/limits.md


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

    queries, keys [B, T, Hv, Dk]; values [B, T, Hv, Dv]; others [B, T, Hv].

    decays are logarithms; `..._error` is the deviation of what fp32 errs, / u^2 where squared.
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


def true_tokens(qkv: Tensor, a: Tensor, b: Tensor, weights: RecurrenceWeights, sizes: RecurrenceSizes) -> TrueTokens:
    """Convolution, norms and gates of sequences from their first token on.

    qkv [B, T, conv_dim]; a, b [B, T, Hv]
    """
    padded, taps = F.pad(qkv.double(), (0, 0, sizes.width - 1, 0)), weights.conv.double()
    terms = padded.unfold(1, sizes.width, 1)
    sums = (terms * taps).sum(dim=-1)
    mixed = F.silu(sums)
    # silu's slope is at most 1.1; then its own exponential, quotient and product.
    squared = 1.21 * (1 + sizes.width / 6) * (terms.square() * taps.square()).sum(dim=-1) + (4 + sums.abs()) ** 2 * (
        mixed.square()
    )
    size = sizes.num_key_heads * sizes.key_dim

    def heads(part: Tensor) -> Tensor:
        by_head = part.reshape(*part.shape[:2], sizes.num_key_heads, sizes.key_dim)
        return by_head.repeat_interleave(sizes.group, dim=2)

    normed = []
    for start in (0, size):
        own, error = heads(mixed[..., start : start + size]), heads(squared[..., start : start + size])
        length = (own.square().sum(dim=-1, keepdim=True) + _NORM_EPS).sqrt()
        unit = own / length
        # Of the length: its elements' errors along the head, and the sum's own.
        of_length = (unit.square() * error).sum(dim=-1, keepdim=True) / length.square() + 4 + sizes.key_dim / 6
        normed.append((unit, error / length.square() + unit.square() * of_length))
    by_value_head = (*mixed.shape[:2], sizes.num_value_heads, sizes.value_dim)
    values, value_error = (part[..., 2 * size :].reshape(by_value_head) for part in (mixed, squared))
    x = a.double() + weights.dt_bias.double()
    factor, softplus = weights.a_log.double().exp(), F.softplus(x)
    decays = -factor * softplus
    by_x = factor * torch.sigmoid(x) * (x.abs() + 1)
    return TrueTokens(
        normed[0][0], normed[1][0], values, decays.clamp(min=-1e30), torch.sigmoid(b.double()),
        normed[0][1], normed[1][1], value_error,
        (4 + 12 * decays.abs() + by_x) ** 2, (4 + b.double().abs()) ** 2,
    )  # fmt: skip


def true_states(
    tokens: TrueTokens,
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype = torch.float64,
    begun: Tensor | None = None,
) -> tuple[Tensor, TrueStates]:
    """Return results [B, T, Hv, Dv], not scaled, and what the rule adds and keeps, rounded as a right path does it.

    dtype        what keys, values and what is added are rounded to
    state_dtype  likewise of states at borders
    begun        [B, Hv, Dk, Dv] fp64: the state before the first token, at a border; None: zero
    """
    tokens = replace(tokens, keys=tokens.keys.to(dtype).double(), values=tokens.values.to(dtype).double())
    num_sequences, num_tokens, num_heads, key_dim = tokens.keys.shape
    state = (
        tokens.keys.new_zeros(num_sequences, num_heads, key_dim, tokens.values.shape[-1]) if begun is None else begun
    )
    out, added, borders = torch.empty_like(tokens.values), torch.empty_like(tokens.values), [state]
    for token in range(num_tokens):
        state, added[:, token] = _next(state, tokens, token, dtype)
        out[:, token] = (tokens.queries[:, token, :, :, None] * state).sum(dim=2)
        if (token + 1) % CHUNK == 0:
            state = state.to(state_dtype).double()
            borders.append(state)
    return out, TrueStates(added, torch.stack(borders, dim=1), tokens)


def write_kept_state(
    state: RecurrenceState, slot: int, kept: TrueStates, qkv: Tensor, sequence: int, num_tokens: int
) -> None:
    """Write what a right path keeps behind the first tokens of a sequence to a slot.

    qkv  [B, T, conv_dim]
    """
    border, tokens = num_tokens // CHUNK * CHUNK, kept.tokens
    state.states[slot] = kept.borders[sequence, border // CHUNK].to(state.states.dtype)
    group = tokens.keys.shape[2] // state.keys.shape[2]
    for ring, known, begin in (
        (state.keys, tokens.keys[sequence, :, ::group], border),
        (state.values, kept.added[sequence], border),
        (state.decays, tokens.decays[sequence], border),
        (state.betas, tokens.betas[sequence], border),
        (state.misses, _misses(kept, sequence, num_tokens), num_tokens // BLOCK * BLOCK),
        (state.inputs, qkv[sequence], max(0, num_tokens - state.inputs.shape[1])),
    ):
        if begin < num_tokens and ring.shape[1]:
            places = [position % ring.shape[1] for position in range(begin, num_tokens)]
            ring[slot, places] = known[begin:num_tokens].to(ring.dtype)


def _misses(kept: TrueStates, sequence: int, num_tokens: int) -> Tensor:
    """[T, Hv, Dv]: of the tokens of the last block, what they add and what those before them in it take from that."""
    begin = num_tokens // BLOCK * BLOCK
    own = slice(begin, num_tokens)
    keys, added = kept.tokens.keys[sequence, own].transpose(0, 1), kept.added[sequence, own].transpose(0, 1)
    sums = kept.tokens.decays[sequence, own].t().cumsum(dim=-1)
    decays = (sums[:, :, None] - sums[:, None, :]).exp().tril(-1)
    of_keys = kept.tokens.betas[sequence, own].t()[..., None] * decays * (keys @ keys.transpose(1, 2))
    misses = torch.zeros_like(kept.added[sequence])
    misses[own] = (added + of_keys @ added).transpose(0, 1)
    return misses


def _next(state: Tensor, tokens: TrueTokens, token: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(state behind the token, what the token added)."""
    key = tokens.keys[:, token, :, :, None]
    state = tokens.decays[:, token].exp()[..., None, None] * state
    added = tokens.betas[:, token, :, None] * (tokens.values[:, token] - (key * state).sum(dim=2))
    added = added.to(dtype).double()
    return state + key * added[:, :, None], added


def recurrence_reference(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    sizes: RecurrenceSizes,
    borders: Tensor,
    state_dtype: torch.dtype,
) -> RecurrenceReference:
    """Return the expected results and states of sequences from their first token on, and what a right path may err.

    qkv      [B, T, conv_dim] and a, b [B, T, Hv], zero behind a sequence's end
    borders  [B] int: multiples of 64 at which states are judged, at most T
    """
    tokens = true_tokens(qkv, a, b, weights, sizes)
    out, states = true_states(tokens)
    errors = _Errors(out, states, rounding_of(qkv.dtype), borders)
    rounding = rounding_of(state_dtype) if state_dtype is not torch.float32 else None
    for chunk in reversed(range(-(-out.shape[1] // CHUNK))):
        errors.go_back(chunk, rounding)
    scale = sizes.key_dim**-0.5
    limit = errors.limit()
    num_tokens, truth = out.shape[1], scale * out
    of_out = scale * limit[:, :, :num_tokens].transpose(1, 2) + rounding_of(qkv.dtype).of(truth) + _LEAST
    at_border = states.borders[torch.arange(len(borders), device=out.device), borders // CHUNK]
    return RecurrenceReference(
        _reference(truth, of_out),
        _reference(at_border, limit[:, :, num_tokens:] + _LEAST),
        true_states(tokens, qkv.dtype, state_dtype)[1],
    )


def recurrence_reference_from(
    kept: RecurrenceState, num_known: int, qkv: Tensor, a: Tensor, b: Tensor, weights: RecurrenceWeights, first: int
) -> Reference:
    """Return the expected results [n, 1, Dv] of tokens behind a kept state, of one value head and its key head.

    kept       of one slot, [...]: as `RecurrenceState` has it, of one head each; inputs [ring, 2 * Dk + Dv]
    num_known  tokens behind the state's border that the slot keeps
    qkv [n, 2 * Dk + Dv], a, b [n, 1]: of the tokens from position `first` on
    """
    key_dim, value_dim = kept.states.shape[-2:]
    sizes = RecurrenceSizes(1, 1, key_dim, value_dim, weights.conv.shape[1])
    before = min(first, sizes.width - 1)
    places = [position % kept.inputs.shape[0] for position in range(first - before, first)]
    all_inputs = torch.cat([kept.inputs[places].to(qkv.dtype), qkv])
    gates = [torch.cat([it.new_zeros(before, 1), it]) for it in (a, b)]
    tokens = _behind(true_tokens(all_inputs[None], gates[0][None], gates[1][None], weights, sizes), before)
    state = kept.states.double()[None] if first else torch.zeros_like(kept.states, dtype=torch.float64)[None]
    tokens = _after_known(tokens, kept, first - num_known, num_known, state)
    out, states = true_states(tokens, begun=state)
    errors = _Errors(out, states, rounding_of(qkv.dtype), torch.tensor([-1], device=out.device))
    for chunk in reversed(range(-(-out.shape[1] // CHUNK))):
        errors.go_back(chunk, rounding_of(kept.states.dtype) if kept.states.dtype is not torch.float32 else None)
    num_tokens, scale = out.shape[1], key_dim**-0.5
    truth = scale * out[0, num_known:]
    limit = scale * errors.limit()[:, :, :num_tokens].transpose(1, 2)[0, num_known:]
    return Reference(truth, limit + rounding_of(qkv.dtype).of(truth) + _LEAST, None, float("inf"))


def _behind(tokens: TrueTokens, count: int) -> TrueTokens:
    return replace(tokens, **{name: getattr(tokens, name)[:, count:] for name in TrueTokens.__slots__})


def _after_known(tokens: TrueTokens, kept: RecurrenceState, border: int, count: int, state: Tensor) -> TrueTokens:
    """Return the tokens with those before them that a slot keeps: with values that make them add what they have added.

    Their errors are counted as if they were computed again.
    """
    if count == 0:
        return tokens
    places = [position % kept.keys.shape[0] for position in range(border, border + count)]
    keys, added, decays = (it[places].double() for it in (kept.keys, kept.values, kept.decays))
    values = []
    for key, own, decay in zip(keys, added, decays, strict=True):
        state = decay.exp()[None, :, None, None] * state
        read = (key[None, :, :, None] * state).sum(dim=2)
        values.append(own[None] + read)
        state = state + key[None, :, :, None] * own[None, :, None]
    one = torch.ones_like(decays)[None]
    known = TrueTokens(
        keys[None], keys[None], torch.stack(values, dim=1), decays[None], one, torch.zeros_like(keys)[None],
        torch.zeros_like(keys)[None], torch.zeros_like(added)[None], 0 * one, 0 * one,
    )  # fmt: skip
    joined = {name: torch.cat([getattr(known, name), getattr(tokens, name)], dim=1) for name in TrueTokens.__slots__}
    return TrueTokens(**joined)


def _reference(truth: Tensor, limit: Tensor) -> Reference:
    return Reference(truth.flatten(0, 1).contiguous(), limit.flatten(0, 1).contiguous(), None, float("inf"))


class _Errors:
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
        """[B, Hv, rows, Dv]: of what is not the rounding of the result."""
        rounded = _SECOND_ORDER * torch.minimum(self._worst, _Z_ROUNDED * (self._rounded / 3).sqrt())
        return rounded + _Z_FP32 * _U32 * self._fp32.sqrt()

    def go_back(self, chunk: int, state_rounding: Rounding | None) -> None:
        """Follow the errors of the tokens of a chunk."""
        tokens, first, last = self._tokens, chunk * CHUNK, min((chunk + 1) * CHUNK, self._num_tokens)
        state, states = self._states.borders[:, chunk], []
        for token in range(first, last):
            states.append(state)
            state, _ = _next(state, tokens, token)
        self._begin_states(last, state, state_rounding)
        own, before = slice(first, last), torch.stack(states, dim=2)  # [B, Hv, n, Dk, Dv]
        behind = torch.cat([before[:, :, 1:], state[:, :, None]], dim=2)
        queries, keys = tokens.queries[:, own].transpose(1, 2), tokens.keys[:, own].transpose(1, 2)
        query_error, key_error = tokens.query_error[:, own].transpose(1, 2), tokens.key_error[:, own].transpose(1, 2)
        between = self._between(first, last)
        of_queries, of_keys = (between * (it @ keys.transpose(2, 3)) for it in (queries, keys))
        self._add(own, *self._sums(queries, query_error, behind, of_queries, first))
        self._fp32[:, :, own] += 16 * self._past[:, :, own].square()
        decayed = tokens.decays[:, own].transpose(1, 2).exp()[..., None, None] * before
        sums = self._sums(keys, key_error, decayed, of_keys.tril(-1), first)
        for token in reversed(range(first, last)):
            fp32, rounded, worst = (it[:, :, token - first] for it in sums)
            self._of_token(token, fp32, rounded, worst)
        if state_rounding is not None:
            rows = slice(first, None)
            most, response = state_rounding.of(self._states.borders[:, chunk]), self._response[:, :, rows]
            self._add(
                rows, torch.zeros_like(self._past[:, :, rows]), response.square() @ most.square(), response.abs() @ most
            )

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

    def _sums(
        self, factors: Tensor, error: Tensor, behind: Tensor, weights: Tensor, first: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(variance in fp32, squares of roundings, their worst sum) of a product with the state, [B, Hv, n, Dv].

        factors  [B, Hv, n, Dk]: queries or keys of the chunk's tokens; error: its variance
        behind   [B, Hv, n, Dk, Dv]: the states they are multiplied by
        weights  [B, Hv, n, n]: of what the chunk's tokens added
        """
        own, rounding = slice(first, first + factors.shape[2]), self._rounding
        added, border = self._states.added[:, own].transpose(1, 2), self._states.borders[:, first // CHUNK]
        decayed = factors * self._tokens.decays[:, own].transpose(1, 2).cumsum(2).exp()[..., None]
        products = _each(factors.square(), behind.square()) + decayed.square() @ border.square()
        fp32 = (1 + factors.shape[-1] / 6) * products + _OF_SUM * (weights.square() @ added.square())
        fp32 = fp32 + _each(error, behind.square())
        if rounding.u == 0:
            return fp32, torch.zeros_like(fp32), torch.zeros_like(fp32)
        most, of_weights = rounding.of(factors), rounding.of(weights) * (weights != 0)
        rounded = _each(most.square(), behind.square()) + of_weights.square() @ added.square()
        worst = _each(most, behind.abs()) + of_weights @ added.abs()
        of_parts = _each(factors.abs(), behind.abs()) + decayed.abs() @ border.abs()
        return fp32, rounded + _TWO_PARTS**2 * products, worst + _TWO_PARTS * of_parts

    def _between(self, first: int, last: int) -> Tensor:
        """[B, Hv, n, n]: decays until each token of a chunk of what each one before it, or itself, added; else 0."""
        logs = self._tokens.decays[:, first:last].transpose(1, 2)
        size = last - first
        places = torch.arange(size, device=logs.device)
        is_behind = places[:, None] > places
        sums = torch.where(is_behind, logs[..., None], 0.0).cumsum(dim=2)
        return torch.where(places[:, None] >= places, sums.exp(), 0.0)

    def _of_token(self, token: int, fp32: Tensor, rounded: Tensor, worst: Tensor) -> None:
        """Follow the errors of what one token adds; the last three are `_sums` of its key, [B, Hv, Dv]."""
        tokens, rounding = self._tokens, self._rounding
        key, added, value = tokens.keys[:, token], self._states.added[:, token], tokens.values[:, token]
        decay, share = tokens.decays[:, token].exp()[..., None, None], tokens.betas[:, token][..., None]
        read = value - added / share.clamp(min=_LEAST)
        fp32 = share.square() * (fp32 + tokens.value_error[:, token] + 8 * (value.square() + read.square()))
        fp32 = fp32 + (16 + tokens.beta_error[:, token][..., None]) * added.square()
        rows = slice(token, None)
        response, past = self._response[:, :, rows], self._past[:, :, rows]
        unit = response @ key[..., None]  # [B, Hv, rows, 1]
        past -= unit * added[:, :, None]
        squared, added_squared = response.square(), added.square()[:, :, None]
        turned = squared @ (tokens.key_error[:, token] + 4 * key.square())[..., None]
        self._fp32[:, :, rows] += unit.square() * fp32[:, :, None] + turned * added_squared
        self._fp32[:, :, rows] += tokens.decay_error[:, token][..., None, None] * past.square()
        if rounding.u:
            most, most_value, most_added = rounding.of(key)[..., None], rounding.of(value), rounding.of(added)
            # What a token adds is rounded, and once more times its decay where it is added to the state.
            rounded = share.square() * (rounded + most_value.square()) + 2 * most_added.square()
            worst = share * (worst + most_value) + 2 * most_added
            self._rounded[:, :, rows] += unit.square() * rounded[:, :, None]
            self._rounded[:, :, rows] += (squared @ most.square()) * added_squared
            self._worst[:, :, rows] += unit.abs() * worst[:, :, None]
            self._worst[:, :, rows] += (response.abs() @ most) * added.abs()[:, :, None]
        response -= share[..., None] * unit * key[:, :, None]
        response *= decay

    def _add(self, rows: slice, fp32: Tensor, rounded: Tensor, worst: Tensor) -> None:
        self._fp32[:, :, rows] += fp32
        self._rounded[:, :, rows] += rounded
        self._worst[:, :, rows] += worst


def _each(factors: Tensor, states: Tensor) -> Tensor:
    """[B, Hv, n, Dv]: of each token its factors [.., n, Dk] times its own state [.., n, Dk, Dv]."""
    return (factors[..., None, :] @ states)[..., 0, :]
