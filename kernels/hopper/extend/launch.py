"""Launches of `gluon.extend.hopper`.

Two to four launches a call, as the host's bounds say: the plan; its splitting; the attention; the sum of the parts.
Each starts before the one before it has ended, and waits for it. Nothing is read back by the host, so that a CUDA graph
may hold them. Kernels are looked up by what is compiled in.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded, is_interpreted
from kernels.calls.processors import num_processors
from kernels.hopper.extend.kernel import hallmark_gluon_extend
from kernels.hopper.extend.plan import (
    hallmark_gluon_extend_combine,
    hallmark_gluon_extend_plan,
    hallmark_gluon_extend_split,
)
from kernels.hopper.extend.variants import extend_variant_of, longer, variants_beside, whole
from kernels.hopper.schedule import HEADER, ITEM, bounded_window, keys_per_group
from kernels.hopper.tensor_layout import aligned, has_work, is_addressable, store_layout, value_dims
from kernels.hopper.variants import ROWS, Variant
from kernels.tma.launches import Launches, Maps, any_map, repeated, scales, tensor_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class

_MAX_WAVES = 12  # above so many tiles a multiprocessor nothing is split: what is unbalanced is less than a tenth
_MIN_GAIN = 12.0  # blocks of keys: what splitting costs, with its launches, where it fills the GPU (H200: 8 lose 2 %)
_MIN_BLOCKS = 4  # of keys: a shorter context is not worth two more launches
_PARTS_A_PROCESSOR = 3
# Row blocks that the splitting program holds, and the choices it compares: its compiled sizes.
_SIZES = ((32, 64), (128, 32), (512, 16))
_SPLIT_WARPS = 8
# By columns of partial results, in blocks of keys: what a tile's start and end cost, and adding up the parts (H200).
_PART_COST = {64: 3.5, 128: 3.5, 256: 4.5}
_COMBINE_COST = {64: 5.0, 128: 5.0, 256: 7.0}
# Three consumers pay from so many keys a multiprocessor, each counted for every tile that reads it, and from so many
# rows of a sequence under one KV head: below, too much of a tile is empty.
_LONG_BLOCK = 192
_LONG_WORK = 60_000
_LONG_ROWS = 768
_COMBINE_ROWS = {64: 8, 128: 8, 256: 4}  # of one program, by those columns
_COMBINE_WIDTH = 1024  # head dims times parts that it reads at once: registers
_FEW = 4  # programs of the plan whose work the splitting one does beside its own
_SEQS = 64  # sequences that one step of the plan's loop reads
_BLOCKS = 64  # row blocks of one program of the plan
_BLOCKS_WITH_SPANS = 8  # spans are read row by row

_KERNELS: dict[str, Any] = {
    "plan": hallmark_gluon_extend_plan,
    "split": hallmark_gluon_extend_split,
    "combine": hallmark_gluon_extend_combine,
}


@dataclass(frozen=True, slots=True)
class Work:
    """Bounds of a batch's tiles that the host can compute.

    tile_heads  heads that tiles are made for: KV heads where query heads are packed
    max_blocks  row blocks, at most
    max_parts   of row blocks whose keys are split, all heads of one counted once; 0: the device is not asked
    """

    tile_heads: int
    max_blocks: int
    max_parts: int

    @property
    def plan_size(self) -> int:
        """Integers of the plan, see plan.py."""
        one_list: int = HEADER.value + ITEM.value * self.max_blocks
        return one_list if self.max_parts == 0 else 2 * one_list + (ITEM.value + 2) * self.max_parts


def is_long_work(num_tokens: int, num_heads: int, batch: AttentionBatch, variant: Variant, num_processors: int) -> bool:
    """Return whether tiles of three consumers have enough work, and rows that are mostly full."""
    tiles = num_tokens * num_heads / _LONG_BLOCK / num_processors
    return tiles * batch.max_context >= _LONG_WORK and num_tokens * variant.pack >= _LONG_ROWS * batch.num_seqs


def work_of(
    num_tokens: int, num_heads: int, num_kv_heads: int, batch: AttentionBatch, variant: Variant, num_processors: int
) -> Work:
    tile_heads = num_kv_heads if variant.pack > 1 else num_heads
    block_q = variant.tiling.block_m // variant.pack
    max_blocks = num_tokens // block_q + batch.num_seqs
    tiles = -(-num_tokens // block_q) * tile_heads
    waves = -(-tiles // num_processors)
    gain = (waves - tiles / num_processors) * batch.max_context / variant.tiling.block_n
    is_balanced = batch.num_seqs == 1 and gain < _MIN_GAIN
    is_short = batch.max_context <= _MIN_BLOCKS * variant.tiling.block_n
    if is_balanced or is_short or waves > _MAX_WAVES or max_blocks > _SIZES[-1][0]:
        return Work(tile_heads, max_blocks, 0)
    return Work(tile_heads, max_blocks, max(2, -(-_PARTS_A_PROCESSOR * num_processors // tile_heads)))


def plan_extend(batch: AttentionBatch, flags: AttentionFlags, variant: Variant, work: Work, processors: int) -> Tensor:
    """The plan of a batch: int32 on the device, good for launches one after another."""
    starts, contexts = batch.cu_seqlens_q, batch.context_lens
    assert contexts is not None, "extend reads pages"
    plan = torch.empty(work.plan_size, dtype=torch.int32, device=starts.device)
    constants = _plan_constants(variant)
    _, _, block_q, blocks, *_ = constants
    programs = max(1, -(-batch.max_seqlen_q // (block_q * blocks)))  # of one sequence
    tensors, numbers = (plan, starts, contexts, flags.spans), (batch.num_seqs, bounded_window(flags))
    is_one = work.max_parts > 0 and batch.num_seqs * programs <= _FEW
    if not is_one:
        to_launch("plan", (batch.num_seqs, programs, 1), tensors, numbers, constants)()
    if work.max_parts:
        size = next(size for size in _SIZES if work.max_blocks <= size[0])
        numbers = (batch.num_seqs if is_one else 0, numbers[1])
        bounds = (work.max_blocks, work.max_parts, work.tile_heads, processors)
        to_launch("split", (1, 1, 1), tensors, (*numbers, *bounds), (*constants, *_split_constants(variant, size)))()
    return plan


def tiles_of(plan: Tensor, work: Work) -> Tensor:
    """The list that the attention kernel works on: row blocks, or row blocks and parts."""
    return plan if work.max_parts == 0 else plan[HEADER.value + ITEM.value * work.max_blocks :]


def combine_parts(
    plan: Tensor, scratch: tuple[Tensor, Tensor], out: Tensor, flags: AttentionFlags, variant: Variant, work: Work
) -> partial[None]:
    """Return the launch that fills the rows of `out` whose keys were split; it may be called repeatedly."""
    stride_row, stride_head, _ = out.stride()
    constants = _combine_constants(variant, (stride_row, stride_head), flags.sinks is not None)
    grid = (
        min(work.max_blocks, work.max_parts // 2),
        variant.tiling.block_m // _COMBINE_ROWS[variant.tiling.part_d],
        work.tile_heads,
    )
    return to_launch(
        "combine", grid, (plan, *scratch, out, flags.sinks),
        (stride_row, stride_head, work.max_blocks, work.max_parts, work.tile_heads), constants,
    )  # fmt: skip


def compile_for_parts(
    variant: Variant,
    device: torch.device,
    out: PointerClass | None,
    out_strides: tuple[int, int],
    sinks: PointerClass | None,
    lengths: tuple[PointerClass | None, ...],
) -> None:
    """Compile and load all that splitting may need: which of it a batch needs shows only in service.

    lengths  of cu_seqlens_q, context_lens and spans
    """
    int32, fp32 = (torch.int32, 0), (torch.float32, 0)
    plan, tensors = _plan_constants(variant), (int32, *lengths)
    calls: list[tuple[str, tuple[PointerClass | None, ...], int, tuple[Any, ...]]] = [("plan", tensors, 2, plan)]
    for size in _SIZES:
        calls.append(("split", tensors, 6, (*plan, *_split_constants(variant, size))))
    combine = _combine_constants(variant, out_strides, sinks is not None)
    calls.append(("combine", (int32, fp32, fp32, out, sinks), 5, combine))
    for name, pointers, num_numbers, constants in calls:
        compiled_for(name, device, pointers, num_numbers, constants)


def _plan_constants(variant: Variant) -> tuple[Any, ...]:
    blocks = _BLOCKS_WITH_SPANS if variant.spans else _BLOCKS
    return (
        HEADER.value, ITEM.value, variant.tiling.block_m // variant.pack, blocks, _SEQS, variant.window, variant.spans,
    )  # fmt: skip


def _split_constants(variant: Variant, size: tuple[int, int]) -> tuple[Any, ...]:
    width = variant.tiling.part_d
    return variant.tiling.block_n, *size, _PART_COST[width], _COMBINE_COST[width]


def _combine_constants(variant: Variant, out_strides: tuple[int, int], has_sinks: bool) -> tuple[Any, ...]:
    block_m, width = variant.tiling.block_m, variant.tiling.part_d
    is_aligned = (out_strides[0] | out_strides[1]) % 8 == 0
    return (
        HEADER.value, ITEM.value, block_m, _COMBINE_ROWS[width], _COMBINE_WIDTH // width, variant.head_dim, width,
        variant.pack, has_sinks, is_aligned,
    )  # fmt: skip


def to_launch(
    name: str,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
) -> partial[None]:
    """The launch of a kernel of `_KERNELS` of these parameters, past Triton's binder where it is compiled."""
    found = tensors[0]
    assert found is not None
    if is_interpreted():
        return partial(_KERNELS[name][grid], *tensors, *numbers, *constants, False)
    kernel = compiled_for(name, found.device, tuple(map(pointer_class, tensors)), len(numbers), constants)
    return kernel.repeated(grid, (*(None if x is None else x.data_ptr() for x in tensors), *numbers))


