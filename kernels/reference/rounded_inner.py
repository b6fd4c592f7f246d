"""Limits of what is rounded to 8 bits in the middle of an expert, where a right path may be a little off.

Of numbers that lie near the middle between two codes a right path may take either; and the scale, which is by the
largest of a row or a run, may itself be off, which moves all of its numbers together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear.formats.fp8_weights import (
    BLOCK,
    E4M3,
    LARGEST,
    Fp8BlocksWeight,
    Fp8RowsWeight,
    Fp8StaticWeight,
    scales_of_rows,
    scales_of_runs,
    spread,
)
from kernels.linear.weights import LinearWeight

_OF_A_QUOTIENT = 2.0**-22  # a scale, and a quotient by it, each rounded to fp32
_ONE_SIDED = 3**0.5  # a step to the next code has one direction: its variance is no third of its square


@dataclass(frozen=True, slots=True)
class RoundedInner:
    """truth  [n, I] fp64: the numbers that the second product multiplies
    reach  [n, I]: how far a right path's may be off because it takes another code
    off    [n, runs]: the largest share that a scale may be off by, of the columns of `runs`
    """

    truth: Tensor
    reach: Tensor
    off: Tensor
    runs: tuple[slice, ...]

    def moved(self, down: Tensor) -> Tensor:
        """Return what scales that are off change of the products with down [H, I]: [n, H]."""
        parts = (
            self.off[:, index : index + 1] * (self.truth[:, run] @ down[:, run].T).abs()
            for index, run in enumerate(self.runs)
        )
        return sum(parts, torch.zeros(self.truth.shape[0], down.shape[0], dtype=self.truth.dtype, device=down.device))


def rounded_inner(inner: Tensor, error: Tensor, weight: LinearWeight, dtype: torch.dtype) -> RoundedInner | None:
    """Return inner [n, I] fp64, off by up to `error`, as a weight's product rounds it; None of one that does not.

    dtype: that it is rounded to before
    """
    runs: tuple[slice, ...] = (slice(0, inner.shape[1]),)
    size = inner.abs()
    sizes = size, (size - error).clamp_min(0), size + error
    match weight:
        case Fp8StaticWeight():
            scales = [weight.input_scales[:1].double().expand(inner.shape[0], 1)] * 3
        case Fp8RowsWeight():
            scales = [scales_of_rows(it).double() for it in sizes]
        case Fp8BlocksWeight():
            scales = [scales_of_runs(it).double() for it in sizes]
            runs = tuple(slice(first, first + BLOCK) for first in range(0, inner.shape[1], BLOCK))
        case _:
            return None
    width = inner.shape[1]
    scale, low, high = (it if len(runs) == 1 else spread(it, width, 1) for it in scales)
    truth = weight.as_multiplied(inner.to(dtype)).double()
    nearest = truth / scale
    bottom, top = inner - error, inner + error
    lowest, highest = torch.minimum(bottom / low, bottom / high), torch.maximum(top / low, top / high)
    reach = torch.maximum(
        nearest - _codes(lowest - _OF_A_QUOTIENT * lowest.abs()),
        _codes(highest + _OF_A_QUOTIENT * highest.abs()) - nearest,
    ).clamp_min(0)
    off = torch.maximum(scales[2] / scales[0] - 1, 1 - scales[1] / scales[0])
    return RoundedInner(truth, _ONE_SIDED * reach * high, off, runs)


def _codes(values: Tensor) -> Tensor:
    """Return the numbers e4m3 nearest to fp64 values, by way of fp32."""
    return values.float().clamp(-LARGEST, LARGEST).to(E4M3).double()
