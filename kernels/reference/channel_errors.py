"""Errors that a right path of the delta rule of channels may make (docs/limits.md derives them).

A right path computes in fp32, in any order of sums within a chunk of 64 tokens. It rounds to the dtype of the tokens:
queries and keys behind their norms, values behind the convolution, what a token adds to the state. It multiplies by
matrix units of 16 bits what it has as two numbers of 16 bits: keys and queries times decays, and the state. Sums of
decays' logarithms are exact. It rounds the state at borders to the dtype of the state, and the result once.
"""

import torch
from torch import Tensor

from kernels.recurrence.sizes import BLOCK, CHUNK
from kernels.reference.experts import Rounding
from kernels.reference.recurrent_errors import LEAST, OF_SUM, TWO_PARTS, DeltaErrors, factors, state_behind

_OF_TERM = 12  # variance of a term of a product: of its decay, whose exponent is rounded, and of two products
_PARTS = 3 * TWO_PARTS  # of a product of two numbers of two parts each, without that of the small ones


class ChannelErrors(DeltaErrors):
    """Errors of the delta rule of channels, followed token by token."""

    def _of_chunk(self, chunk: int, state_rounding: Rounding | None) -> None:
        tokens, first, last = self._tokens, chunk * CHUNK, min((chunk + 1) * CHUNK, self._num_tokens)
        state = self._states.borders[:, chunk]
        terms = _Terms(state)
        reads, decayed, folded = [], [], {}
        for token in range(first, last):
            kept = factors(tokens.decays[:, token])
            terms.decay(kept)
            decayed.append(kept * state)
            key, added = tokens.keys[:, token], self._states.added[:, token]
            reads.append(self._read(key, tokens.key_error[:, token], decayed[-1], terms))
            state, _ = state_behind(state, tokens, token)
            terms.add(key, added)
            of_query = self._read(tokens.queries[:, token], tokens.query_error[:, token], state, terms)
            self._add(slice(token, token + 1), *(it[:, :, None] for it in of_query))
            self._fp32[:, :, token] += 16 * self._past[:, :, token].square()
            if (token + 1) % BLOCK == 0:
                folded[token] = terms.squares
        self._begin_states(last, state, state_rounding)
        for token in reversed(range(first, last)):
            if token in folded:  # sums of terms, one block behind the other
                rows = slice(token + 1, None)
                self._fp32[:, :, rows] += OF_SUM * (self._response[:, :, rows].square() @ folded[token])
            self._of_token(token, decayed[token - first], *reads[token - first])
        self._stored(chunk, state_rounding)

    def _read(self, row: Tensor, error: Tensor, state: Tensor, terms: "_Terms") -> tuple[Tensor, Tensor, Tensor]:
        """(variance in fp32, squares of roundings, their worst sum) of a key or query [B, Hv, Dk] times the state."""
        products, rounding = _times(row.square(), terms.squares), self._rounding
        fp32 = (
            (_OF_TERM + row.shape[-1] / 6) * products + OF_SUM * terms.of_weights(row) + _times(error, state.square())
        )
        if rounding.u == 0:
            return fp32, torch.zeros_like(fp32), torch.zeros_like(fp32)
        most = rounding.of(row)
        rounded = _times(most.square(), state.square()) + _PARTS**2 * products
        return fp32, rounded, _times(most, state.abs()) + _PARTS * _times(row.abs(), terms.sizes)

    def _of_token(self, token: int, decayed: Tensor, fp32: Tensor, rounded: Tensor, worst: Tensor) -> None:
        """Follow the errors of what one token adds, and of its decays; the last three are `_read` of its key."""
        tokens, rounding = self._tokens, self._rounding
        key, added, value = tokens.keys[:, token], self._states.added[:, token], tokens.values[:, token]
        share = tokens.betas[:, token][..., None]
        read = value - added / share.clamp(min=LEAST)
        fp32 = share.square() * (fp32 + tokens.value_error[:, token] + 8 * (value.square() + read.square()))
        fp32 = fp32 + (16 + tokens.beta_error[:, token][..., None]) * added.square()
        rows = slice(token, None)
        response = self._response[:, :, rows]
        unit, squared, added_squared = response @ key[..., None], response.square(), added.square()[:, :, None]
        turned = squared @ (tokens.key_error[:, token] + _OF_TERM * key.square())[..., None]
        self._fp32[:, :, rows] += unit.square() * fp32[:, :, None] + turned * added_squared
        if rounding.u:
            most, most_value, most_added = rounding.of(key)[..., None], rounding.of(value), rounding.of(added)
            most = most + _PARTS * key.abs()[..., None]
            rounded = share.square() * (rounded + most_value.square()) + most_added.square()
            worst = share * (worst + most_value) + most_added
            self._rounded[:, :, rows] += unit.square() * rounded[:, :, None]
            self._rounded[:, :, rows] += (squared @ most.square()) * added_squared
            self._worst[:, :, rows] += unit.abs() * worst[:, :, None]
            self._worst[:, :, rows] += (response.abs() @ most) * added.abs()[:, :, None]
        response -= share[..., None] * unit * key[:, :, None]
        of_decays = tokens.decay_error[:, token][..., None] * decayed.square()
        self._fp32[:, :, rows] += response.square() @ of_decays
        response *= factors(tokens.decays[:, token]).transpose(2, 3)


class _Terms:
    """The terms of a state within a chunk: the state at its border, and what each token added, all decayed.

    squares, sizes  [B, Hv, Dk, Dv]: sums of the terms' squares and absolute values
    """

    def __init__(self, border: Tensor) -> None:
        self.squares, self.sizes = border.square(), border.abs()
        self._keys: list[Tensor] = []  # of the chunk's tokens, decayed
        self._added: list[Tensor] = []

    def decay(self, kept: Tensor) -> None:
        """Multiply by the decays [B, Hv, Dk, 1] of a token."""
        self.squares, self.sizes = kept.square() * self.squares, kept * self.sizes
        self._keys = [kept[..., 0] * it for it in self._keys]

    def add(self, key: Tensor, added: Tensor) -> None:
        """Add a token's key [B, Hv, Dk] times what it added [B, Hv, Dv]."""
        self.squares = self.squares + key.square()[..., None] * added.square()[:, :, None]
        self.sizes = self.sizes + key.abs()[..., None] * added.abs()[:, :, None]
        self._keys.append(key)
        self._added.append(added)

    def of_weights(self, row: Tensor) -> Tensor:
        """Return the sum over the chunk's tokens of (row times key times added)^2, [B, Hv, Dv]."""
        if not self._keys:
            return torch.zeros_like(self.squares[:, :, 0])
        weights = (torch.stack(self._keys, dim=2) @ row[..., None])[..., 0]
        return _times(weights.square(), torch.stack(self._added, dim=2).square())


def _times(row: Tensor, state: Tensor) -> Tensor:
    """[B, Hv, Dk] times [B, Hv, Dk, Dv]."""
    return (row[..., None, :] @ state)[..., 0, :]
