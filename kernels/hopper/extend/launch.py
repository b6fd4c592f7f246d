"""How `gluon.extend.hopper` is launched.

Two to four launches a call, as the host's bounds say: the plan; its splitting; the attention; the sum of the parts.
Each starts before the one before it has ended, and waits for it. Nothing is read back by the host, so that a CUDA graph
may hold them. Kernels are looked up by what is compiled in.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.hopper.extend.kernel import hallmark_gluon_extend
from kernels.hopper.extend.sizing import (
    Work,
    combine_parts,
    compile_for_parts,
    is_long_work,
    plan_extend,
    tiles_of,
    work_of,
)
from kernels.hopper.extend.variants import extend_variant_of, longer, variants_beside, whole
from kernels.hopper.schedule import bounded_window, keys_per_group
from kernels.hopper.tensor_layout import aligned, has_work, is_addressable, store_layout, value_dims
from kernels.hopper.variants import ROWS, AnyTensor, PointerClass, Variant, any_tensor, pointer_class
from kernels.launch import Loaded
from kernels.processors import num_processors
from kernels.tma.launches import Launches, Maps, any_map, repeated, scales, tensor_map


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
        then=combine_parts(plan, scratch, out, flags, variant, work) if work.max_parts else None,
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
    """How many rows a page is from the next one."""
    return strides[0] // strides[1]


def as_rows(pages: Tensor) -> Tensor:
    """`pages` itself where TMA can address it as rows, one a slot; a copy elsewhere."""
    if are_rows(pages.stride(), pages.itemsize) and pages.data_ptr() % 16 == 0:
        return pages
    return pages.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=256)
def are_rows(strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether pages lie whole rows apart, as in one pool or side by side with others, and TMA can address the rows."""
    stride_page, *of_rows = strides
    return is_addressable(tuple(of_rows), itemsize) and stride_page >= 0 and stride_page % of_rows[0] == 0


@lru_cache(maxsize=64)  # kept for the next step
def page_maps(kernel: Loaded, shape: tuple[int, ...], k_strides: tuple[int, ...], v_strides: tuple[int, ...]) -> Maps:
    """Of pages as rows [rows, kv_heads, head_dim]: values with a bound that every copy chooses for itself."""
    num_pages, page_size, num_heads, head_dim = shape

    def dims(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return ((num_pages - 1) * rows_of_page(strides) + page_size, num_heads, head_dim), strides[1:]

    return Maps(tensor_map(kernel, 1, *dims(k_strides)), tensor_map(kernel, 2, *value_dims(*dims(v_strides))))


class Operands(NamedTuple):
    """What is compiled in of the attention's tensors: q, k and v by dtype, and out's strides."""

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
