"""Prepared calls of `gluon.prefill.hopper`: the launches of launch.py, but for addresses and the stream."""

import math

from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.prepared import PreparedCall, launch_options
from kernels.calls.processors import num_processors
from kernels.hopper.prefill.launch import prepared
from kernels.hopper.schedule import HEADER, ITEM, bounded_window, compiled_plan, keys_per_group
from kernels.hopper.variants import variant_of
from kernels.tma.pointers import pointer_class
from kernels.tma.prepared import KeptMaps


def prepare_prefill(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> PreparedCall | None:
    """The plan and the attention of calls of this form: each call plans for itself, by its lengths on the device."""
    starts_q, starts_k, device = batch.cu_seqlens_q, batch.cu_seqlens_k, q.device
    if not flags.causal or starts_k is None or q.shape[0] == 0 or k.shape[0] == 0:
        return None
    variant = variant_of(q.shape[2], batch, flags)
    out_class, sinks_class, spans_class = (pointer_class(x) for x in (out, flags.sinks, flags.spans))
    call = prepared(
        variant, device, (q.dtype, k.dtype, v.dtype), (q.shape, k.shape),
        (q.stride(), k.stride(), v.stride(), out.stride()), flags.scale, flags.softcap, flags.window,
        out_class, sinks_class, spans_class,
    )  # fmt: skip
    if not call.is_addressable or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return None
    lengths = ((starts_q.dtype, starts_q.data_ptr() % 16), (starts_k.dtype, starts_k.data_ptr() % 16))
    planner, constants = compiled_plan(variant.tiling.block_m, variant.window, device, *lengths, spans_class)
    assert planner is not None, "no interpreter has TMA"

    num_seqs, max_blocks = batch.num_seqs, q.shape[0] // variant.tiling.block_m + batch.num_seqs
    plan_size = HEADER.value + ITEM.value * max_blocks
    rows = constants.block_m * constants.blocks  # of one program
    plan, stream, plan_options = planner.launch, planner.stream, launch_options(planner)
    plan_grid = (num_seqs, max(1, (batch.max_seqlen_q + rows - 1) // rows), 1)
    plan_rest = (num_seqs, bounded_window(flags), keys_per_group(variant), *planner.tail)
    attend, options = call.kernel.launch, launch_options(call.kernel)
    grid = (min(num_processors(device), max_blocks * q.shape[1]), 1, 1)
    strides, rest = call.out_strides, (*call.numbers, *call.kernel.tail)
    queries, keys, values = KeptMaps(call.queries), KeptMaps(call.keys), KeptMaps(call.values)

    def launch(
        beside: Tensor, q_at: int, k_at: int, v_at: int, starts_at: int, keys_at: int, _lengths_at: int | None,
        sinks_at: int | None, spans_at: int | None, out_at: int,
    ) -> None:  # fmt: skip
        held = beside.new_empty(plan_size)
        plan_at, now = held.data_ptr(), stream()
        plan(*plan_grid, now, *plan_options, plan_at, starts_at, keys_at, spans_at, *plan_rest)
        attend(
            *grid, now, *options, *queries[q_at], *keys[k_at], *values[v_at], out_at, *strides, plan_at, sinks_at,
            spans_at, *rest,
        )  # fmt: skip

    return PreparedCall(launch, 0, math.inf)
