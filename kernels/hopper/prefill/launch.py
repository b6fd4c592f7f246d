"""Launches of `gluon.prefill.hopper`: the plan (schedule.py), then the attention.

Nothing is read back by the host; all that a call needs besides its arguments is the plan's tensor, allocated on the
current stream. Kernels are looked up by what is compiled in.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.hopper.prefill.kernel import hallmark_gluon_prefill
from kernels.hopper.schedule import HEADER, ITEM, bounded_window, keys_per_group, plan_tiles
from kernels.hopper.tensor_layout import aligned, has_work, is_addressable, store_layout, value_dims
from kernels.hopper.variants import ROWS, Variant, variant_of
from kernels.tma.launches import Launches, Maps, TensorMap, any_map, repeated, scales, tensor_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class


@repeated
def run_prefill(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> Launches | None:
    """Fill `out` for a causal packed batch, in a launch that does not wait for the device, and one before for the plan.

    A batch with plans is planned once for all layers of a window.
    q, out [tokens, heads, head_dim]; k, v [key tokens, kv_heads, head_dim]; fp16 or bf16, last dims contiguous.
    Where queries and keys are the same tokens, pass one tensor as both cu_seqlens: that is a few percent faster.
    Raises ValueError for a head dim or a mask that the path's limits reject.
    """
    if not has_work(q, k, flags, out):
        return None
    variant = variant_of(q.shape[2], batch, flags)
    planned = ("prefill", q.shape[0], variant, flags.window, flags.spans)
    plan = batch.once(planned, lambda: plan_tiles(q.shape[0], batch, flags, variant))
    launches = launches_of(q, k, v, plan, flags, out, variant)
    if launches is None:
        run_prefill(aligned(q), aligned(k), aligned(v), batch, flags, out)  # copies are held until launched
    return launches


def launches_of(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, flags: AttentionFlags, out: Tensor, variant: Variant
) -> Launches | None:
    """Attention by a plan of this batch, these flags and this variant. None where TMA cannot address a tensor."""
    sinks, spans = flags.sinks, flags.spans
    call = prepared(
        variant, q.device, (q.dtype, k.dtype, v.dtype), (q.shape, k.shape),
        (q.stride(), k.stride(), v.stride(), out.stride()), flags.scale, flags.softcap, flags.window,
        pointer_class(out), pointer_class(sinks), pointer_class(spans),
    )  # fmt: skip
    q_at = q.data_ptr()
    if not call.is_addressable or (q_at | k.data_ptr() | v.data_ptr()) % 16:
        return None
    pointers = (
        plan.data_ptr(), None if sinks is None else sinks.data_ptr(), None if spans is None else spans.data_ptr(),
    )  # fmt: skip
    return Launches(
        call.kernel,
        min(num_processors(q.device), (plan.numel() - HEADER.value) // ITEM.value * q.shape[1]),
        call.queries.at(q_at),
        Maps(call.keys, call.values),  # of this call's plans: such addresses come and go
        (out.data_ptr(), *call.out_strides, *pointers, *call.numbers),
        sinks_at=4,
        held=(plan,),
    )


class Prepared(NamedTuple):
    """A launch but for its addresses, its plan and its stream.

    numbers  the kernel's arguments behind the pointers
    """

    kernel: Loaded
    is_addressable: bool
    queries: TensorMap
    keys: TensorMap
    values: TensorMap
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
    flags = AttentionFlags(scale, window=window, softcap=softcap)
    return Prepared(
        kernel,
        all(is_addressable(of, dtype.itemsize) for of, dtype in zip(strides, dtypes, strict=False)),
        tensor_map(kernel, 0, shapes[0], strides[0]),
        tensor_map(kernel, 1, shapes[1], strides[1]),
        tensor_map(kernel, 2, *value_dims(shapes[1], strides[2])),
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
    block_n, columns = variant.tiling.block_n, variant.copied
    boxes = ([ROWS, 1, columns], [block_n, 1, columns], [1, 1, block_n, 1, columns])
    return hallmark_gluon_prefill.warmup(
        *(any_map(dtype, box) for dtype, box in zip(dtypes, boxes, strict=True)),
        any_tensor(out), *out_strides, AnyTensor(torch.int32, 0), any_tensor(sinks), any_tensor(spans),
        0, 0, 0, 0.0, 0.0, 0, store_layout(variant.columns[0]), variant, grid=(1,), num_warps=4,
    )  # fmt: skip
