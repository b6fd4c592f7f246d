"""Products with weights by cuBLASLt, each by the algorithm that was fastest on this GPU for as many rows."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kernels.linear.cublaslt import Algorithm, CublasLt, CublasLtError, Prepared, Product
from kernels.linear.fallbacks import MatmulFallback, MatmulFallbacks

FEWEST_ROWS = 65  # of fewer, matmuls of our own are ahead
MOST_ROWS = 8192
_MOST_EXACT, _MOST_FINE = 1024, 2048  # rows
_TILE = 128  # rows that a program takes at least, of so many


class TunedProduct:
    """x @ weight^T for every weight [size_out, size_in] of one shape, dtype and device."""

    def __init__(
        self,
        library: CublasLt,
        shape: tuple[int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        algorithms: Mapping[int, Algorithm | None],
        fallbacks: MatmulFallbacks | None = None,
    ) -> None:
        """shape: (size_out, size_in); dtypes: of x and weight, and of the result; algorithms: by the number of rows
        that they were measured with, None where PyTorch's is no slower. What they do not serve is noted in `fallbacks`.
        """
        self._library = library
        self._shape = shape
        self._dtypes = dtypes
        self._algorithms = algorithms
        self._fallbacks = fallbacks or MatmulFallbacks()
        self._unsuitable: set[int] = set()  # numbers of rows of inputs that were noted
        self._prepared: dict[int, Prepared | None] = {}  # by number of rows

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether `product` computes x: always the same for one number of rows, as the model makes them."""
        num_rows = x.shape[0]
        if num_rows not in self._prepared:
            self._prepared[num_rows] = self._prepare(num_rows)
        if self._prepared[num_rows] is None:
            return False
        is_aligned = (x.data_ptr() | weight.data_ptr()) % self._library.alignment_bytes == 0
        if x.dtype is self._dtypes[0] and x.is_contiguous() and is_aligned:
            return True
        if num_rows not in self._unsuitable:
            self._unsuitable.add(num_rows)
            detail = f"{x.dtype}, strides {x.stride()}, at {x.data_ptr():#x} and {weight.data_ptr():#x}"
            self._note(MatmulFallback.UNSUITABLE_INPUT, num_rows, detail)
        return False

    def product(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """x [M, size_in] @ weight^T: [M, size_out], in `out` where it is given, contiguous and aligned.

        By PyTorch where the library fails, and from then on.
        """
        num_rows = x.shape[0]
        prepared = self._prepared[num_rows]
        assert prepared is not None
        y = x.new_empty(num_rows, self._shape[0], dtype=self._dtypes[1]) if out is None else out
        try:
            self._library.launch(prepared, x, weight, y)
        except CublasLtError as error:
            self._prepared[num_rows] = None
            self._note(MatmulFallback.LAUNCH_FAILED, num_rows, error)
            multiply_by_torch(x, weight, y)
        return y

    def _prepare(self, num_rows: int) -> Prepared | None:
        algorithm = self._algorithms.get(measured_rows(num_rows))
        if algorithm is None:
            return None
        try:
            prepared = self._library.prepared(Product(num_rows, *self._shape, *self._dtypes), algorithm)
        except CublasLtError as error:
            self._note(MatmulFallback.ROWS_REFUSED, num_rows, error)
            return None
        if prepared is None:
            self._note(MatmulFallback.ROWS_REFUSED, num_rows, "the chosen algorithm does not take them")
        return prepared

    def _note(self, reason: MatmulFallback, num_rows: int, detail: object) -> None:
        size_out, size_in = self._shape
        self._fallbacks.note(reason, f"{num_rows} rows by a weight of {size_out} x {size_in}", detail)


def multiply_by_torch(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """y = x @ weight^T, in y's dtype: that of x, or on a GPU fp32."""
    if y.dtype is x.dtype:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.mm(x, weight.t(), out_dtype=y.dtype, out=y)


def measured_rows(num_rows: int) -> int:
    """The number of rows whose algorithm serves so many.

    Up to 1024 the number itself, for what is best changes with each: of 384 rows by what is best for 512 a layer takes
    1.3 of its time (one H200, 8B). Of more, one with as many tiles of 128.
    """
    return num_rows if num_rows <= _MOST_EXACT else -(-num_rows // _TILE) * _TILE


def sizes_up_to(most: int, exact: Iterable[int]) -> list[int]:
    """Return the numbers of rows to measure, ascending: up to 1024 those in `exact`, then tiles up to `most`.

    From 2048 on every other tile: an odd last one is left to PyTorch.
    """
    most = min(most, MOST_ROWS)
    fine = range(_MOST_EXACT + _TILE, min(most, _MOST_FINE) + 1, _TILE)
    coarse = range(_MOST_FINE + 2 * _TILE, most + 1, 2 * _TILE)
    few = {size for size in exact if FEWEST_ROWS <= size <= min(most, _MOST_EXACT)}
    return sorted(few.union(fine, coarse))
