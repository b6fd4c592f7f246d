"""The truth of a recurrence in fp64, token by token, and what a right path may err there (docs/limits.md derives it).

A right path computes in fp32, in any order of sums within a chunk of 64 tokens. It rounds to the dtype of the tokens:
queries and keys behind their norms, values behind the convolution, what a token adds to the state; and, where it
multiplies by matrix units of 16 bits, decays times products of keys. It reads the state as it is, or as two numbers of
16 bits. It rounds the state at borders to the dtype of the state, and the result once.

`recurrent_errors.py` says how an error reaches a result, and `channel_errors.py` what differs where each channel of a
key has a decay of its own.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrence.calls import RecurrenceState, RecurrenceWeights
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from kernels.recurrence.sizes import BLOCK, CHUNK, RecurrenceSizes
from kernels.reference.channel_errors import ChannelErrors
from kernels.reference.compare import Reference
from kernels.reference.experts import Rounding, rounding_of
from kernels.reference.recurrent_errors import (
    LEAST,
    OF_SUM,
    TWO_PARTS,
    DeltaErrors,
    RecurrenceReference,
    TrueStates,
    TrueTokens,
    begun_state,
    by_value_head,
    factors,
    reference_of_heads,
    state_behind,
    tokens_from,
    with_kept_inputs,
    with_known,
)

_NORM_EPS = 1e-6


def true_tokens(qkv: Tensor, a: Tensor, b: Tensor, weights: RecurrenceWeights, sizes: RecurrenceSizes) -> TrueTokens:
    """Convolution, norms and gates of sequences from their first token on.

    qkv [B, T, conv_dim]; a, b [B, T, Hv], but of channels a [B, T, Hv * Dk]
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
    normed = []
    for start in (0, size):
        own, error = (by_value_head(it[..., start : start + size], sizes) for it in (mixed, squared))
        length = (own.square().sum(dim=-1, keepdim=True) + _NORM_EPS).sqrt()
        unit = own / length
        # Of the length: its elements' errors along the head, and the sum's own.
        of_length = (unit.square() * error).sum(dim=-1, keepdim=True) / length.square() + 4 + sizes.key_dim / 6
        normed.append((unit, error / length.square() + unit.square() * of_length))
    of_values = (*mixed.shape[:2], sizes.num_value_heads, sizes.value_dim)
    values, value_error = (part[..., 2 * size :].reshape(of_values) for part in (mixed, squared))
    x, factor = a.double() + weights.dt_bias.double(), weights.a_log.double().exp()
    if isinstance(weights, ChannelDeltaWeights):
        x, factor = x.view(*x.shape[:2], sizes.num_value_heads, sizes.key_dim), factor[:, None]
    softplus = F.softplus(x)
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
        state, added[:, token] = state_behind(state, tokens, token, dtype)
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
    rings = [
        (state.keys, tokens.keys[sequence, :, ::group], border),
        (state.values, kept.added[sequence], border),
        (state.decays, tokens.decays[sequence], border),
        (state.inputs, qkv[sequence], max(0, num_tokens - state.inputs.shape[1])),
    ]
    if state.misses.shape[1]:  # of the gated delta rule alone
        rings.append((state.betas, tokens.betas[sequence], border))
        rings.append((state.misses, _misses(kept, sequence, num_tokens), num_tokens // BLOCK * BLOCK))
    for ring, known, begin in rings:
        if begin < num_tokens:
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

    qkv      [B, T, conv_dim] and a, b as of `true_tokens`, zero behind a sequence's end
    borders  [B] int: multiples of 64 at which states are judged, at most T
    """
    tokens = true_tokens(qkv, a, b, weights, sizes)
    out, states = true_states(tokens)
    limit = _errors_of(weights)(out, states, rounding_of(qkv.dtype), borders).followed(state_dtype)
    scale, num_tokens = sizes.key_dim**-0.5, out.shape[1]
    truth = scale * out
    of_out = scale * limit[:, :, :num_tokens].transpose(1, 2) + rounding_of(qkv.dtype).of(truth) + LEAST
    at_border = states.borders[torch.arange(len(borders), device=out.device), borders // CHUNK]
    return RecurrenceReference(
        reference_of_heads(truth, of_out),
        reference_of_heads(at_border, limit[:, :, num_tokens:] + LEAST),
        true_states(tokens, qkv.dtype, state_dtype)[1],
    )


def recurrence_reference_from(
    kept: RecurrenceState, num_known: int, qkv: Tensor, a: Tensor, b: Tensor, weights: RecurrenceWeights, first: int
) -> Reference:
    """Return the expected results [n, 1, Dv] of tokens behind a kept state, of one value head and its key head.

    kept       of one slot, [...]: as `RecurrenceState` has it, of one head each; inputs [ring, 2 * Dk + Dv]
    num_known  tokens behind the state's border that the slot keeps
    qkv [n, 2 * Dk + Dv], a, b [n, 1]: of the tokens from position `first` on; of channels a [n, Dk]
    """
    key_dim, value_dim = kept.states.shape[-2:]
    sizes = RecurrenceSizes(1, 1, key_dim, value_dim, weights.conv.shape[1])
    inputs = with_kept_inputs(kept, qkv, first, sizes.width)
    before = inputs.shape[0] - qkv.shape[0]
    gates = [torch.cat([it.new_zeros(before, it.shape[1]), it]) for it in (a, b)]
    tokens = tokens_from(true_tokens(inputs[None], gates[0][None], gates[1][None], weights, sizes), before)
    state = begun_state(kept, first)
    tokens = _after_known(tokens, kept, first - num_known, num_known, state)
    out, states = true_states(tokens, begun=state)
    errors = _errors_of(weights)(out, states, rounding_of(qkv.dtype), torch.tensor([-1], device=out.device))
    scale, truth = key_dim**-0.5, key_dim**-0.5 * out[:, num_known:]
    limit = scale * errors.followed(kept.states.dtype)[:, :, num_known : out.shape[1]].transpose(1, 2)
    return reference_of_heads(truth, limit + rounding_of(qkv.dtype).of(truth) + LEAST)


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
        state = factors(decay[None]) * state
        read = (key[None, :, :, None] * state).sum(dim=2)
        values.append(own[None] + read)
        state = state + key[None, :, :, None] * own[None, :, None]
    return with_known(keys[None], torch.stack(values, dim=1), decays[None], tokens)


def _errors_of(weights: RecurrenceWeights) -> "type[_Errors | ChannelErrors]":
    return ChannelErrors if isinstance(weights, ChannelDeltaWeights) else _Errors


class _Errors(DeltaErrors):
    """Errors of the gated delta rule, followed chunk by chunk."""

    def _of_chunk(self, chunk: int, state_rounding: Rounding | None) -> None:
        tokens, first, last = self._tokens, chunk * CHUNK, min((chunk + 1) * CHUNK, self._num_tokens)
        state, states = self._states.borders[:, chunk], []
        for token in range(first, last):
            states.append(state)
            state, _ = state_behind(state, tokens, token)
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
        self._stored(chunk, state_rounding)

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
        fp32 = (1 + factors.shape[-1] / 6) * products + OF_SUM * (weights.square() @ added.square())
        fp32 = fp32 + _each(error, behind.square())
        if rounding.u == 0:
            return fp32, torch.zeros_like(fp32), torch.zeros_like(fp32)
        most, of_weights = rounding.of(factors), rounding.of(weights) * (weights != 0)
        rounded = _each(most.square(), behind.square()) + of_weights.square() @ added.square()
        worst = _each(most, behind.abs()) + of_weights @ added.abs()
        of_parts = _each(factors.abs(), behind.abs()) + decayed.abs() @ border.abs()
        return fp32, rounded + TWO_PARTS**2 * products, worst + TWO_PARTS * of_parts

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
        read = value - added / share.clamp(min=LEAST)
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


def _each(factors: Tensor, states: Tensor) -> Tensor:
    """[B, Hv, n, Dv]: of each token its factors [.., n, Dk] times its own state [.., n, Dk, Dv]."""
    return (factors[..., None, :] @ states)[..., 0, :]
