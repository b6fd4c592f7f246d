"""Products by cuBLASLt: by whichever of its algorithms, PyTorch's choice among them, is measured the fastest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.fused.activation import swiglu
from kernels.linear.epilogue import Epilogue
from kernels.linear.library.cublaslt import Algorithm, CublasLt, CublasLtError, Prepared, Product, load_library
from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.linear.library.measured_rows import measured_rows
from kernels.linear.torch_path import run_torch

if TYPE_CHECKING:
    from kernels.linear.weights import PlainWeight

_MOST_PROPOSED = 16  # algorithms, for any product

# (rows of the weight, its columns, dtype of x and the weight, dtype of the sums) of products that share algorithms
Sizes = tuple[int, int, torch.dtype, torch.dtype]
Choices = Mapping[int, Algorithm | None]  # by the number of rows; None: PyTorch's is no slower
# (reason, what PyTorch multiplies instead, detail): reported once for each product and number of rows
Note = Callable[[MatmulFallback, str, object], None]


@dataclass(frozen=True, slots=True)
class RunProposed:
    """A product by one algorithm: a proof must hold for each that `RunMeasured` may choose.

    index  among the algorithms that the library proposes for the number of rows, from 0 again where it is beyond them;
           None for PyTorch's choice, which also computes what the library has no algorithm for
    """

    index: int | None = 0

    @property
    def variants(self) -> "tuple[RunProposed, ...]":
        """Return one call for every algorithm that may be chosen."""
        return (RunProposed(None), *(RunProposed(index) for index in range(_MOST_PROPOSED)))

    def __call__(self, x: Tensor, weight: "PlainWeight", bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
        """Fill out [rows, size_out]. Raises RuntimeError where the library is missing or does not launch."""
        if self.index is None:
            return run_torch(x, weight, bias, epilogue, out)
        try:
            product = Product(x.shape[0], *weight.size, x.dtype, _dtype_of_sums(x, epilogue))
            prepared = _proposed(x.device, product, self.index)
            if prepared is None:
                return run_torch(x, weight, bias, epilogue, out)
            _launch(_library_on(x.device), prepared, x, weight, epilogue, out)
        except CublasLtError as error:
            raise RuntimeError(str(error)) from error
        return None


class RunMeasured:
    """The products of an engine: each by the algorithm that was measured for its number of rows, else by PyTorch.

    For one device and one thread. A bias is PyTorch's.
    """

    def __init__(self, note: Note) -> None:
        """`note`: gets what PyTorch multiplies though an algorithm was measured for it."""
        self._note = note
        self._library: CublasLt | None = None
        self._choices: dict[Sizes, Choices] = {}
        # By the number of rows and the sizes. None: PyTorch multiplies.
        self._prepared: dict[tuple[int, Sizes], Prepared | None] = {}
        self._unsuitable: set[tuple[int, Sizes]] = set()  # inputs that were noted

    def choose(self, library: CublasLt, choices: Mapping[Sizes, Choices]) -> None:
        """Multiply by these algorithms from now on: before the first step that is served."""
        self._library = library
        self._choices = dict(choices)
        self._prepared.clear()

    @property
    def choices(self) -> Mapping[Sizes, Choices]:
        """Return the measured algorithms."""
        return dict(self._choices)

    def __call__(self, x: Tensor, weight: "PlainWeight", bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
        """Fill out [rows, size_out]; by PyTorch where the library fails, and from then on."""
        library = self._library
        if library is None or bias is not None:
            return run_torch(x, weight, bias, epilogue, out)
        sizes = *weight.size, weight.dtype, _dtype_of_sums(x, epilogue)
        key = x.shape[0], sizes
        if key not in self._prepared:
            self._prepared[key] = self._prepare(library, *key)
        prepared = self._prepared[key]
        if prepared is None or not self._is_suitable(library, x, weight, key):
            return run_torch(x, weight, bias, epilogue, out)
        try:
            _launch(library, prepared, x, weight, epilogue, out)
        except CublasLtError as error:
            self._prepared[key] = None
            self._note(MatmulFallback.LAUNCH_FAILED, _text(key), error)
            run_torch(x, weight, bias, epilogue, out)
        return None

    def _prepare(self, library: CublasLt, num_rows: int, sizes: Sizes) -> Prepared | None:
        algorithm = self._choices.get(sizes, {}).get(measured_rows(num_rows))
        if algorithm is None:
            return None
        try:
            prepared = library.prepared(Product(num_rows, *sizes), algorithm)
        except CublasLtError as error:
            self._note(MatmulFallback.ROWS_REFUSED, _text((num_rows, sizes)), error)
            return None
        if prepared is None:
            detail = "the chosen algorithm does not take them"
            self._note(MatmulFallback.ROWS_REFUSED, _text((num_rows, sizes)), detail)
        return prepared

    def _is_suitable(self, library: CublasLt, x: Tensor, weight: "PlainWeight", key: tuple[int, Sizes]) -> bool:
        """Return whether the inputs are as those that were measured: always the same for one number of rows."""
        at_x, at_weight = x.data_ptr(), weight.values.data_ptr()
        if x.dtype is weight.dtype and x.is_contiguous() and (at_x | at_weight) % library.alignment_bytes == 0:
            return True
        if key not in self._unsuitable:
            self._unsuitable.add(key)
            detail = f"{x.dtype}, strides {x.stride()}, at {at_x:#x} and {at_weight:#x}"
            self._note(MatmulFallback.UNSUITABLE_INPUT, _text(key), detail)
        return False


def _launch(
    library: CublasLt, prepared: Prepared, x: Tensor, weight: "PlainWeight", epilogue: Epilogue, out: Tensor
) -> None:
    if epilogue is not Epilogue.SWIGLU:
        library.launch(prepared, x, weight.values, out)
        return
    gate_up = x.new_empty(x.shape[0], weight.size[0])
    library.launch(prepared, x, weight.values, gate_up)
    swiglu(gate_up, out)


def _dtype_of_sums(x: Tensor, epilogue: Epilogue) -> torch.dtype:
    return torch.float32 if epilogue is Epilogue.FP32 else x.dtype


def _text(key: tuple[int, Sizes]) -> str:
    num_rows, (size_out, size_in, *_) = key
    return f"{num_rows} rows by a weight of {size_out} x {size_in}"


# A pure function of the library and the product: to ask takes the host 62 us, a product of 128 rows by 4096 x 6144 the
# GPU 26 (medians of one H200).
@lru_cache(maxsize=4096)
def _proposed(device: torch.device, product: Product, index: int) -> Prepared | None:
    library = _library_on(device)
    algorithms = library.algorithms(product)
    return library.prepared(product, algorithms[index % len(algorithms)]) if algorithms else None


# The library's handle of a device: it holds no state of a product but a workspace of 32 MiB for each stream.
@lru_cache(maxsize=16)
def _library_on(device: torch.device) -> CublasLt:
    return CublasLt(load_library(), device)
