"""`gluon.prefill.hopper`: attention of packed prompts on sm_90, written in Gluon for Triton 3.6.0.

One persistent program per multiprocessor, in roles:

  scheduler  1 warp        takes tiles from the plan by an atomic counter and posts them in a small shared ring
  producer   1 warp        copies queries, keys and values by TMA into shared rings, ahead of the consumers
  consumers  4 warps each  64 query rows each: both matmuls by wgmma, the softmax in registers

Two launches a call: the plan (gluon_schedule.py), then the attention. Nothing is read back by the host; all that a call
needs besides its arguments is the plan's tensor, allocated on the current stream. Sources: Shah et al. 2024 (FA3); Dao
2023 (FA2).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention import gluon_pipeline, gluon_schedule
from kernels.attention.batch import AttentionBatch, AttentionFlags
from kernels.attention.gluon_consumer import consume
from kernels.attention.gluon_pipeline import produce
from kernels.attention.gluon_schedule import hallmark_gluon_plan, schedule
from kernels.attention.gluon_softmax import LOG2E
from kernels.attention.gluon_variants import BLOCK_M, Variant, variant_of
from kernels.launch import num_processors

ROWS = gluon_pipeline.ROWS
CONSUMERS = gluon_pipeline.CONSUMERS
RING = gluon_schedule.RING
FIELDS = gluon_schedule.FIELDS
HEADER = gluon_schedule.HEADER
ITEM = gluon_schedule.ITEM
_MAX_WINDOW = 1 << 30  # int32 arithmetic on positions must not overflow
_ANY_ROW = 0x7FFF0000  # bound of a dim that the hardware need not check
_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@jit(do_not_specialize=["num_heads", "group", "heads_per_group", "window"])
def hallmark_gluon_prefill(
    q_desc, k_desc, v_desc, out, stride_row, stride_head, plan, sinks, spans, num_heads, group, heads_per_group,
    scale, softcap_scale, window, STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Rings, barriers and roles of one program. group: query heads a KV head; heads_per_group: those of an L2 group."""
    dtype: gl.constexpr = q_desc.dtype
    TILING: gl.constexpr = VARIANT.tiling
    Q_SHAPE: gl.constexpr = [TILING.q_buffers * CONSUMERS, ROWS, TILING.block_d]
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILING.block_d], dtype)
    KV_SHAPE: gl.constexpr = [TILING.stages, TILING.block_n, TILING.block_d]
    KV_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILING.block_n, TILING.block_d], dtype)
    TILES_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_full = barriers(TILING.q_buffers * CONSUMERS, 1)
    q_free = barriers(TILING.q_buffers * CONSUMERS, 1)
    k_full = barriers(TILING.stages, 1)
    v_full = barriers(TILING.stages, 1)
    tile_full = barriers(RING, 1)
    tile_free = barriers(RING, CONSUMERS + 1)
    want = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(want, count=1)
    if TILING.named_barriers:  # never allocate what no role uses: Triton would lay it over the queries
        k_free = k_full
        v_free = v_full
    else:
        k_free = barriers(TILING.stages, CONSUMERS)
        v_free = barriers(TILING.stages, CONSUMERS)
    queries = (gl.allocate_shared_memory(dtype, Q_SHAPE, Q_LAYOUT), q_full, q_free)
    keys = (gl.allocate_shared_memory(dtype, KV_SHAPE, KV_LAYOUT), k_full, k_free)
    values = (gl.allocate_shared_memory(dtype, KV_SHAPE, KV_LAYOUT), v_full, v_free)
    tiles = (gl.allocate_shared_memory(gl.int32, [RING * FIELDS, 1], TILES_LAYOUT), tile_full, tile_free, want)
    gl.warp_specialize([
        (consume, (out, stride_row, stride_head, sinks, spans, scale, softcap_scale, window,
                   tiles, queries, keys, values, 0, STORE, VARIANT)),
        (consume, (out, stride_row, stride_head, sinks, spans, scale, softcap_scale, window,
                   tiles, queries, keys, values, 1, STORE, VARIANT)),
        (produce, (q_desc, k_desc, v_desc, group, tiles, queries, keys, values, VARIANT)),
        (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


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


def plan_tiles(num_tokens: int, batch: AttentionBatch, flags: AttentionFlags, variant: Variant) -> Tensor:
    """The order of work of a batch, see gluon_schedule.py: int32 on the device, good for one launch."""
    assert batch.cu_seqlens_k is not None, "a prefill batch is packed"
    max_blocks = num_tokens // BLOCK_M + batch.num_seqs
    plan = torch.empty(HEADER.value + ITEM.value * max_blocks, dtype=torch.int32, device=batch.cu_seqlens_q.device)
    blocks = 8 if variant.spans else 64  # of one program; spans are read row by row
    hallmark_gluon_plan[batch.num_seqs, max(1, triton.cdiv(batch.max_seqlen_q, BLOCK_M * blocks))](
        plan, batch.cu_seqlens_q, batch.cu_seqlens_k, flags.spans, batch.num_seqs, _window(flags),
        _keys_per_group(variant), HEADER.value, ITEM.value, BLOCK_M, blocks, SEQS=64,
        HAS_WINDOW=variant.window, HAS_SPANS=variant.spans,
    )  # fmt: skip
    return plan


def launch_prefill(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, flags: AttentionFlags, out: Tensor, variant: Variant
) -> None:
    """Attention by a plan of this batch, these flags and this variant."""
    max_tiles = (plan.numel() - HEADER.value) // ITEM.value * q.shape[1]
    programs = min(num_processors(q.device), max_tiles)
    hallmark_gluon_prefill[programs,](*launch_arguments(q, k, v, plan, flags, out, variant), num_warps=4)


def launch_arguments(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, flags: AttentionFlags, out: Tensor, variant: Variant
) -> tuple[object, ...]:
    """The arguments of `hallmark_gluon_prefill`: to launch it, or to compile it ahead."""
    tiling, num_heads, group = variant.tiling, q.shape[1], q.shape[1] // k.shape[1]
    heads_per_group = group * max(1, _keys_per_group(variant) // k.shape[0])
    return (
        row_descriptor(q, ROWS.value, tiling.block_d), row_descriptor(k, tiling.block_n, tiling.block_d),
        value_descriptor(v, tiling.block_n, tiling.block_d), out, out.stride(0), out.stride(1), plan,
        flags.sinks, flags.spans, num_heads, group, min(num_heads, heads_per_group), *_scales(flags), _window(flags),
        store_layout(tiling.block_d), variant,
    )  # fmt: skip


def row_descriptor(x: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """TMA boxes of `rows` tokens of one head; what is past the tensor or past its head dim arrives as zeros."""
    x = _aligned(x)
    layout = gl.NVMMASharedLayout.get_default_for([rows, 1, block_d], _GLUON_DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 1, block_d], layout)


def value_descriptor(v: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """The same for values, with a bound on rows that every copy chooses for itself.

    The leading two dims have strides 2**34 - s and s, s being the row stride. At index (HALF, r + n, HALF - n) they
    cancel modulo 2**64 bytes to row r, while the third dim's bound HALF is n rows away: rows from r + n on are zeros.
    """
    v = _aligned(v)
    stride_row, stride_head, _ = v.stride()
    box = [1, 1, rows, 1, block_d]
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[v.dtype])
    shape = [_ANY_ROW, _ANY_ROW, gluon_pipeline.HALF.value, v.shape[1], v.shape[2]]
    return TensorDescriptor(v, shape, [2**34 - stride_row, stride_row, stride_row, stride_head, 1], box, layout)


def store_layout(block_d: int) -> gl.DistributedLinearLayout:
    """Rows as in a wgmma accumulator; four lanes side by side with 8 columns (16 bytes) each."""
    columns = [[0, 1 << i] for i in range(5, block_d.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *columns]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [ROWS.value, block_d])


def _aligned(x: Tensor) -> Tensor:
    """`x` itself where TMA can address it: 16-byte aligned, positive strides; a copy elsewhere."""
    bytes_apart = (x.stride(0) * x.element_size(), x.stride(1) * x.element_size())
    is_addressable = x.stride(2) == 1 and all(apart > 0 and apart % 16 == 0 for apart in bytes_apart)
    return x if is_addressable and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _keys_per_group(variant: Variant) -> int:
    """Keys of one head that fit in a group's share of L2 beside their values."""
    return gluon_schedule.L2_BYTES // (2 * 2 * variant.head_dim)


def _scales(flags: AttentionFlags) -> tuple[float, float]:
    """What scores (with a softcap: their tanh) are multiplied by for exp2, and what scores are before tanh."""
    if flags.softcap is None:
        return flags.scale * LOG2E, 1.0
    return flags.softcap * LOG2E, flags.scale / flags.softcap


def _window(flags: AttentionFlags) -> int:
    return 0 if flags.window is None else min(flags.window, _MAX_WINDOW)
