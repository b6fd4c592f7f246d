"""The truth of a product with a weight in fp64, and what a right path may err there (docs/limits.md derives it).

A right path multiplies the operands as they are, sums in fp32, in any order and by any instructions, adds the bias to
the sums, and rounds once. Before SwiGLU it may round gate and up to the dtype of x (PyTorch does, a fused kernel need
not). Matrix units that take 16 bits may cut sums off where they should round; those that take 8 bits cut each term.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.shape import FP8_FORMATS, WeightFormat
from kernels.reference.compare import Reference
from kernels.reference.experts import Rounding, rounding_of

_Z_ROUNDED = 8.5  # standard deviations, as in `compare.py`
_Z_FP32 = 10.0
_U32 = 2.0**-24
_LEAST = 1e-30  # limit of an element whose truth is 0
_SECOND_ORDER = 1.01  # of roundings of gate and up that meet: products of two of them are below 1%
_STEP = 8  # columns that a matrix unit sums before it may cut: Hopper's take 16 of 16 bits, Ampere's 8
# Of matrix units that take 8 bits, whose sums of 128 columns are added up in fp32: docs/limits.md derives the numbers.
_U8 = 2.0**-13  # of the largest term of a step, of which what is smaller is cut off
_Z_CUT = 8.5
_CUT_SQUARES = 4.0
_CUT_BY_LARGEST = 128 / 3  # a term that exceeds all others of its 128 columns cuts each of them
_CUT_OF_SUMS = 8.0
_BLOCK_ELEMENTS = 2**25  # of the weight or the product at once: 268 MB in fp64


@dataclass(frozen=True, slots=True)
class _Sums:
    """Products [rows, columns] fp64 before the epilogue: of x and the weight, the bias included.

    variance  of what fp32 errs, / u^2
    cut       the most that cutting sums off adds, / u
    """

    values: Tensor
    variance: Tensor
    cut: Tensor | float


def units_may_take_8_bits(weight_format: WeightFormat, num_rows: int) -> bool:
    """Return whether a path may multiply numbers of 8 bits as they are: of one row all take 16 bits or more."""
    return weight_format in FP8_FORMATS and num_rows > 1


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Epilogue,
    dtype: torch.dtype | None = None,
    *,
    of_8_bits: bool = False,
) -> Reference:
    """The expected [rows, 1, size_out] fp64 of `epilogue(x @ weight^T + bias)`, and what a right path may err.

    x [rows, size_in], weight [parts * size_out, size_in] and bias [size_out] or None: of one dtype, or wider where a
    format has them as `LinearWeight.as_multiplied` and `dequantized` say; `dtype` is then that of the path's inputs.
    of_8_bits: whether matrix units may multiply numbers of 8 bits as they are.
    `errors_of(y[:, None], reference)` measures a result. The mean signed error is not measured.
    """
    dtype = x.dtype if dtype is None else dtype
    size_out = weight.shape[0] // epilogue.parts
    truth, limit = (torch.empty(x.shape[0], size_out, dtype=torch.float64, device=x.device) for _ in range(2))
    wide = x.double()
    for part in _blocks(size_out, max(x.shape)):
        of_bias = None if bias is None else bias[part]
        starts = range(0, weight.shape[0], size_out)
        sums = [_sums(wide, weight[start:][part], of_bias, dtype, of_8_bits=of_8_bits) for start in starts]
        gated = epilogue is Epilogue.SWIGLU
        judged = _gated(sums[0], sums[1], dtype) if gated else _plain(sums[0], dtype, epilogue)
        truth[:, part], limit[:, part] = judged
    return Reference(truth[:, None], limit[:, None], None, float("inf"))


def _blocks(size_out: int, largest: int) -> Iterator[slice]:
    columns = max(1, _BLOCK_ELEMENTS // largest)
    yield from (slice(start, min(start + columns, size_out)) for start in range(0, size_out, columns))


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, of_8_bits: bool = False) -> _Sums:
    """Partial sums of n terms deviate by spread from the line to the whole, or to the first half and from there on.

    Their squares add up to n (o^2 / 3 + half^2 / 3 + spread^2 / 6), each rounding has a variance of u^2 / 3 of that.
    """
    size_in = x.shape[1]
    of_weight = weight.double()
    first = x[:, : size_in // 2] @ of_weight[:, : size_in // 2].T
    values = torch.addmm(first, x[:, size_in // 2 :], of_weight[:, size_in // 2 :].T)
    x_squares, w_squares = x.square(), of_weight.square_()
    squares = x_squares @ w_squares.T  # spread^2: the sum of (x w)^2
    variance = (1 + size_in / 6) * squares + 4 * values.square() + size_in / 9 * (values.square() + first.square())
    # A step cuts up to 2 u of a partial sum, which is half of the whole, of the first half and of spread on average.
    of_halves = (values - first).abs() + first.abs()
    largest = values.abs() + first.abs_() + squares.sqrt()
    cut = 0.0 if dtype is torch.float32 else -(-size_in // _STEP) * largest
    if of_8_bits:
        fourth = x_squares.square_() @ w_squares.square_().T
        spread = (_CUT_SQUARES * squares + _CUT_BY_LARGEST * fourth.sqrt_()).sqrt_()
        cut = cut + _U8 / _U32 * (_Z_CUT * spread + _CUT_OF_SUMS * of_halves)
    if bias is not None:
        values = values + bias.double()
        variance = variance + 4 * values.square() + 2 * bias.double().square()
    return _Sums(values, variance, cut)


def _plain(sums: _Sums, dtype: torch.dtype, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """(truth, limit)."""
    limit = _U32 * (_Z_FP32 * sums.variance.sqrt() + sums.cut) + _LEAST
    if epilogue is not Epilogue.FP32:
        limit = limit + rounding_of(dtype).of(sums.values)
    return sums.values, limit


def _gated(gate: _Sums, up: _Sums, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(truth, limit) of silu(gate) * up."""
    rounding = rounding_of(dtype)
    gate_error, up_error = _largest_error(gate, rounding), _largest_error(up, rounding)
    factor = F.silu(gate.values)
    slope = torch.maximum(*((F.silu(gate.values + step) - factor).abs() for step in (gate_error, -gate_error)))
    slope /= gate_error
    inner, by_gate, by_up = factor * up.values, slope * up.values.abs(), factor.abs()
    fp32 = by_gate.square() * gate.variance + by_up.square() * up.variance + 16 * inner.square()
    limit = _U32 * (_Z_FP32 * fp32.sqrt() + by_gate * gate.cut + by_up * up.cut) + _LEAST
    # Where gate and up both all but vanish, so do the terms above: what is left is one error times the other.
    limit = limit + slope * gate_error * up_error
    if dtype is not torch.float32:
        each = by_gate * rounding.of(gate.values), by_up * rounding.of(up.values)
        worst, squares = each[0] + each[1], each[0].square() + each[1].square()
        limit = limit + rounding.of(inner) + _SECOND_ORDER * torch.minimum(worst, _Z_ROUNDED * (squares / 3).sqrt())
    return inner, limit


def _largest_error(sums: _Sums, rounding: Rounding) -> Tensor:
    """The most that sums may err, and then be rounded by."""
    return rounding.of(sums.values) + _U32 * (_Z_FP32 * sums.variance.sqrt() + sums.cut) + _LEAST
