"""The rule by which an attention kernel's output is right: no worse than naive attention in the same dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.batch import AttentionBatch, AttentionFlags
from kernels.attention.oracle import attention_naive, attention_oracle

_MAX_FACTOR = 2.0
_MEAN_FACTOR = 1.5
_FP32_ROUNDINGS = 4  # what counts as one rounding in fp32: the exp2 of a GPU errs by 2 ulps, naive attention's exp by 1
_SOFTCAP_FACTOR = 1.5  # on both: tanh amplifies the rounding of scores. Source: FlashAttention's tests allow 3x.

# Of the maximum error on input of unit variance, where outputs are at most a few units large.
ABSOLUTE_CAPS: dict[torch.dtype, float] = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True)
class Errors:
    """How far an output is from the truth, how far naive attention is, and what the rule allows."""

    max_error: float
    mean_error: float
    naive_max_error: float
    naive_mean_error: float
    max_limit: float  # 2x naive's (3x with a softcap) plus one rounding of the largest true value
    mean_limit: float  # 1.5x naive's (2.25x with a softcap) plus one rounding of the mean true value
    absolute_cap: float  # of max_error; meaningful for input of unit variance only
    num_nonfinite: int  # NaN and infinities in the output

    @property
    def is_within_rule(self) -> bool:
        return self.num_nonfinite == 0 and self.max_error <= self.max_limit and self.mean_error <= self.mean_limit

    @property
    def is_within_cap(self) -> bool:
        return self.num_nonfinite == 0 and self.max_error <= self.absolute_cap


@dataclass(frozen=True, slots=True)
class Reference:
    """What the same rows of every path's output are compared with: [n, heads, head_dim] each."""

    truth: Tensor  # fp64
    naive: Tensor  # in q's dtype


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
    """Measure `out` [tokens, heads, head_dim] against the fp64 oracle and naive attention in q's dtype.

    rows  [n] int64, ascending: the query rows to measure; None for all
    """
    return errors_of(out if rows is None else out[rows], reference_of(q, k, v, batch, flags, rows=rows), flags)


def reference_of(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, *, rows: Tensor | None = None
) -> Reference:
    truth = attention_oracle(q, k, v, batch, flags, rows=rows)
    return Reference(truth, attention_naive(q, k, v, batch, flags, rows=rows))


def errors_of(chosen: Tensor, reference: Reference, flags: AttentionFlags) -> Errors:
    """Measure the rows [n, heads, head_dim] of an output whose reference this is.

    Naive attention that overflows (large fp16 logits) sets no limit looser than the absolute cap.
    """
    truth, naive = reference.truth, reference.naive
    error = (chosen.double() - truth).abs()
    naive_error = (naive.double() - truth).abs()
    cap = ABSOLUTE_CAPS[chosen.dtype]
    rounding = torch.finfo(chosen.dtype).eps * (_FP32_ROUNDINGS if chosen.dtype is torch.float32 else 1)
    naive_max, naive_mean = _max(naive_error), _mean(naive_error)
    factor = _SOFTCAP_FACTOR if flags.softcap is not None else 1.0
    is_naive_finite = bool(torch.isfinite(naive).all())
    return Errors(
        max_error=_max(error),
        mean_error=_mean(error),
        naive_max_error=naive_max,
        naive_mean_error=naive_mean,
        max_limit=_MAX_FACTOR * factor * naive_max + rounding * _max(truth.abs()) if is_naive_finite else cap,
        mean_limit=_MEAN_FACTOR * factor * naive_mean + rounding * _mean(truth.abs()) if is_naive_finite else cap,
        absolute_cap=cap,
        num_nonfinite=int((~torch.isfinite(chosen)).sum()),
    )


def _max(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0
