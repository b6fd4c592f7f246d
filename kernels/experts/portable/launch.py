"""`triton.experts`: a mixture's products in Triton, for any GPU of sm_80 or newer.

Four to six launches whose grids depend on the number of tokens alone, so that a CUDA graph holds them: slots sorted by
expert, gate and up with the activation, down, and the weighted sum; two of few tokens with mxfp4 weights. A token's
result does not depend on what its neighbours are; how many there are chooses the tiles.
"""

import torch
import triton
from torch import Tensor

from kernels.calls.processors import shared_bytes
from kernels.experts.kinds import ClampedSwiglu, ExpertActivation
from kernels.experts.portable.few_mxfp4 import hallmark_experts_few_down, hallmark_experts_few_gate_up
from kernels.experts.portable.products import hallmark_experts_combine, hallmark_experts_down, hallmark_experts_gate_up
from kernels.experts.routing.dependent import launches_ahead
from kernels.experts.routing.sorting import sort_slots
from kernels.experts.tiles import READ_TOGETHER, ProductTiles, expert_tiles, few_tiles, is_few
from kernels.experts.weights import AnyExpertWeights, Mxfp4Weights

_SUM_BLOCK = 1024  # columns of one program of the weighted sum


def run_experts(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert_weights: AnyExpertWeights,
    activation: ExpertActivation,
    out: Tensor,
) -> None:
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden, out [T, H], last dim contiguous; experts [T, k] int32, contiguous, each below the number of experts; weights
    [T, k] fp32, last dim contiguous. Does not wait for the device.
    """
    num_tokens, num_active = experts.shape
    if num_tokens == 0:
        return
    size, width = hidden.shape[1], expert_weights.width
    num_slots, num_experts = num_tokens * num_active, expert_weights.num_experts
    if isinstance(expert_weights, Mxfp4Weights) and is_few(num_slots, num_experts):
        _run_few(hidden, experts, weights, expert_weights, activation, out)
        return
    is_mxfp4 = isinstance(expert_weights, Mxfp4Weights)
    tiles = expert_tiles(num_slots, num_experts, hidden.element_size(), shared_bytes(hidden.device), is_mxfp4=is_mxfp4)
    by_expert = sort_slots(experts, num_experts, tiles.block_m)
    of_rows = by_expert.tiles
    num_tiles = of_rows.shape[0]
    inner, results = hidden.new_empty(num_slots, width), hidden.new_empty(num_slots, size)
    if isinstance(expert_weights, Mxfp4Weights):
        gate_up, gate_up_scales = expert_weights.gate_up_blocks.view(torch.int32), expert_weights.gate_up_scales
        down, down_scales = expert_weights.down_blocks.view(torch.int32), expert_weights.down_scales
    else:
        gate_up, down = expert_weights.gate_up, expert_weights.down
        gate_up_scales = down_scales = None  # type: ignore[assignment]
    name, limit, alpha = activation_arguments(activation)
    hallmark_experts_gate_up[_grid(num_tiles, width, tiles.gate_up)](
        hidden, gate_up, gate_up_scales, expert_weights.gate_up_bias, inner, by_expert.order, of_rows,
        num_active, num_tiles, hidden.stride(0), size, width, limit, alpha, ACTIVATION=name,
        HAS_BIAS=expert_weights.gate_up_bias is not None, IS_MXFP4=is_mxfp4, **_sizes(tiles.gate_up, size),
    )  # fmt: skip
    hallmark_experts_down[_grid(num_tiles, size, tiles.down)](
        inner, down, down_scales, expert_weights.down_bias, results, by_expert.order, of_rows, num_tiles,
        size, width, HAS_BIAS=expert_weights.down_bias is not None, IS_MXFP4=is_mxfp4, **_sizes(tiles.down, width),
    )  # fmt: skip
    combine(results, weights, out)


def _run_few(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert_weights: Mxfp4Weights,
    activation: ExpertActivation,
    out: Tensor,
) -> None:
    """`run_experts` of few tokens with mxfp4 weights: two launches."""
    num_tokens, num_active = experts.shape
    size, width, ahead = hidden.shape[1], expert_weights.width, launches_ahead(hidden.device)
    gate_up, down = few_tiles(shared_bytes(hidden.device))
    inner = hidden.new_empty(experts.numel(), width)
    name, limit, alpha = activation_arguments(activation)
    gate_up_bias, down_bias = expert_weights.gate_up_bias, expert_weights.down_bias
    hallmark_experts_few_gate_up[(triton.cdiv(width, gate_up.block_n), experts.numel())](
        hidden, expert_weights.gate_up_blocks.view(torch.int32), expert_weights.gate_up_scales, gate_up_bias, inner,
        experts, num_active, hidden.stride(0), width, limit, alpha, HIDDEN=size, ACTIVATION=name,
        HAS_BIAS=gate_up_bias is not None, BLOCK_N=gate_up.block_n, BLOCK_K=gate_up.block_k, IS_DEPENDENT=ahead,
        num_warps=gate_up.num_warps, launch_pdl=ahead,
    )  # fmt: skip
    hallmark_experts_few_down[(triton.cdiv(size, down.block_n), num_tokens)](
        inner, expert_weights.down_blocks.view(torch.int32), expert_weights.down_scales, down_bias, out, experts,
        weights, weights.stride(0), out.stride(0), size, WIDTH=width, NUM_ACTIVE=num_active,
        BLOCK_A=min(num_active, READ_TOGETHER), HAS_BIAS=down_bias is not None, BLOCK_N=down.block_n,
        BLOCK_K=down.block_k, IS_DEPENDENT=ahead, num_warps=down.num_warps, launch_pdl=ahead,
    )  # fmt: skip


def combine(results: Tensor, weights: Tensor, out: Tensor) -> None:
    """Fill out [T, H] with the weighted sum, in the order of slots, of results [T * k, H]."""
    size, ahead = out.shape[1], launches_ahead(out.device)
    block = min(_SUM_BLOCK, max(16, triton.next_power_of_2(size)))
    hallmark_experts_combine[(out.shape[0], triton.cdiv(size, block))](
        results, weights, out, weights.stride(0), out.stride(0), size, NUM_ACTIVE=weights.shape[1], BLOCK=block,
        IS_DEPENDENT=ahead, launch_pdl=ahead,
    )  # fmt: skip


def activation_arguments(activation: ExpertActivation) -> tuple[str, float, float]:
    """The kernel's name of an activation, its limit and its alpha."""
    if isinstance(activation, ClampedSwiglu):
        return "clamped", activation.limit, activation.alpha
    return activation.value, 0.0, 0.0


def _grid(num_tiles: int, size_out: int, tiles: ProductTiles) -> tuple[int]:
    return (num_tiles * triton.cdiv(size_out, tiles.block_n),)


def _sizes(tiles: ProductTiles, size_in: int) -> dict[str, int | bool]:
    return {
        "EVEN_K": size_in % tiles.block_k == 0,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
