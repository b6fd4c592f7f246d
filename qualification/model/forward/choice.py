"""The choice of a token by its definition: what a request's parameters, seed and the logits at its place allow.

Logits are edited in this order: biases, penalties (repetition over prompt and answer, presence and frequency over the
answer), bans, allowed tokens. Then the likeliest token at a temperature of 0; else scores are logits less their largest
over the temperature, top-k, top-p of those and min-p leave some tokens, and of these the one with the largest score
plus noise is drawn. The noise of a token is a hash of (seed, position, token). Computed in fp64, one row at a time.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_ROUNDING = 1e-4  # of scores and noise in fp32, which are at most 22 apart where it matters: 20 times their roundings
_SHARE = 1e-5  # of sums of probabilities in fp32
_MASK = 0xFFFFFFFF


class Wanted(Protocol):
    """Parameters of a request, as they were when it was queued."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def allowed_token_ids(self) -> tuple[int, ...]: ...
    @property
    def bad_words(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def min_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a token of an answer, behind `prompt` and the `answer` so far.

    banned  tokens that must not end an answer that is shorter than min_tokens
    masked  [vocab] bool on the device of the logits: the tokens that a grammar forbids there; None without a grammar
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    seed: int
    banned: frozenset[int] = frozenset()
    masked: Tensor | None = None

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.answer)


def is_log_probability(value: float, logits: Tensor, token_id: int) -> bool:
    """Return whether a number is the natural log probability of a token by logits [vocab] that nothing has edited."""
    exact = logits.double()
    found = float(exact[token_id] - exact.logsumexp(0))
    return abs(found - value) <= _ROUNDING + 1e-6 * float(exact.abs().max())


def may_be_chosen(logits: Tensor, token_id: int, wanted: Wanted, place: Place, *, margin: float = 0.0) -> bool:
    """Return whether a token may be the one that is chosen by logits [vocab], each of which may be off by `margin`."""
    exact = edited(logits.double(), wanted, place)
    if not math.isfinite(float(exact[token_id])):
        return False
    largest, apart = exact.max(), 2 * margin
    if wanted.temperature == 0:
        return float(exact[token_id] + apart) >= float(largest) - _ROUNDING * 1e-2
    scores, apart = (exact - largest) / wanted.temperature, apart / wanted.temperature + _ROUNDING
    least, surely = (_threshold(scores, wanted, apart * sign) for sign in (1, -1))
    own = float(scores[token_id])
    if own + apart < least:
        return False
    noisy = scores + noise(place.seed, place.position, scores.shape[0], scores.device)
    rivals = noisy[scores - apart > surely]
    return rivals.numel() == 0 or float(noisy[token_id]) + apart >= float(rivals.max())


def edited(logits: Tensor, wanted: Wanted, place: Place) -> Tensor:
    """Return logits [vocab] fp64 as the request wants them; those that it bans are -inf."""
    found = logits.clone()
    for token_id, bias in wanted.logit_bias:
        found[token_id] += bias
    if wanted.repetition_penalty != 1 or wanted.presence_penalty or wanted.frequency_penalty:
        counts = Counter(place.answer)
        seen = torch.tensor(sorted({*place.prompt, *counts}), device=found.device)
        values = found[seen]
        found[seen] = torch.where(values > 0, values / wanted.repetition_penalty, values * wanted.repetition_penalty)
        for token_id, num in counts.items():
            found[token_id] -= wanted.frequency_penalty * num + wanted.presence_penalty
    banned = set() if len(place.answer) >= wanted.min_tokens else set(place.banned)
    for *beginning, last in wanted.bad_words:
        if list(place.answer[len(place.answer) - len(beginning) :]) == beginning:
            banned.add(last)
    if banned:
        found[torch.tensor(sorted(banned), device=found.device)] = -math.inf
    if wanted.allowed_token_ids:
        kept = torch.full_like(found, -math.inf)
        allowed = torch.tensor(wanted.allowed_token_ids, device=found.device)
        kept[allowed] = found[allowed]
        found = kept
    return found if place.masked is None else found.masked_fill(place.masked, -math.inf)


def _threshold(scores: Tensor, wanted: Wanted, apart: float) -> float:
    """Return the lowest score that the limits keep: the least that it may be for `apart` > 0, the most for less."""
    found = -math.inf if wanted.min_p == 0 else math.log(wanted.min_p) - apart
    size = scores.shape[0]
    num = size if wanted.top_k is None else min(wanted.top_k, size)
    if num == size and wanted.top_p >= 1:
        return found
    ranked = scores.sort(descending=True).values[:num]
    found = max(found, float(ranked[-1]))
    if wanted.top_p < 1:
        reached = ranked.exp().cumsum(0)
        share = wanted.top_p * math.exp(2 * apart) + math.copysign(_SHARE, apart)
        num_before = int((reached < share * reached[-1]).sum())  # those whose sum does not reach it, and one more
        found = max(found, float(ranked[min(num_before, num - 1)]))
    return found


def noise(seed: int, position: int, num_tokens: int, device: torch.device) -> Tensor:
    """Return standard Gumbel noise [num_tokens] fp64 of a place.

    A token's 31 bits come from two keys of seed and position, by the 32-bit mixer "lowbias32" of hash-prospector. The
    uniform number is that of fp32, whose rounding belongs to the definition.
    """
    low, high, place = seed & _MASK, seed >> 32 & _MASK, position & _MASK
    first = _mix_number(_mix_number(_mix_number(low) ^ high) ^ place)
    second = _mix_number(_mix_number(_mix_number(high ^ 0x85EBCA6B) ^ low) ^ place)
    tokens = torch.arange(num_tokens, dtype=torch.int64, device=device) * 0x9E3779B9 & _MASK
    bits = _mix(_mix((tokens + first) & _MASK) ^ second) & 0x7FFFFFFF
    uniform = ((bits.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24).double()
    return -torch.log(-torch.log1p(-uniform))


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 numbers below 2^32. A product may leave 64 bits: its low 32 are right."""
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    return x ^ x >> 16


def _mix_number(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    return x ^ x >> 16
