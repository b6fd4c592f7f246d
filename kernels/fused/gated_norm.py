"""Results of a recurrence's heads, normed and multiplied by gates. Computed in fp32, rounded once.

A head's bits depend on its own numbers alone.
"""

import torch
from torch import Tensor

from kernels.fused.activation_kind import Activation
from kernels.fused.alike import activated_alike, sigmoid_alike
from kernels.fused.backend import jit, next_power_of_2, overlap, runs_on_triton, tl


def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, is_sigmoid: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate), or the sigmoid of the gate, each head by itself.

    x       [T, H, D] contiguous; a head may stand for a group of them
    gate    [T, H * D] of x's dtype, last dim contiguous
    weight  [D], or one of each head [H * D], of any float dtype
    Returns [T, H * D] of x's dtype, contiguous. Source: Yang et al. 2024 (Gated Delta Networks), section 3.4.
    """
    num_tokens, num_heads, size = x.shape
    is_whole = weight.shape[0] != size
    if not runs_on_triton(x):
        precise = x.float()
        scale = torch.rsqrt(precise.square().mean(dim=-1, keepdim=True) + eps)
        gates = sigmoid_alike(gate.float()) if is_sigmoid else activated_alike(gate.float(), Activation.SILU)
        return (
            (precise * scale * weight.float().view(-1, size) * gates.view(num_tokens, num_heads, size))
            .to(x.dtype)
            .flatten(1)
        )
    out = x.new_empty(num_tokens, num_heads * size)
    _norm_and_gate_kernel[(num_tokens, num_heads)](
        x, gate, weight, out, gate.stride(0), eps, HEADS=num_heads, SIZE=size, BLOCK=next_power_of_2(size),
        IS_SIGMOID=is_sigmoid, WEIGHT_STRIDE=size if is_whole else 0, num_warps=1 if size <= 256 else 4,
        **overlap(x.device),
    )  # fmt: skip
    return out


@jit
def _norm_and_gate_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    stride_gt,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SIGMOID: tl.constexpr = False,
    WEIGHT_STRIDE: tl.constexpr = 0,
    OVERLAPS: tl.constexpr = False,
):
    """One program a token and head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_ptr + head * WEIGHT_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    place = (token * HEADS + head) * SIZE + cols
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gt + head * SIZE + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    gated = x * scale * weight * (1.0 if IS_SIGMOID else gate) / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + place, gated.to(out_ptr.dtype.element_ty), mask=mask)
