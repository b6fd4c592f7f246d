"""The launch of `gluon.prefill.window.hopper`: one a call, without a plan and without memory of its own.

Nothing is read back by the host. Kernels are looked up by what is compiled in.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.hopper.tensor_layout import aligned, has_work, is_addressable, store_layout, value_dims
from kernels.hopper.variants import Variant
from kernels.hopper.window.kernel import hallmark_gluon_window_prefill
from kernels.hopper.window.variants import MAX_WINDOW, tokens_of, window_variant
from kernels.tma.launches import Launches, Maps, TensorMap, any_map, repeated, scales, tensor_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class

_STARTS = AnyTensor(torch.int32, 4)  # offsets of sequences at any address: one kernel for all


@repeated
def run_window_prefill(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> Launches | None:
    """Fill `out` for a causal packed batch under a short window, in a launch that does not wait for the device.

    q, out [tokens, heads, head_dim]; k, v [key tokens, kv_heads, head_dim]; fp16 or bf16, last dims contiguous.
    Raises ValueError for arguments that the path's limits reject.
    """
    if not has_work(q, k, flags, out):
        return None
    variant = window_variant(q.shape[2], q.shape[1] // k.shape[1], flags)
    launches = launches_of(q, k, v, batch, flags, out, variant)
    if launches is None:
        run_window_prefill(aligned(q), aligned(k), aligned(v), batch, flags, out)  # copies are held until launched
    return launches


def num_programs(num_tokens: int, num_heads: int, batch: AttentionBatch, variant: Variant) -> int:
    """Return the number of programs: at most that of the tiles of num_heads KV heads, or of multiprocessors."""
    tiles = (num_tokens // tokens_of(variant) + batch.num_seqs) * num_heads
    return min(num_processors(batch.cu_seqlens_q.device), tiles)


def launches_of(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, variant: Variant
) -> Launches | None:
    """Attention by a variant made for these arguments. None where TMA cannot address a tensor."""
    sinks, starts_q, starts_k = flags.sinks, batch.cu_seqlens_q, batch.cu_seqlens_k
    assert starts_k is not None, "a prefill batch is packed"
    assert flags.window is not None, "the variant needs one"
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
        num_programs(q.shape[0], k.shape[1], batch, variant),
        call.queries.at(q_at),
        Maps(call.keys, call.values),  # of this call's plans: such addresses come and go
        (
            out.data_ptr(), *call.out_strides, starts_q.data_ptr(), starts_k.data_ptr(),
            None if sinks is None else sinks.data_ptr(), batch.num_seqs, *call.numbers,
        ),
        sinks_at=5,
    )  # fmt: skip


class Prepared(NamedTuple):
    """A launch but for its addresses, its sequences and its stream.

    numbers  the kernel's arguments behind the number of sequences
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
    """The launch for q, k (v is as k) and out of these shapes and strides.

    pointers: of out and of sinks.
    """
    (_, num_heads, _), (_, num_kv_heads, _) = shapes
    out_strides = (strides[3][0], strides[3][1])
    kernel = launcher(variant, device, dtypes, out_strides, window == MAX_WINDOW, *pointers)
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
    out_strides: tuple[int, int],
    is_whole: bool,
    out: PointerClass,
    sinks: PointerClass | None,
) -> Any:
    """`hallmark_gluon_window_prefill` for q, k and v of these dtypes; is_whole: the window is MAX_WINDOW."""
    tokens, columns = tokens_of(variant), variant.tiling.block_d
    boxes = ([tokens, variant.pack, columns], [tokens, 1, columns], [1, 1, tokens, 1, columns])
    return hallmark_gluon_window_prefill.warmup(
        *(any_map(dtype, box) for dtype, box in zip(dtypes, boxes, strict=True)),
        any_tensor(out), *out_strides, _STARTS, _STARTS, any_tensor(sinks), 0, 0, 0, 0.0, 0,
        store_layout(columns), variant, is_whole, grid=(1,), num_warps=4,
    )  # fmt: skip
