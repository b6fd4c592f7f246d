"""The error of every row of an output: one wrong tile among ten thousand must not pass between the rows that are drawn.

The maximum error of a whole output cannot see it. Its limit is set by the first rows, which see few keys and have large
values; a row that sees thousands of keys is so small that even a missing tile of keys stays below that limit. So each
row of each head is measured as a share of its own size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.oracle import attention_naive, attention_oracle
from kernels.attention.sequences import sequences_of
from qualification.inputs import Case

# Of naive attention's largest error in the same dtype. Of n keys a missing tile of 64 changes a row by sqrt(64 / n): in
# bf16 the limit comes to 0.016, so that a tile is missed from 250,000 keys on; flash attention's own error is 0.004.
_FACTOR = 1.5
_SOFTCAP_FACTOR = 1.5  # tanh amplifies the rounding of scores
_ROUNDING = 0.25  # what the limit allows on top, in units of the dtype's eps
_FP32_FLOOR = 2e-5  # where the reference is no more exact than what it judges
_MAX_CPU_SCORES = 2**22  # of one case, 0.1 s on one core; above it a CPU measures the drawn rows only
_TINY = 1e-30  # a row of zeros must be met exactly


@dataclass(frozen=True, slots=True)
class RowReference:
    """What the rows of every path's output are measured against."""

    rows: Tensor | None  # [n] int64, those that are measured; None for all
    truth: Tensor  # [n, heads, head_dim] fp32, computed step by step
    limit: float  # of the largest error of a row and head


def row_reference(case: Case) -> RowReference:
    rows = None if _is_affordable(case) else case.rows
    truth = attention_oracle(case.q, case.k, case.v, case.batch, case.flags, rows=rows, dtype=torch.float32)
    naive = attention_naive(case.q, case.k, case.v, case.batch, case.flags, rows=case.rows)
    naive_error = _largest(naive, truth[case.rows] if rows is None else truth)
    factor = _FACTOR * (_SOFTCAP_FACTOR if case.flags.softcap is not None else 1.0)
    floor = _FP32_FLOOR if naive.dtype is torch.float32 else _ROUNDING * torch.finfo(naive.dtype).eps
    return RowReference(rows, truth, factor * naive_error + floor)


def row_error(out: Tensor, reference: RowReference) -> float:
    """The largest error of any row and head of `out` [tokens, heads, head_dim], as a share of the row's length."""
    return _largest(out if reference.rows is None else out[reference.rows], reference.truth)


def _largest(out: Tensor, truth: Tensor) -> float:
    """Of |out - truth| / |truth| over all rows and heads; NaN where any value is."""
    if truth.numel() == 0:
        return 0.0
    error = torch.linalg.vector_norm(out.float() - truth, dim=-1)
    return float((error / torch.linalg.vector_norm(truth, dim=-1).clamp(min=_TINY)).max())


def _is_affordable(case: Case) -> bool:
    if case.q.device.type != "cpu":
        return True
    pairs = sum(sequence.num_queries * sequence.num_keys for sequence in sequences_of(case.batch))
    return pairs * case.q.shape[1] <= _MAX_CPU_SCORES
