"""Products with weights of few bits by PyTorch, on any device: both operands widened to fp32 first."""

import torch
from torch import Tensor

from kernels.fused.activation import swiglu
from kernels.linear.epilogue import Epilogue
from kernels.linear.weights import LinearWeight

_MOST_NUMBERS = 2**25  # of the weight at once: 134 MB


def multiply_widened(x: Tensor, weight: LinearWeight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias), x rounded as the format says."""
    num_rows, size_in = weight.size
    inputs = weight.as_multiplied(x).float()
    sums = torch.empty(x.shape[0], num_rows, dtype=torch.float32, device=x.device)
    step = max(1, _MOST_NUMBERS // size_in)
    for start in range(0, num_rows, step):
        part = slice(start, min(start + step, num_rows))
        torch.mm(inputs, weight.dequantized(part).float().t(), out=sums[:, part])
    if bias is not None:
        sums += bias.float()
    if epilogue is Epilogue.SWIGLU:
        swiglu(sums.to(out.dtype), out)
    else:
        out.copy_(sums)
