"""`gluon.experts.hopper`: a mixture's products on sm_90.

Three to six launches whose grids depend on the number of tokens alone, so that a CUDA graph holds them: slots sorted by
expert, where there are more than a few tokens; gate and up with the activation, and down, by hopper.py or, of few rows
an expert, few.py; and the weighted sum. Each kernel is launched while the one before it still runs.

mxfp4 weights become 16-bit ones for a call of many tokens; with fewer, Triton's products serve here too.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.calls.launch import Loaded
from kernels.experts.hopper.arguments import TensorLayout, address, grid, matrix, pairs_of_8, tensor_map
from kernels.experts.hopper.few import hallmark_gluon_experts_few, hallmark_gluon_experts_few_gathered
from kernels.experts.hopper.many import hallmark_gluon_experts_down, hallmark_gluon_experts_gate_up
from kernels.experts.hopper.tilings import COLUMNS, FOLDED, FOLDS, ROWS, STEP, FewTiling, ManyTiling, few_tiling
from kernels.experts.kinds import ExpertActivation
from kernels.experts.portable.dequantize import plain_weights
from kernels.experts.portable.launch import activation_arguments, combine, run_experts
from kernels.experts.routing.sorting import sort_slots
from kernels.experts.tiles import hopper_rows, takes_codes
from kernels.experts.weights import AnyExpertWeights, ExpertWeights, Mxfp4Weights
from kernels.tma.launches import any_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class


def run_experts_hopper(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert_weights: AnyExpertWeights,
    activation: ExpertActivation,
    out: Tensor,
) -> None:
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden, out [T, H], last dim contiguous; experts [T, k] int32, contiguous, each below the number of experts; weights
    [T, k] fp32, last dim contiguous. H a multiple of 64, the experts' width of 16; fp16 or bf16. Does not wait for the
    device.
    """
    num_tokens, num_active = experts.shape
    if isinstance(expert_weights, Mxfp4Weights):
        if takes_codes(experts.numel(), expert_weights.num_experts):
            run_experts(hidden, experts, weights, expert_weights, activation, out)
            return
        expert_weights = plain_weights(expert_weights, hidden.dtype)
    rows = hopper_rows(num_tokens, num_active, expert_weights.num_experts)
    if rows == 1 and (hidden.shape[1] % FOLDED or expert_weights.width % FOLDED):
        rows = 16
    run_in_tiles(hidden, experts, weights, expert_weights, activation, out, rows)


def run_in_tiles(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert_weights: ExpertWeights,
    activation: ExpertActivation,
    out: Tensor,
    rows: int,
) -> None:
    """`run_experts_hopper` by tiles of so many sorted slots: 16, 32, 64 or 128; or 1, of slots as they are."""
    num_tokens, num_active = experts.shape
    if num_tokens == 0:
        return
    if hidden.stride(0) % 16 or hidden.data_ptr() % 16:  # of a tensor map, and as the kernels are compiled
        hidden = hidden.clone(memory_format=torch.contiguous_format)
    if rows == 1:
        num_tiles, order, table = experts.numel(), experts, experts
    else:
        by_expert = sort_slots(experts, expert_weights.num_experts, rows)
        num_tiles, order, table = by_expert.tiles.shape[0], by_expert.order, by_expert.table
    products = _many_rows if rows == 2 * ROWS else _few_rows
    results = products(hidden, order, table, num_tiles, num_active, expert_weights, activation, rows)
    combine(results, weights, out)


