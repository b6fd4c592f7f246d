"""Launches of `gluon.ordered.hopper`.

Over pages the plan, its splitting, the attention, and the sum of parts; of packed keys the plan and the attention. The
grids are functions of shapes and host bounds, and nothing is read back, so that a CUDA graph may hold them.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded, is_interpreted
from kernels.calls.processors import num_processors
from kernels.hopper.extend.launch import Operands, as_rows, page_maps, rows_of_page
from kernels.hopper.extend.plan import hallmark_gluon_extend_plan
from kernels.hopper.ordered.kernel import hallmark_gluon_ordered
from kernels.hopper.ordered.plan import hallmark_gluon_ordered_combine, hallmark_gluon_ordered_split
from kernels.hopper.ordered.variants import OrderedVariant, ordered_variant_of, variants_beside
from kernels.hopper.schedule import HEADER, ITEM, bounded_window, keys_per_group, plan_tiles
from kernels.hopper.tensor_layout import aligned, has_work, store_layout, value_dims
from kernels.hopper.variants import ROWS
from kernels.tma.launches import Launches, Maps, any_map, repeated, scales, tensor_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class

_SCRATCH_BYTES = 128 << 20  # of parts, at most: blocks beyond it are folded by their own tile
# A multiprocessor: with more tiles than these chunks are not split. Parts are written and read again: a chunk of 512
# over 8k, 128 tiles, took 2.9 times as long so (H200).
_MOST_TILES = 0.5
_SEQS = 64  # sequences that one step of the plan's loop reads
_BLOCKS = 64  # row blocks of one program of the plan
_BLOCKS_WITH_SPANS = 8  # spans are read row by row
_WIDTH = 256  # row blocks that a program of the splitting reads at a time
_PARTS = 64  # parts that it writes at a time
_COMBINE_WIDTH = 1024  # head dims times parts times rows that a program reads at once: registers
_COMBINE_ROWS = 8  # of one program, of chunks; of a few queries one

_KERNELS: dict[str, Any] = {
    "plan": hallmark_gluon_extend_plan,
    "split": hallmark_gluon_ordered_split,
    "combine": hallmark_gluon_ordered_combine,
}


@dataclass(frozen=True, slots=True)
class Work:
    """Bounds of a batch's tiles that the host can compute.

    tile_heads  heads that tiles are made for: KV heads where query heads are packed
    max_blocks  row blocks, at most
    max_parts   that the scratch has room for, all heads of one counted once; 0: nothing is split
    part_rows   rows of a part that the scratch has room for
    """

    tile_heads: int
    max_blocks: int
    max_parts: int
    part_rows: int

    @property
    def plan_size(self) -> int:
        """Integers of the plan, see plan.py."""
        one_list: int = HEADER.value + ITEM.value * self.max_blocks
        split: int = self.owners_at + self.max_parts * (2 + self.tile_heads)
        return split if self.max_parts else one_list

    @property
    def owners_at(self) -> int:
        """Where in the plan it says of each part which others its row block has; the tickets are behind that."""
        both_lists: int = 2 * HEADER.value + ITEM.value * (2 * self.max_blocks + self.max_parts)
        return both_lists + 4 * self.max_blocks


def work_of(
    num_tokens: int, heads: tuple[int, int], batch: AttentionBatch, flags: AttentionFlags, variant: OrderedVariant,
    processors: int,
) -> Work:  # fmt: skip
    """The bounds of a batch over pages; heads: query heads and KV heads."""
    form = variant.form
    block_m = form.tiling.block_m
    tile_heads = heads[1] if form.pack > 1 else heads[0]
    block_q = block_m // form.pack
    max_blocks = num_tokens // block_q + batch.num_seqs
    is_few = form.tiling.consumers == 1
    part_rows = min(block_m, max(1, batch.max_seqlen_q) * form.pack)
    keys = batch.max_context if flags.window is None else min(batch.max_context, flags.window + block_q)
    tiles = -(-num_tokens // block_q) * tile_heads
    if keys <= 1 or batch.max_context <= variant.part_keys or (not is_few and tiles > _MOST_TILES * processors):
        return Work(tile_heads, max_blocks, 0, part_rows)
    parts_of_block = -(-keys // variant.part_keys) + 1
    room = _SCRATCH_BYTES // (4 * tile_heads * part_rows * (form.tiling.part_d + 2))
    return Work(tile_heads, max_blocks, min(max_blocks * parts_of_block, room), part_rows)


def plan_pages(batch: AttentionBatch, flags: AttentionFlags, variant: OrderedVariant, work: Work) -> Tensor:
    """The plan of a batch over pages: int32 on the device, good for launches one after another."""
    starts, contexts = batch.cu_seqlens_q, batch.context_lens
    assert contexts is not None, "pages come with lengths"
    plan = torch.empty(work.plan_size, dtype=torch.int32, device=starts.device)
    constants = _plan_constants(variant)
    _, _, block_q, blocks, *_ = constants
    programs = max(1, -(-batch.max_seqlen_q // (block_q * blocks)))  # of one sequence
    numbers = (batch.num_seqs, bounded_window(flags))
    to_launch("plan", (batch.num_seqs, programs, 1), (plan, starts, contexts, flags.spans), numbers, constants)()
    if work.max_parts:
        bounds = (work.max_blocks, work.max_parts, work.tile_heads)
        to_launch("split", (work.max_blocks, 1, 1), (plan,), bounds, _split_constants(variant))()
    return plan


def tiles_of(plan: Tensor, work: Work) -> Tensor:
    """The list that the attention kernel works on: row blocks, or row blocks and parts."""
    return plan if work.max_parts == 0 else plan[HEADER.value + ITEM.value * work.max_blocks :]


def combine_parts(
    plan: Tensor, scratch: tuple[Tensor, Tensor], out: Tensor, flags: AttentionFlags, variant: OrderedVariant,
    work: Work,
) -> partial[None]:  # fmt: skip
    """Return the launch that fills the rows of `out` whose keys were split; it may be called repeatedly."""
    stride_row, stride_head, _ = out.stride()
    constants = _combine_constants(variant, (stride_row, stride_head), flags.sinks is not None)
    grid = (work.max_blocks, -(-work.part_rows // constants[2]), work.tile_heads)
    numbers = (stride_row, stride_head, work.max_blocks, work.max_parts, work.tile_heads, work.part_rows)
    return to_launch("combine", grid, (plan, *scratch, out, flags.sinks), numbers, constants)


def _plan_constants(variant: OrderedVariant) -> tuple[Any, ...]:
    block_q = variant.form.tiling.block_m // variant.form.pack
    blocks = _BLOCKS_WITH_SPANS if variant.form.spans else _BLOCKS
    return HEADER.value, ITEM.value, block_q, blocks, _SEQS, variant.form.window, variant.form.spans


def _split_constants(variant: OrderedVariant) -> tuple[Any, ...]:
    return HEADER.value, ITEM.value, variant.part_keys, _WIDTH, _PARTS


def _combine_constants(variant: OrderedVariant, out_strides: tuple[int, int], has_sinks: bool) -> tuple[Any, ...]:
    width, is_aligned = variant.form.tiling.part_d, (out_strides[0] | out_strides[1]) % 8 == 0
    rows = 1 if variant.form.tiling.consumers == 1 else _COMBINE_ROWS
    parts = min(16, _COMBINE_WIDTH * 8 // (width * rows))
    return (
        HEADER.value, ITEM.value, rows, parts, variant.form.head_dim, width, variant.form.pack, variant.group,
        has_sinks, is_aligned,
    )  # fmt: skip


def to_launch(
    name: str, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], numbers: tuple[int, ...],
    constants: tuple[Any, ...],
) -> partial[None]:  # fmt: skip
    """The launch of a kernel of `_KERNELS` of these parameters, past Triton's binder where it is compiled."""
    found = tensors[0]
    assert found is not None
    if is_interpreted():
        return partial(_KERNELS[name][grid], *tensors, *numbers, *constants, False)
    kernel = compiled_for(name, found.device, tuple(map(pointer_class, tensors)), len(numbers), constants)
    return kernel.repeated(grid, (*(None if x is None else x.data_ptr() for x in tensors), *numbers))


