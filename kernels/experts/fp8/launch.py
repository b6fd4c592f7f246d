"""`gluon.experts.fp8.hopper`: a mixture's products on sm_90, with weights of 8 bits and inputs rounded to 8 bits.

Three to eight launches whose grids depend on the number of tokens alone, so that a CUDA graph holds them. Of one or
two tokens: gate and up with the activation, and down, by slots.py, whose programs round their inputs, and the weighted
sum. Of more: the tokens' rows rounded, slots sorted by expert, gate and up by few.py or many.py, their result rounded
once it is in the model's dtype, down, and the weighted sum. Each kernel is launched while the one before still runs.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.experts.few_bits.weights import FewBitExperts, FewBitWeight
from kernels.experts.fp8.few import hallmark_gluon_experts_fp8_few_down, hallmark_gluon_experts_fp8_few_gate_up
from kernels.experts.fp8.many import hallmark_gluon_experts_fp8_down, hallmark_gluon_experts_fp8_gate_up
from kernels.experts.fp8.rounding import empty_rounded, rounded_rows
from kernels.experts.fp8.slots import hallmark_gluon_experts_fp8_slots
from kernels.experts.fp8.tilings import STEP, SlotTiling, TileTiling, slot_tiling, tile_tiling
from kernels.experts.hopper.arguments import grid, matrix, pairs_of_8, tensor_map
from kernels.experts.kinds import ExpertActivation
from kernels.experts.portable.launch import activation_arguments, combine
from kernels.experts.routing.sorting import sort_slots
from kernels.experts.tiles import hopper_rows
from kernels.linear.formats.fp8_weights import E4M3, Fp8BlocksWeight
from kernels.tma.pointers import AnyTensor

_FEWEST = 16  # slots of a tile
_MOST_UNSORTED = 4  # tokens whose slots each read their own expert's weights: 43 us, sorted 54 (Qwen3-30B-A3B, H200)
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def run_experts_fp8(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: FewBitExperts, activation: ExpertActivation,
    out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden, out [T, H], fp16 or bf16, last dim contiguous; experts [T, k] int32, contiguous, each below the number of
    experts; weights [T, k] fp32, last dim contiguous. H and the experts' width whole blocks of 128. Does not wait for
    the device.
    """
    num_tokens, num_active = experts.shape
    rows = hopper_rows(num_tokens, num_active, expert_weights.num_experts)
    if rows == _FEWEST and num_tokens <= _MOST_UNSORTED:
        # Those of more tokens are compiled now: a start tries no number of tokens between these and the next rows.
        for tiling in _tilings(expert_weights, rows, activation):
            tile_launcher(tiling, hidden.dtype, hidden.device)
        rows = 1
    run_in_tiles(hidden, experts, weights, expert_weights, activation, out, rows)


def run_in_tiles(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: FewBitExperts, activation: ExpertActivation,
    out: Tensor, rows: int,
) -> None:  # fmt: skip
    """`run_experts_fp8` by tiles of so many sorted slots: 16, 32, 64 or 128; or 1, of slots as they are."""
    if experts.shape[0] == 0:
        return
    products = _products_of_slots if rows == 1 else _products_of_tiles
    combine(products(hidden, experts, expert_weights, activation, rows), weights, out)


