"""`triton.experts.capped`: a mixture with a bounded activation in Triton, for any GPU of sm_80 or newer.

Slots sorted by expert, their rows gathered; gate and up by the kernel of the last product, the activation by PyTorch,
down, and the weighted sum. No launch depends on which experts are visited, so that a CUDA graph holds them all. Beside
experts whose kernel activates, it writes and reads gate and up once more: 4 * I numbers a slot.
"""

from dataclasses import dataclass

import triton
from torch import Tensor

from kernels.calls.processors import shared_bytes
from kernels.experts.few_bits.launch import down_launches
from kernels.experts.few_bits.weights import FewBitExperts, FewBitWeight
from kernels.experts.portable.launch import combine
from kernels.experts.portable.products import hallmark_experts_down
from kernels.experts.routing.sorting import SortedSlots, sort_slots
from kernels.experts.tiles import ExpertTiles, expert_tiles
from kernels.experts.weights import ExpertWeights
from kernels.fused.capped import capped
from kernels.fused.capped_kind import CappedSilu


def run_capped_triton(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: ExpertWeights | FewBitExperts,
    activation: CappedSilu, out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] with the sum over a token's k experts of weight * down(capped(gate, up)).

    hidden, out [T, H], last dim contiguous; experts [T, k] int32, contiguous, each below the number of experts; weights
    [T, k] fp32, last dim contiguous; experts without biases. Does not wait for the device.
    """
    num_tokens, num_active = experts.shape
    if num_tokens == 0:
        return
    num_slots, num_experts = num_tokens * num_active, expert_weights.num_experts
    tiles = expert_tiles(num_slots, num_experts, hidden.element_size(), shared_bytes(hidden.device))
    by_expert = sort_slots(experts, num_experts, tiles.block_m)
    grouped = _Grouped(by_expert, tiles)
    both = hidden.new_empty(num_slots, 2 * expert_weights.width)
    results = hidden.new_empty(num_slots, hidden.shape[1])
    grouped.multiply(hidden.index_select(0, by_expert.order // num_active), expert_weights.gate_up, both)
    grouped.multiply(capped(both, activation).index_select(0, by_expert.order), expert_weights.down, results)
    combine(results, weights, out)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """A grouped product: of rows in the order of their experts, each result stored at its slot."""

    by_expert: SortedSlots
    tiles: ExpertTiles

    def multiply(self, rows: Tensor, weight: Tensor | FewBitWeight, out: Tensor) -> None:
        """Fill out [slots, O] of rows [slots, I] and a weight [E, O, I], or [E * O, I] of few bits."""
        order, table, tiles = self.by_expert.order, self.by_expert.tiles, self.tiles.down
        if not isinstance(weight, Tensor):
            for launch in down_launches(rows, FewBitExperts(weight, weight), out, order, table, tiles.block_m):
                launch.run()
            return
        num_tiles, size_in, size_out = table.shape[0], rows.shape[1], out.shape[1]
        hallmark_experts_down[(num_tiles * triton.cdiv(size_out, tiles.block_n),)](
            rows, weight, None, None, out, order, table, num_tiles, size_out, size_in,
            HAS_BIAS=False, IS_MXFP4=False, EVEN_K=size_in % tiles.block_k == 0, BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
