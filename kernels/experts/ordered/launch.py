"""`triton.experts.few_bits.ordered`, `triton.experts.ungated.ordered`, `triton.experts.capped.ordered`.

The products of the paths without `.ordered`, by one tile whatever the number of tokens: 64 slots of an expert. A slot's
products are summed step by step over the inner dim by itself, inputs are rounded by their own largest number, and a
token's experts are added in the order of its slots. So the bits of a token depend on that token alone. Little is spent
on few tokens, whose time is that of the weights; of many, tiles of 128 slots would read weights half as often.
"""

import triton
from torch import Tensor

from kernels.calls.processors import shared_bytes
from kernels.experts.capped.launch import _Grouped as CappedProducts
from kernels.experts.few_bits.launch import down_launches, gate_up_launches
from kernels.experts.few_bits.weights import FewBitExperts
from kernels.experts.kinds import ExpertActivation
from kernels.experts.portable.launch import combine
from kernels.experts.portable.products import hallmark_experts_down
from kernels.experts.routing.sorting import sort_slots
from kernels.experts.tiles import ExpertTiles, expert_tiles
from kernels.experts.ungated.few_bits import run_in_tiles
from kernels.experts.ungated.launch import _sizes as constants_of
from kernels.experts.ungated.products import hallmark_experts_up
from kernels.experts.ungated.weights import UngatedExperts, UngatedFewBitExperts
from kernels.experts.weights import ExpertWeights
from kernels.fused.capped import capped
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.ungated_kind import Ungated

_ROWS_OF_EXPERT = 48  # that tiles are made for, however many there are


def run_few_bits_ordered(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: FewBitExperts, activation: ExpertActivation,
    out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] as `run_few_bits_triton` does; arguments likewise."""
    if not experts.numel():
        return
    tiles = _tiles(hidden)
    by_expert = sort_slots(experts, expert_weights.num_experts, tiles.block_m)
    inner, results = hidden.new_empty(experts.numel(), expert_weights.width), _results(hidden, experts)
    given = by_expert.order, by_expert.tiles, tiles.block_m
    for launch in gate_up_launches(hidden, expert_weights, activation, inner, *given, experts.shape[1]):
        launch.run()
    for launch in down_launches(inner, expert_weights, results, *given):
        launch.run()
    combine(results, weights, out)


def run_ungated_ordered(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: UngatedExperts | UngatedFewBitExperts,
    activation: Ungated, out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] as `run_ungated_triton` and `run_ungated_few_bits_triton` do; arguments likewise."""
    assert activation is Ungated.RELU2, "there is one activation without a gate"
    if not experts.numel():
        return
    tiles, num_active = _tiles(hidden), experts.shape[1]
    if isinstance(expert_weights, UngatedFewBitExperts):
        run_in_tiles(hidden, experts, weights, expert_weights, activation, out, tiles.block_m)
        return
    by_expert = sort_slots(experts, expert_weights.num_experts, tiles.block_m)
    inner, results = hidden.new_empty(experts.numel(), expert_weights.width), _results(hidden, experts)
    one, table = tiles.down, by_expert.tiles
    num_tiles, width, size = table.shape[0], expert_weights.width, hidden.shape[1]
    hallmark_experts_up[(num_tiles * triton.cdiv(width, one.block_n),)](
        hidden, expert_weights.gate_up, inner, by_expert.order, table, num_active, num_tiles, hidden.stride(0),
        size, width, **constants_of(one, size),
    )  # fmt: skip
    hallmark_experts_down[(num_tiles * triton.cdiv(size, one.block_n),)](
        inner, expert_weights.down, None, None, results, by_expert.order, table, num_tiles, size, width,
        HAS_BIAS=False, IS_MXFP4=False, **constants_of(one, width),
    )  # fmt: skip
    combine(results, weights, out)


def run_capped_ordered(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: ExpertWeights | FewBitExperts,
    activation: CappedSilu, out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] as `run_capped_triton` does; arguments likewise."""
    if not experts.numel():
        return
    tiles, num_active = _tiles(hidden), experts.shape[1]
    by_expert = sort_slots(experts, expert_weights.num_experts, tiles.block_m)
    products = CappedProducts(by_expert, tiles)
    both, results = hidden.new_empty(experts.numel(), 2 * expert_weights.width), _results(hidden, experts)
    products.multiply(hidden.index_select(0, by_expert.order // num_active), expert_weights.gate_up, both)
    products.multiply(capped(both, activation).index_select(0, by_expert.order), expert_weights.down, results)
    combine(results, weights, out)


def _tiles(hidden: Tensor) -> ExpertTiles:
    return expert_tiles(_ROWS_OF_EXPERT, 1, hidden.element_size(), shared_bytes(hidden.device))


def _results(hidden: Tensor, experts: Tensor) -> Tensor:
    return hidden.new_empty(experts.numel(), hidden.shape[1])
