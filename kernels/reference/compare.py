"""The rule by which an attention kernel's output is right, and the limits it rests on (docs/limits.md derives them).

A right kernel computes scores and sums in fp32, in any order and by any instructions, and rounds its weights and its
output to the dtype of q. What such a kernel may err follows from the truth's own weights p, scores s and output o, for
each element of the output: there is no random draw in it. Two rules hold for a right kernel with a probability of more
than 1 - 1e-6 a check:
- each element errs no more than its limit (`Reference.limit`);
- the whole output is not scaled: the mean of its signed errors along o stays below `Reference.bias_limit`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.reference.oracle import Chunk, chunks

# Standard deviations. Of roundings to 16 bits, each bounded and independent of the others, so that the sum of n of them
# is beyond z deviations with a probability below 2 exp(-z**2 / 2): 4e-16 an element.
_Z_ROUNDED = 8.5
_Z_FP32 = 10.0  # of errors in fp32, whose deviation is a model: 4.8 was the largest of 34,349 checks (one Xeon)
_Z_BIAS = 6.0  # one number a check: 3e-8
# Of a whole output's scale. Tensor cores cut sums off where they should round: by up to 3e-4 over 128k keys.
_BIAS_FLOOR = {torch.float16: 1e-4, torch.bfloat16: 1e-4, torch.float32: 1e-6}
_BIAS_FLOOR_OF_A_KEY = 5e-9
_U32 = 2.0**-24
_LEAST = 1e-30  # limit of an element whose truth is 0


@dataclass(frozen=True, slots=True)
class Reference:
    """The expected values of some rows, for every path's output.

    truth   [n, heads, head_dim] fp64
    limit   [n, heads, head_dim] fp64, of |out - truth|
    along   [n, heads, head_dim] fp64: the bias is the sum of along * (out - truth); None: it is not measured
    bias_limit   of its absolute value
    """

    truth: Tensor
    limit: Tensor
    along: Tensor | None
    bias_limit: float

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.truth, self.limit, self.along) if tensor is not None)


@dataclass(frozen=True, slots=True)
class Errors:
    """The distance of an output from the truth, in units of the limit: at most 1 is right."""

    worst: float  # the largest error as a share of its limit
    worst_at: tuple[int, int, int]  # row (of those compared), head, column
    worst_error: float  # there
    worst_limit: float  # there
    bias: float  # the output is 1 + bias times the truth, by its mean signed error
    bias_limit: float
    max_error: float  # the largest absolute error
    num_nonfinite: int  # NaN and infinities in the output

    @property
    def is_within_rule(self) -> bool:
        return self.num_nonfinite == 0 and self.worst <= 1 and abs(self.bias) <= self.bias_limit


def compare(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    *,
    rows: Tensor | None = None,
) -> Errors:
    """Measure `out` [tokens, heads, head_dim] against the fp64 oracle.

    rows  [n] int64, ascending: the query rows to measure; None for all
    """
    return errors_of(out if rows is None else out[rows], reference_of(q, k, v, batch, flags, rows=rows))


def errors_of(chosen: Tensor, reference: Reference) -> Errors:
    """Measure the rows [n, heads, head_dim] of an output whose reference this is."""
    num_nonfinite = int((~torch.isfinite(chosen)).sum())
    if chosen.numel() == 0:
        return Errors(0.0, (0, 0, 0), 0.0, 0.0, 0.0, reference.bias_limit, 0.0, 0)
    difference = chosen.to(reference.truth.dtype) - reference.truth
    share = (difference.abs() / reference.limit).nan_to_num(nan=float("inf"))
    at = int(share.argmax())
    row, rest = divmod(at, chosen.shape[1] * chosen.shape[2])
    return Errors(
        worst=float(share.view(-1)[at]),
        worst_at=(row, *divmod(rest, chosen.shape[2])),
        worst_error=float(difference.abs().view(-1)[at]),
        worst_limit=float(reference.limit.view(-1)[at]),
        bias=0.0 if reference.along is None else float((difference * reference.along).sum()),
        bias_limit=reference.bias_limit,
        max_error=float(difference.abs().max()),
        num_nonfinite=num_nonfinite,
    )


def reference_of(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, *, rows: Tensor | None = None
) -> Reference:
    """The truth of the chosen rows, and what a right kernel in q's dtype may err there."""
    num_rows = q.shape[0] if rows is None else rows.numel()
    sizes = num_rows, q.shape[1], v.shape[-1]
    truth, limit, along = (torch.zeros(sizes, dtype=torch.float64, device=q.device) for _ in range(3))
    limit += _LEAST
    num_keys = 0
    for chunk in chunks(q, k, v, batch, flags, rows=rows, dtype=torch.float64):
        out, limits, direction = _judge_chunk(chunk, flags, q.dtype)
        truth[chunk.part], limit[chunk.part], along[chunk.part] = map(chunk.by_row, (out, limits, direction))
        num_keys = max(num_keys, chunk.keys.shape[1])
    # `along` is o / |o|^2 over the variance of a row's scale so far: sum of its products with o is the sum of weights.
    total = float((along * truth).sum())
    floor = _BIAS_FLOOR[q.dtype] + _BIAS_FLOOR_OF_A_KEY * num_keys
    bias_limit = floor + (_Z_BIAS / total**0.5 if total > 0 else 0.0)
    return Reference(truth, limit, along / total if total > 0 else along, bias_limit)


