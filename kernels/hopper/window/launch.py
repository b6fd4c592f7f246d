"""Launches of `gluon.prefill.window`: the plan (schedule.py), then the attention.

Nothing is read back by the host; all that a call needs besides its arguments is the plan's tensor, allocated on the
current stream. Kernels are looked up by what is compiled in.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.hopper.schedule import HEADER, ITEM, bounded_window, compiled_plan, keys_per_group
from kernels.hopper.tensor_layout import aligned, has_work, is_addressable, store_layout, value_dims
from kernels.hopper.variants import Variant
from kernels.hopper.window.kernel import hallmark_gluon_window_prefill
from kernels.hopper.window.variants import MAX_WINDOW, tokens_of, window_variant
from kernels.launch import Loaded
from kernels.processors import num_processors
from kernels.tma.launches import Launches, Maps, TensorMap, any_map, repeated, scales, tensor_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class


@repeated
def run_window_prefill(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> Launches | None:
    """Fill `out` for a causal packed batch under a short window, in a launch that does not wait for the device.

    Before it is one for the plan; a batch with plans is planned once for all layers of a window.
    q, out [tokens, heads, head_dim]; k, v [key tokens, kv_heads, head_dim]; fp16 or bf16, last dims contiguous.
    Raises ValueError for arguments that the path's limits reject.
    """
    if not has_work(q, k, flags, out):
        return None
    variant = window_variant(q.shape[2], q.shape[1] // k.shape[1], flags)
    planned = ("window prefill", q.shape[0], variant, flags.window)
    plan = batch.once(planned, lambda: plan_window(q.shape[0], batch, flags, variant))
    launches = launches_of(q, k, v, plan, flags, out, variant)
    if launches is None:
        run_window_prefill(aligned(q), aligned(k), aligned(v), batch, flags, out)  # copies are held until launched
    return launches


def plan_window(num_tokens: int, batch: AttentionBatch, flags: AttentionFlags, variant: Variant) -> Tensor:
    """The order of work of a batch, see schedule.py: int32 on the device, good for launches one after another."""
    starts_q, starts_k = batch.cu_seqlens_q, batch.cu_seqlens_k
    assert starts_k is not None, "a prefill batch is packed"
    plan = torch.empty(plan_size(num_tokens, batch.num_seqs, variant), dtype=torch.int32, device=starts_q.device)
    lengths = (pointer_class(starts_q), pointer_class(starts_k))
    kernel, constants = compiled_plan(tokens_of(variant), True, starts_q.device, *lengths, None)  # type: ignore[arg-type]
    assert kernel is not None, "no interpreter has TMA"
    rows = constants.block_m * constants.blocks  # of one program
    grid = (batch.num_seqs, max(1, -(-batch.max_seqlen_q // rows)), 1)
    numbers = (batch.num_seqs, bounded_window(flags), keys_per_group(variant))
    kernel(grid, (plan.data_ptr(), starts_q.data_ptr(), starts_k.data_ptr(), None, *numbers))
    return plan


def plan_size(num_tokens: int, num_seqs: int, variant: Variant) -> int:
    """Integers of a plan, see schedule.py."""
    header: int = HEADER.value
    item: int = ITEM.value
    return header + item * (num_tokens // tokens_of(variant) + num_seqs)


def launches_of(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, flags: AttentionFlags, out: Tensor, variant: Variant
) -> Launches | None:
    """Attention by a plan of this batch, these flags and this variant. None where TMA cannot address a tensor."""
    sinks = flags.sinks
    call = prepared(
        variant, q.device, (q.dtype, k.dtype, v.dtype), (q.shape, k.shape),
        (q.stride(), k.stride(), v.stride(), out.stride()), flags.scale, flags.window,
        pointer_class(out), pointer_class(sinks),
    )  # fmt: skip
    q_at = q.data_ptr()
    if not call.is_addressable or (q_at | k.data_ptr() | v.data_ptr()) % 16:
        return None
    return Launches(
        call.kernel,
        min(num_processors(q.device), (plan.numel() - HEADER.value) // ITEM.value * k.shape[1]),
        call.queries.at(q_at),
        Maps(call.keys, call.values),  # of this call's plans: such addresses come and go
        (
            out.data_ptr(), *call.out_strides, plan.data_ptr(), None if sinks is None else sinks.data_ptr(),
            *call.numbers,
        ),
        sinks_at=4,
        held=(plan,),
    )  # fmt: skip


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
    window: int,
    *pointers: PointerClass | None,
) -> Prepared:
    """The launch for q, k (v is as k) and out of these shapes and strides. pointers: of out and sinks."""
    (_, num_heads, _), (_, num_kv_heads, _) = shapes
    out_strides = (strides[3][0], strides[3][1])
    kernel = launcher(variant, device, dtypes, pointers[0], out_strides, pointers[1], window == MAX_WINDOW)
    factor, _ = scales(AttentionFlags(scale))
    return Prepared(
        kernel,
        all(is_addressable(of, dtype.itemsize) for of, dtype in zip(strides, dtypes, strict=False)),
        tensor_map(kernel, 0, shapes[0], strides[0]),
        tensor_map(kernel, 1, shapes[1], strides[1]),
        tensor_map(kernel, 2, *value_dims(shapes[1], strides[2])),
        out_strides,
        (num_kv_heads, num_heads // num_kv_heads // variant.pack, factor, window),
    )


@lru_cache(maxsize=256)
def launcher(variant: Variant, device: torch.device, *compiled_in: Any) -> Loaded:
    return Loaded(compiled_window_prefill(variant, *compiled_in), device)


def compiled_window_prefill(
    variant: Variant,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    out: PointerClass,
    out_strides: tuple[int, int],
    sinks: PointerClass | None,
    is_whole: bool,
) -> Any:
    """`hallmark_gluon_window_prefill` for q, k and v of these dtypes; is_whole: the window is MAX_WINDOW."""
    tokens, columns = tokens_of(variant), variant.tiling.block_d
    boxes = ([tokens, variant.pack, columns], [tokens, 1, columns], [1, 1, tokens, 1, columns])
    return hallmark_gluon_window_prefill.warmup(
        *(any_map(dtype, box) for dtype, box in zip(dtypes, boxes, strict=True)),
        any_tensor(out), *out_strides, AnyTensor(torch.int32, 0), any_tensor(sinks), 0, 0, 0.0, 0,
        store_layout(columns), variant, is_whole, grid=(1,), num_warps=4,
    )  # fmt: skip
