"""`gluon.extend.hopper`: attention of prompt chunks over paged context on sm_90, written in Gluon for Triton 3.6.0.

The roles and consumers of `gluon.prefill.hopper`, with a producer that follows the page table. Where a group of query
heads is a power of two, its heads are packed into the rows of a tile: a short chunk still fills one. Where tiles are
few, or one is much longer than the others, keys are split into parts (gluon_extend_plan.py).

Two to four launches a call, as the host's bounds say: the plan; its splitting; the attention; the sum of the parts.
Each starts before the one before it has ended, and waits for it. Nothing is read back by the host, so that a CUDA graph
may hold them. Sources: Kwon et al. 2023 (pages); Shah et al. 2024 (FA3); Dao et al. 2023 (Flash-Decoding: split keys).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.runtime import driver

from kernels.attention.batch import AttentionBatch, AttentionFlags
from kernels.attention.gluon_consumer import consume
from kernels.attention.gluon_extend_producer import produce_pages
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
    ToLaunch,
    aligned,
    any_map,
    loaded,
    row_map,
    scales,
    store_layout,
    value_map,
)
from kernels.attention.gluon_pipeline import rings
from kernels.attention.gluon_schedule import bounded_window, keys_per_group, schedule
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
from kernels.launch import num_processors


@jit
def wait_for_launch_before():
    """Until what the launch before wrote can be read. From here on the next one may start, and wait in its turn."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit(do_not_specialize=["stride_table", "k_rows", "v_rows", "num_heads", "group", "heads_per_group", "window"])