# Pure functions of what is compiled in: the caches hold no state. What falls out is found again in Triton's own cache.
# By name: a Triton function hashes its source each time.
@lru_cache(maxsize=256)
def compiled_for(
    name: str, device: torch.device, pointers: tuple[PointerClass | None, ...], num_numbers: int,
    constants: tuple[Any, ...],
) -> Loaded:  # fmt: skip
    """A kernel of `_KERNELS` for such tensors, which starts early and waits. No number may be specialised."""
    compiled = _KERNELS[name].warmup(
        *map(any_tensor, pointers), *[0] * num_numbers, *constants, True, grid=(1,), launch_pdl=True, num_warps=4
    )
    return Loaded(compiled, device)


@repeated
def run_ordered(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> Launches | None:
    """Fill `out` for prompts with packed keys, or for chunks and single tokens over pages.

    The bits of a row depend on its query and on the keys and values that it sees, and on nothing else.
    q, out [tokens, heads, head_dim]; k, v [key tokens, kv_heads, head_dim] or [num_pages, page_size, kv_heads,
    head_dim]; fp16 or bf16, last dims contiguous. Slots past a context may hold anything, NaN too. Not read:
    page-table entries past a sequence's last page, and those behind the windows of its queries.
    Raises ValueError for a head dim, a page size or a mask that the path's limits reject.
    """
    if not has_work(q, k, flags, out):
        return None
    if not batch.is_paged:
        addressable = (aligned(q), aligned(k), aligned(v))
    else:
        addressable = (aligned(q), as_rows(k), as_rows(v))
    if any(found is not given for found, given in zip(addressable, (q, k, v), strict=True)):
        run_ordered(*addressable, batch, flags, out)  # copies are held until launched
        return None
    page_size, group = (k.shape[1], q.shape[1] // k.shape[2]) if batch.is_paged else (0, q.shape[1] // k.shape[1])
    variant = ordered_variant_of(q.shape[2], page_size, group, False, flags)
    if batch.is_paged and max(1, batch.max_seqlen_q) * variant.form.pack <= ROWS:
        variant = ordered_variant_of(q.shape[2], page_size, group, True, flags)
    return launches_of(q, k, v, batch, flags, out, variant=variant)


def launches_of(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *,
    variant: OrderedVariant,
) -> Launches:  # fmt: skip
    """The launches of a call, of a variant made for these arguments, which TMA can address. The plan is launched."""
    make = launches_of_pages if batch.is_paged else launches_of_prompts
    return make(q, k, v, batch, flags, out, variant)


def launches_of_pages(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, variant: OrderedVariant
) -> Launches:
    form, num_heads, num_kv_heads = variant.form, q.shape[1], k.shape[2]
    processors = num_processors(q.device)

    def made() -> tuple[Work, Tensor, tuple[Tensor, Tensor, Tensor], int]:
        work = work_of(q.shape[0], (num_heads, num_kv_heads), batch, flags, variant, processors)
        programs = min(processors, (work.max_blocks + work.max_parts) * work.tile_heads)
        return work, plan_pages(batch, flags, variant, work), scratch_of(work, variant, programs, q.device), programs

    planned = ("ordered", q.shape[0], num_heads, num_kv_heads, variant, flags.window, flags.spans)
    work, plan, scratch, programs = batch.once(planned, made)
    parts, stats, totals = scratch
    table, sinks, spans = batch.page_table, flags.sinks, flags.spans
    assert table is not None, "pages come with a table"
    strides = (out.stride(0), out.stride(1))
    operands = Operands(
        (q.dtype, k.dtype, k.dtype), pointer_class(out), strides, *map(pointer_class, (table, sinks, spans))
    )
    kernel = launcher(variant, q.device, operands, *map(pointer_class, (batch.cu_seqlens_q, batch.context_lens)))
    k_strides, v_strides = k.stride(), v.stride()
    heads_of_kv = 1 if form.pack > 1 else num_heads // num_kv_heads
    heads_per_group = work.tile_heads  # in groups the last one would begin its longest tile last
    if batch.num_seqs == 1 and work.max_parts == 0 and not variant.folds_last:
        heads_per_group = heads_of_kv * max(1, keys_per_group(form) // max(1, batch.max_context))
    owners = plan.data_ptr() + 4 * work.owners_at if work.max_parts else plan.data_ptr()
    rest = (
        out.data_ptr(), *strides, parts.data_ptr(), stats.data_ptr(), work.part_rows, owners,
        owners + 8 * work.max_parts,
        totals.data_ptr(), table.data_ptr(), table.stride(0), rows_of_page(k_strides), rows_of_page(v_strides),
        tiles_of(plan, work).data_ptr(), None if sinks is None else sinks.data_ptr(),
        None if spans is None else spans.data_ptr(), work.tile_heads, heads_of_kv,
        min(heads_per_group, work.tile_heads), *scales(flags), bounded_window(flags),
    )  # fmt: skip
    return Launches(
        kernel,
        programs,
        tensor_map(kernel, 0, q.shape, q.stride()).at(q.data_ptr()),
        page_maps(kernel, k.shape, k_strides, v_strides),
        rest,
        sinks_at=14,
        then=combine_parts(plan, (parts, stats), out, flags, variant, work)
        if work.max_parts and not variant.folds_last
        else None,
        then_sinks_at=Loaded.FIRST + 4,
        held=(plan, *scratch),
    )


def launches_of_prompts(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, variant: OrderedVariant
) -> Launches:
    form, num_heads, group = variant.form, q.shape[1], q.shape[1] // k.shape[1]
    processors = num_processors(q.device)
    none = Work(num_heads, 0, 0, 1)

    def made() -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], int]:
        plan = plan_tiles(q.shape[0], batch, flags, form)
        programs = min(processors, (plan.numel() - HEADER.value) // ITEM.value * num_heads)
        return plan, scratch_of(none, variant, programs, q.device), programs

    plan, scratch, programs = batch.once(("ordered", q.shape[0], num_heads, variant, flags.window, flags.spans), made)
    parts, stats, totals = scratch
    sinks, spans = flags.sinks, flags.spans
    strides = (out.stride(0), out.stride(1))
    operands = Operands(
        (q.dtype, k.dtype, v.dtype), pointer_class(out), strides, None, *map(pointer_class, (sinks, spans))
    )
    kernel = launcher(variant, q.device, operands, None, None)
    heads_per_group = min(num_heads, group * max(1, keys_per_group(form) // k.shape[0]))
    rest = (
        out.data_ptr(), *strides, parts.data_ptr(), stats.data_ptr(), 1, plan.data_ptr(), plan.data_ptr(),
        totals.data_ptr(), None, 0, 0, 0, plan.data_ptr(), None if sinks is None else sinks.data_ptr(),
        None if spans is None else spans.data_ptr(), num_heads, group, heads_per_group, *scales(flags),
        bounded_window(flags),
    )  # fmt: skip
    return Launches(
        kernel,
        programs,
        tensor_map(kernel, 0, q.shape, q.stride()).at(q.data_ptr()),
        Maps(tensor_map(kernel, 1, k.shape, k.stride()), tensor_map(kernel, 2, *value_dims(k.shape, v.stride()))),
        rest,
        sinks_at=14,
        held=(plan, *scratch),
    )


def scratch_of(
    work: Work, variant: OrderedVariant, programs: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for parts, for their (m, l), and for what is folded so far; one element each where there is none."""
    rows, width = work.max_parts * work.tile_heads * work.part_rows, variant.form.tiling.part_d
    totals = 1 if variant.totals_shared else programs * variant.form.tiling.block_m * width
    sizes = (max(1, rows * width), max(1, rows * 2), totals)
    parts, stats, of_totals = (torch.empty(size, dtype=torch.float32, device=device) for size in sizes)
    return parts, stats, of_totals


@lru_cache(maxsize=256)
def launcher(
    variant: OrderedVariant, device: torch.device, operands: Operands, starts: PointerClass | None,
    contexts: PointerClass | None,
) -> Loaded:  # fmt: skip
    """`compiled_ordered`, loaded, and beside it the kernels that plan, split and add up, and the other variant's.

    Which of them a batch needs shows only in service.
    """
    int32, fp32 = (torch.int32, 0), (torch.float32, 0)
    for each in variants_beside(variant):
        compiled_for("plan", device, (int32, starts, contexts, operands.spans), 2, _plan_constants(each))
        compiled_for("split", device, (int32,), 3, _split_constants(each))
        combine = _combine_constants(each, operands.out_strides, operands.sinks is not None)
        compiled_for("combine", device, (int32, fp32, fp32, operands.out, operands.sinks), 6, combine)
        compiled_ordered(each, operands).run  # noqa: B018 -- loads it
    return Loaded(compiled_ordered(variant, operands), device)


def compiled_ordered(variant: OrderedVariant, operands: Operands) -> Any:
    """`hallmark_gluon_ordered` for such tensors."""
    form = variant.form
    box, columns, pack = form.box, form.copied, form.pack
    if form.page_size:
        boxes = ([ROWS // pack, pack, columns], [box, 1, columns], [1, 1, box, 1, columns])
    else:
        block_n = form.tiling.block_n
        boxes = ([ROWS, 1, columns], [block_n, 1, columns], [1, 1, block_n, 1, columns])
    fp32, int32 = AnyTensor(torch.float32, 0), AnyTensor(torch.int32, 0)
    return hallmark_gluon_ordered.warmup(
        *(any_map(dtype, box) for dtype, box in zip(operands.dtypes, boxes, strict=True)),
        any_tensor(operands.out), *operands.out_strides, fp32, fp32, 0, int32, any_tensor((torch.int32, 4)),
        fp32, any_tensor(operands.table), 0, 0, 0, int32, any_tensor(operands.sinks), any_tensor(operands.spans),
        0, 0, 0, 0.0, 0.0, 0,
        store_layout(form.columns[0]), variant, grid=(1,), num_warps=4, launch_pdl=True,
    )  # fmt: skip