def coarse_reference_of(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags) -> Reference:
    """The same of every row in fp32: wider limits, which the reference's own errors lie within, and no bias.

    A row takes a fifth of the time of `reference_of`: it is for the rows between those that are drawn.
    """
    truth = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float32, device=q.device)
    limit = torch.full_like(truth, _LEAST)
    for chunk in chunks(q, k, v, batch, flags, rows=None, dtype=torch.float32):
        out, limits = _judge_chunk_coarsely(chunk, flags, q.dtype)
        truth[chunk.part], limit[chunk.part] = chunk.by_row(out), chunk.by_row(limits)
    return Reference(truth, limit, None, float("inf"))


def _judge_chunk_coarsely(chunk: Chunk, flags: AttentionFlags, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(o, its limit) fp32. The largest score of a row stands for all of them, the largest key for all keys.

    Squares are of weights relative to a row's largest: beside a sink weights are 1e-20, whose squares fp32 cannot hold.
    """
    head_dim = chunk.queries.shape[-1]
    unit = chunk.weights.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    weights = chunk.weights / unit
    o = weights @ chunk.values
    squared = weights.square()
    weighted = squared @ chunk.values.square()
    spread = weighted + o.square() * chunk.weights.square().sum(dim=-1, keepdim=True)
    largest_keys = chunk.keys.square().amax(dim=1, keepdim=True)  # [kv_heads, 1, head_dim]
    variance = (1 + head_dim / 6) * (chunk.queries.square() * largest_keys).sum(dim=-1, keepdim=True) + 4
    largest = chunk.products.abs().amax(dim=-1, keepdim=True)
    if flags.softcap is not None:
        variance = variance + 8 * flags.softcap**2
    if chunk.sinks is not None:
        largest = torch.maximum(largest, chunk.sinks.abs().nan_to_num(0.0, 0.0, 0.0))
    variance = variance + 4 * largest.square()
    sums = (1 + chunk.keys.shape[1] / 6) * (weighted + o.square())
    limit = 2**0.5 * _Z_FP32 * _U32 * (2 * variance * spread + sums).sqrt()  # of two that err: path and reference
    lost: Tensor | float = 0.0
    if dtype is not torch.float32:
        u = torch.finfo(dtype).eps / 2
        subnormal = torch.finfo(dtype).smallest_normal * u
        limit = limit + u * o.abs() + _Z_ROUNDED * u * (spread / 3).sqrt()
        # Of weights whose rounding is subnormal: as in `_judge_chunk`, by the largest value.
        lost = subnormal * chunk.keys.shape[1] ** 0.5 * _largest_weight(chunk)
        lost = subnormal + _Z_ROUNDED * lost * chunk.values.abs().amax(dim=1, keepdim=True)
    return unit * o, unit * limit + lost + _LEAST


def _largest_weight(chunk: Chunk) -> Tensor:
    """[kv_heads, group * rows, 1], the sink's included: a kernel may start its running maximum with the sink."""
    largest = chunk.weights.amax(dim=-1, keepdim=True)
    return largest if chunk.sink_weights is None else torch.maximum(largest, chunk.sink_weights)


def _judge_chunk(chunk: Chunk, flags: AttentionFlags, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(o, its limit, o / |o|^2 / variance of the row's scale), each [kv_heads, group * rows, head_dim] fp64."""
    p, v = chunk.weights, chunk.values
    o = p @ v
    squared, v_squared = p.square(), v.square()
    weighted = squared @ v_squared  # sum of (p v)^2
    collision = squared.sum(dim=-1, keepdim=True)  # sum of p^2
    deviation = _fp32_deviation(chunk, flags, o, squared, weighted)
    length = o.square().sum(dim=-1, keepdim=True)
    # Errors of scores are shared by a row's elements, so that they count with one sign.
    scale_variance = ((o.abs() * deviation).sum(dim=-1, keepdim=True)).square()
    if dtype is torch.float32:
        limit = _Z_FP32 * deviation
    else:
        u = torch.finfo(dtype).eps / 2
        subnormal = torch.finfo(dtype).smallest_normal * u
        # The variance of a rounding is at most u^2 / 3. Weights are rounded; their sum may be of rounded ones or not.
        # A weight below the smallest normal number errs by half a subnormal, whatever it is.
        lost = subnormal * _largest_weight(chunk)
        rounded = u**2 * (weighted + o.square() * collision) + lost.square() * _over_seen(chunk, v_squared)
        largest = u * (p @ v.abs()) + lost * _over_seen(chunk, v.abs())
        by_weights = torch.minimum(2 * largest, _Z_ROUNDED * (rounded / 3).sqrt())
        limit = u * o.abs() + subnormal + by_weights + _Z_FP32 * deviation
        along_values = o @ v.transpose(1, 2)
        rounding = o.square().square().sum(dim=-1, keepdim=True) + collision * length.square()
        rounding = rounding + (squared * along_values.square()).sum(dim=-1, keepdim=True)
        scale_variance = scale_variance + u**2 / 3 * rounding
        # What is subnormal, outputs and weights, errs by its own step.
        lost_along = (along_values.square() * (p > 0)).sum(dim=-1, keepdim=True)
        scale_variance = scale_variance + (subnormal**2 * length + lost.square() * lost_along) / 3
    direction = torch.where(length > 0, o * length / scale_variance.clamp(min=_LEAST), 0.0)
    return o, limit + _LEAST, direction


def _fp32_deviation(chunk: Chunk, flags: AttentionFlags, o: Tensor, squared: Tensor, weighted: Tensor) -> Tensor:
    """Standard deviation of what attention in fp32 errs in each element of o, whatever the order of its sums.

    squared   p^2; weighted: the sum of (p v)^2
    A sum of n terms is rounded n times, by up to u of what it has come to: a variance of at most n / 6 u^2 of its
    terms' squares. A weight errs by its score's error, and by up to 4 ulps of exp2, of which 1 is a deviation.
    """
    head_dim = chunk.queries.shape[-1]
    # A product of head_dim terms: sum of (q k)^2, times the roundings of its sum.
    variance = (1 + head_dim / 6) * (chunk.queries.square() @ chunk.keys.square().transpose(1, 2))
    if flags.softcap is None:
        variance += 4 * chunk.products.square() + 4
    else:
        variance += 2 * chunk.products.square()
        tanh = (chunk.products / flags.softcap).tanh_()
        # 1 - 2 / (e^2x + 1) errs by some u of 1, which the softcap multiplies.
        variance *= (1 - tanh.square()).square()
        variance += 2 * (flags.softcap * tanh).square() + 4 * flags.softcap**2 + 4
    squared_variance = squared * variance
    spread = squared_variance @ chunk.values.square() - 2 * o * (squared_variance @ chunk.values)
    spread = spread + o.square() * squared_variance.sum(dim=-1, keepdim=True)
    num_seen = chunk.seen.sum(dim=-1).to(o.dtype)
    if chunk.sinks is not None and chunk.sink_weights is not None:
        own = chunk.sink_weights.square() * (4 * chunk.sinks.square() + 4)
        spread = spread + own.nan_to_num(0.0) * o.square()
    group = o.shape[1] // num_seen.numel()
    sums = (1 + num_seen / 6).repeat(group)[None, :, None] * (weighted + o.square())
    return _U32 * (spread.clamp(min=0) + sums).sqrt()


def _over_seen(chunk: Chunk, values: Tensor) -> Tensor:
    """About the sum of the values [kv_heads, keys, head_dim] that each row sees: [kv_heads, group * rows, head_dim]."""
    num_seen = chunk.seen.sum(dim=-1).to(values.dtype)
    group = chunk.weights.shape[1] // num_seen.numel()
    return num_seen.repeat(group)[None, :, None] * values.mean(dim=1, keepdim=True)
