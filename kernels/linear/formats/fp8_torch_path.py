"""Products with weights of 8 bits by PyTorch, on any device."""

from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import Fp8Weight
from kernels.linear.formats.widened import multiply_widened


def run_fp8_torch(x: Tensor, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias), x rounded as the format says."""
    multiply_widened(x, weight, bias, epilogue, out)
