"""Products by PyTorch's own choice of algorithm: cuBLAS on a GPU, MKL or oneDNN on a CPU."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.fused.activation import swiglu
from kernels.linear.epilogue import Epilogue

if TYPE_CHECKING:
    from kernels.linear.weights import PlainWeight


def run_torch(x: Tensor, weight: "PlainWeight", bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias)."""
    by_columns = weight.values.t()
    if epilogue is Epilogue.SWIGLU:
        swiglu(x @ by_columns, out)
    elif epilogue is Epilogue.FP32:
        multiply_into_fp32(x, weight, bias, out)
    elif bias is None:
        torch.mm(x, by_columns, out=out)
    else:
        torch.addmm(bias, x, by_columns, out=out)


def multiply_into_fp32(x: Tensor, weight: "PlainWeight", bias: Tensor | None, out: Tensor) -> None:
    """Fill out [rows, size_out] fp32 with x @ weight^T + bias, of x in 16 bits on a GPU."""
    torch.mm(x, weight.values.t(), out_dtype=torch.float32, out=out)
    if bias is not None:
        out.add_(bias)
