"""Products with weights of 4 bits by PyTorch, on any device."""

from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.int4_weights import Int4Weight
from kernels.linear.formats.widened import multiply_widened


def run_int4_torch(x: Tensor, weight: Int4Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias)."""
    multiply_widened(x, weight, bias, epilogue, out)
