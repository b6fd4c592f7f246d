"""Results of a state space, multiplied by gates and then normed, group by group. Computed in fp32, rounded once.

A group's bits depend on its own numbers alone.
"""

import torch
from torch import Tensor

from kernels.fused.activation_kind import Activation
from kernels.fused.alike import activated_alike
from kernels.fused.backend import jit, next_power_of_2, overlap, runs_on_triton, tl


def gate_and_norm(x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """y / sqrt(mean(y^2) + eps) * weight of y = x * silu(gate), each group of neighbouring heads by itself.

    x       [T, H, D] contiguous; a group has H * D / num_groups numbers
    gate    [T, H * D] of x's dtype, last dim contiguous
    weight  [H * D] of any float dtype
    Returns [T, H * D] of x's dtype, contiguous. Source: Dao and Gu 2024 (Mamba-2), section 7.1.
    """
    num_tokens, size = x.shape[0], x.shape[1] * x.shape[2] // num_groups
    if not runs_on_triton(x):
        gated = x.flatten(1).float() * activated_alike(gate.float(), Activation.SILU)
        groups = gated.view(num_tokens, num_groups, size)
        scale = torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps)
        return ((groups * scale).flatten(1) * weight.float()).to(x.dtype)
    out = x.new_empty(num_tokens, num_groups * size)
    _gate_and_norm_kernel[(num_tokens, num_groups)](
        x, gate, weight, out, gate.stride(0), eps, GROUPS=num_groups, SIZE=size, BLOCK=next_power_of_2(size),
        **overlap(x.device),
    )  # fmt: skip
    return out


@jit
def _gate_and_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    stride_gt,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):
    """One program a token and group."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_ptr + group * SIZE + cols, mask=mask, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    place = (token * GROUPS + group) * SIZE + cols
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gt + group * SIZE + cols, mask=mask, other=0.0).to(tl.float32)
    gated = x * gate / (1.0 + tl.exp(-gate))
    scale = tl.rsqrt(tl.sum(gated * gated, axis=0) / SIZE + eps)
    tl.store(out_ptr + place, (gated * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)
