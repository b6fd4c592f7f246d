"""How `gluon.prefill.hopper` is launched: the plan (gluon_schedule.py), then the attention.

Nothing is read back by the host; all that a call needs besides its arguments is the plan's tensor, allocated on the
current stream. Kernels are looked up by what is compiled in.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.attention.batch import AttentionBatch, AttentionFlags
from kernels.attention.gluon_launch import (
    TensorMap,
    aligned,
    any_map,
    has_work,
    is_addressable,
    scales,
    store_layout,
    tensor_map,
    value_dims,
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
from kernels.launch import Loaded, num_processors


def run_prefill(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Fill `out` for a causal packed batch, in a launch that does not wait for the device, and one before for the plan.

    A batch with plans is planned once for all layers of a window; its tensors are of one dtype, v lies as k, and out as
    that of every call for such q.
    q, out [tokens, heads, head_dim]; k, v [key tokens, kv_heads, head_dim]; fp16 or bf16, last dims contiguous.
    Where queries and keys are the same tokens, pass one tensor as both cu_seqlens: that is a few percent faster.
    Raises ValueError for a head dim or a mask that the path's limits reject.
    """
    plans, key = batch.plans, None
    if plans is not None:
        # What the layers of a step allocate lies where that of the layer before them lay.
        key = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), q.shape, q.stride(), k.shape, k.stride(),
            flags.scale, flags.window, flags.softcap, flags.sinks, flags.spans, flags.causal,
        )  # fmt: skip
        known: Launched | None = plans.get(key)
        if known is not None:
            known.launch(*known.arguments)
            return
    if not has_work(q, k, flags, out):
        return
    variant = variant_of(q.shape[2], batch, flags)
    planned = ("prefill", q.shape[0], variant, flags.window, flags.spans)
    plan = batch.once(planned, lambda: plan_tiles(q.shape[0], batch, flags, variant))
    launched = launch_prefill(q, k, v, plan, flags, out, variant)
    if plans is not None and launched is not None:
        plans[key] = launched


class Launched(NamedTuple):
    """A launch to repeat for tensors at the same addresses, on the same stream."""

    launch: Callable[..., None]
    arguments: tuple[Any, ...]


def launch_prefill(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, flags: AttentionFlags, out: Tensor, variant: Variant
) -> Launched | None:
    """Attention by a plan of this batch, these flags and this variant. None where tensors were copied for it."""
    sinks, spans = flags.sinks, flags.spans
    call = prepared(
        variant, q.device, (q.dtype, k.dtype, v.dtype), (q.shape, k.shape),
        (q.stride(), k.stride(), v.stride(), out.stride()), flags.scale, flags.softcap, flags.window,
        pointer_class(out), pointer_class(sinks), pointer_class(spans),
    )  # fmt: skip
    q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if not call.is_addressable or (q_at | k_at | v_at) % 16:
        launch_prefill(aligned(q), aligned(k), aligned(v), plan, flags, out, variant)  # copies are held until launched
        return None
    q_map, k_map, v_map = call.maps
    kernel = call.kernel
    arguments = (
        kernel.encode(q_at, *q_map.layout), *q_map.numbers,
        kernel.encode(k_at, *k_map.layout), *k_map.numbers,
        kernel.encode(v_at, *v_map.layout), *v_map.numbers,
        out.data_ptr(), *call.out_strides, plan.data_ptr(),
        None if sinks is None else sinks.data_ptr(), None if spans is None else spans.data_ptr(), *call.numbers,
    )  # fmt: skip
    num_programs = min(num_processors(q.device), (plan.numel() - HEADER.value) // ITEM.value * q.shape[1])
    complete = kernel.complete((num_programs, 1, 1), arguments)
    kernel.launch(*complete)
    return Launched(kernel.launch, complete)


class Prepared(NamedTuple):
    """A launch but for its addresses, its plan and its stream.

    maps     of q, k and v
    numbers  the kernel's arguments behind the pointers
    """

    kernel: Loaded
    is_addressable: bool
    maps: tuple[TensorMap, TensorMap, TensorMap]
    out_strides: tuple[int, int]
    numbers: tuple[Any, ...]


# Pure functions of what is asked for: the caches hold no state. What falls out is found again in Triton's own cache.
@lru_cache(maxsize=1024)
def prepared(
    variant: Variant,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    strides: tuple[tuple[int, ...], ...],
    scale: float,
    softcap: float | None,
    window: int | None,
    *pointers: PointerClass | None,
) -> Prepared:
    """The launch for q, k (v is as k) and out of these shapes and strides. pointers: of out, sinks and spans."""
    (_, num_heads, _), (num_keys, num_kv_heads, _) = shapes
    group = num_heads // num_kv_heads
    heads_per_group = min(num_heads, group * max(1, keys_per_group(variant) // num_keys))
    out, sinks, spans = pointers
    out_strides = (strides[3][0], strides[3][1])
    kernel = launcher(variant, device, dtypes, out, out_strides, sinks, spans)
    q_box, k_box, v_box = kernel.boxes
    flags = AttentionFlags(scale, window=window, softcap=softcap)
    return Prepared(
        kernel,
        all(is_addressable(of, dtype.itemsize) for of, dtype in zip(strides, dtypes, strict=False)),
        (
            tensor_map(q_box, shapes[0], strides[0]),
            tensor_map(k_box, shapes[1], strides[1]),
            tensor_map(v_box, *value_dims(shapes[1], strides[2])),
        ),
        out_strides,
        (num_heads, group, heads_per_group, *scales(flags), bounded_window(flags)),
    )


@lru_cache(maxsize=256)
def launcher(variant: Variant, device: torch.device, *compiled_in: Any) -> Loaded:
    return Loaded(compiled_prefill(variant, *compiled_in), device)


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
        0, 0, 0, 0.0, 0.0, 0, store_layout(variant.columns[0]), variant, grid=(1,), num_warps=4,
    )  # fmt: skip
