"""Prepared calls of `gluon.prefill.window.hopper`: the launch of launch.py, but for addresses and the stream."""

import math

from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.prepared import PreparedCall, launch_options
from kernels.hopper.window.launch import num_programs, prepared
from kernels.hopper.window.variants import window_variant
from kernels.tma.pointers import pointer_class
from kernels.tma.prepared import KeptMaps


def prepare_window_prefill(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> PreparedCall | None:
    """The attention of calls of this form: each finds its tiles by its lengths on the device."""
    if not flags.causal or batch.cu_seqlens_k is None or q.shape[0] == 0 or k.shape[0] == 0:
        return None
    variant = window_variant(q.shape[2], q.shape[1] // k.shape[1], flags)
    assert flags.window is not None, "the variant needs one"
    call = prepared(
        variant, q.device, (q.dtype, k.dtype, v.dtype), (q.shape, k.shape),
        (q.stride(), k.stride(), v.stride(), out.stride()), flags.scale, flags.window,
        pointer_class(out), pointer_class(flags.sinks),
    )  # fmt: skip
    if not call.is_addressable or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return None
    attend, stream, options = call.kernel.launch, call.kernel.stream, launch_options(call.kernel)
    grid = (num_programs(q.shape[0], k.shape[1], batch, variant), 1, 1)
    strides, rest = call.out_strides, (batch.num_seqs, *call.numbers, *call.kernel.tail)
    queries, keys, values = KeptMaps(call.queries), KeptMaps(call.keys), KeptMaps(call.values)

    def launch(
        _beside: Tensor, q_at: int, k_at: int, v_at: int, starts_at: int, keys_at: int, _lengths_at: int | None,
        sinks_at: int | None, _spans_at: int | None, out_at: int,
    ) -> None:  # fmt: skip
        attend(
            *grid, stream(), *options, *queries[q_at], *keys[k_at], *values[v_at], out_at, *strides, starts_at, keys_at,
            sinks_at, *rest,
        )  # fmt: skip

    return PreparedCall(launch, 0, math.inf)
