"""Launches of `gluon.extend.wide.hopper`: two to four, as those of `gluon.extend.hopper`."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.hopper.extend.launch import (
    Operands,
    Work,
    as_rows,
    compiled_for,
    head_counts,
    page_maps,
    rows_of_page,
    scratch_of,
    tiles_of,
    to_launch,
    work_of,
)
from kernels.hopper.schedule import HEADER, ITEM
from kernels.hopper.tensor_layout import aligned, has_work, store_layout
from kernels.hopper.variants import ROWS, Variant
from kernels.hopper.wide.kernel import hallmark_gluon_wide_extend
from kernels.hopper.wide.prefill import check_flags
from kernels.hopper.wide.variants import HEAD_DIM, check_head_dim, wide_extend_variant
from kernels.tma.launches import Launches, any_map, repeated, scales, tensor_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class

_SIZES = ((32, 64), (128, 32), (512, 16))  # row blocks that the splitting program holds, and choices it compares
_PART_COST, _COMBINE_COST = 3.0, 6.0  # in blocks of keys, of a tile's start and end, and of adding up the parts
_COMBINE_ROWS, _COMBINE_PARTS = 2, 2  # of one program at once: registers
_FEW = 4  # programs of the plan whose work the splitting one does beside its own
_SEQS, _BLOCKS = 64, 64  # sequences that one step of the plan's loop reads, row blocks of one of its programs


@repeated
def run_wide_extend(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> Launches | None:
    """Fill `out` for chunks over paged context of heads of 512, as `run_extend` of `gluon.extend.hopper`.

    Raises ValueError for another head dim, and for a page size and flags that the path's limits reject.
    """
    check_head_dim(q.shape[2])
    check_flags(flags)
    if not has_work(q, k, flags, out):
        return None
    addressable = (aligned(q), as_rows(k), as_rows(v))
    if any(found is not given for found, given in zip(addressable, (q, k, v), strict=True)):
        run_wide_extend(*addressable, batch, flags, out)  # copies are held until launched
        return None
    num_heads, num_kv_heads = q.shape[1], k.shape[2]
    group, processors = num_heads // num_kv_heads, num_processors(q.device)
    variant = wide_extend_variant(k.shape[1], group, parts=True)

    def made() -> tuple[Work, Tensor, tuple[Tensor, Tensor]]:
        work = work_of(q.shape[0], num_heads, num_kv_heads, batch, variant, processors)
        return work, _plan(batch, variant, work, processors), scratch_of(work, variant, q.device)

    planned = ("wide extend", q.shape[0], num_heads, num_kv_heads, variant)
    work, plan, scratch = batch.once(planned, made)
    if work.max_parts == 0:
        variant = wide_extend_variant(k.shape[1], group, parts=False)
    table = batch.page_table
    assert table is not None, "extend reads pages"
    strides = (out.stride(0), out.stride(1))
    operands = Operands((q.dtype, k.dtype, k.dtype), pointer_class(out), strides, pointer_class(table), None, None)
    kernel = launcher(variant, q.device, operands, *map(pointer_class, (batch.cu_seqlens_q, batch.context_lens)))
    rest = (
        out.data_ptr(), *strides, *(part.data_ptr() for part in scratch), table.data_ptr(), table.stride(0),
        rows_of_page(k.stride()), rows_of_page(v.stride()), tiles_of(plan, work).data_ptr(),
        *head_counts(group, batch, variant, work), scales(flags)[0],
    )  # fmt: skip
    combine = to_launch(
        "combine",
        (min(work.max_blocks, work.max_parts // 2), variant.tiling.block_m // _COMBINE_ROWS, work.tile_heads),
        (plan, *scratch, out, None),
        (*strides, work.max_blocks, work.max_parts, work.tile_heads),
        _combine_constants(variant, strides),
    )
    return Launches(
        kernel,
        min(processors, (work.max_blocks + work.max_parts) * work.tile_heads),
        tensor_map(kernel, 0, q.shape, q.stride()).at(q.data_ptr()),
        page_maps(kernel, k.shape, k.stride(), v.stride()),
        rest,
        sinks_at=0,
        then=combine if work.max_parts else None,
        held=(plan, *scratch),
    )


def _plan(batch: AttentionBatch, variant: Variant, work: Work, processors: int) -> Tensor:
    """The plan of a batch: int32 on the device, good for launches one after another."""
    starts, contexts = batch.cu_seqlens_q, batch.context_lens
    assert contexts is not None, "extend reads pages"
    plan = torch.empty(work.plan_size, dtype=torch.int32, device=starts.device)
    constants = _plan_constants(variant)
    programs = max(1, -(-batch.max_seqlen_q * variant.pack // (ROWS * _BLOCKS)))  # of one sequence
    tensors = (plan, starts, contexts, None)
    is_one = work.max_parts > 0 and batch.num_seqs * programs <= _FEW
    if not is_one:
        to_launch("plan", (batch.num_seqs, programs, 1), tensors, (batch.num_seqs, 0), constants)()
    if work.max_parts:
        size = next(size for size in _SIZES if work.max_blocks <= size[0])
        numbers = (batch.num_seqs if is_one else 0, 0, work.max_blocks, work.max_parts, work.tile_heads, processors)
        to_launch("split", (1, 1, 1), tensors, numbers, (*constants, *_split_constants(variant, size)))()
    return plan


def _plan_constants(variant: Variant) -> tuple[Any, ...]:
    return HEADER.value, ITEM.value, ROWS // variant.pack, _BLOCKS, _SEQS, False, False


def _split_constants(variant: Variant, size: tuple[int, int]) -> tuple[Any, ...]:
    return variant.tiling.block_n, *size, _PART_COST, _COMBINE_COST


def _combine_constants(variant: Variant, out_strides: tuple[int, int]) -> tuple[Any, ...]:
    is_aligned = (out_strides[0] | out_strides[1]) % 8 == 0
    return (
        HEADER.value, ITEM.value, ROWS, _COMBINE_ROWS, _COMBINE_PARTS, HEAD_DIM, HEAD_DIM, variant.pack, False,
        is_aligned,
    )  # fmt: skip


# Pure functions of what is compiled in: the caches hold no state. What falls out is found again in Triton's own cache.
@lru_cache(maxsize=256)
def launcher(
    variant: Variant,
    device: torch.device,
    operands: Operands,
    starts: PointerClass | None,
    contexts: PointerClass | None,
) -> Loaded:
    """`compiled_wide_extend`, loaded, and beside it all that other batches of the same tensors need."""
    int32, fp32 = (torch.int32, 0), (torch.float32, 0)
    group = variant.pack
    split, whole = (wide_extend_variant(variant.page_size, group, parts) for parts in (True, False))
    plan, tensors = _plan_constants(variant), (int32, starts, contexts, None)
    compiled_for("plan", device, tensors, 2, plan)
    for size in _SIZES:
        compiled_for("split", device, tensors, 6, (*plan, *_split_constants(variant, size)))
    combined = (int32, fp32, fp32, operands.out, None)
    compiled_for("combine", device, combined, 5, _combine_constants(variant, operands.out_strides))
    for each in (split, whole):
        compiled_wide_extend(each, operands).run  # noqa: B018 -- loads it
    return Loaded(compiled_wide_extend(variant, operands), device)


def compiled_wide_extend(variant: Variant, operands: Operands) -> Any:
    """`hallmark_gluon_wide_extend` for such tensors."""
    box, columns, pack = variant.box, variant.copied, variant.pack
    boxes = ([ROWS // pack, pack, columns], [box, 1, columns], [1, 1, box, 1, columns])
    fp32, int32 = AnyTensor(torch.float32, 0), AnyTensor(torch.int32, 0)
    return hallmark_gluon_wide_extend.warmup(
        *(any_map(dtype, box) for dtype, box in zip(operands.dtypes, boxes, strict=True)),
        any_tensor(operands.out), *operands.out_strides, fp32, fp32, any_tensor(operands.table), 0, 0, 0, int32,
        0, 0, 0, 0.0, store_layout(variant.tiling.block_d // 2), variant, grid=(1,), num_warps=4, launch_pdl=True,
    )  # fmt: skip
