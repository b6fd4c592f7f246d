"""Launches of `few.py`."""

from __future__ import annotations
import torch
import triton
from torch import Tensor
from kernels.experts.few import hallmark_experts_few_down, hallmark_experts_few_gate_up
from kernels.experts.weights import Mxfp4Weights


def run_few(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert_weights,
    activation,
    out: Tensor,
    up=(4, 512, 4),
    down=(4, 256, 4, 8),
    pdl=True,
) -> None:
    from kernels.experts.triton_path import activation_arguments

    num_tokens, num_active = experts.shape
    size, width = hidden.shape[1], expert_weights.width
    name, limit, alpha = activation_arguments(activation)
    inner = hidden.new_empty(num_tokens * num_active, width)
    mx = isinstance(expert_weights, Mxfp4Weights)
    if mx:
        gu, gus, dn, dns = (
            expert_weights.gate_up_blocks.view(torch.int32),
            expert_weights.gate_up_scales,
            expert_weights.down_blocks.view(torch.int32),
            expert_weights.down_scales,
        )
        if up[1] == 512:
            up, down = (4, 1024, 4), (4, 1024, 4, 2)
    else:
        gu, gus, dn, dns = expert_weights.gate_up, None, expert_weights.down, None
    hallmark_experts_few_gate_up[(triton.cdiv(width, up[0]), num_tokens * num_active)](
        hidden,
        gu,
        gus,
        expert_weights.gate_up_bias,
        inner,
        experts,
        num_active,
        hidden.stride(0),
        width,
        limit,
        alpha,
        HIDDEN=size,
        ACTIVATION=name,
        HAS_BIAS=expert_weights.gate_up_bias is not None,
        IS_MXFP4=mx,
        BLOCK_N=up[0],
        BLOCK_K=up[1],
        IS_DEPENDENT=pdl,
        num_warps=up[2],
        launch_pdl=pdl,
    )
    hallmark_experts_few_down[(triton.cdiv(size, down[0]), num_tokens)](
        inner,
        dn,
        dns,
        expert_weights.down_bias,
        out,
        experts,
        weights,
        weights.stride(0),
        out.stride(0),
        size,
        WIDTH=width,
        NUM_ACTIVE=num_active,
        BLOCK_A=down[3],
        HAS_BIAS=expert_weights.down_bias is not None,
        IS_MXFP4=mx,
        BLOCK_N=down[0],
        BLOCK_K=down[1],
        IS_DEPENDENT=pdl,
        num_warps=down[2],
        launch_pdl=pdl,
    )
