"""`gluon.prefill.hopper`: attention of packed prompts on sm_90, written in Gluon for Triton 3.6.0.

One persistent program per multiprocessor, in roles:

  scheduler  1 warp        takes tiles from the plan by an atomic counter and posts them in a small shared ring
  producer   1 warp        copies queries, keys and values by TMA into shared rings, ahead of the consumers
  consumers  4 warps each  64 query rows each: both matmuls by wgmma, the softmax in registers

Two launches a call: the plan (gluon_schedule.py), then the attention. Nothing is read back by the host; all that a call
needs besides its arguments is the plan's tensor, allocated on the current stream. Kernels are looked up by what is
compiled in and launched past Triton's binder, which costs the host more than a short prompt costs the GPU. Sources:
Shah et al. 2024 (FA3); Dao 2023 (FA2).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from kernels.attention import gluon_pipeline, gluon_schedule
from kernels.attention.batch import AttentionBatch, AttentionFlags
from kernels.attention.gluon_consumer import consume
from kernels.attention.gluon_pipeline import produce, rings
from kernels.attention.gluon_schedule import bounded_window, keys_per_group, plan_tiles, schedule
from kernels.attention.gluon_softmax import LOG2E
from kernels.attention.gluon_variants import (
    AnyTensor,
    PointerClass,
    Variant,
    any_tensor,
    pointer_class,
    variant_of,
)
from kernels.launch import num_processors

ROWS = gluon_pipeline.ROWS
HEADER = gluon_schedule.HEADER
ITEM = gluon_schedule.ITEM
_ANY_ROW = 0x7FFF0000  # bound of a dim that the hardware need not check
_HALF = gluon_pipeline.HALF.value
_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@jit(do_not_specialize=["num_heads", "group", "heads_per_group", "window"])
def hallmark_gluon_prefill(
    q_desc, k_desc, v_desc, out, stride_row, stride_head, plan, sinks, spans, num_heads, group, heads_per_group,
    scale, softcap_scale, window, STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Rings, barriers and roles of one program. group: query heads a KV head; heads_per_group: those of an L2 group."""
    tiles, queries, keys, values = rings(q_desc.dtype, VARIANT)
    if VARIANT.tiling.consumers == 2:
        gl.warp_specialize([
            (consume, ((out, stride_row, stride_head), sinks, spans, scale, softcap_scale, window,
                       tiles, queries, keys, values, 0, STORE, VARIANT)),
            (consume, ((out, stride_row, stride_head), sinks, spans, scale, softcap_scale, window,
                       tiles, queries, keys, values, 1, STORE, VARIANT)),
            (produce, (q_desc, k_desc, v_desc, group, tiles, queries, keys, values, VARIANT)),
            (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:  # all 65,536 registers
        gl.warp_specialize([
            (consume, ((out, stride_row, stride_head), sinks, spans, scale, softcap_scale, window,
                       tiles, queries, keys, values, 0, STORE, VARIANT)),
            (consume, ((out, stride_row, stride_head), sinks, spans, scale, softcap_scale, window,
                       tiles, queries, keys, values, 1, STORE, VARIANT)),
            (consume, ((out, stride_row, stride_head), sinks, spans, scale, softcap_scale, window,
                       tiles, queries, keys, values, 2, STORE, VARIANT)),
            (produce, (q_desc, k_desc, v_desc, group, tiles, queries, keys, values, VARIANT)),
            (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
        ], [4, 4, 1, 1], [160, 160, 32, 32])  # fmt: skip


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


class ToLaunch(NamedTuple):
    """A loaded `hallmark_gluon_prefill`: `run` takes arguments by position, each tensor map with its shape and strides.

    encode  makes a tensor map of an address, a box, a shape, strides and 0 (what is outside arrives as zeros)
    boxes   of q, k and v: swizzle, element bytes, element type and block
    """

    run: Any
    function: int
    metadata: tuple[int, ...]
    encode: Callable[..., object]
    boxes: tuple[tuple[Any, ...], ...]
    num_processors: int


class ExpandedSource(NamedTuple):
    """What Triton's launcher asks of a kernel's source."""

    fn: Any
    constants: Any
    signature: dict[Any, str]


# Pure functions of what is compiled in: the caches hold no state. What falls out is found again in Triton's own cache.
@lru_cache(maxsize=256)
def launcher(variant: Variant, device: torch.device, *compiled_in: Any) -> ToLaunch:
    """`compiled_prefill`, loaded. Triton's own launch takes 5 us more to replace descriptors among the arguments."""
    return loaded(compiled_prefill(variant, *compiled_in), device)


def loaded(kernel: Any, device: torch.device) -> ToLaunch:
    """A compiled kernel whose first arguments are the tensor maps of q, k and v."""
    kernel.run  # noqa: B018 -- loads it
    signature = []
    for argument in kernel.src.signature.values():
        if argument.startswith("tensordesc"):
            rank = len(argument.split("[")[1].split("]")[0].split(","))
            signature += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
        else:
            signature.append(argument)
    source = ExpandedSource(kernel.src.fn, {}, dict(enumerate(signature)))
    run = driver.active.launcher_cls(source, kernel.metadata._replace(tensordesc_meta=None))
    boxes = tuple(
        (box["swizzle"], box["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[box["elem_type"]], box["block_size"])
        for box in kernel.metadata.tensordesc_meta
    )
    encode = driver.active.utils.fill_tma_descriptor
    return ToLaunch(run, kernel.function, kernel.packed_metadata, encode, boxes, num_processors(device))


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
    boxes = ([ROWS.value, 1, block_d], [block_n, 1, block_d], [1, 1, block_n, 1, block_d])
    return hallmark_gluon_prefill.warmup(
        *(any_map(dtype, box) for dtype, box in zip(dtypes, boxes, strict=True)),
        any_tensor(out), *out_strides, AnyTensor(torch.int32, 0), any_tensor(sinks), any_tensor(spans),
        0, 0, 0, 0.0, 0.0, 0, store_layout(block_d), variant, grid=(1,), num_warps=4,
    )  # fmt: skip


def any_map(dtype: torch.dtype, box: list[int]) -> TensorDescriptor:
    """Stands for every tensor map of this dtype and box: what Triton compiles in of one."""
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[dtype])
    return TensorDescriptor(AnyTensor(dtype, 0), [1] * len(box), [8] * (len(box) - 1) + [1], box, layout)


def row_map(x: Tensor, encode: Callable[..., object], box: tuple[Any, ...]) -> tuple[object, ...]:
    """Boxes of some tokens of one head; what is past the tensor or past its head dim arrives as zeros."""
    shape, strides = x.shape, x.stride()
    return encode(x.data_ptr(), *box, shape, strides, 0), *shape, *strides


def value_map(v: Tensor, encode: Callable[..., object], box: tuple[Any, ...]) -> tuple[object, ...]:
    """The same for values, with a bound on rows that every copy chooses for itself."""
    shape, strides = value_dims(v)
    return encode(v.data_ptr(), *box, shape, strides, 0), *shape, *strides


def value_dims(v: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the tensor map of values, in elements.

    The leading two dims have strides 2**34 - s and s, s being the row stride. At index (HALF, r + n, HALF - n) they
    cancel modulo 2**64 bytes to row r, while the third dim's bound HALF is n rows away: rows from r + n on are zeros.
    """
    (_, num_heads, head_dim), (stride_row, stride_head, _) = v.shape, v.stride()
    shape = (_ANY_ROW, _ANY_ROW, _HALF, num_heads, head_dim)
    return shape, (2**34 - stride_row, stride_row, stride_row, stride_head, 1)


def store_layout(block_d: int) -> gl.DistributedLinearLayout:
    """Rows as in a wgmma accumulator; four lanes side by side with 8 columns (16 bytes) each."""
    columns = [[0, 1 << i] for i in range(5, block_d.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *columns]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [ROWS.value, block_d])


def aligned(x: Tensor) -> Tensor:
    """`x` itself where TMA can address it: 16-byte aligned, positive strides; a copy elsewhere."""
    stride_row, stride_head, stride_dim = x.stride()
    is_addressable = stride_dim == 1 and stride_row > 0 and stride_head > 0
    in_bytes = (stride_row | stride_head) * x.itemsize
    if is_addressable and in_bytes % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def scales(flags: AttentionFlags) -> tuple[float, float]:
    """What scores (with a softcap: their tanh) are multiplied by for exp2, and what scores are before tanh."""
    if flags.softcap is None:
        return flags.scale * LOG2E, 1.0
    return flags.softcap * LOG2E, flags.scale / flags.softcap
