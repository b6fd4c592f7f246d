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
from kernels.experts.hopper_few import hallmark_gluon_experts_few, hallmark_gluon_experts_few_gathered
from kernels.experts.kinds import ExpertActivation
from kernels.experts.sorting import sort_slots
from kernels.experts.triton_path import activation_arguments, combine
from kernels.experts.weights import ExpertWeights
from kernels.launch import Loaded
from kernels.processors import num_processors
from kernels.tma.launches import any_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class

COLUMNS, ROWS, STEP = _COLUMNS.value, _ROWS.value, _STEP.value
_FOLDS = 4
_FOLDED = 8 * _FOLDS  # tensor maps have strides of 16 bytes
_MOST_UNSORTED = 4  # tokens whose slots each read their own experts' weights
_ROWS_BY_AVERAGE = ((10, 16), (20, 32), (44, 64))  # rows of an expert on average, and of its tile
_MOST_STAGES = 12  # hardware barriers
_RING_BYTES = 225_280  # of shared memory; the rest of the 232,448 is for layouts' conversions


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


@dataclass(frozen=True, slots=True)
class FewTiling:
    """What is compiled into a product of few rows an expert.

    folds    segments of the inner dim that a tile's rows are of: 1 where slots are sorted, else a tile is one slot's
    parts    2 where a tile holds gate and up, whose activated product is stored
    pad      slots of a tile; of one slot 2, the second of which is dropped: wgmma's N is a multiple of 8
    boxes    of 64 columns, in a stage of the ring
    is_even  whether steps of boxes divide the inner dim
    """

    folds: int
    parts: int
    pad: int
    boxes: int
    stages: int
    has_bias: bool
    activation: str
    is_even: bool

    @property
    def consumers(self) -> int:
        return 2 if self.folds == 1 else 1

    @property
    def gathers(self) -> bool:
        """Whether x is gathered by order."""
        return self.folds == 1 and self.parts == 2

    @property
    def columns(self) -> int:
        """Of x in a step, wgmma's N."""
        return self.folds * self.pad

    @property
    def rows(self) -> int:
        """Columns of the result in a tile."""
        return self.consumers * ROWS // (self.folds * self.parts)

    @property
    def weights_box(self) -> list[int]:
        if self.folds == 1:
            return [1, self.rows // 8, 2, 8, STEP] if self.parts == 2 else [1, self.rows, STEP]
        return [1, self.folds, 2, self.rows, STEP] if self.parts == 2 else [1, self.folds, self.rows, STEP]

    @property
    def inputs_box(self) -> list[int]:
        return [self.pad, STEP] if self.folds == 1 else [self.pad, self.folds, STEP]


def rows_of_tile(num_tokens: int, num_active: int, expert_weights: ExpertWeights) -> int:
    """Sorted slots of a tile for so many tokens; 1 where a tile is one slot's, and nothing is sorted."""
    size, width = expert_weights.down.shape[1:]
    if num_tokens <= _MOST_UNSORTED and size % _FOLDED == 0 and width % _FOLDED == 0:
        return 1
    average = num_tokens * num_active / expert_weights.num_experts
    return next((rows for most, rows in _ROWS_BY_AVERAGE if average <= most), 2 * ROWS)


def run_experts_hopper(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert_weights: ExpertWeights,
    activation: ExpertActivation,
    out: Tensor,
    tile_rows: int | None = None,
    group: int = 16,
) -> None:
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden, out [T, H], last dim contiguous, rows of hidden 32-byte aligned; experts [T, k] int32, contiguous, each below
    the number of experts; weights [T, k] fp32, last dim contiguous. H a multiple of 64, the width of 16. Does not wait
    for the device.
    """
    num_tokens, num_active = experts.shape
    if num_tokens == 0:
        return
    size, width, num_experts = hidden.shape[1], expert_weights.width, expert_weights.num_experts
    num_slots, device = num_tokens * num_active, hidden.device
    rows = tile_rows or rows_of_tile(num_tokens, num_active, expert_weights)
    inner, results = hidden.new_empty(num_slots, width), hidden.new_empty(num_slots, size)
    if rows == 1:
        order = table = experts.data_ptr()
        num_tiles = num_slots
    else:
        by_expert = sort_slots(experts, num_experts, rows)
        order, table = by_expert.order.data_ptr(), by_expert.table.data_ptr()
        num_tiles = by_expert.table.shape[0] - 1
    folds = _FOLDS if rows == 1 else 1
    segment, half = size // folds, width // folds
    name, limit, alpha = activation_arguments(activation)
    gate_up_bias, down_bias = expert_weights.gate_up_bias, expert_weights.down_bias
    if rows == 1:
        w_map: Any = (num_experts, folds, 2, width, segment), (2 * width * size, segment, width * size, size, 1)
        x_map: Any = (num_tokens, folds, segment), (hidden.stride(0), segment, 1)
        inner_map: Any = (num_slots, folds, half), (width, half, 1)
        down_map: Any = (num_experts, folds, size, half), (size * width, half, width, 1)
    else:
        w_map = (num_experts, width // 8, 2, 8, size), (2 * width * size, 8 * size, width * size, size, 1)
        inner_map = (num_slots, width), (width, 1)
        down_map = (num_experts, size, width), (size * width, width, 1)
    if rows <= 64:
        up, down = few_tilings(rows, segment, half, gate_up_bias is not None, down_bias is not None, name)
        kernel = few_launcher(up, hidden.dtype, pointer_class(gate_up_bias), device)
        across = -(-width // up.rows)
        grid = (min(num_processors(device), num_tiles * across), 1, 1)
        x = (hidden.data_ptr(),) if up.gathers else _map(kernel, 1, hidden, x_map)
        strides = (hidden.stride(0),) if up.gathers else ()
        kernel(grid, (
            *_map(kernel, 0, expert_weights.gate_up, w_map), *x, inner.data_ptr(), _address(gate_up_bias), order,
            table, *strides, num_active, num_slots, across, size, width, limit, alpha,
        ))  # fmt: skip
        kernel = few_launcher(down, hidden.dtype, pointer_class(down_bias), device)
        across = -(-size // down.rows)
        grid = (min(num_processors(device), num_tiles * across), 1, 1)
        kernel(grid, (
            *_map(kernel, 0, expert_weights.down, down_map), *_map(kernel, 1, inner, inner_map), results.data_ptr(),
            _address(down_bias), order, table, 1, num_slots, across, width, size, 0.0, 0.0,
        ))  # fmt: skip
    else:
        kernel = launcher(
            HopperTiling(True, 2, gate_up_bias is not None, name, group=group), hidden.dtype,
            pointer_class(gate_up_bias), device,
        )  # fmt: skip
        across = -(-width // (COLUMNS // 2))
        grid = (min(num_processors(device), num_tiles * across), 1, 1)
        kernel(grid, (
            *_map(kernel, 0, expert_weights.gate_up, w_map), hidden.data_ptr(), inner.data_ptr(),
            _address(gate_up_bias), order, table, hidden.stride(0), num_active, across, size, width, limit, alpha,
        ))  # fmt: skip
        kernel = launcher(
            HopperTiling(False, 1, down_bias is not None, "", group=group), hidden.dtype, pointer_class(down_bias),
            device,
        )  # fmt: skip
        across = -(-size // COLUMNS)
        grid = (min(num_processors(device), num_tiles * across), 1, 1)
        kernel(grid, (
            *_map(kernel, 0, expert_weights.down, down_map), *_map(kernel, 1, inner, inner_map), results.data_ptr(),
            _address(down_bias), order, table, across, width, size,
        ))  # fmt: skip
    combine(results, weights, out)


def few_tilings(
    rows: int, segment: int, half: int, has_gate_up_bias: bool, has_down_bias: bool, activation: str
) -> tuple[FewTiling, FewTiling]:
    """Tilings of both products. segment, half: columns of the inner dims in a fold."""

    def tiling(parts: int, size_in: int, has_bias: bool, activation: str) -> FewTiling:
        folds, pad = (_FOLDS, 2) if rows == 1 else (1, rows)
        boxes = 3 if rows == 1 and size_in % (3 * STEP) == 0 else 2
        bytes_of_stage = ((ROWS if rows == 1 else 2 * ROWS) + folds * pad) * boxes * STEP * 2
        stages = min(_MOST_STAGES, _RING_BYTES // bytes_of_stage)
        return FewTiling(folds, parts, pad, boxes, stages, has_bias, activation, size_in % (boxes * STEP) == 0)

    return tiling(2, segment, has_gate_up_bias, activation), tiling(1, half, has_down_bias, "")


def _map(kernel: Loaded, place: int, x: Tensor, layout: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Any, ...]:
    """A tensor map as a kernel's arguments."""
    return kernel.encode(x.data_ptr(), *kernel.boxes[place], *layout, 0), *layout[0], *layout[1]


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
            16, 1, 1, STEP, 16, 1.5, 1.5, tiling, grid=(1,), num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return hallmark_gluon_experts_down.warmup(
        any_map(dtype, [1, COLUMNS, STEP]), any_map(dtype, [tiling.rows, STEP]), values, any_tensor(bias), numbers,
        numbers, 1, 16, 16, tiling, grid=(1,), num_warps=4, launch_pdl=True,
    )  # fmt: skip


@lru_cache(maxsize=256)
def few_launcher(tiling: FewTiling, dtype: torch.dtype, bias: PointerClass | None, device: torch.device) -> Loaded:
    """`compiled_few`, ready to launch past Triton's binder."""
    return Loaded(compiled_few(tiling, dtype, bias), device)


def compiled_few(tiling: FewTiling, dtype: torch.dtype, bias: PointerClass | None) -> Any:
    """The product of few rows of this tiling, these weights and this bias for sm_90; no GPU is needed."""
    values, numbers, weights = AnyTensor(dtype, 0), AnyTensor(torch.int32, 0), any_map(dtype, tiling.weights_box)
    options = {"grid": (1,), "num_warps": 4, "launch_pdl": True}
    if tiling.gathers:
        return hallmark_gluon_experts_few_gathered.warmup(
            weights, values, values, any_tensor(bias), numbers, numbers, 16, 1, 1, 1, 16, 16, 1.5, 1.5, tiling,
            **options,
        )  # fmt: skip
    return hallmark_gluon_experts_few.warmup(
        weights, any_map(dtype, tiling.inputs_box), values, any_tensor(bias), numbers, numbers, 1, 1, 1, 16, 16, 1.5,
        1.5, tiling, **options,
    )  # fmt: skip
