"""Launches of `gluon.prefill.unmasked.hopper`: the plan, then the attention, neither of which waits for the device."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded, is_interpreted
from kernels.calls.processors import num_processors
from kernels.hopper.full.kernel import hallmark_gluon_full, hallmark_gluon_full_plan
from kernels.hopper.schedule import HEADER, ITEM, keys_per_group
from kernels.hopper.tensor_layout import aligned, is_addressable, store_layout, value_dims
from kernels.hopper.variants import HEAD_DIM_MULTIPLE, ROWS, TILINGS, Variant
from kernels.tma.launches import Launches, Maps, any_map, repeated, scales, tensor_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class

MAX_HEAD_DIM = 128  # the tilings below hold one block of scores ahead, and leave room for two tiles of queries
_SEQS = 64  # lengths that a program of the plan reads at once
_BLOCKS = 64


@repeated
def run_full(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> Launches | None:
    """Fill `out`: each query sees all keys of its sequence. A batch with plans is planned once for all layers.

    q, out [tokens, heads, head_dim]; k, v [key tokens, kv_heads, head_dim]; fp16 or bf16, last dims contiguous.
    Raises ValueError for a head dim or a flag that the path's limits reject.
    """
    if flags.causal or flags.window is not None or flags.softcap is not None or flags.sinks is not None:
        raise ValueError("flags: expected none, and causal False")
    if not q.shape[0]:
        return None
    if not k.shape[0]:
        out.zero_()  # TMA takes no empty tensor
        return None
    variant = variant_of(q.shape[2])
    plan = batch.once(("full", q.shape[0], variant), lambda: _plan(q.shape[0], batch, variant))
    launches = _launches(q, k, v, plan, flags.scale, out, variant)
    if launches is None:
        run_full(aligned(q), aligned(k), aligned(v), batch, flags, out)  # copies are held until launched
    return launches


@lru_cache
def variant_of(head_dim: int) -> Variant:
    """Return the variant of a head dim. Raises ValueError for one that no tiling takes."""
    block_d = next((size for size in TILINGS if head_dim <= size <= MAX_HEAD_DIM), None)
    if block_d is None or head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(f"head_dim: expected a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}, found {head_dim}")
    return Variant(TILINGS[block_d], head_dim)


def _plan(num_tokens: int, batch: AttentionBatch, variant: Variant) -> Tensor:
    """The order of work of a batch: int32 on the device, good for launches one after another."""
    starts_q, starts_k = batch.cu_seqlens_q, batch.cu_seqlens_k
    assert starts_k is not None, "a prefill batch is packed"
    block_m, num_seqs = variant.tiling.block_m, batch.num_seqs
    size = HEADER.value + ITEM.value * (num_tokens // block_m + num_seqs)
    plan = torch.empty(size, dtype=torch.int32, device=starts_q.device)
    constants = (HEADER.value, ITEM.value, block_m, _BLOCKS, _SEQS)
    rows = block_m * _BLOCKS  # of one program
    grid = (num_seqs, max(1, (batch.max_seqlen_q + rows - 1) // rows), 1)
    if is_interpreted():
        hallmark_gluon_full_plan[grid](plan, starts_q, starts_k, num_seqs, *constants)
        return plan
    kernel = _plan_kernel(starts_q.device, pointer_class(starts_q), pointer_class(starts_k), constants)
    kernel(grid, (plan.data_ptr(), starts_q.data_ptr(), starts_k.data_ptr(), num_seqs))
    return plan


# Pure functions of what is compiled in: the caches hold no state.
@lru_cache(maxsize=64)
def _plan_kernel(
    device: torch.device, starts_q: PointerClass, starts_k: PointerClass, constants: tuple[int, ...]
) -> Loaded:
    tensors = (AnyTensor(torch.int32, 0), any_tensor(starts_q), any_tensor(starts_k))
    return Loaded(hallmark_gluon_full_plan.warmup(*tensors, 0, *constants, grid=(1,)), device)


def _launches(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, scale: float, out: Tensor, variant: Variant
) -> Launches | None:
    """Attention by a plan of this batch and this variant. None where TMA cannot address a tensor."""
    dtypes = (q.dtype, k.dtype, v.dtype)
    strides = (q.stride(), k.stride(), v.stride())
    is_fit = all(is_addressable(of, dtype.itemsize) for of, dtype in zip(strides, dtypes, strict=True))
    if not is_fit or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return None
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    group = num_heads // num_kv_heads
    out_strides = (out.stride(0), out.stride(1))
    kernel = _launcher(variant, q.device, dtypes, pointer_class(out), out_strides)
    of_l2 = min(num_heads, group * max(1, keys_per_group(variant) // k.shape[0]))
    factor, _ = scales(AttentionFlags(scale, causal=False))
    return Launches(
        kernel,
        min(num_processors(q.device), (plan.numel() - HEADER.value) // ITEM.value * num_heads),
        tensor_map(kernel, 0, tuple(q.shape), strides[0]).at(q.data_ptr()),
        Maps(
            tensor_map(kernel, 1, tuple(k.shape), strides[1]),
            tensor_map(kernel, 2, *value_dims(tuple(k.shape), strides[2])),
        ),
        (out.data_ptr(), *out_strides, plan.data_ptr(), num_heads, group, of_l2, factor),
        sinks_at=0,  # there are none
        held=(plan,),
    )


@lru_cache(maxsize=64)
def _launcher(variant: Variant, device: torch.device, *compiled_in: Any) -> Loaded:
    return Loaded(compiled_full(variant, *compiled_in), device)


def compiled_full(
    variant: Variant,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    out: PointerClass,
    out_strides: tuple[int, int],
) -> Any:
    """`hallmark_gluon_full` for q, k and v of these dtypes and such an output."""
    block_n, columns = variant.tiling.block_n, variant.copied
    boxes = ([ROWS, 1, columns], [block_n, 1, columns], [1, 1, block_n, 1, columns])
    return hallmark_gluon_full.warmup(
        *(any_map(dtype, box) for dtype, box in zip(dtypes, boxes, strict=True)),
        any_tensor(out), *out_strides, AnyTensor(torch.int32, 0), 0, 0, 0, 0.0,
        store_layout(variant.columns[0]), variant, grid=(1,), num_warps=4,
    )  # fmt: skip
