"""Numbers in fp64 with the most that a right implementation may differ from them.

docs/limits.md ("Layers") derives the rules. A right implementation multiplies numbers of its dtype, sums in fp32 in any
order, and rounds to its dtype at the places that each function names.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

U = 2.0**-24  # half an eps of fp32
_HOEFFDING = 8.5  # deviations of a sum of bounded, independent roundings: beyond it 4e-16 a number
_DEVIATIONS = 10.0  # of a sum of roundings in fp32
_SECOND_ORDER = 1.01  # errors of errors
_CHUNK = 2**25  # numbers of a weight that are in fp64 at once


@dataclass(frozen=True, slots=True)
class Bounded:
    """A result of shape [..., n].

    truth      fp64
    most       fp64: what roundings to the dtype can add up to
    deviation  fp64: the standard deviation of what sums in fp32 add
    """

    truth: Tensor
    most: Tensor
    deviation: Tensor

    @classmethod
    def exact(cls, values: Tensor) -> "Bounded":
        """Return what is given and not computed."""
        truth = values.double()
        zeros = torch.zeros_like(truth)
        return cls(truth, zeros, zeros)

    @property
    def limit(self) -> Tensor:
        """Return the most that a right implementation may be off: its probability is derived in docs/limits.md."""
        return _SECOND_ORDER * (self.most + _DEVIATIONS * self.deviation)

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Bounded":
        """Return a view, a permutation or a selection of the numbers."""
        return Bounded(change(self.truth), change(self.most), change(self.deviation))

    def rows(self, rows: Tensor) -> "Bounded":
        """Return some rows, by their numbers."""
        return self.changed(lambda it: it[rows])

    def columns(self, columns: slice) -> "Bounded":
        """Return some of the numbers of the last dim."""
        return self.changed(lambda it: it[..., columns])

    def plus(self, other: "Bounded") -> "Bounded":
        """Return the sum, before it is rounded."""
        deviation = (self.deviation**2 + other.deviation**2).sqrt()
        return Bounded(self.truth + other.truth, self.most + other.most, deviation)

    def times(self, factor: Tensor | float) -> "Bounded":
        """Return the product with exact factors, before it is rounded."""
        size = factor.abs() if isinstance(factor, Tensor) else abs(factor)
        return Bounded(self.truth * factor, self.most * size, self.deviation * size)


def in_fp32(factor: float) -> float:
    """Return a factor as PyTorch multiplies by it."""
    return float(torch.tensor(factor, dtype=torch.float32))


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype that results are stored in."""

    dtype: torch.dtype

    @property
    def is_narrow(self) -> bool:
        return self.dtype is not torch.float32

    def stored(self, tensor: Tensor) -> Tensor:
        """Return a checkpoint's tensor in fp64, as it is once it is stored in the dtype."""
        return tensor.to(self.dtype).double()

    def rounding(self, truth: Tensor) -> Tensor:
        """Return the most that one rounding of these numbers errs."""
        found = torch.finfo(self.dtype)
        return truth.abs() * (found.eps / 2) + found.tiny * found.eps / 2

    def rounded(self, value: Bounded, *, times: int = 1) -> Bounded:
        """Return the value after `times` roundings, or fewer."""
        return Bounded(value.truth, value.most + times * self.rounding(value.truth), value.deviation)


# Matrix units of 8 bits cut each term to 13 bits behind the first one of the largest; docs/limits.md ("Products with
# weights") derives the numbers.
_U8 = 2.0**-13
_CUT_SQUARES, _CUT_BY_LARGEST, _CUT_OF_SUMS = 4.0, 128 / 3, 8.0

Rows = Callable[[], Iterator[Tensor]]  # the weight [out, in] in fp64, some rows after others