def _products_of_slots(
    hidden: Tensor, experts: Tensor, expert_weights: FewBitExperts, activation: ExpertActivation, _rows: int
) -> Tensor:
    """Compute each slot's result [slots, H], by slots.py."""
    num_experts, size, width = expert_weights.num_experts, hidden.shape[1], expert_weights.width
    gate_up, down, device = expert_weights.gate_up, expert_weights.down, hidden.device
    num_slots, num_active = experts.numel(), experts.shape[1]
    inner, results = hidden.new_empty(num_slots, width), hidden.new_empty(num_slots, size)
    (name, limit, alpha), processors = activation_arguments(activation), num_processors(device)

    tiling = slot_tiling(num_active, 2 * width, size, processors, 2, _in_blocks(gate_up), name)
    kernel = slot_launcher(tiling, hidden.dtype, device)
    kernel((-(-width // tiling.columns), num_slots, 1), (
        *tensor_map(kernel, 0, gate_up.codes, pairs_of_8(num_experts, width, size)), hidden.data_ptr(),
        gate_up.scales.data_ptr(), inner.data_ptr(), experts.data_ptr(), hidden.stride(0), num_active, size, width,
        limit, alpha,
    ))  # fmt: skip

    tiling = slot_tiling(num_active, size, width, processors, 1, _in_blocks(down), "")
    kernel = slot_launcher(tiling, hidden.dtype, device)
    weights_layout = (num_experts, size, width), (size * width, width, 1)
    kernel((-(-size // tiling.columns), num_slots, 1), (
        *tensor_map(kernel, 0, down.codes, weights_layout), inner.data_ptr(), down.scales.data_ptr(),
        results.data_ptr(), experts.data_ptr(), width, 1, width, size, 0.0, 0.0,
    ))  # fmt: skip
    return results


def _products_of_tiles(
    hidden: Tensor, experts: Tensor, expert_weights: FewBitExperts, activation: ExpertActivation, rows: int
) -> Tensor:
    """Compute each slot's result [slots, H], by few.py or many.py."""
    num_experts, size, width = expert_weights.num_experts, hidden.shape[1], expert_weights.width
    gate_up, down, device = expert_weights.gate_up, expert_weights.down, hidden.device
    tiling, of_down = _tilings(expert_weights, rows, activation)
    (num_tokens, num_active), num_slots = experts.shape, experts.numel()
    _, limit, alpha = activation_arguments(activation)
    x, x_scales = rounded_rows(hidden, in_blocks=_in_blocks(gate_up))
    by_expert = sort_slots(experts, num_experts, rows)
    num_tiles, sorted_by = by_expert.tiles.shape[0], (by_expert.order.data_ptr(), by_expert.table.data_ptr())
    results = hidden.new_empty(num_slots, size)

    if tiling.rounds:
        inner, inner_scales = empty_rounded(num_slots, width, device, in_blocks=True)
    else:
        inner = hidden.new_empty(num_slots, width)
    rounded_to = (inner_scales.data_ptr(),) if tiling.rounds else (None,) if tiling.is_many else ()
    kernel, across = tile_launcher(tiling, hidden.dtype, device), -(-width // tiling.columns)
    kernel(grid(num_tiles * across, device), (
        *tensor_map(kernel, 0, gate_up.codes, pairs_of_8(num_experts, width, size)), x.data_ptr(),
        gate_up.scales.data_ptr(), x_scales.data_ptr(), inner.data_ptr(), *rounded_to, *sorted_by, num_active,
        num_tokens, *((num_slots,) if tiling.is_many else ()), across, size, width, limit, alpha,
    ))  # fmt: skip

    if not tiling.rounds:
        inner, inner_scales = rounded_rows(inner, in_blocks=_in_blocks(down))
    kernel, across = tile_launcher(of_down, hidden.dtype, device), -(-size // of_down.columns)
    weights_layout = (num_experts, size, width), (size * width, width, 1)
    kernel(grid(num_tiles * across, device), (
        *tensor_map(kernel, 0, down.codes, weights_layout), *tensor_map(kernel, 1, inner, matrix(inner)),
        down.scales.data_ptr(), inner_scales.data_ptr(), results.data_ptr(), *sorted_by, num_slots, across, width,
        size,
    ))  # fmt: skip
    return results


def _tilings(experts: FewBitExperts, rows: int, activation: ExpertActivation) -> tuple[TileTiling, TileTiling]:
    """Return the tilings of both products by tiles of so many slots."""
    name, _, _ = activation_arguments(activation)
    gate_up, down = (_in_blocks(it) for it in (experts.gate_up, experts.down))
    return tile_tiling(rows, 2, gate_up, name), tile_tiling(rows, 1, down, "")


def _in_blocks(weight: FewBitWeight) -> bool:
    return isinstance(weight, Fp8BlocksWeight)


# Pure functions of what is compiled in: the caches hold no state.
@lru_cache(maxsize=256)
def slot_launcher(tiling: SlotTiling, dtype: torch.dtype, device: torch.device) -> Loaded:
    """`compiled_slots`, ready to launch past Triton's binder."""
    return Loaded(compiled_slots(tiling, dtype), device)


@lru_cache(maxsize=256)
def tile_launcher(tiling: TileTiling, dtype: torch.dtype, device: torch.device) -> Loaded:
    """`compiled_tiles`, ready to launch past Triton's binder."""
    return Loaded(compiled_tiles(tiling, dtype), device)


def compiled_slots(tiling: SlotTiling, dtype: torch.dtype) -> Any:
    """The product of single slots of this tiling, of inputs in this dtype, for sm_90; no GPU is needed."""
    x, scales, numbers = AnyTensor(dtype, 0), AnyTensor(torch.float32, 0), AnyTensor(torch.int32, 0)
    return hallmark_gluon_experts_fp8_slots.warmup(
        _map_of_codes(tiling.weights_box), x, scales, x, numbers, 16, 1, 16, 16, 1.5, 1.5, tiling, grid=(1,),
        num_warps=4 * tiling.groups, launch_pdl=True,
    )  # fmt: skip


def compiled_tiles(tiling: TileTiling, dtype: torch.dtype) -> Any:
    """The product of sorted slots of this tiling, with results in this dtype, for sm_90; no GPU is needed."""
    codes, out, scales, numbers = (AnyTensor(it, 0) for it in (E4M3, dtype, torch.float32, torch.int32))
    weights, options = _map_of_codes(tiling.weights_box), {"grid": (1,), "num_warps": 4, "launch_pdl": True}
    sizes = 16, 16, 1.5, 1.5, tiling
    if tiling.gathers and tiling.is_many:
        rounded_to = (codes, scales) if tiling.rounds else (out, None)
        return hallmark_gluon_experts_fp8_gate_up.warmup(
            weights, codes, scales, scales, *rounded_to, numbers, numbers, 1, 1, 1, 1, *sizes, _DTYPES[dtype], **options
        )
    if tiling.gathers:
        return hallmark_gluon_experts_fp8_few_gate_up.warmup(
            weights, codes, scales, scales, out, numbers, numbers, 1, 1, 1, *sizes, **options
        )
    down = hallmark_gluon_experts_fp8_down if tiling.is_many else hallmark_gluon_experts_fp8_few_down
    return down.warmup(
        weights, _map_of_codes([tiling.rows, STEP]), scales, scales, out, numbers, numbers, 1, 1, 16, 16, tiling,
        **options,
    )  # fmt: skip


def _map_of_codes(box: list[int]) -> TensorDescriptor:
    """Return a stand-in for every tensor map of codes of 8 bits and this box."""
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float8e4nv)
    return TensorDescriptor(AnyTensor(E4M3, 0), [1] * len(box), [16] * (len(box) - 1) + [1], box, layout)
