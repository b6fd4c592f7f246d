"""Attention of one sequence's rows over all of its keys, in fp64, with the limits of docs/limits.md."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qualification.model.forward.bounded import Bounded, Precision, U

_HOEFFDING = 8.5


@dataclass(frozen=True, slots=True)
class Attends:
    """scale of scores; window: tokens that a token sees, itself included; sinks [heads] fp64.

    is_causal   whether a token sees none behind it; else it sees all keys
    spans  [start, stop) of keys: a token of one of these sees those of it that are behind the token, too
    chunk  positions of which a token sees those before it in its own multiple alone
    chosen  [T, n] bool: keys that an indexer has chosen for each token, which sees no others; None: nothing chooses
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    is_causal: bool = True
    spans: tuple[tuple[int, int], ...] = ()
    chosen: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, attends: Attends, precision: Precision) -> Bounded:
    """Return [T, heads, d] of q [T, heads, d], the last T tokens, and all keys and values k, v [n, kv_heads, d]."""
    num_rows, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    first = num_keys - num_rows
    end = num_keys
    if attends.window is not None:  # keys that no row sees
        skipped = max(0, first - attends.window + 1)
        k, v, num_keys, first = k[skipped:], v[skipped:], num_keys - skipped, first - skipped
    chunks = None
    if attends.chunk is not None:
        skipped = first // attends.chunk * attends.chunk
        k, v, num_keys, first = k[skipped:], v[skipped:], num_keys - skipped, first - skipped
        chunks = torch.arange(num_keys, device=q.device) // attends.chunk
    group = num_heads // num_kv_heads
    heads_q = q.double().transpose(0, 1).reshape(num_kv_heads, group, num_rows, head_dim)
    heads_k, heads_v = (it.double().transpose(0, 1).unsqueeze(1) for it in (k, v))  # [kv, 1, n, d]
    scores = attends.scale * heads_q @ heads_k.mT
    spread = (1 + head_dim / 6) * attends.scale**2 * (heads_q**2 @ (heads_k**2).mT)
    variance = spread + 4 * scores**2 + 4
    if attends.softcap is not None:
        cap, bent = attends.softcap, (scores / attends.softcap).tanh()
        slope = (1 - bent**2) ** 2
        variance = (spread + 2 * scores**2) * slope + 2 * (cap * bent) ** 2 + 4 * cap**2 + 4
        scores = cap * bent
    rows = torch.arange(first, first + num_rows, device=q.device)[:, None]
    keys = torch.arange(num_keys, device=q.device)[None]
    hidden = (keys > rows) & attends.is_causal
    for start, stop in ((start - end + num_keys, stop - end + num_keys) for start, stop in attends.spans):
        hidden &= ~((start <= rows) & (rows < stop) & (keys < stop))
    if attends.window is not None:
        hidden |= keys <= rows - attends.window
    if chunks is not None:
        hidden |= chunks[None] < chunks[first:, None]
    if attends.chosen is not None:
        hidden |= ~attends.chosen
    scores = scores.masked_fill(hidden, float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    sinks = None
    if attends.sinks is not None:
        sinks = attends.sinks.double().view(num_kv_heads, group, 1, 1)
        largest = torch.maximum(largest, sinks)
    weights = (scores - largest).exp()
    total = weights.sum(dim=-1, keepdim=True)
    best = weights.amax(dim=-1, keepdim=True)
    if sinks is not None:
        of_sink = (sinks - largest).exp()
        total, best = total + of_sink, torch.maximum(best, of_sink)
    p, best = weights / total, best / total
    out = p @ heads_v
    counts = (~hidden).sum(dim=-1).double()[:, None]
    # The sum over j of p^2 var (v - o)^2, expanded.
    weighted = p**2 * variance.masked_fill(hidden, 0)
    of_scores = weighted @ heads_v**2 - 2 * out * (weighted @ heads_v) + out**2 * weighted.sum(dim=-1, keepdim=True)
    of_sums = (1 + counts / 6) * (p**2 @ heads_v**2 + out**2)
    deviation = U * (of_scores.clamp(min=0) + of_sums).sqrt()
    most = precision.rounding(out)
    if precision.is_narrow:
        most = most + _weights_rounded(p, best, heads_v, out, hidden, precision)

    def in_order(it: Tensor) -> Tensor:
        return it.flatten(0, 1).transpose(0, 1)

    return Bounded(in_order(out), in_order(most), in_order(deviation))


def _weights_rounded(p: Tensor, best: Tensor, v: Tensor, out: Tensor, hidden: Tensor, precision: Precision) -> Tensor:
    """Return what weights add that are rounded to the dtype before they are multiplied with the values."""
    found = torch.finfo(precision.dtype)
    unit, least = found.eps / 2, found.tiny * found.eps / 2 * best
    seen = (~hidden).double()
    largest = unit * (p @ v.abs()) + least * (seen @ v.abs())
    rounded = unit**2 * (p**2 @ v**2 + out**2 * (p**2).sum(dim=-1, keepdim=True)) + least**2 * (seen @ v**2)
    return torch.minimum(2 * largest, _HOEFFDING * (rounded / 3).sqrt())
