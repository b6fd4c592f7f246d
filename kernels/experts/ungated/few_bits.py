"""`triton.experts.ungated.few_bits`: experts without a gate in 8 or 4 bits in Triton, for any GPU of sm_89 or newer.

Slots sorted by expert, their rows gathered; up by the kernel of the last product of other mixtures, the activation,
down, and the weighted sum. Inputs of both products are rounded once a slot; where a file has one scale for all inputs
of a product, each expert has its own, by which rows that visit it are rounded. No launch depends on which experts are
visited, so that a CUDA graph holds them all.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.calls.processors import shared_bytes
from kernels.experts.few_bits.launch import GroupedInputs, rows_launches
from kernels.experts.few_bits.weights import FewBitWeight
from kernels.experts.portable.launch import combine
from kernels.experts.routing.sorting import SortedSlots, sort_slots
from kernels.experts.tiles import expert_tiles
from kernels.experts.ungated.weights import UngatedFewBitExperts
from kernels.fused.ungated import activated
from kernels.fused.ungated_kind import Ungated
from kernels.linear.formats.fp8_weights import Fp8RowsWeight, Fp8StaticWeight, rounded


def run_ungated_few_bits_triton(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: UngatedFewBitExperts, activation: Ungated,
    out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(up)).

    hidden, out [T, H], last dim contiguous; experts [T, k] int32, contiguous, each below the number of experts; weights
    [T, k] fp32, last dim contiguous. Does not wait for the device.
    """
    num_tokens, num_active = experts.shape
    if num_tokens == 0:
        return
    num_slots, num_experts = num_tokens * num_active, expert_weights.num_experts
    tiles = expert_tiles(num_slots, num_experts, hidden.element_size(), shared_bytes(hidden.device))
    run_in_tiles(hidden, experts, weights, expert_weights, activation, out, tiles.block_m)


def run_in_tiles(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: UngatedFewBitExperts, activation: Ungated,
    out: Tensor, block_m: int,
) -> None:  # fmt: skip
    """`run_ungated_few_bits_triton` by tiles of `block_m` slots of an expert, of one token at least."""
    num_slots, num_experts = experts.numel(), expert_weights.num_experts
    by_expert = sort_slots(experts, num_experts, block_m)
    grouped = _Grouped(by_expert, experts.view(-1).index_select(0, by_expert.order), num_experts, block_m)
    inner, results = hidden.new_empty(num_slots, expert_weights.width), hidden.new_empty(num_slots, hidden.shape[1])
    grouped.multiply(hidden.index_select(0, by_expert.order // experts.shape[1]), expert_weights.gate_up, inner)
    inner = activated(inner, activation)
    grouped.multiply(inner.index_select(0, by_expert.order), expert_weights.down, results)
    combine(results, weights, out)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """A grouped product: of rows in the order of their experts, each result stored at its slot.

    experts  [slots], of the rows
    """

    by_expert: SortedSlots
    experts: Tensor
    num_experts: int
    block_m: int

    def multiply(self, rows: Tensor, weight: FewBitWeight, out: Tensor) -> None:
        """Fill out [slots, O] of rows [slots, I] and a weight [E * O, I]."""
        if isinstance(weight, Fp8StaticWeight):
            of_experts = weight.input_scales.view(self.num_experts, -1)[:, 0]
            scales = of_experts.index_select(0, self.experts)
            x = GroupedInputs(rounded(rows.float(), scales[:, None]), scales, ())
            weight = Fp8RowsWeight(weight.codes, weight.scales, weight.inputs)
        else:
            x = GroupedInputs.of(rows, weight)
        for launch in rows_launches(rows, x, weight, out, self.by_expert.order, self.by_expert.tiles, self.block_m):
            launch.run()
