"""How `gluon.prefill.hopper` is launched: the plan (gluon_schedule.py), then the attention.

Nothing is read back by the host; all that a call needs besides its arguments is the plan's tensor, allocated on the
current stream. Kernels are looked up by what is compiled in.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from kernels.attention.batch import AttentionBatch, AttentionFlags
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
from kernels.attention.gluon_prefill import hallmark_gluon_prefill
from kernels.attention.gluon_schedule import HEADER, ITEM, bounded_window, keys_per_group, plan_tiles
from kernels.attention.gluon_variants import (
    ROWS,
    AnyTensor,
    PointerClass,
    Variant,
    any_tensor,
    pointer_class,
    variant_of,
)


def run_prefill(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Fill `out` for a causal packed batch, in two launches that do not wait for the device.

    q, out [tokens, heads, head_dim]; k, v [key tokens, kv_heads, head_dim]; fp16 or bf16, last dims contiguous.
    Where queries and keys are the same tokens, pass one tensor as both cu_seqlens: that is a few percent faster.
    Raises ValueError for a head dim or a mask that the path's limits reject.
    """
    if not flags.causal:
        raise ValueError("causal: expected True, found False")
    if q.shape[0] == 0:
        return
    if k.shape[0] == 0:
        out.zero_()  # no key, so no query sees one; TMA takes no empty tensor
        return
    variant = variant_of(q.shape[2], batch, flags)
    plan = plan_tiles(q.shape[0], batch, flags, variant)
    launch_prefill(q, k, v, plan, flags, out, variant)


def launch_prefill(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, flags: AttentionFlags, out: Tensor, variant: Variant
) -> None:
    """Attention by a plan of this batch, these flags and this variant."""
    num_heads, device = q.shape[1], q.device
    num_keys, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    max_tiles = (plan.numel() - HEADER.value) // ITEM.value * num_heads
    heads_per_group = min(num_heads, group * max(1, keys_per_group(variant) // num_keys))
    stride_row, stride_head, _ = out.stride()
    to_launch = launcher(
        variant, device, (q.dtype, k.dtype, v.dtype), pointer_class(out), (stride_row, stride_head),
        pointer_class(flags.sinks), pointer_class(flags.spans),
    )  # fmt: skip
    encode, (q_box, k_box, v_box) = to_launch.encode, to_launch.boxes
    q, k, v = aligned(q), aligned(k), aligned(v)  # held until launched: a freed copy's memory may be the next's
    to_launch.run(
        min(to_launch.num_processors, max_tiles), 1, 1, driver.active.get_current_stream(device.index),
        to_launch.function, to_launch.metadata, None, None, None,
        *row_map(q, encode, q_box), *row_map(k, encode, k_box), *value_map(v, encode, v_box),
        out, stride_row, stride_head, plan, flags.sinks, flags.spans,
        num_heads, group, heads_per_group, *scales(flags), bounded_window(flags), None, None,
    )  # fmt: skip


# Pure functions of what is compiled in: the caches hold no state. What falls out is found again in Triton's own cache.
@lru_cache(maxsize=256)
def launcher(variant: Variant, device: torch.device, *compiled_in: Any) -> ToLaunch:
    """`compiled_prefill`, loaded. Triton's own launch takes 5 us more to replace descriptors among the arguments."""
    return loaded(compiled_prefill(variant, *compiled_in), device)


def compiled_prefill(
    variant: Variant,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    out: PointerClass,
    out_strides: tuple[int, int],
    sinks: PointerClass | None,
    spans: PointerClass | None,
) -> Any:
    """`hallmark_gluon_prefill` for q, k and v of these dtypes and such other tensors."""
    block_n, block_d = variant.tiling.block_n, variant.tiling.block_d
    boxes = ([ROWS, 1, block_d], [block_n, 1, block_d], [1, 1, block_n, 1, block_d])
    return hallmark_gluon_prefill.warmup(
        *(any_map(dtype, box) for dtype, box in zip(dtypes, boxes, strict=True)),
        any_tensor(out), *out_strides, AnyTensor(torch.int32, 0), any_tensor(sinks), any_tensor(spans),
        0, 0, 0, 0.0, 0.0, 0, store_layout(block_d), variant, grid=(1,), num_warps=4,
    )  # fmt: skip
