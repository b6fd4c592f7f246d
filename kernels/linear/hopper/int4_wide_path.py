"""Products of more than 64 rows with weights of 4 bits by the kernel of `int4_wide.py`: one launch."""

from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.int4_weights import Int4Weight
from kernels.linear.hopper.int4_wide import Int4WideTiling, launch_int4_wide


def run_int4_wide(x: Tensor, weight: Int4Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias)."""
    tiling = Int4WideTiling(epilogue.parts, weight.group, bias is not None)
    launch_int4_wide(x, weight.codes, weight.scales, weight.zeros, bias, out, tiling)