def hallmark_gluon_extend(
    q_desc, k_desc, v_desc, out, stride_row, stride_head, parts, logs, table, stride_table, k_rows, v_rows, plan, sinks,
    spans, num_heads, group, heads_per_group, scale, softcap_scale, window,
    STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Rings and roles of one program.

    parts, logs      scratch of split keys, see `store_part`
    k_rows, v_rows   rows of the tensor map from one page to the next
    num_heads        heads of tiles; group: those that share a KV head; heads_per_group: those of an L2 group
    """
    tiles, queries, keys, values = rings(q_desc.dtype, VARIANT)
    result = (out, stride_row, stride_head, parts, logs, num_heads)
    wait_for_launch_before()
    if VARIANT.tiling.consumers == 2:
        gl.warp_specialize([
            (consume, (result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values,
                       0, STORE, VARIANT)),
            (consume, (result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values,
                       1, STORE, VARIANT)),
            (produce_pages, (q_desc, k_desc, v_desc, table, stride_table, k_rows, v_rows, group, tiles, queries, keys,
                             values, VARIANT)),
            (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
        ], [4, 1, 1], [240, 32, 32])  # fmt: skip
    else:  # all 65,536 registers
        gl.warp_specialize([
            (consume, (result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values,
                       0, STORE, VARIANT)),
            (consume, (result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values,
                       1, STORE, VARIANT)),
            (consume, (result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values,
                       2, STORE, VARIANT)),
            (produce_pages, (q_desc, k_desc, v_desc, table, stride_table, k_rows, v_rows, group, tiles, queries, keys,
                             values, VARIANT)),
            (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
        ], [4, 4, 1, 1], [160, 160, 32, 32])  # fmt: skip


def run_extend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Fill `out` for chunks over paged context, in launches that do not wait for the device.

    q, out [tokens, heads, head_dim]; k, v [num_pages, page_size, kv_heads, head_dim]; fp16 or bf16, last dims
    contiguous. Slots past a context may hold anything, NaN too. Not read: page-table entries past a sequence's last
    page, and those behind the windows of its queries.
    Raises ValueError for a head dim, a page size or a mask that the path's limits reject.
    """
    if not flags.causal:
        raise ValueError("causal: expected True, found False")
    if q.shape[0] == 0:
        return
    if k.shape[0] == 0:
        out.zero_()  # no key, so no query sees one; TMA takes no empty tensor
        return
    variant = extend_variant_of(q.shape[2], k.shape[1], q.shape[1] // k.shape[2], flags)
    if is_long_work(q.shape[0], q.shape[1], batch, variant, num_processors(q.device)):
        variant = longer(variant)
    run_variant(q, k, v, batch, flags, out, variant=variant)


def run_variant(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *, variant: Variant
) -> None:
    """The launches of a call, of a variant made for these arguments."""
    num_heads, num_kv_heads = q.shape[1], k.shape[2]
    processors = num_processors(q.device)

    def made() -> tuple[Work, Tensor, tuple[Tensor, Tensor]]:
        work = work_of(q.shape[0], num_heads, num_kv_heads, batch, variant, processors)
        return work, plan_extend(batch, flags, variant, work, processors), scratch_of(work, variant, q.device)

    planned = ("extend", q.shape[0], num_heads, num_kv_heads, variant, flags.window, flags.spans)
    work, plan, scratch = batch.once(planned, made)
    if work.max_parts == 0:
        variant = whole(variant)
    launch_extend(q, k, v, batch, flags, out, variant=variant, work=work, plan=plan, scratch=scratch)
    if work.max_parts:
        combine_parts(plan, scratch, out, flags, variant, work)


def scratch_of(work: Work, variant: Variant, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for partial results and their logs, see `store_part`; one element each where nothing is split."""
    rows = work.max_parts * work.tile_heads * variant.tiling.block_m
    parts = torch.empty(max(1, rows * variant.tiling.block_d), dtype=torch.float32, device=device)
    return parts, torch.empty(max(1, rows), dtype=torch.float32, device=device)


def launch_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    out: Tensor,
    *,
    variant: Variant,
    work: Work,
    plan: Tensor,
    scratch: tuple[Tensor, Tensor],
) -> None:
    """Attention by a plan of this batch, these flags and this variant."""
    device, table = q.device, batch.page_table
    assert table is not None, "extend reads pages"
    group = q.shape[1] // k.shape[2]
    heads_of_kv = 1 if variant.pack > 1 else group
    heads_per_group = work.tile_heads  # in groups the last one would begin its longest tile last
    if batch.num_seqs == 1 and work.max_parts == 0:
        heads_per_group = heads_of_kv * max(1, keys_per_group(variant) // max(1, batch.max_context))
    stride_row, stride_head, _ = out.stride()
    parts, logs = scratch
    to_launch = launcher(
        variant, device, (q.dtype, k.dtype, v.dtype), pointer_class(out), (stride_row, stride_head),
        pointer_class(table), pointer_class(flags.sinks), pointer_class(flags.spans),
        pointer_class(batch.cu_seqlens_q), pointer_class(batch.context_lens),
    )  # fmt: skip
    encode, (q_box, k_box, v_box) = to_launch.encode, to_launch.boxes
    q = aligned(q)  # held until launched: a freed copy's memory may be the next's
    k, k_rows = page_rows(k)
    v, v_rows = page_rows(v)
    max_tiles = (work.max_blocks + work.max_parts) * work.tile_heads
    to_launch.run(
        min(to_launch.num_processors, max_tiles), 1, 1, driver.active.get_current_stream(device.index),
        to_launch.function, to_launch.metadata, None, None, None,
        *row_map(q, encode, q_box), *row_map(k, encode, k_box), *value_map(v, encode, v_box),
        out, stride_row, stride_head, parts, logs, table, table.stride(0), k_rows, v_rows, tiles_of(plan, work),
        flags.sinks, flags.spans, work.tile_heads, heads_of_kv, min(heads_per_group, work.tile_heads), *scales(flags),
        bounded_window(flags), None, None,
    )  # fmt: skip


def page_rows(pages: Tensor) -> tuple[Tensor, int]:
    """Pages as rows [rows, kv_heads, head_dim], one a slot, and how many rows a page is from the next one.

    A view where pages lie whole rows apart, as in one pool or side by side with others; a copy elsewhere.
    """
    num_pages, page_size, num_heads, head_dim = pages.shape
    stride_page, stride_row, stride_head, _ = pages.stride()
    if stride_row <= 0 or stride_page % stride_row or stride_page < 0 or not is_addressable(pages):
        pages = pages.clone(memory_format=torch.contiguous_format)
        stride_page, stride_row, stride_head, _ = pages.stride()
    rows_of_page = stride_page // stride_row
    num_rows = (num_pages - 1) * rows_of_page + page_size
    rows = pages.as_strided((num_rows, num_heads, head_dim), (stride_row, stride_head, 1))
    return rows, rows_of_page


def is_addressable(pages: Tensor) -> bool:
    """Whether TMA can address the pages: 16-byte aligned, positive strides."""
    _, stride_row, stride_head, stride_dim = pages.stride()
    in_bytes = (stride_row | stride_head) * pages.itemsize
    return stride_dim == 1 and stride_head > 0 and in_bytes % 16 == 0 and pages.data_ptr() % 16 == 0


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
) -> ToLaunch:
    """`compiled_extend`, loaded, and beside it the kernels that plan, split keys and add up parts.

    Also those of the other variants for the same tensors: which of them a batch needs shows only in service.
    """
    for each in variants_beside(variant):
        compile_for_parts(each, device, out, out_strides, sinks, (starts, contexts, spans))
        kernel = compiled_extend(each, dtypes, out, out_strides, table, sinks, spans)
        kernel.run  # noqa: B018 -- loads it
    return loaded(compiled_extend(variant, dtypes, out, out_strides, table, sinks, spans), device)


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
