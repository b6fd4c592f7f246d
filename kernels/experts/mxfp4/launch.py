"""`gluon.experts.mxfp4.hopper`: a mixture's products on sm_90 with weights of 4 bits, which stay codes in memory.

Five or seven launches whose grids depend on the number of tokens alone, so that a CUDA graph holds them: slots sorted
by expert; their rows of x, in the order in which codes are multiplied; gate and up with the activation; down; and the
weighted sum. Each kernel is launched while the one before it still runs. Few tokens are Triton's, by
portable/few_mxfp4.py.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.calls.launch import Loaded
from kernels.experts.hopper.arguments import address, grid, matrix, pairs_of_8, tensor_map
from kernels.experts.kinds import MXFP4_BLOCK, ExpertActivation
from kernels.experts.mxfp4.order import gather, ordered_size
from kernels.experts.mxfp4.products import hallmark_gluon_experts_codes
from kernels.experts.mxfp4.tilings import STEP, CodesTiles, CodesTiling, codes_tiles
from kernels.experts.portable.launch import activation_arguments, combine, run_experts
from kernels.experts.routing.sorting import sort_slots
from kernels.experts.weights import AnyExpertWeights, Mxfp4Weights
from kernels.tma.launches import any_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class


def run_experts_codes(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert_weights: AnyExpertWeights,
    activation: ExpertActivation,
    out: Tensor,
) -> None:
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden, out [T, H] bf16, last dim contiguous; experts [T, k] int32, contiguous, each below the number of experts;
    weights [T, k] fp32, last dim contiguous; expert_weights in mxfp4. H and the experts' width multiples of 64. Does
    not wait for the device.
    """
    assert isinstance(expert_weights, Mxfp4Weights), "the path's limits say so"
    num_tokens, num_active = experts.shape
    tiles = codes_tiles(num_tokens, num_active, expert_weights.num_experts)
    if tiles is None:
        run_experts(hidden, experts, weights, expert_weights, activation, out)
    else:
        run_in_tiles(hidden, experts, weights, expert_weights, activation, out, tiles)


def run_in_tiles(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert_weights: Mxfp4Weights,
    activation: ExpertActivation,
    out: Tensor,
    tiles: CodesTiles,
) -> None:
    """`run_experts_codes` by these tiles, whatever the number of tokens."""
    (num_tokens, _), device = experts.shape, hidden.device
    if num_tokens == 0:
        return
    (num_experts, size, _), width, num_slots = expert_weights.down_scales.shape, expert_weights.width, experts.numel()
    name, limit, alpha = activation_arguments(activation)
    large = expert_weights.has_large_scales
    gate_up = tiles.gate_up(has_bias=expert_weights.gate_up_bias is not None, activation=name, has_large_scales=large)
    down = tiles.down(has_bias=expert_weights.down_bias is not None, has_large_scales=large)
    by_expert = sort_slots(experts, num_experts, tiles.tokens)
    num_tiles, sorted_by = by_expert.tiles.shape[0], (by_expert.order.data_ptr(), by_expert.table.data_ptr())
    inner = hidden.new_empty(num_slots, ordered_size(width))
    x = gather(hidden, by_expert.order, inner, width)
    results = hidden.new_empty(num_slots, size)

    kernel = launcher(gate_up, pointer_class(expert_weights.gate_up_bias), device)
    across = -(-width // gate_up.columns)
    numbers = size // 4  # of 16 bits in a row of codes
    kernel(grid(num_tiles * across, device, tiles.programs), (
        *tensor_map(kernel, 0, expert_weights.gate_up_blocks, pairs_of_8(num_experts, width, numbers)),
        *tensor_map(kernel, 1, x, matrix(x)), inner.data_ptr(), expert_weights.gate_up_scales.data_ptr(),
        address(expert_weights.gate_up_bias), *sorted_by, across, x.shape[1] // STEP,
        size // MXFP4_BLOCK, width, inner.shape[1], limit, alpha,
    ))  # fmt: skip

    kernel = launcher(down, pointer_class(expert_weights.down_bias), device)
    across, numbers = -(-size // down.columns), width // 4
    weights_layout = (num_experts, size, numbers), (size * numbers, numbers, 1)
    kernel(grid(num_tiles * across, device, tiles.programs), (
        *tensor_map(kernel, 0, expert_weights.down_blocks, weights_layout),
        *tensor_map(kernel, 1, inner, matrix(inner)), results.data_ptr(), expert_weights.down_scales.data_ptr(),
        address(expert_weights.down_bias), *sorted_by, across, inner.shape[1] // STEP, width // MXFP4_BLOCK, size, size,
        0.0, 0.0,
    ))  # fmt: skip
    combine(results, weights, out)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: CodesTiling, bias: PointerClass | None, device: torch.device) -> Loaded:
    """`compiled`, ready to launch past Triton's binder."""
    return Loaded(compiled(tiling, bias), device)


def compiled(tiling: CodesTiling, bias: PointerClass | None) -> Any:
    """The product of this tiling and this bias for sm_90; no GPU is needed."""
    dtype = torch.bfloat16
    values, numbers, weights = AnyTensor(dtype, 0), AnyTensor(torch.int32, 0), any_map(dtype, tiling.weights_box)
    scales = AnyTensor(torch.uint8, 0)
    return hallmark_gluon_experts_codes.warmup(
        weights, any_map(dtype, tiling.inputs_box), values, scales, any_tensor(bias), numbers, numbers, 1, 1, 1, 16, 16,
        1.5, 1.5, tiling, grid=(1,), num_warps=4, launch_pdl=True, maxnreg=tiling.max_registers,
    )  # fmt: skip
