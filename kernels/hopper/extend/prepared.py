"""Prepared calls of `gluon.extend.hopper`: the launches of launch.py, but for addresses and the stream.

Private names of launch.py are used here: to rename them would make the evidence stale that is bound to it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.prepared import PreparedCall, Step, launch_options, steady_range, step_of
from kernels.calls.processors import num_processors
from kernels.hopper.extend import launch as eager
from kernels.hopper.extend.variants import extend_variant_of, longer, whole
from kernels.hopper.schedule import HEADER, ITEM, bounded_window
from kernels.hopper.tensor_layout import is_addressable
from kernels.hopper.variants import Variant
from kernels.tma.launches import scales, tensor_map
from kernels.tma.pointers import PointerClass, pointer_class
from kernels.tma.prepared import KeptMaps

_ALIGNMENT = 32  # integers, 128 bytes: partial results begin at a multiple of it behind the plan
_INT32, _FP32 = (torch.int32, 0), (torch.float32, 0)  # pointers into memory that a call allocates


def prepare_extend(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> PreparedCall | None:
    """All launches of calls of this form: each call plans for itself, by its lengths on the device."""
    table, contexts = batch.page_table, batch.context_lens
    if not flags.causal or table is None or contexts is None or q.shape[0] == 0 or k.shape[0] == 0:
        return None
    strides = q.stride(), k.stride(), v.stride()
    are_addressable = is_addressable(strides[0], q.itemsize) and all(
        eager.are_rows(of_pages, k.itemsize) for of_pages in strides[1:]
    )
    if not are_addressable or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return None
    (num_tokens, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, k.shape
    group, processors = num_heads // num_kv_heads, num_processors(q.device)
    plain = extend_variant_of(head_dim, page_size, group, flags)

    def work_at(max_context: int) -> tuple[Variant, eager.Work, tuple[int, int, int]]:
        bounded = replace(batch, max_context=max_context)
        is_long = eager.is_long_work(num_tokens, num_heads, bounded, plain, processors)
        variant = longer(plain) if is_long else plain
        work = eager.work_of(num_tokens, num_heads, num_kv_heads, bounded, variant, processors)
        return variant, work, eager.head_counts(group, bounded, variant, work)

    variant, work, heads = work_at(batch.max_context)
    is_split = work.max_parts > 0
    out_strides = (out.stride(0), out.stride(1))
    lengths = tuple(pointer_class(x) for x in (batch.cu_seqlens_q, contexts, flags.spans))
    operands = eager.Operands(
        (q.dtype, k.dtype, k.dtype), pointer_class(out), out_strides,
        *(pointer_class(x) for x in (table, flags.sinks, flags.spans)),
    )  # fmt: skip
    kernel = eager.launcher(variant if is_split else whole(variant), q.device, operands, *lengths[:2])
    planners = tuple(_planners(q.device, batch, flags, variant, work, lengths))
    combine = _combine(q.device, operands, variant, work) if is_split else None

    # The plan, and behind it the partial results of what is split, in one piece of memory; offsets in bytes.
    part_rows = work.max_parts * work.tile_heads * variant.tiling.block_m
    parts_from = -(-work.plan_size // _ALIGNMENT) * _ALIGNMENT
    logs_from = parts_from + part_rows * variant.tiling.part_d
    size = logs_from + part_rows if is_split else work.plan_size
    parts_at, logs_at = (4 * parts_from, 4 * logs_from) if is_split else (0, 0)  # not read where nothing is split
    tiles_at = 4 * (HEADER.value + ITEM.value * work.max_blocks) if is_split else 0

    attend, stream, options = kernel.launch, kernel.stream, launch_options(kernel)
    grid = (min(processors, (work.max_blocks + work.max_parts) * work.tile_heads), 1, 1)
    queries = KeptMaps(tensor_map(kernel, 0, q.shape, strides[0]))
    pages = eager.page_maps(kernel, k.shape, *strides[1:])
    of_pages = (table.stride(0), *map(eager.rows_of_page, strides[1:]))
    rest = (*heads, *scales(flags), bounded_window(flags), *kernel.tail)

    def launch(
        beside: Tensor, q_at: int, k_at: int, v_at: int, starts_at: int, table_at: int, lengths_at: int | None,
        sinks_at: int | None, spans_at: int | None, out_at: int,
    ) -> None:  # fmt: skip
        held = beside.new_empty(size)
        plan_at, now = held.data_ptr(), stream()
        parts = (plan_at + parts_at, plan_at + logs_at)
        for plan in planners:
            plan.launch(*plan.grid, now, *plan.options, plan_at, starts_at, lengths_at, spans_at, *plan.rest)
        attend(
            *grid, now, *options, *queries[q_at], *pages[k_at, v_at], out_at, *out_strides, *parts, table_at, *of_pages,
            plan_at + tiles_at, sinks_at, spans_at, *rest,
        )  # fmt: skip
        if combine is not None:
            combine.launch(*combine.grid, now, *combine.options, plan_at, *parts, out_at, sinks_at, *combine.rest)

    return PreparedCall(launch, *steady_range(batch.max_context, table.shape[1] * page_size, work_at))


def _planners(
    device: torch.device,
    batch: AttentionBatch,
    flags: AttentionFlags,
    variant: Variant,
    work: eager.Work,
    lengths: tuple[PointerClass | None, ...],
) -> Iterator[Step]:
    """The launches of `plan_extend`, in their order."""
    constants = eager._plan_constants(variant)
    _, _, block_q, blocks, *_ = constants
    programs = max(1, -(-batch.max_seqlen_q // (block_q * blocks)))  # of one sequence
    tensors, window = (_INT32, *lengths), bounded_window(flags)
    is_one = work.max_parts > 0 and batch.num_seqs * programs <= eager._FEW
    if not is_one:
        yield _step("plan", device, tensors, (batch.num_seqs, programs, 1), (batch.num_seqs, window), constants)
    if work.max_parts:
        size = next(size for size in eager._SIZES if work.max_blocks <= size[0])
        bounds = (work.max_blocks, work.max_parts, work.tile_heads, num_processors(device))
        numbers = (batch.num_seqs if is_one else 0, window, *bounds)
        yield _step("split", device, tensors, (1, 1, 1), numbers, (*constants, *eager._split_constants(variant, size)))


def _combine(device: torch.device, operands: eager.Operands, variant: Variant, work: eager.Work) -> Step:
    """The launch of `combine_parts`."""
    constants = eager._combine_constants(variant, operands.out_strides, operands.sinks is not None)
    programs = variant.tiling.block_m // eager._COMBINE_ROWS[variant.tiling.part_d]
    grid = (min(work.max_blocks, work.max_parts // 2), programs, work.tile_heads)
    numbers = (*operands.out_strides, work.max_blocks, work.max_parts, work.tile_heads)
    tensors = (_INT32, _FP32, _FP32, operands.out, operands.sinks)
    return _step("combine", device, tensors, grid, numbers, constants)


def _step(
    name: str,
    device: torch.device,
    tensors: tuple[PointerClass | None, ...],
    grid: tuple[int, int, int],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
) -> Step:
    kernel = eager.compiled_for(name, device, tensors, len(numbers), constants)
    return step_of(kernel, grid, numbers)
