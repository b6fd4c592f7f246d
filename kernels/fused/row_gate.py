"""A row multiplied by the sigmoid of its own product with one vector: the gate of what all tokens of a mixture visit.

A library's product of one column changes its algorithm with the number of rows; here a row's bits depend on that row
alone.
"""

from torch import Tensor

from kernels.fused.alike import sigmoid_alike
from kernels.fused.backend import jit, next_power_of_2, runs_on_triton, tl


def gate_rows_(out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """out *= sigmoid(x @ gate), in place, computed in fp32 and rounded once; returns out.

    out, x [T, H] of one dtype, contiguous; gate [H]
    """
    if not runs_on_triton(x):
        return out.copy_(out.float() * sigmoid_alike((x.float() * gate.float()).sum(dim=-1, keepdim=True)))
    num_tokens, size = x.shape
    block = next_power_of_2(size)
    num_warps = min(max(block // 512, 1), 16)
    _gate_rows_kernel[(num_tokens,)](out, x, gate, SIZE=size, BLOCK=block, num_warps=num_warps)
    return out


@jit
def _gate_rows_kernel(out_ptr, x_ptr, gate_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program a token; its whole row is in registers."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    x = tl.load(x_ptr + token * SIZE + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-tl.sum(x * gate, axis=0)))
    row = out_ptr + token * SIZE + cols
    gated = tl.load(row, mask=mask, other=0.0).to(tl.float32) * share
    tl.store(row, gated.to(out_ptr.dtype.element_ty), mask=mask)
