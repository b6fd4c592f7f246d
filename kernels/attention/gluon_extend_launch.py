"""How `gluon.extend.hopper` is launched.

Two to four launches a call, as the host's bounds say: the plan; its splitting; the attention; the sum of the parts.
Each starts before the one before it has ended, and waits for it. Nothing is read back by the host, so that a CUDA graph
may hold them. Kernels are looked up by what is compiled in.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.attention.batch import AttentionBatch, AttentionFlags
from kernels.attention.gluon_extend import hallmark_gluon_extend
from kernels.attention.gluon_extend_work import (
    Work,
    combine_parts,
    compile_for_parts,
    is_long_work,
    plan_extend,
    tiles_of,
    work_of,
)
from kernels.attention.gluon_launch import (
    aligned,
    any_map,
    has_work,
    is_addressable,
    scales,
    store_layout,
    tensor_map,
    value_dims,
)
from kernels.attention.gluon_schedule import bounded_window, keys_per_group
from kernels.attention.gluon_variants import (
    ROWS,
    AnyTensor,
    PointerClass,
    Variant,
    any_tensor,
    extend_variant_of,
    longer,
    pointer_class,
    variants_beside,
    whole,
)
from kernels.launch import Loaded, num_processors


def run_extend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Fill `out` for chunks over paged context, in launches that do not wait for the device.

    A batch with plans is planned once for all layers of a window; its tensors are of one dtype, and out lies as that of
    every call for such q.
    q, out [tokens, heads, head_dim]; k, v [num_pages, page_size, kv_heads, head_dim]; fp16 or bf16, last dims
    contiguous. Slots past a context may hold anything, NaN too. Not read: page-table entries past a sequence's last
    page, and those behind the windows of its queries.
    Raises ValueError for a head dim, a page size or a mask that the path's limits reject.
    """
    plans, key = batch.plans, None
    if plans is not None:
        key = (
            q.data_ptr(), out.data_ptr(), q.shape, q.stride(), k.shape,
            flags.scale, flags.window, flags.softcap, flags.sinks, flags.spans, flags.causal,
        )  # fmt: skip
        known: Launches | None = plans.get(key)
        if known is not None:
            known.over(k, v)
            return
    if not has_work(q, k, flags, out):
        return
    variant = extend_variant_of(q.shape[2], k.shape[1], q.shape[1] // k.shape[2], flags)
    if is_long_work(q.shape[0], q.shape[1], batch, variant, num_processors(q.device)):
        variant = longer(variant)
    launches = run_variant(q, k, v, batch, flags, out, variant=variant)
    if plans is not None and launches is not None:
        plans[key] = launches


def run_variant(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *, variant: Variant
) -> "Launches | None":
    """The launches of a call, of a variant made for these arguments. None where queries were copied for it."""
    num_heads, num_kv_heads = q.shape[1], k.shape[2]
    processors = num_processors(q.device)

    def made() -> tuple[Work, Tensor, tuple[Tensor, Tensor]]:
        work = work_of(q.shape[0], num_heads, num_kv_heads, batch, variant, processors)
        return work, plan_extend(batch, flags, variant, work, processors), scratch_of(work, variant, q.device)

    planned = ("extend", q.shape[0], num_heads, num_kv_heads, variant, flags.window, flags.spans)
    work, plan, scratch = batch.once(planned, made)
    if work.max_parts == 0:
        variant = whole(variant)
    addressable = aligned(q)  # held until launched: a freed copy's memory may be the next's
    launches = launches_of(addressable, k, batch, flags, out, variant=variant, work=work, plan=plan, scratch=scratch)
    launches.over(k, v)
    return launches if addressable is q else None


def scratch_of(work: Work, variant: Variant, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for partial results and their logs, see `store_part`; one element each where nothing is split."""
    rows = work.max_parts * work.tile_heads * variant.tiling.block_m
    parts = torch.empty(max(1, rows * variant.tiling.block_d), dtype=torch.float32, device=device)
    return parts, torch.empty(max(1, rows), dtype=torch.float32, device=device)


class Launches(NamedTuple):
    """The attention and the sum of its parts, to repeat over other pages for tensors at the same addresses.

    queries  the kernel's arguments before those of k and v
    between  those from there to the rows of a page; after: those behind them
    """

    kernel: Loaded
    grid: tuple[int, int, int]
    queries: tuple[Any, ...]
    between: tuple[Any, ...]
    after: tuple[Any, ...]
    combine: Callable[[], None] | None

    def over(self, k: Tensor, v: Tensor) -> None:
        kernel = self.kernel
        _, k_box, v_box = kernel.boxes
        keys = page_map(kernel.encode, k_box, k.data_ptr(), k.shape, k.stride(), are_values=False)
        values = page_map(kernel.encode, v_box, v.data_ptr(), v.shape, v.stride(), are_values=True)
        if keys is None or values is None:  # copies are held until launched
            self.over(*(pages.clone(memory_format=torch.contiguous_format) for pages in (k, v)))
            return
        rows = (keys.rows_of_page, values.rows_of_page)
        kernel(self.grid, (*self.queries, *keys.arguments, *values.arguments, *self.between, *rows, *self.after))
        if self.combine is not None:
            self.combine()


def launches_of(
    q: Tensor,
    k: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    out: Tensor,
    *,
    variant: Variant,
    work: Work,
    plan: Tensor,
    scratch: tuple[Tensor, Tensor],
) -> Launches:
    """Attention by a plan of this batch, these flags and this variant. q: such that TMA can address it."""
    device, table, sinks, spans = q.device, batch.page_table, flags.sinks, flags.spans
    assert table is not None, "extend reads pages"
    heads_of_kv = 1 if variant.pack > 1 else q.shape[1] // k.shape[2]
    heads_per_group = work.tile_heads  # in groups the last one would begin its longest tile last
    if batch.num_seqs == 1 and work.max_parts == 0:
        heads_per_group = heads_of_kv * max(1, keys_per_group(variant) // max(1, batch.max_context))
    strides = (out.stride(0), out.stride(1))
    kernel = launcher(
        variant, device, (q.dtype, k.dtype, k.dtype), pointer_class(out), strides,
        pointer_class(table), pointer_class(sinks), pointer_class(spans),
        pointer_class(batch.cu_seqlens_q), pointer_class(batch.context_lens),
    )  # fmt: skip
    q_map = tensor_map(kernel.boxes[0], q.shape, q.stride())
    max_tiles = (work.max_blocks + work.max_parts) * work.tile_heads
    return Launches(
        kernel,
        (min(num_processors(device), max_tiles), 1, 1),
        (kernel.encode(q.data_ptr(), *q_map.layout), *q_map.numbers),
        (out.data_ptr(), *strides, *(part.data_ptr() for part in scratch), table.data_ptr(), table.stride(0)),
        (
            tiles_of(plan, work).data_ptr(),
            None if sinks is None else sinks.data_ptr(), None if spans is None else spans.data_ptr(),
            work.tile_heads, heads_of_kv, min(heads_per_group, work.tile_heads), *scales(flags), bounded_window(flags),
        ),
        combine_parts(plan, scratch, out, flags, variant, work) if work.max_parts else None,
    )  # fmt: skip


class PageMap(NamedTuple):
    """A tensor map of pages with its shape and its strides, and how many rows a page is from the next one."""

    arguments: tuple[object, ...]
    rows_of_page: int


@lru_cache(maxsize=1024)  # a function of these numbers alone; the pools of a model's layers stay where they are
def page_map(
    encode: Callable[..., object],
    box: tuple[Any, ...],
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *,
    are_values: bool,
) -> PageMap | None:
    """Pages as rows [rows, kv_heads, head_dim], one a slot: values with a bound that every copy chooses for itself.

    None where TMA cannot address them, or pages do not lie whole rows apart as in one pool or side by side with others.
    """
    num_pages, page_size, num_heads, head_dim = shape
    stride_page, *of_rows = strides
    itemsize: int = box[1]
    if not is_addressable(tuple(of_rows), itemsize) or stride_page < 0 or stride_page % of_rows[0] or address % 16:
        return None
    rows_of_page = stride_page // of_rows[0]
    dims = ((num_pages - 1) * rows_of_page + page_size, num_heads, head_dim), tuple(of_rows)
    found = tensor_map(box, *(value_dims(*dims) if are_values else dims))
    return PageMap((encode(address, *found.layout), *found.numbers), rows_of_page)


# Pure functions of what is compiled in: the caches hold no state. What falls out is found again in Triton's own cache.
@lru_cache(maxsize=256)
def launcher(
    variant: Variant,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    out: PointerClass,
    out_strides: tuple[int, int],
    table: PointerClass,
    sinks: PointerClass | None,
    spans: PointerClass | None,
    starts: PointerClass | None,
    contexts: PointerClass | None,
) -> Loaded:
    """`compiled_extend`, loaded, and beside it the kernels that plan, split keys and add up parts.

    Also those of the other variants for the same tensors: which of them a batch needs shows only in service.
    """
    for each in variants_beside(variant):
        compile_for_parts(each, device, out, out_strides, sinks, (starts, contexts, spans))
        kernel = compiled_extend(each, dtypes, out, out_strides, table, sinks, spans)
        kernel.run  # noqa: B018 -- loads it
    return Loaded(compiled_extend(variant, dtypes, out, out_strides, table, sinks, spans), device)


def compiled_extend(
    variant: Variant,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    out: PointerClass,
    out_strides: tuple[int, int],
    table: PointerClass,
    sinks: PointerClass | None,
    spans: PointerClass | None,
) -> Any:
    """`hallmark_gluon_extend` for q, k and v of these dtypes and such other tensors."""
    box, block_d, pack = variant.box, variant.tiling.block_d, variant.pack
    boxes = ([ROWS // pack, pack, block_d], [box, 1, block_d], [1, 1, box, 1, block_d])
    fp32, int32 = AnyTensor(torch.float32, 0), AnyTensor(torch.int32, 0)
    return hallmark_gluon_extend.warmup(
        *(any_map(dtype, box) for dtype, box in zip(dtypes, boxes, strict=True)),
        any_tensor(out), *out_strides, fp32, fp32, any_tensor(table), 0, 0, 0, int32,
        any_tensor(sinks), any_tensor(spans), 0, 0, 0, 0.0, 0.0, 0, store_layout(block_d), variant,
        grid=(1,), num_warps=4, launch_pdl=True,
    )  # fmt: skip
