"""`triton.experts.ungated`: a mixture whose experts have no gate in Triton, for any GPU of sm_80 or newer.

Slots sorted by expert, up with the activation, down, and the weighted sum. No launch depends on which experts are
visited, so that a CUDA graph holds them all. Both products have the tiles of the last one of other mixtures: one sum
a program.
"""

import triton
from torch import Tensor

from kernels.calls.processors import shared_bytes
from kernels.experts.portable.launch import combine
from kernels.experts.portable.products import hallmark_experts_down
from kernels.experts.routing.sorting import sort_slots
from kernels.experts.tiles import ProductTiles, expert_tiles
from kernels.experts.ungated.products import hallmark_experts_up
from kernels.experts.ungated.weights import UngatedExperts
from kernels.fused.ungated_kind import Ungated


def run_ungated_triton(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: UngatedExperts, activation: Ungated, out: Tensor
) -> None:
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(up)).

    hidden, out [T, H], last dim contiguous; experts [T, k] int32, contiguous, each below the number of experts; weights
    [T, k] fp32, last dim contiguous. Does not wait for the device.
    """
    assert activation is Ungated.RELU2, "there is one activation without a gate"
    num_tokens, num_active = experts.shape
    if num_tokens == 0:
        return
    size, width = hidden.shape[1], expert_weights.width
    num_slots, num_experts = num_tokens * num_active, expert_weights.num_experts
    tiles = expert_tiles(num_slots, num_experts, hidden.element_size(), shared_bytes(hidden.device)).down
    by_expert = sort_slots(experts, num_experts, tiles.block_m)
    num_tiles = by_expert.tiles.shape[0]
    inner, results = hidden.new_empty(num_slots, width), hidden.new_empty(num_slots, size)
    hallmark_experts_up[(num_tiles * triton.cdiv(width, tiles.block_n),)](
        hidden, expert_weights.gate_up, inner, by_expert.order, by_expert.tiles, num_active, num_tiles,
        hidden.stride(0), size, width, **_sizes(tiles, size),
    )  # fmt: skip
    hallmark_experts_down[(num_tiles * triton.cdiv(size, tiles.block_n),)](
        inner, expert_weights.down, None, None, results, by_expert.order, by_expert.tiles, num_tiles, size, width,
        HAS_BIAS=False, IS_MXFP4=False, **_sizes(tiles, width),
    )  # fmt: skip
    combine(results, weights, out)


def _sizes(tiles: ProductTiles, size_in: int) -> dict[str, int | bool]:
    return {
        "EVEN_K": size_in % tiles.block_k == 0,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
