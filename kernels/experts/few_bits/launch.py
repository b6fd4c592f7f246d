"""`triton.experts.few_bits`: a mixture in 8 or 4 bits in Triton, for any GPU of sm_89 or newer.

Slots sorted by expert, inputs rounded once a token, gate and up with the activation, its result rounded once a slot,
down, and the weighted sum. Grids depend on the number of tokens alone, so that a CUDA graph holds them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.calls.processors import shared_bytes
from kernels.experts.few_bits.products import hallmark_experts_few_bits_down, hallmark_experts_few_bits_gate_up
from kernels.experts.few_bits.weights import FewBitExperts, FewBitWeight
from kernels.experts.kinds import ExpertActivation
from kernels.experts.portable.launch import activation_arguments, combine
from kernels.experts.routing.sorting import sort_slots
from kernels.experts.tiles import expert_tiles
from kernels.linear.formats.fp8_weights import Fp8BlocksWeight, Fp8RowsWeight, Fp8StaticWeight
from kernels.linear.formats.int4_weights import Int4Weight
from kernels.linear.portable.fp8_inputs import rounded_inputs
from kernels.linear.portable.launches import Launch

_FEW_ROWS = 16  # of a tile, up to which memory is what bounds it
_MOST_COLUMNS = 64  # of a group of 4 bits whose tile has as many rows of weights
_MOST_AS_HALF = 64  # rows of a tile whose codes of 8 bits become fp16


def run_few_bits_triton(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: FewBitExperts, activation: ExpertActivation,
    out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden, out [T, H], last dim contiguous; experts [T, k] int32, contiguous, each below the number of experts; weights
    [T, k] fp32, last dim contiguous. Does not wait for the device.
    """
    num_tokens, num_active = experts.shape
    if num_tokens == 0:
        return
    size, num_slots = hidden.shape[1], num_tokens * num_active
    tiles = expert_tiles(num_slots, expert_weights.num_experts, hidden.element_size(), shared_bytes(hidden.device))
    by_expert = sort_slots(experts, expert_weights.num_experts, tiles.block_m)
    inner, results = hidden.new_empty(num_slots, expert_weights.width), hidden.new_empty(num_slots, size)
    given = by_expert.order, by_expert.tiles, tiles.block_m
    for launch in gate_up_launches(hidden, expert_weights, activation, inner, *given, num_active):
        launch.run()
    for launch in down_launches(inner, expert_weights, results, *given):
        launch.run()
    combine(results, weights, out)


def gate_up_launches(
    hidden: Tensor, experts: FewBitExperts, activation: ExpertActivation, inner: Tensor, order: Tensor, tiles: Tensor,
    block_m: int, num_active: int,
) -> list[Launch]:  # fmt: skip
    """Return what rounds hidden [T, H], where the format does, and fills inner [slots, I] in the order of `order`."""
    weight, width = experts.gate_up, experts.width
    x = GroupedInputs.of(hidden, weight)
    block_n = _columns_of(block_m, weight)
    name, limit, alpha = activation_arguments(activation)
    arguments = (
        x.values, x.scales, weight.codes, weight.scales, _zeros_of(weight), inner, order, tiles, num_active,
        tiles.shape[0], hidden.shape[0], x.values.stride(0), hidden.shape[1], x.values.shape[1],
        weight.scales.shape[1], width, limit, alpha,
    )  # fmt: skip
    options = {"ACTIVATION": name, **_options(weight, block_m, block_n, hidden.element_size())}
    grid = (tiles.shape[0] * triton.cdiv(width, block_n),)
    return [*x.launches, Launch(hallmark_experts_few_bits_gate_up, grid, arguments, options)]


def down_launches(
    inner: Tensor, experts: FewBitExperts, results: Tensor, order: Tensor, tiles: Tensor, block_m: int
) -> list[Launch]:
    """Return what rounds inner [slots, I], where the format does, and fills results [slots, H] at their slots."""
    return rows_launches(inner, GroupedInputs.of(inner, experts.down), experts.down, results, order, tiles, block_m)


def rows_launches(
    inner: Tensor, x: "GroupedInputs", weight: FewBitWeight, results: Tensor, order: Tensor, tiles: Tensor, block_m: int
) -> list[Launch]:
    """Return what rounds rows in the order of their experts, and fills results [slots, H] at their slots.

    inner [slots, I], x: its numbers as they are multiplied; weight [E * H, I]
    """
    hidden, block_n = results.shape[1], _columns_of(block_m, weight)
    arguments = (
        x.values, x.scales, weight.codes, weight.scales, _zeros_of(weight), results, order, tiles, tiles.shape[0],
        inner.shape[0], x.values.stride(0), inner.shape[1], x.values.shape[1], weight.scales.shape[1], hidden,
    )  # fmt: skip
    grid = (tiles.shape[0] * triton.cdiv(hidden, block_n),)
    options = _options(weight, block_m, block_n, inner.element_size())
    return [*x.launches, Launch(hallmark_experts_few_bits_down, grid, arguments, options)]


@dataclass(frozen=True, slots=True)
class GroupedInputs:
    """Inputs of a product: codes and scales once `launches` have run, or numbers as they are."""

    values: Tensor
    scales: Tensor | None
    launches: tuple[Launch, ...]

    @classmethod
    def of(cls, x: Tensor, weight: FewBitWeight) -> "GroupedInputs":
        if isinstance(weight, Int4Weight):
            return cls(x, None, ())
        codes, scales, launch = rounded_inputs(x, weight)
        return cls(codes, scales, (launch,))


def _zeros_of(weight: FewBitWeight) -> Tensor | None:
    return weight.zeros if isinstance(weight, Int4Weight) else None


def _columns_of(block_m: int, weight: FewBitWeight) -> int:
    """Return the weight's rows of a tile, of each part. Of groups of 128 columns half, or registers spill."""
    is_wide = isinstance(weight, Int4Weight) and weight.group > _MOST_COLUMNS
    return (32 if block_m <= _FEW_ROWS else 64) // (2 if is_wide else 1)


def _options(weight: FewBitWeight, block_m: int, block_n: int, bytes_of_x: int) -> dict[str, Any]:
    """Return a kernel's constexpr parameters and launch options; fp32 is for tests: it has no matrix units."""
    assert not isinstance(weight, Fp8StaticWeight), "a token's inputs would have a scale for each expert"
    columns = weight.size[1]
    kind = "rows" if isinstance(weight, Fp8RowsWeight) else "blocks" if isinstance(weight, Fp8BlocksWeight) else "int4"
    block_k = weight.group if isinstance(weight, Int4Weight) else 128
    is_many = block_m > _MOST_AS_HALF
    stages = 1 if bytes_of_x > torch.bfloat16.itemsize else 3 if is_many else 4
    return {
        "KIND": kind,
        "AS_HALF": not is_many,
        "EVEN_K": columns % block_k == 0,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": 4 if block_m <= _FEW_ROWS else 8,
        "num_stages": stages,
    }
