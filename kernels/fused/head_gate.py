"""Heads of attention multiplied by a function of a product of the same token: one number a head, or one a dimension.

On a CPU a number's bits do not depend on its place in the tensor: see `kernels.fused.alike`.
"""

import torch
from torch import Tensor

from kernels.fused.alike import sigmoid_alike
from kernels.fused.backend import jit, next_power_of_2, overlap, runs_on_triton, tl
from kernels.fused.head_gate_kind import GateFunction

_MOST_BLOCK = 2048  # numbers that one program gates: 16 a thread


def gate_heads_(out: Tensor, gate: Tensor, function: GateFunction) -> Tensor:
    """out *= function(gate), in place, computed in fp32 and rounded once; returns out.

    out   [T, heads, d], contiguous
    gate  [T, heads] or [T, heads * d], of the same dtype, the last dim contiguous
    """
    num_tokens, num_heads, head_dim = out.shape
    if not runs_on_triton(out):
        shares = _of_function(gate.float(), function)
        return out.mul_(shares.view(num_tokens, num_heads, -1))
    size, per_gate = num_heads * head_dim, num_heads * head_dim // gate.shape[1]
    block = min(next_power_of_2(size), _MOST_BLOCK)
    _gate_heads_kernel[(num_tokens, -(-size // block))](
        out,
        gate,
        gate.stride(0),
        SIZE=size,
        PER_GATE=per_gate,
        IS_SOFTPLUS=function is GateFunction.SOFTPLUS,
        BLOCK=block,
        **overlap(out.device),
    )
    return out


def _of_function(x: Tensor, function: GateFunction) -> Tensor:
    match function:
        case GateFunction.SIGMOID:
            return sigmoid_alike(x)
        case GateFunction.SOFTPLUS:
            return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


@jit
def _gate_heads_kernel(
    out_ptr,
    gate_ptr,
    stride_gate,
    SIZE: tl.constexpr,
    PER_GATE: tl.constexpr,
    IS_SOFTPLUS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):
    """One program a token and block of its heads' numbers."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    gate = tl.load(gate_ptr + token * stride_gate + cols // PER_GATE, mask=mask, other=0.0).to(tl.float32)
    if IS_SOFTPLUS:
        small = tl.exp(-tl.abs(gate))
        total = 1.0 + small
        # log(1 + small): the sum is rounded, and the quotient takes that error out (Kahan). It is 0 / 0 for a sum of 1.
        rest = tl.where(total == 1.0, 1.0, total - 1.0)
        share = tl.maximum(gate, 0.0) + tl.where(total == 1.0, small, tl.log(total) * (small / rest))
    else:
        share = 1.0 / (1.0 + tl.exp(-gate))
    row = out_ptr + token * SIZE + cols
    gated = tl.load(row, mask=mask, other=0.0).to(tl.float32) * share
    tl.store(row, gated.to(out_ptr.dtype.element_ty), mask=mask)
