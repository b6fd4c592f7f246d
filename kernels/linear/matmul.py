"""Products with weights, x @ weight^T: for the rows of a decode step at the speed of memory, else by PyTorch."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.calls.launch import is_interpreted, triton_version
from kernels.calls.processors import num_processors
from kernels.fused.activation import swiglu
from kernels.linear.tilings import ROW_COUNTS, WIDE_ROW_COUNTS, SkinnyTiling, WideTiling, tiling_for
from kernels.linear.tuned import TunedProduct

_HOPPER = (9, 0)
_DTYPES = (torch.float16, torch.bfloat16)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    chosen: TunedProduct | None = None,
) -> Tensor:
    """x [M, K] @ weight^T + bias: [M, N] of x's dtype.

    weight [N, K] and bias [N] of x's dtype; `chosen`: the weight's products of many rows on a GPU. On sm_90 and for M
    up to 128 in 16 bits the weight is read without waiting for the kernel before this call, so it must not have come
    from there.
    """
    tiling = tiling_of(x, weight, weight.shape[0], has_bias=bias is not None)
    if tiling is None and chosen is not None and bias is None and chosen.takes(x, weight):
        return chosen.product(x, weight)
    if tiling is None:
        return F.linear(x, weight, bias)
    return _launch(x, weight, bias, x.new_empty(x.shape[0], weight.shape[0]), tiling)


def linear_fp32(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    chosen: TunedProduct | None = None,
) -> Tensor:
    """x [M, K] @ weight^T in fp32, as `linear` otherwise; in `out` [M, N], contiguous, where it is given."""
    if out is None and not x.is_cuda:
        return linear(x, weight).float()
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
    tiling = tiling_of(x, weight, weight.shape[0])
    if tiling is not None:
        return _launch(x, weight, None, out, tiling)
    if chosen is not None and chosen.takes(x, weight):
        return chosen.product(x, weight, out)
    if x.is_cuda and x.dtype in _DTYPES:
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    return out.copy_(F.linear(x, weight))


def linear_swiglu(
    x: Tensor,
    gate_up: Tensor,
    bias: Tensor | None = None,
    chosen: TunedProduct | None = None,
) -> Tensor:
    """silu(gate) * up of [gate, up] = x [M, K] @ gate_up [2 * N, K]^T + bias: [M, N], as `linear` otherwise.

    In one kernel, without rounding gate and up, where `linear` would be one and there is no bias.
    """
    tiling = None if bias is not None else tiling_of(x, gate_up, gate_up.shape[0] // 2, parts=2)
    if tiling is None:
        return swiglu(linear(x, gate_up, bias, chosen))
    return _launch(x, gate_up, None, x.new_empty(x.shape[0], gate_up.shape[0] // 2), tiling)


def compile_linear(
    weight: Tensor, *, parts: int = 1, has_bias: bool = False, dtype_out: torch.dtype | None = None
) -> None:
    """Compile what the functions above launch with this weight for every number of rows: then none is in service.

    parts is 2 for `linear_swiglu`; dtype_out fp32 for `linear_fp32`, else the weight's own.
    """
    for num_rows in (*ROW_COUNTS, *WIDE_ROW_COUNTS):
        x = weight.new_empty(num_rows, weight.shape[1])
        tiling = tiling_of(x, weight, weight.shape[0] // parts, parts=parts, has_bias=has_bias)
        if isinstance(tiling, SkinnyTiling):
            from kernels.linear.skinny import launcher

            launcher(tiling, weight.dtype, dtype_out or weight.dtype, weight.device)
        elif tiling is not None:
            from kernels.linear.wide import launcher as wide_launcher

            wide_launcher(tiling, weight.dtype, dtype_out or weight.dtype, weight.device)


def tiling_of(
    x: Tensor, weight: Tensor, size_out: int, *, parts: int = 1, has_bias: bool = False
) -> SkinnyTiling | WideTiling | None:
    """Return the tiling that computes this product; None where no kernel can, or where none is the fastest."""
    num_rows, size_in = x.shape
    if num_rows > WIDE_ROW_COUNTS[-1] or not x.is_cuda or weight.dtype is not x.dtype or x.dtype not in _DTYPES:
        return None
    is_plain = x.stride(1) == 1 and x.stride(0) >= size_in and x.stride(0) % 8 == 0 and weight.is_contiguous()
    if not is_plain or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    return _tiling_on(x.device, num_rows, size_out, size_in, parts, has_bias)


@lru_cache(maxsize=4096)
def _tiling_on(
    device: torch.device, num_rows: int, size_out: int, size_in: int, parts: int, has_bias: bool
) -> SkinnyTiling | WideTiling | None:
    if triton_version() is None or is_interpreted() or torch.cuda.get_device_capability(device) != _HOPPER:
        return None
    return tiling_for(num_rows, size_out, size_in, num_processors(device), parts=parts, has_bias=has_bias)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, tiling: SkinnyTiling | WideTiling) -> Tensor:
    if isinstance(tiling, SkinnyTiling):
        from kernels.linear.skinny import launch_skinny

        launch_skinny(x, weight, bias, y, tiling)
    else:
        from kernels.linear.wide import launch_wide

        launch_wide(x, weight, bias, y, tiling)
    return y
