"""The truth of a sum over ranks in fp64, and what a right path may err there (docs/limits.md derives it).

A right path adds the parts up in fp32, in the order of the ranks, and rounds the sum to their dtype once; what follows
reads that: the sum with the residual is rounded too, and so is the norm. These limits bound the errors: no right path
is beyond them, whatever its inputs.
"""

from torch import Tensor

from kernels.collective.peers import AddNorm
from kernels.reference.compare import Reference
from kernels.reference.experts import rounding_of

_U32 = 2.0**-24
_LEAST = 1e-30
_SECOND_ORDER = 1.01  # of errors that meet: products of two of them are below 1%
_NORM_ULPS = 64  # of fp32: the sum of squares in any order of 16 levels, a division, an inverse root, two products


def sum_reference(parts: Tensor, residual: Tensor | None = None) -> Reference:
    """The expected [rows, 1, columns] fp64 of the sum of parts [ranks, rows, columns], or of residual + that sum."""
    exact, rounding = parts.double(), rounding_of(parts.dtype)
    truth = exact.sum(0)
    # Of n parts n - 1 sums are rounded, each by at most u of what it has come to.
    limit = (len(parts) - 1) * _U32 * exact.abs().sum(0)
    limit = _SECOND_ORDER * (limit + rounding.of(truth))
    if residual is not None:
        truth = truth + residual.double()
        limit = limit + _SECOND_ORDER * (_U32 * truth.abs() + rounding.of(truth) + rounding.u * limit)
    return Reference(truth[:, None], limit[:, None] + _LEAST, None, float("inf"))


def norm_reference(parts: Tensor, follows: AddNorm) -> Reference:
    """The expected [rows, 1, columns] fp64 of the norm of residual + sum; `follows` as it was before the call."""
    added = sum_reference(parts, follows.residual)
    x, error = added.truth, added.limit
    rounding = rounding_of(parts.dtype)
    squares = x.square().mean(-1, keepdim=True) + follows.eps
    scale, weight = squares.rsqrt(), follows.weight.double()
    truth = x * scale * weight
    # An error e of the row moves the scale by at most the mean of |x e| over the mean square, as a share.
    share = (x.abs() * error).mean(-1, keepdim=True) / squares + _NORM_ULPS * _U32
    limit = _SECOND_ORDER * (error * scale * weight.abs() + share * truth.abs()) + rounding.of(truth)
    return Reference(truth, limit + _LEAST, None, float("inf"))
