"""Launches of `gluon.prefill.wide.hopper`: the plan (schedule.py), then the attention."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.hopper.schedule import HEADER, ITEM, keys_per_group, plan_tiles
from kernels.hopper.tensor_layout import aligned, has_work, store_layout, value_dims
from kernels.hopper.variants import ROWS, Variant
from kernels.hopper.wide.kernel import hallmark_gluon_wide_prefill
from kernels.hopper.wide.variants import check_head_dim, wide_prefill_variant
from kernels.tma.launches import Launches, Maps, any_map, repeated, scales, tensor_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class


@repeated
def run_wide_prefill(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> Launches | None:
    """Fill `out` for a causal packed batch of heads of 512, as `run_prefill` of `gluon.prefill.hopper`.

    Raises ValueError for another head dim and for flags that the path's limits reject.
    """
    check_head_dim(q.shape[2])
    check_flags(flags)
    if not has_work(q, k, flags, out):
        return None
    addressable = (aligned(q), aligned(k), aligned(v))
    if any(found is not given for found, given in zip(addressable, (q, k, v), strict=True)):
        run_wide_prefill(*addressable, batch, flags, out)  # copies are held until launched
        return None
    variant = wide_prefill_variant(batch.cu_seqlens_q is not batch.cu_seqlens_k)
    plan = batch.once(("wide prefill", q.shape[0], variant), lambda: plan_tiles(q.shape[0], batch, flags, variant))
    kernel = launcher(variant, q.device, (q.dtype, k.dtype, v.dtype), pointer_class(out), out.stride()[:2])
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    group = num_heads // num_kv_heads
    heads_per_group = min(num_heads, group * max(1, keys_per_group(variant) // k.shape[0]))
    return Launches(
        kernel,
        min(num_processors(q.device), (plan.numel() - HEADER.value) // ITEM.value * num_heads),
        tensor_map(kernel, 0, q.shape, q.stride()).at(q.data_ptr()),
        Maps(
            tensor_map(kernel, 1, k.shape, k.stride()),
            tensor_map(kernel, 2, *value_dims(k.shape, v.stride())),
        ),
        (out.data_ptr(), *out.stride()[:2], plan.data_ptr(), num_heads, group, heads_per_group, scales(flags)[0]),
        sinks_at=0,
        held=(plan,),
    )


def check_flags(flags: AttentionFlags) -> None:
    """Raise ValueError for a window, a softcap, sinks or spans: no model with heads of 512 asks for them."""
    for name in ("window", "softcap", "sinks", "spans"):
        value = getattr(flags, name)
        if value is not None:
            found = "a tensor" if isinstance(value, Tensor) else value
            raise ValueError(f"{name}: expected none with heads of 512, found {found}")


@lru_cache(maxsize=256)
def launcher(variant: Variant, device: torch.device, *compiled_in: Any) -> Loaded:
    return Loaded(compiled_wide_prefill(variant, *compiled_in), device)


def compiled_wide_prefill(
    variant: Variant,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    out: PointerClass,
    out_strides: tuple[int, int],
) -> Any:
    """`hallmark_gluon_wide_prefill` for q, k and v of these dtypes and such an output."""
    block_n, columns = variant.tiling.block_n, variant.copied
    boxes = ([ROWS, 1, columns], [block_n, 1, columns], [1, 1, block_n, 1, columns])
    return hallmark_gluon_wide_prefill.warmup(
        *(any_map(dtype, box) for dtype, box in zip(dtypes, boxes, strict=True)),
        any_tensor(out), *out_strides, AnyTensor(torch.int32, 0), 0, 0, 0, 0.0,
        store_layout(variant.tiling.block_d // 2), variant, grid=(1,), num_warps=4,
    )  # fmt: skip
