"""Inputs on which wrong products go wrong: edges of tiles, sums that cancel or grow, NaN that must not be read."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.shape import LinearShape
from kernels.linear.weights import LinearWeight, class_of
from kernels.system.device import torch_dtype
from kernels.vocabulary.row_buckets import LinearRows
from qualification.measure.inputs.guard import GUARD_ROWS

_EACH_UP_TO = 128  # rows: every number of them is tested on a GPU; above, and on a CPU, edges and what is asked for
_STEPS = 8  # of a large bucket, between which a GPU tests no more: the sizes of CUDA graphs up to 2048 rows are borders
_MOST_ON_CPU = 512  # rows, where a bucket does not begin beyond: the reference of more takes seconds
_PERIOD = 2**22 - 3  # random numbers of a weight before they come again: prime, so that no two rows are the same
_PADDED_COLUMNS = 8  # of NaN between the rows of x: 16 bytes in 16 bits


@dataclass(frozen=True, slots=True)
class LinearOperands:
    """A weight [parts * size_out, size_in] and a bias [size_out] or None; NaN lies before and behind a plain weight."""

    weight: LinearWeight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LinearCase:
    """One input of products with one weight.

    x           [rows, size_in]: NaN stands before and behind it, and where it is strided between its rows
    row_counts  the product is computed for each of them, of the first rows of x
    nan_row     a row of x that is NaN: no other row may be
    repeats     whether each product is computed twice
    """

    name: str
    seed: int
    x: Tensor
    operands: LinearOperands
    epilogue: Epilogue
    row_counts: tuple[int, ...]
    nan_row: int | None = None
    repeats: bool = False

    def first_rows(self, num_rows: int) -> Tensor:
        """x [num_rows, size_in] between NaN, of x's own strides."""
        return between_nan(self.x[:num_rows], is_strided=not self.x.is_contiguous())


def operands_of(shape: LinearShape, device: torch.device, *, seed: int) -> LinearOperands:
    """Random operands, the same for every number of rows: a product keeps the size of its input."""
    random = torch.Generator(device).manual_seed(seed)
    dtype = torch_dtype(shape.dtype)
    rows, edge = shape.num_weight_rows, GUARD_ROWS
    storage = torch.full((rows + 2 * edge, shape.size_in), torch.nan, dtype=dtype, device=device)
    values = storage[edge : edge + rows]
    numbers = values.view(-1)
    period = torch.randn(min(_PERIOD, numbers.numel()), generator=random, device=device) * shape.size_in**-0.5
    for start in range(0, numbers.numel(), _PERIOD):
        part = numbers[start : start + _PERIOD]
        part.copy_(period[: part.numel()])
    bias = torch.randn(shape.size_out, generator=random, device=device).to(dtype) if shape.has_bias else None
    return LinearOperands(class_of(shape.weight_format).of(values), bias)


def linear_cases(
    shape: LinearShape,
    operands: LinearOperands,
    *,
    seed: int,
    row_counts: Sequence[int] | None = None,
    takes_strides: bool = True,
) -> Iterator[LinearCase]:
    """Every hostile input of a shape; of more than 128 rows on a CPU three of them.

    row_counts    ascending, of the shape's bucket; None for `rows_to_test`. For paths that take some of them only

    counts        each of them on its own, for an algorithm may be chosen by it
    large         x times 30: SwiGLU saturates. Less for few columns, whose products would leave fp16
    outlier       one column of x times 100, likewise
    cancelling    the second half of the inner dim takes back what the first adds, but for 2%
    positive      all terms are of one sign, so that sums grow and no rounding is lost among others
    nan row       one row is NaN, as what lies in the padding of a step may be; not of a single row
    strided       rows of x are further apart than they are long, NaN between them
    """
    device = operands.weight.device
    random = torch.Generator(device).manual_seed(seed + 1)
    counts = tuple(row_counts or rows_to_test(shape.rows, is_cpu=device.type == "cpu"))
    few = next((count for count in reversed(counts) if count <= _EACH_UP_TO), counts[0])

    def randn(num_rows: int) -> Tensor:
        return torch.randn(num_rows, shape.size_in, generator=random, device=device)

    def case(
        name: str, x: Tensor, of: LinearOperands = operands, *, is_strided: bool = False, nan_row: int | None = None
    ) -> LinearCase:
        if nan_row is not None:
            x[nan_row] = torch.nan
        placed = between_nan(x.to(torch_dtype(shape.dtype)), is_strided=is_strided)
        is_first = name == "counts"
        computed = counts if is_first else (few,)
        return LinearCase(name, seed, placed, of, shape.epilogue, computed, nan_row, repeats=is_first)

    yield case("counts", randn(counts[-1]))
    # On a CPU what serves many rows serves 128 of them too, and a start with nothing proven is to be short.
    is_whole = device.type != "cpu" or shape.rows.lo < _EACH_UP_TO
    most = 6 * shape.size_in**0.5
    if is_whole:
        yield case("large", randn(few) * min(30, most))
        outlier = randn(few)
        outlier[:, shape.size_in // 3] *= min(100, most)
        yield case("outlier", outlier)
    if shape.size_in > 1:
        half = shape.size_in // 2
        x = randn(few)
        x[:, half : 2 * half] = -x[:, :half] + 0.02 * x[:, half : 2 * half]
        values = operands.weight.dequantized().to(operands.weight.dtype, copy=True)
        values[:, half : 2 * half] = values[:, :half]
        yield case("cancelling", x, LinearOperands(operands.weight.of(values), operands.bias))
    if is_whole:
        yield case("positive", randn(few).abs(), LinearOperands(_absolute(operands.weight), operands.bias))
    if few > 1:
        yield case("nan row", randn(few), nan_row=few // 2)
    if takes_strides and is_whole:
        yield case("strided", randn(few), is_strided=True)


def rows_to_test(bucket: LinearRows, served_rows: Iterable[int] = (), *, is_cpu: bool) -> tuple[int, ...]:
    """Return numbers of rows to test, ascending: all of a small bucket, of others edges, one odd one and `served_rows`.

    On a CPU edges alone: its kernels are the same for all buckets, and a start with nothing proven is to be short.

    The bucket without an end is tested up to one row more than a tile of 128 beyond its border.
    """
    first, last = bucket.lo + 1, bucket.hi or bucket.lo + 129
    if last <= _EACH_UP_TO and not is_cpu:
        return tuple(range(first, last + 1))
    if is_cpu:
        edges = {first, last} if last <= _MOST_ON_CPU else {first}
    else:
        edges = {first, (first + last) // 2 | 1, last - 1, *range(last, first, -((last - bucket.lo) // _STEPS))}
    return tuple(sorted({count for count in {*edges, *served_rows} if bucket.holds(count)}))


def _absolute(weight: LinearWeight) -> LinearWeight:
    return weight.of(weight.dequantized().abs().to(weight.dtype))


def between_nan(x: Tensor, *, is_strided: bool) -> Tensor:
    """A copy of x [rows, columns] in the middle of NaN; with a stride of some columns more where asked for."""
    num_rows, columns = x.shape
    wide = columns + _PADDED_COLUMNS * is_strided
    storage = torch.full((num_rows + 2 * GUARD_ROWS, wide), torch.nan, dtype=x.dtype, device=x.device)
    view = storage[GUARD_ROWS : GUARD_ROWS + num_rows, :columns]
    return view.copy_(x)
