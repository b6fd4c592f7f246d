"""A product by the first path of the catalog that can compute it: as a plan decides where every path is proven."""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.paths import LinearPath, linear_paths_on
from kernels.linear.shape import LinearShape
from kernels.linear.weights import LinearWeight
from kernels.system.device import dtype_of, read_fingerprint, torch_dtype
from kernels.vocabulary.row_buckets import LinearRows


def multiply(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.NONE,
    out: Tensor | None = None,
) -> Tensor:
    """Return epilogue(x [rows, size_in] @ weight^T + bias) [rows, size_out], in `out` where it is given.

    For callers without a plan. Raises ValueError where no path can compute it.
    """
    shape = LinearShape(
        dtype_of(x.dtype),
        weight.size[1],
        weight.size[0] // epilogue.parts,
        LinearRows.of(x.shape[0]),
        bias is not None,
        epilogue,
        weight.format(),
    )
    if out is None:
        out = x.new_empty(x.shape[0], shape.size_out, dtype=torch_dtype(shape.dtype_out))
    run = first_path(shape, x.device).run
    assert run is not None
    run(x, weight, bias, epilogue, out)
    return out


# A pure function of the shape and the machine: the cache holds no state.
@lru_cache(maxsize=4096)
def first_path(shape: LinearShape, device: torch.device) -> LinearPath:
    """Return the most preferred path that can compute a shape on this machine. Raises ValueError where none can."""
    machine = read_fingerprint(device)
    for path in linear_paths_on(device):
        if path.run is not None and not path.rejects(shape, machine):
            return path
    raise ValueError(f"no path computes {shape} on {machine.device.value}")