# A pure function of what is compiled in: its cache holds no state. What falls out is found again in Triton's own cache.
# By name: a Triton function hashes its source each time.
@lru_cache(maxsize=256)
def compiled_for(
    name: str,
    device: torch.device,
    pointers: tuple[PointerClass | None, ...],
    num_numbers: int,
    constants: tuple[Any, ...],
) -> Loaded:
    """A kernel of `_KERNELS` for such tensors, which starts early and waits. No number may be specialised."""
    compiled = _KERNELS[name].warmup(
        *map(any_tensor, pointers), *[0] * num_numbers, *constants, True, grid=(1,), launch_pdl=True,
        num_warps=_SPLIT_WARPS if name == "split" else 4,
    )  # fmt: skip
    return Loaded(compiled, device)


@repeated
def run_extend(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> Launches | None:
    """Fill `out` for chunks over paged context, in launches that do not wait for the device.

    A batch with plans is planned once for all layers of a window.
    q, out [tokens, heads, head_dim]; k, v [num_pages, page_size, kv_heads, head_dim]; fp16 or bf16, last dims
    contiguous. Slots past a context may hold anything, NaN too. Not read: page-table entries past a sequence's last
    page, and those behind the windows of its queries.
    Raises ValueError for a head dim, a page size or a mask that the path's limits reject.
    """
    if not has_work(q, k, flags, out):
        return None
    addressable = (aligned(q), as_rows(k), as_rows(v))
    if any(found is not given for found, given in zip(addressable, (q, k, v), strict=True)):
        run_extend(*addressable, batch, flags, out)  # copies are held until launched
        return None
    variant = extend_variant_of(q.shape[2], k.shape[1], q.shape[1] // k.shape[2], flags)
    if is_long_work(q.shape[0], q.shape[1], batch, variant, num_processors(q.device)):
        variant = longer(variant)
    return launches_of(q, k, v, batch, flags, out, variant=variant)


def launches_of(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *, variant: Variant
) -> Launches:
    """The attention and the sum of its parts, of a variant made for these arguments, which TMA can address.

    The plan is launched here.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[2]
    processors = num_processors(q.device)

    def made() -> tuple[Work, Tensor, tuple[Tensor, Tensor]]:
        work = work_of(q.shape[0], num_heads, num_kv_heads, batch, variant, processors)
        return work, plan_extend(batch, flags, variant, work, processors), scratch_of(work, variant, q.device)

    planned = ("extend", q.shape[0], num_heads, num_kv_heads, variant, flags.window, flags.spans)
    work, plan, scratch = batch.once(planned, made)
    if work.max_parts == 0:
        variant = whole(variant)
    table, sinks, spans = batch.page_table, flags.sinks, flags.spans
    assert table is not None, "extend reads pages"
    strides = (out.stride(0), out.stride(1))
    operands = Operands(
        (q.dtype, k.dtype, k.dtype), pointer_class(out), strides, *map(pointer_class, (table, sinks, spans))
    )
    kernel = launcher(variant, q.device, operands, *map(pointer_class, (batch.cu_seqlens_q, batch.context_lens)))
    k_strides, v_strides = k.stride(), v.stride()
    rest = (
        out.data_ptr(), *strides, *(part.data_ptr() for part in scratch), table.data_ptr(), table.stride(0),
        rows_of_page(k_strides), rows_of_page(v_strides), tiles_of(plan, work).data_ptr(),
        None if sinks is None else sinks.data_ptr(), None if spans is None else spans.data_ptr(),
        *head_counts(num_heads // num_kv_heads, batch, variant, work), *scales(flags), bounded_window(flags),
    )  # fmt: skip
    return Launches(
        kernel,
        min(processors, (work.max_blocks + work.max_parts) * work.tile_heads),
        tensor_map(kernel, 0, q.shape, q.stride()).at(q.data_ptr()),
        page_maps(kernel, k.shape, k_strides, v_strides),
        rest,
        sinks_at=10,
        then=combine_parts(plan, scratch, out, flags, variant, work) if work.max_parts else None,
        then_sinks_at=Loaded.FIRST + 4,
        held=(plan, *scratch),
    )


def scratch_of(work: Work, variant: Variant, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for partial results and their logs, see `store_part`; one element each where nothing is split."""
    rows = work.max_parts * work.tile_heads * variant.tiling.block_m
    parts = torch.empty(max(1, rows * variant.tiling.part_d), dtype=torch.float32, device=device)
    return parts, torch.empty(max(1, rows), dtype=torch.float32, device=device)


def head_counts(group: int, batch: AttentionBatch, variant: Variant, work: Work) -> tuple[int, int, int]:
    """Heads that tiles are made for, those of a KV head, and those of an L2 group. group: query heads of a KV head."""
    heads_of_kv = 1 if variant.pack > 1 else group
    heads_per_group = work.tile_heads  # in groups the last one would begin its longest tile last
    if batch.num_seqs == 1 and work.max_parts == 0:
        heads_per_group = heads_of_kv * max(1, keys_per_group(variant) // max(1, batch.max_context))
    return work.tile_heads, heads_of_kv, min(heads_per_group, work.tile_heads)


def rows_of_page(strides: tuple[int, ...]) -> int:
    """Return the distance between two pages, in rows."""
    return strides[0] // strides[1]


def as_rows(pages: Tensor) -> Tensor:
    """`pages` itself where TMA can address it as rows, one a slot; a copy elsewhere."""
    if are_rows(pages.stride(), pages.itemsize) and pages.data_ptr() % 16 == 0:
        return pages
    return pages.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=256)
def are_rows(strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether TMA can address rows of pages that lie whole rows apart (in one pool, or beside others)."""
    stride_page, *of_rows = strides
    return is_addressable(tuple(of_rows), itemsize) and stride_page >= 0 and stride_page % of_rows[0] == 0


@lru_cache(maxsize=64)  # kept for the next step
def page_maps(kernel: Loaded, shape: tuple[int, ...], k_strides: tuple[int, ...], v_strides: tuple[int, ...]) -> Maps:
    """Return maps of pages as rows [rows, kv_heads, head_dim]; every copy of values chooses its own bound."""
    num_pages, page_size, num_heads, head_dim = shape

    def dims(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return ((num_pages - 1) * rows_of_page(strides) + page_size, num_heads, head_dim), strides[1:]

    return Maps(tensor_map(kernel, 1, *dims(k_strides)), tensor_map(kernel, 2, *value_dims(*dims(v_strides))))


class Operands(NamedTuple):
    """Compiled-in properties of the attention's tensors: dtypes of q, k and v, strides of out, pointer classes."""

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    out: PointerClass | None
    out_strides: tuple[int, int]
    table: PointerClass | None
    sinks: PointerClass | None
    spans: PointerClass | None


# Pure functions of what is compiled in: the caches hold no state. What falls out is found again in Triton's own cache.
@lru_cache(maxsize=256)
def launcher(
    variant: Variant,
    device: torch.device,
    operands: Operands,
    starts: PointerClass | None,
    contexts: PointerClass | None,
) -> Loaded:
    """`compiled_extend`, loaded, and beside it the kernels that plan, split keys and add up parts.

    Also those of the other variants for the same tensors: which of them a batch needs shows only in service.
    """
    lengths = (starts, contexts, operands.spans)
    for each in variants_beside(variant):
        compile_for_parts(each, device, operands.out, operands.out_strides, operands.sinks, lengths)
        compiled_extend(each, operands).run  # noqa: B018 -- loads it
    return Loaded(compiled_extend(variant, operands), device)


def compiled_extend(variant: Variant, operands: Operands) -> Any:
    """`hallmark_gluon_extend` for such tensors."""
    box, columns, pack, store = variant.box, variant.copied, variant.pack, store_layout(variant.columns[0])
    boxes = ([ROWS // pack, pack, columns], [box, 1, columns], [1, 1, box, 1, columns])
    fp32, int32 = AnyTensor(torch.float32, 0), AnyTensor(torch.int32, 0)
    return hallmark_gluon_extend.warmup(
        *(any_map(dtype, box) for dtype, box in zip(operands.dtypes, boxes, strict=True)),
        any_tensor(operands.out), *operands.out_strides, fp32, fp32, any_tensor(operands.table), 0, 0, 0, int32,
        any_tensor(operands.sinks), any_tensor(operands.spans), 0, 0, 0, 0.0, 0.0, 0, store, variant,
        grid=(1,), num_warps=4, launch_pdl=True,
    )  # fmt: skip