def product(x: Bounded, weight: Rows, bias: Tensor | None, precision: Precision, *, of_8_bits: bool = False) -> Bounded:
    """Return x W^T + bias, x [T, in], summed in fp32 and not yet rounded.

    of_8_bits: whether matrix units may multiply both as numbers of 8 bits.
    """
    size = x.truth.shape[1]
    half = size // 2
    is_exact = not bool(x.most.any()) and not bool(x.deviation.any())
    squares = [x.truth**2] if is_exact else [x.truth**2, x.most**2, x.deviation**2]
    stacked = torch.cat(squares)
    parts: list[tuple[Tensor, ...]] = []
    for rows in weight():
        first = x.truth[:, :half] @ rows[:, :half].T
        whole = first + x.truth[:, half:] @ rows[:, half:].T
        fourth = (x.truth**4 @ (rows**4).T,) if of_8_bits else ()
        parts.append((first, whole, stacked @ (rows**2).T, *fourth))
    first, truth, of_squares, *of_fourth = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    terms, *others = of_squares.tensor_split(len(squares))
    variance = U**2 * ((1 + size / 6) * terms + size / 9 * (truth**2 + first**2) + 4 * truth**2)
    most = torch.zeros_like(truth)
    if others:
        most = _HOEFFDING * (others[0] / 3).sqrt()
        variance = variance + others[1]
    if precision.is_narrow:  # matrix units cut sums off
        most = most + U * size / 8 * (truth.abs() + first.abs() + terms.sqrt())
    for largest in of_fourth:
        spread = (_CUT_SQUARES * terms + _CUT_BY_LARGEST * largest.sqrt()).sqrt()
        most = most + _U8 * (_HOEFFDING * spread + _CUT_OF_SUMS * (first.abs() + (truth - first).abs()))
    if bias is not None:
        truth = truth + bias
        variance = variance + U**2 * (4 * truth**2 + 2 * bias**2)
    return Bounded(truth, most, variance.sqrt())


def chunks_of(weight: Tensor) -> Rows:
    """Return what gives a weight [out, in] in fp64, a few rows at a time."""
    step = max(1, _CHUNK // max(1, weight.shape[1]))
    return lambda: (weight[start : start + step].double() for start in range(0, weight.shape[0], step))


def sum_over_ranks(parts: Sequence[Bounded], precision: Precision) -> Bounded:
    """Return the sum of the ranks' parts, each rounded: added in fp32 and rounded once. One part is the sum itself."""
    total = parts[0]
    for part in parts[1:]:
        total = total.plus(part)
    if len(parts) == 1:
        return total
    size = U * len(parts) * torch.stack([part.truth.abs() for part in parts]).sum(dim=0)
    return precision.rounded(Bounded(total.truth, total.most + size, total.deviation))


def rms_norm(x: Bounded, weight: Tensor, eps: float, precision: Precision) -> Bounded:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim: rounded twice at most, before the weight and behind.

    A root errs by its share of all numbers' errors: the sum of |x| most / the sum of x^2.
    """
    size = x.truth.shape[-1]
    square = (x.truth**2).mean(dim=-1, keepdim=True) + eps
    factor = weight / square.sqrt()
    truth = x.truth * factor
    of_root = (x.truth.abs() * x.most).mean(dim=-1, keepdim=True) / square
    root_deviation = ((x.truth * x.deviation) ** 2).sum(dim=-1, keepdim=True).sqrt() / (size * square)
    most = x.most * factor.abs() + of_root * truth.abs()
    variance = (x.deviation * factor) ** 2 + (truth * root_deviation) ** 2 + (truth * U) ** 2 * (16 + size / 6)
    return precision.rounded(Bounded(truth, most, variance.sqrt()), times=2)


def layer_norm(x: Bounded, weight: Tensor, eps: float, precision: Precision, bias: Tensor | None = None) -> Bounded:
    """Return the RMSNorm of x less its mean over the last dim, rounded as that; a bias is added, and rounded again.

    The mean is a sum in fp32 of numbers that may be large beside what is left of them.
    """
    size = x.truth.shape[-1]
    mean = x.truth.mean(dim=-1, keepdim=True)
    most = x.most + x.most.mean(dim=-1, keepdim=True)
    of_sum = U * (1 + size / 6) ** 0.5 * (x.truth**2).mean(dim=-1, keepdim=True).sqrt()
    variance = x.deviation**2 + (x.deviation**2).mean(dim=-1, keepdim=True) / size + of_sum**2
    variance = variance + (U * (x.truth - mean)) ** 2 + (U * mean) ** 2
    normed = rms_norm(Bounded(x.truth - mean, most, variance.sqrt()), weight, eps, precision)
    return normed if bias is None else precision.rounded(normed.plus(Bounded.exact(bias)))


def function_of(
    inputs: tuple[Bounded, Bounded], function: Callable[[Tensor, Tensor], Tensor], precision: Precision
) -> Bounded:
    """Return function(a, b), computed in fp32 and rounded: off by what it changes where a and b are off."""
    first, second = inputs
    truth = function(first.truth, second.truth)

    def change(of_first: Tensor, of_second: Tensor) -> Tensor:
        changes = [
            (function(first.truth + sign * of_first, second.truth + other * of_second) - truth).abs()
            for sign, other in ((1, 1), (1, -1), (-1, 1), (-1, -1))
        ]
        return torch.stack(changes).amax(dim=0)

    most = change(first.most, second.most)
    deviation = change(first.deviation, second.deviation)
    own = 4 * U * (truth.abs() + (first.truth * second.truth).abs())
    return precision.rounded(Bounded(truth, most, deviation + own))
