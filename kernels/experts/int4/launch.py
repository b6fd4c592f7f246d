"""`gluon.experts.int4.hopper`: a mixture's products on sm_90 with weights of 4 bits in groups of 128.

Five or seven launches, as those of mxfp4/launch.py: slots sorted by expert; their rows of x, in the order in which
codes are multiplied; gate and up with the activation; down; and the weighted sum. Grids depend on the number of tokens
alone, so that a CUDA graph holds them. Each kernel is launched while the one before it still runs.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.calls.launch import Loaded
from kernels.experts.few_bits.weights import FewBitExperts
from kernels.experts.hopper.arguments import grid, matrix, pairs_of_8, tensor_map
from kernels.experts.int4.products import hallmark_gluon_experts_int4
from kernels.experts.kinds import ExpertActivation
from kernels.experts.mxfp4.order import gather
from kernels.experts.mxfp4.tilings import STEP, CodesTiles, CodesTiling
from kernels.experts.portable.launch import activation_arguments, combine
from kernels.experts.routing.sorting import sort_slots
from kernels.experts.tiles import hopper_rows
from kernels.linear.formats.int4_weights import Int4Weight128
from kernels.tma.launches import any_map
from kernels.tma.pointers import AnyTensor

# By the slots of a tile of the 16-bit products, whose borders are compiled for and tested. Of 64 slots and more wgmma's
# sums of a group and their sum are 64 to 128 registers of a thread: one program has a multiprocessor.
_TILES = {
    1: CodesTiles(8, 2, programs=2),
    16: CodesTiles(16, 2, programs=2),
    32: CodesTiles(32, 2, programs=2),
    64: CodesTiles(64, 2),
    128: CodesTiles(128, 2),
}


def run_experts_int4(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: FewBitExperts, activation: ExpertActivation,
    out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden, out [T, H] bf16, last dim contiguous; experts [T, k] int32, contiguous, each below the number of experts;
    weights [T, k] fp32, last dim contiguous; expert_weights in groups of 128. H and the experts' width multiples of
    128. Does not wait for the device.
    """
    num_tokens, num_active = experts.shape
    rows = hopper_rows(num_tokens, num_active, expert_weights.num_experts)
    run_in_tiles(hidden, experts, weights, expert_weights, activation, out, rows)


def run_in_tiles(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: FewBitExperts, activation: ExpertActivation,
    out: Tensor, rows: int,
) -> None:  # fmt: skip
    """`run_experts_int4` by the tiles of so many slots: 16, 32, 64 or 128; or 1, by tiles of 8."""
    if experts.shape[0] == 0:
        return
    gate_up, down = expert_weights.gate_up, expert_weights.down
    assert isinstance(gate_up, Int4Weight128), "the path's limits say so"
    assert isinstance(down, Int4Weight128), "the path's limits say so"
    num_experts, width, size, tiles = expert_weights.num_experts, expert_weights.width, hidden.shape[1], _TILES[rows]
    name, limit, alpha = activation_arguments(activation)
    by_expert, device = sort_slots(experts, num_experts, tiles.tokens), hidden.device
    num_tiles, sorted_by = by_expert.tiles.shape[0], (by_expert.order.data_ptr(), by_expert.table.data_ptr())
    inner = hidden.new_empty(experts.numel(), width)
    x = gather(hidden, by_expert.order, inner, width)
    results = hidden.new_empty(experts.numel(), size)

    tiling = tiles.gate_up(has_bias=False, activation=name, has_large_scales=False)
    kernel, across = launcher(tiling, device), -(-width // tiling.columns)
    kernel(grid(num_tiles * across, device, tiles.programs), (
        *tensor_map(kernel, 0, gate_up.codes, pairs_of_8(num_experts, width, size // 4)),
        *tensor_map(kernel, 1, x, matrix(x)), inner.data_ptr(), gate_up.scales.data_ptr(), gate_up.zeros.data_ptr(),
        *sorted_by, across, size // STEP, width, width, limit, alpha,
    ))  # fmt: skip

    tiling = tiles.down(has_bias=False, has_large_scales=False)
    kernel, across = launcher(tiling, device), -(-size // tiling.columns)
    weights_layout = (num_experts, size, width // 4), (size * width // 4, width // 4, 1)
    kernel(grid(num_tiles * across, device, tiles.programs), (
        *tensor_map(kernel, 0, down.codes, weights_layout), *tensor_map(kernel, 1, inner, matrix(inner)),
        results.data_ptr(), down.scales.data_ptr(), down.zeros.data_ptr(), *sorted_by, across, width // STEP, size,
        size, 0.0, 0.0,
    ))  # fmt: skip
    combine(results, weights, out)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: CodesTiling, device: torch.device) -> Loaded:
    """`compiled`, ready to launch past Triton's binder."""
    return Loaded(compiled(tiling), device)


def compiled(tiling: CodesTiling) -> Any:
    """The product of this tiling for sm_90; no GPU is needed."""
    values, scales, zeros, numbers = (
        AnyTensor(it, 0) for it in (torch.bfloat16, torch.float32, torch.uint8, torch.int32)
    )
    maps = any_map(torch.bfloat16, tiling.weights_box), any_map(torch.bfloat16, tiling.inputs_box)
    return hallmark_gluon_experts_int4.warmup(
        *maps, values, scales, zeros, numbers, numbers, 1, 1, 16, 16, 1.5, 1.5, tiling, grid=(1,), num_warps=4,
        launch_pdl=True, maxnreg=tiling.max_registers,
    )  # fmt: skip