def _few_rows(
    hidden: Tensor, order: Tensor, table: Tensor, num_tiles: int, num_active: int, expert_weights: ExpertWeights,
    activation: ExpertActivation, rows: int,
) -> Tensor:  # fmt: skip
    """Compute each slot's result [slots, H], by few.py."""
    (num_experts, size, width), device, num_slots = expert_weights.down.shape, hidden.device, order.numel()
    gate_up_bias, down_bias = expert_weights.gate_up_bias, expert_weights.down_bias
    inner, results = hidden.new_empty(num_slots, width), hidden.new_empty(num_slots, size)
    name, limit, alpha = activation_arguments(activation)
    sorted_by = order.data_ptr(), table.data_ptr()

    tiling = few_tiling(rows, 2, size, gate_up_bias is not None, name)
    kernel = few_launcher(tiling, hidden.dtype, pointer_class(gate_up_bias), device)
    across, segment = -(-width // tiling.rows), size // FOLDS
    if tiling.gathers:
        weights_layout, x = pairs_of_8(num_experts, width, size), (hidden.data_ptr(),)
        numbers: tuple[int, ...] = (hidden.stride(0), num_active)
    else:
        folded = (num_experts, FOLDS, 2, width, segment), (2 * width * size, segment, width * size, size, 1)
        x_layout = (hidden.shape[0], FOLDS, segment), (hidden.stride(0), segment, 1)
        weights_layout, x, numbers = folded, tensor_map(kernel, 1, hidden, x_layout), (num_active,)
    kernel(grid(num_tiles * across, device), (
        *tensor_map(kernel, 0, expert_weights.gate_up, weights_layout), *x, inner.data_ptr(), address(gate_up_bias),
        *sorted_by, *numbers, num_slots, across, size, width, limit, alpha,
    ))  # fmt: skip

    tiling = few_tiling(rows, 1, width, down_bias is not None, "")
    kernel = few_launcher(tiling, hidden.dtype, pointer_class(down_bias), device)
    across, segment = -(-size // tiling.rows), width // FOLDS
    if rows == 1:
        weights_layout = (num_experts, FOLDS, size, segment), (size * width, segment, width, 1)
        inner_layout: TensorLayout = (num_slots, FOLDS, segment), (width, segment, 1)
    else:
        weights_layout, inner_layout = ((num_experts, size, width), (size * width, width, 1)), matrix(inner)
    kernel(grid(num_tiles * across, device), (
        *tensor_map(kernel, 0, expert_weights.down, weights_layout), *tensor_map(kernel, 1, inner, inner_layout),
        results.data_ptr(), address(down_bias), *sorted_by, 1, num_slots, across, width, size, 0.0, 0.0,
    ))  # fmt: skip
    return results


def _many_rows(
    hidden: Tensor, order: Tensor, table: Tensor, num_tiles: int, num_active: int, expert_weights: ExpertWeights,
    activation: ExpertActivation, _rows: int,
) -> Tensor:  # fmt: skip
    """Compute each slot's result [slots, H], by hopper.py."""
    (num_experts, size, width), device, num_slots = expert_weights.down.shape, hidden.device, order.numel()
    gate_up_bias, down_bias = expert_weights.gate_up_bias, expert_weights.down_bias
    inner, results = hidden.new_empty(num_slots, width), hidden.new_empty(num_slots, size)
    name, limit, alpha = activation_arguments(activation)
    sorted_by = order.data_ptr(), table.data_ptr()

    tiling = ManyTiling(True, 2, gate_up_bias is not None, name)
    kernel = many_launcher(tiling, hidden.dtype, pointer_class(gate_up_bias), device)
    across = -(-width // (COLUMNS // 2))
    kernel(grid(num_tiles * across, device), (
        *tensor_map(kernel, 0, expert_weights.gate_up, pairs_of_8(num_experts, width, size)), hidden.data_ptr(),
        inner.data_ptr(), address(gate_up_bias), *sorted_by, hidden.stride(0), num_active, across, size, width, limit,
        alpha,
    ))  # fmt: skip

    kernel = many_launcher(
        ManyTiling(False, 1, down_bias is not None, ""), hidden.dtype, pointer_class(down_bias), device
    )  # fmt: skip
    across = -(-size // COLUMNS)
    weights_layout = (num_experts, size, width), (size * width, width, 1)
    kernel(grid(num_tiles * across, device), (
        *tensor_map(kernel, 0, expert_weights.down, weights_layout), *tensor_map(kernel, 1, inner, matrix(inner)),
        results.data_ptr(), address(down_bias), *sorted_by, across, width, size,
    ))  # fmt: skip
    return results


# Pure functions of what is compiled in: the caches hold no state.
@lru_cache(maxsize=256)
def many_launcher(tiling: ManyTiling, dtype: torch.dtype, bias: PointerClass | None, device: torch.device) -> Loaded:
    """`compiled_many`, ready to launch past Triton's binder."""
    return Loaded(compiled_many(tiling, dtype, bias), device)


@lru_cache(maxsize=256)
def few_launcher(tiling: FewTiling, dtype: torch.dtype, bias: PointerClass | None, device: torch.device) -> Loaded:
    """`compiled_few`, ready to launch past Triton's binder."""
    return Loaded(compiled_few(tiling, dtype, bias), device)


def compiled_many(tiling: ManyTiling, dtype: torch.dtype, bias: PointerClass | None) -> Any:
    """The product of many rows of this tiling, these weights and this bias for sm_90; no GPU is needed."""
    values, numbers = AnyTensor(dtype, 0), AnyTensor(torch.int32, 0)
    options = {"grid": (1,), "num_warps": 4, "launch_pdl": True}
    if tiling.gathers:
        weights = any_map(dtype, [1, COLUMNS // 16, 2, 8, STEP])
        return hallmark_gluon_experts_gate_up.warmup(
            weights, values, values, any_tensor(bias), numbers, numbers, 16, 1, 1, 16, 16, 1.5, 1.5, tiling, **options
        )
    weights, rows = any_map(dtype, [1, COLUMNS, STEP]), any_map(dtype, [tiling.consumers * ROWS, STEP])
    return hallmark_gluon_experts_down.warmup(
        weights, rows, values, any_tensor(bias), numbers, numbers, 1, 16, 16, tiling, **options
    )


def compiled_few(tiling: FewTiling, dtype: torch.dtype, bias: PointerClass | None) -> Any:
    """The product of few rows of this tiling, these weights and this bias for sm_90; no GPU is needed."""
    values, numbers, weights = AnyTensor(dtype, 0), AnyTensor(torch.int32, 0), any_map(dtype, tiling.weights_box)
    options = {"grid": (1,), "num_warps": 4, "launch_pdl": True}
    if tiling.gathers:
        return hallmark_gluon_experts_few_gathered.warmup(
            weights,
            values,
            values,
            any_tensor(bias),
            numbers,
            numbers,
            16,
            1,
            1,
            1,
            16,
            16,
            1.5,
            1.5,
            tiling,
            **options,
        )
    return hallmark_gluon_experts_few.warmup(
        weights, any_map(dtype, tiling.inputs_box), values, any_tensor(bias), numbers, numbers, 1, 1, 1, 16, 16, 1.5,
        1.5, tiling, **options,
    )  # fmt: skip
