"""Products by cuBLASLt: whichever of its algorithms, PyTorch's choice among them, a measurement finds the fastest."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.fused.activation import swiglu
from kernels.linear.cublaslt import CublasLt, CublasLtError, Product, load_library
from kernels.linear.epilogue import Epilogue
from kernels.linear.torch_path import run_torch

_MOST_PROPOSED = 16  # algorithms, for any product


@dataclass(frozen=True, slots=True)
class RunProposed:
    """A product by one algorithm; what serves is chosen among all of them when the weights are there.

    index  among the algorithms that the library proposes for the number of rows, from 0 again where it is beyond them;
           None for PyTorch's choice, which also computes what the library has no algorithm for
    """

    index: int | None = 0

    @property
    def variants(self) -> "tuple[RunProposed, ...]":
        """Return one call for every algorithm that may be chosen: a proof must hold for each."""
        return (RunProposed(None), *(RunProposed(index) for index in range(_MOST_PROPOSED)))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
        """Fill out [rows, size_out]. Raises RuntimeError where the library is missing or does not launch."""
        if self.index is None:
            return run_torch(x, weight, bias, epilogue, out)
        num_rows, (size_out, size_in) = x.shape[0], weight.shape
        try:
            library = _library_on(x.device)
            dtype_out = torch.float32 if epilogue is Epilogue.FP32 else x.dtype
            product = Product(num_rows, size_out, size_in, x.dtype, dtype_out)
            algorithms = library.algorithms(product)
            if not algorithms:
                return run_torch(x, weight, bias, epilogue, out)
            prepared = library.prepared(product, algorithms[self.index % len(algorithms)])
            if prepared is None:
                return run_torch(x, weight, bias, epilogue, out)
            y = out if epilogue is not Epilogue.SWIGLU else x.new_empty(num_rows, size_out)
            library.launch(prepared, x, weight, y)
        except CublasLtError as error:
            raise RuntimeError(str(error)) from error
        if epilogue is Epilogue.SWIGLU:
            out.copy_(swiglu(y))
        return None


# The library's handle of a device: it holds no state of a product but a workspace of 32 MiB for each stream.
@lru_cache(maxsize=16)
def _library_on(device: torch.device) -> CublasLt:
    return CublasLt(load_library(), device)
