"""Activations of a feed-forward without a gate. Computed in fp32, rounded once.

Each number's bits depend on itself alone: all is a maximum and a product.
"""

from torch import Tensor

from kernels.fused.backend import jit, next_power_of_2, overlap, runs_on_triton, tl
from kernels.fused.ungated_kind import Ungated

_MAX_BLOCK = 2048


def activated(x: Tensor, activation: Ungated, out: Tensor | None = None) -> Tensor:
    """activation(x).

    x [T, I], last dim contiguous. Returns [T, I] of its dtype, contiguous: `out`, where it is given.
    """
    assert activation is Ungated.RELU2, "there is one activation without a gate"
    if not runs_on_triton(x):
        result = x.float().clamp(min=0).square().to(x.dtype)
        return result if out is None else out.copy_(result)
    num_tokens, size = x.shape
    out = x.new_empty(num_tokens, size) if out is None else out
    block = min(next_power_of_2(size), _MAX_BLOCK)
    _squared_relu_kernel[(num_tokens, -(-size // block))](
        x, out, x.stride(0), SIZE=size, BLOCK=block, **overlap(x.device)
    )
    return out


@jit
def _squared_relu_kernel(
    x_ptr, out_ptr, stride_t, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr = False
):
    """One program a token and block of columns."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    x = tl.load(x_ptr + token * stride_t + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(x < 0, 0.0, x)
    tl.store(out_ptr + token * SIZE + cols, (x * x).to(out_ptr.dtype.element_ty), mask=mask)
