"""`gluon.experts.ordered`: a mixture's products on sm_90, each summed in one order for every number of tokens.

The order is "k16": one fp32 accumulator for each number, to which wgmma adds 16 columns of the inner dim at a time,
from the first to the last; a token's experts are summed in the order in which it visits them. Tiles of 16 to 128 sorted
slots all have it. Of one or two tokens `launch.py` sums segments of the inner dim apart: here they are products of
single slots by slots.py, which have the same order.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.experts.hopper.arguments import address, matrix, pairs_of_8, tensor_map
from kernels.experts.hopper.launch import run_in_tiles
from kernels.experts.hopper.slots import hallmark_gluon_experts_slots
from kernels.experts.hopper.slots_tilings import BOX, PAD, SlotsTiling, slots_tiling
from kernels.experts.kinds import ExpertActivation
from kernels.experts.portable.launch import activation_arguments, combine
from kernels.experts.tiles import hopper_rows
from kernels.experts.weights import AnyExpertWeights, ExpertWeights
from kernels.tma.launches import any_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class


def run_experts_ordered(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert_weights: AnyExpertWeights,
    activation: ExpertActivation,
    out: Tensor,
) -> None:
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden, out [T, H], last dim contiguous; experts [T, k] int32, contiguous, each below the number of experts; weights
    [T, k] fp32, last dim contiguous; expert_weights in the dtype of hidden. H and the experts' width multiples of 64;
    fp16 or bf16. Does not wait for the device.
    """
    assert isinstance(expert_weights, ExpertWeights), "the path's limits say so"
    num_tokens, num_active = experts.shape
    rows = hopper_rows(num_tokens, num_active, expert_weights.num_experts)
    if rows > 1:
        run_in_tiles(hidden, experts, weights, expert_weights, activation, out, rows)
    elif num_tokens:
        combine(_products_of_slots(hidden, experts, expert_weights, activation), weights, out)


def _products_of_slots(
    hidden: Tensor, experts: Tensor, expert_weights: ExpertWeights, activation: ExpertActivation
) -> Tensor:
    """Compute each slot's result [slots, H]."""
    if hidden.stride(0) % 16 or hidden.data_ptr() % 16:  # of a tensor map
        hidden = hidden.clone(memory_format=torch.contiguous_format)
    (num_experts, size, width), device = expert_weights.down.shape, hidden.device
    num_slots, num_active = experts.numel(), experts.shape[1]
    gate_up_bias, down_bias = expert_weights.gate_up_bias, expert_weights.down_bias
    inner, results = hidden.new_empty(num_slots, width), hidden.new_empty(num_slots, size)
    (name, limit, alpha), processors = activation_arguments(activation), num_processors(device)

    tiling = slots_tiling(num_active, 2 * width, size, processors, 2, gate_up_bias is not None, name)
    kernel = launcher(tiling, hidden.dtype, pointer_class(gate_up_bias), device)
    kernel((-(-width // tiling.columns), num_slots, 1), (
        *tensor_map(kernel, 0, expert_weights.gate_up, pairs_of_8(num_experts, width, size)),
        *tensor_map(kernel, 1, hidden, matrix(hidden)), inner.data_ptr(), address(gate_up_bias), experts.data_ptr(),
        num_active, size, width, limit, alpha,
    ))  # fmt: skip

    tiling = slots_tiling(num_active, size, width, processors, 1, down_bias is not None, "")
    kernel = launcher(tiling, hidden.dtype, pointer_class(down_bias), device)
    weights_layout = (num_experts, size, width), (size * width, width, 1)
    kernel((-(-size // tiling.columns), num_slots, 1), (
        *tensor_map(kernel, 0, expert_weights.down, weights_layout), *tensor_map(kernel, 1, inner, matrix(inner)),
        results.data_ptr(), address(down_bias), experts.data_ptr(), 1, width, size, 0.0, 0.0,
    ))  # fmt: skip
    return results


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: SlotsTiling, dtype: torch.dtype, bias: PointerClass | None, device: torch.device) -> Loaded:
    """`compiled_slots`, ready to launch past Triton's binder."""
    return Loaded(compiled_slots(tiling, dtype, bias), device)


def compiled_slots(tiling: SlotsTiling, dtype: torch.dtype, bias: PointerClass | None) -> Any:
    """The product of single slots of this tiling, these weights and this bias for sm_90; no GPU is needed."""
    values, numbers = AnyTensor(dtype, 0), AnyTensor(torch.int32, 0)
    return hallmark_gluon_experts_slots.warmup(
        any_map(dtype, tiling.weights_box), any_map(dtype, [PAD, BOX]), values, any_tensor(bias), numbers, 1, 16, 16,
        1.5, 1.5, tiling, grid=(1,), num_warps=4 * tiling.groups, launch_pdl=True,
    )  # fmt: skip
