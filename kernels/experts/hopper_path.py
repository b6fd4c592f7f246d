"""`gluon.experts.hopper`: a mixture's products on sm_90, of 16-bit weights.

Four to six launches whose grids depend on the number of tokens alone, so that a CUDA graph holds them: those of
`triton_path.py`, with the products in Gluon (hopper.py).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.experts.hopper import COLUMNS as _COLUMNS
from kernels.experts.hopper import ROWS as _ROWS
from kernels.experts.hopper import STEP as _STEP
from kernels.experts.hopper import hallmark_gluon_experts_down, hallmark_gluon_experts_gate_up
from kernels.experts.kinds import ExpertActivation
from kernels.experts.sorting import sort_slots
from kernels.experts.triton_path import activation_arguments, combine
from kernels.experts.weights import ExpertWeights
from kernels.launch import Loaded
from kernels.processors import num_processors
from kernels.tma.launches import any_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class

COLUMNS, ROWS, STEP = _COLUMNS.value, _ROWS.value, _STEP.value


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """What is compiled into a product.

    gathers     whether rows are gathered from tokens; otherwise they lie together
    parts       2 where a tile holds gate and up, whose activated product is stored
    consumers   of 64 rows each
    stages      of the ring
    group       tiles of rows whose columns are computed one after the other
    """

    gathers: bool
    parts: int
    has_bias: bool
    activation: str
    consumers: int = 2
    stages: int = 4
    group: int = 16

    @property
    def rows(self) -> int:
        return self.consumers * ROWS


def run_experts_hopper(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert_weights: ExpertWeights,
    activation: ExpertActivation,
    out: Tensor,
) -> None:
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden, out [T, H], last dim contiguous, rows of hidden 16-byte aligned; experts [T, k] int32, contiguous, each below
    the number of experts; weights [T, k] fp32, last dim contiguous. H a multiple of 64, the width of 8. Does not wait
    for the device.
    """
    num_tokens, num_active = experts.shape
    if num_tokens == 0:
        return
    size, width, num_experts = hidden.shape[1], expert_weights.width, expert_weights.num_experts
    num_slots = num_tokens * num_active
    name, limit, alpha = activation_arguments(activation)
    gate_up = HopperTiling(True, 2, expert_weights.gate_up_bias is not None, name)
    down = HopperTiling(False, 1, expert_weights.down_bias is not None, "")
    by_expert = sort_slots(experts, num_experts, gate_up.rows)
    most_tiles = by_expert.table.shape[0] - 1
    inner, results = hidden.new_empty(num_slots, width), hidden.new_empty(num_slots, size)
    order, table = by_expert.order.data_ptr(), by_expert.table.data_ptr()

    kernel = launcher(gate_up, hidden.dtype, pointer_class(expert_weights.gate_up_bias), hidden.device)
    across = -(-width // (COLUMNS // 2))
    w_map = (num_experts, width // 8, 2, 8, size), (2 * width * size, 8 * size, width * size, size, 1)
    grid = (min(num_processors(hidden.device), most_tiles * across), 1, 1)
    kernel(grid, (
        kernel.encode(expert_weights.gate_up.data_ptr(), *kernel.boxes[0], *w_map, 0), *w_map[0], *w_map[1],
        hidden.data_ptr(), inner.data_ptr(), _address(expert_weights.gate_up_bias), order, table, hidden.stride(0),
        num_active, across, size, width, limit, alpha,
    ))  # fmt: skip

    kernel = launcher(down, hidden.dtype, pointer_class(expert_weights.down_bias), hidden.device)
    across = -(-size // COLUMNS)
    of_down = (num_experts, size, width), (size * width, width, 1)
    of_inner = (num_slots, width), (width, 1)
    grid = (min(num_processors(hidden.device), most_tiles * across), 1, 1)
    kernel(grid, (
        kernel.encode(expert_weights.down.data_ptr(), *kernel.boxes[0], *of_down, 0), *of_down[0], *of_down[1],
        kernel.encode(inner.data_ptr(), *kernel.boxes[1], *of_inner, 0), *of_inner[0], *of_inner[1],
        results.data_ptr(), _address(expert_weights.down_bias), order, table, across, width, size,
    ))  # fmt: skip
    combine(results, weights, out)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: HopperTiling, dtype: torch.dtype, bias: PointerClass | None, device: torch.device) -> Loaded:
    """`compiled`, ready to launch past Triton's binder."""
    return Loaded(compiled(tiling, dtype, bias), device)


def compiled(tiling: HopperTiling, dtype: torch.dtype, bias: PointerClass | None) -> Any:
    """The product of this tiling, these weights and this bias for sm_90; no GPU is needed."""
    values, numbers = AnyTensor(dtype, 0), AnyTensor(torch.int32, 0)
    if tiling.parts == 2:
        return hallmark_gluon_experts_gate_up.warmup(
            any_map(dtype, [1, COLUMNS // 16, 2, 8, STEP]), values, values, any_tensor(bias), numbers, numbers,
            16, 1, 1, STEP, 16, 1.5, 1.5, tiling, grid=(1,), num_warps=4,
        )  # fmt: skip
    return hallmark_gluon_experts_down.warmup(
        any_map(dtype, [1, COLUMNS, STEP]), any_map(dtype, [tiling.rows, STEP]), values, any_tensor(bias), numbers,
        numbers, 1, 16, 16, tiling, grid=(1,), num_warps=4,
    )  # fmt: skip
