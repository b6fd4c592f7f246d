"""Launches of `gluon.decode.wide.hopper`: the tiles of a step (tokens.py), then the sum of their parts."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.hopper.decode.kernel import hallmark_gluon_decode_combine
from kernels.hopper.decode.launch import ToLaunch, maps_of, operands_of
from kernels.hopper.decode.variants import DecodeVariant
from kernels.hopper.tensor_layout import aligned
from kernels.hopper.wide.prefill import check_flags
from kernels.hopper.wide.tokens import hallmark_gluon_wide_decode
from kernels.hopper.wide.variants import FEW_SEQS, check_head_dim, wide_decode_variant
from kernels.tma.launches import Launches, any_map, repeated, scales
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor

_PARTS = 16  # partial results that a combining program works on at once: 64 registers a thread
_COMBINE_WARPS = 4


@repeated
def run_wide_decode(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> Launches | None:
    """Fill `out` for heads of 512, in two launches, as `run_decode` of `gluon.decode.hopper`.

    Raises ValueError for arguments that the path's limits reject, and for pages that TMA cannot address.
    """
    check_head_dim(q.shape[2])
    check_flags(flags)
    if not flags.causal:
        raise ValueError("mask: expected causal, found another")
    if q.shape[0] == 0:
        return None
    table = batch.page_table
    assert table is not None, "decode reads pages"
    if k.shape[0] == 0 or table.shape[1] == 0:
        out.zero_()  # no key, so no query sees one; TMA takes no empty tensor, and a table's first entry may be read
        return None
    addressable = aligned(q)
    if addressable is not q:
        run_wide_decode(addressable, k, v, batch, flags, out)  # the copy is held until launched
        return None
    of_few = batch.num_seqs <= FEW_SEQS
    variant = wide_decode_variant(k.shape[1], (q.shape[1], k.shape[2]), max(1, batch.max_seqlen_q), of_few=of_few)
    operands = operands_of(batch, flags, out)
    to_launch = launcher(variant, q.device, *operands.compiled_in(q.dtype))
    split, num_programs = to_launch.split, to_launch.num_programs
    size = 2 * num_programs * variant.heads * variant.columns * (variant.block_d + 2)
    # One for all layers of a step: written when the launch before has ended, which may have read it.
    scratch = batch.once(("decode scratch", size), lambda: torch.empty(size, dtype=torch.float32, device=q.device))
    rows_of_sequence = k.shape[2] // variant.heads * variant.parts
    out_at, _, *lengths, table_at = operands.addresses()
    result = (out_at, scratch.data_ptr(), None, *lengths)
    strides, numbers = operands.strides(), (batch.num_seqs, rows_of_sequence)
    return Launches(
        split,
        num_programs,
        *maps_of(split, variant, q, k, v),
        (
            out_at,
            scratch.data_ptr(),
            *lengths,
            table_at,
            *strides,
            operands.table.stride(0),
            *numbers,
            scales(flags)[0],
        ),
        sinks_at=0,
        then=to_launch.combine.repeated((num_programs, variant.heads, 1), (*result, *strides, *numbers, 0)),
        then_sinks_at=Loaded.FIRST + 2,
        held=(scratch,),
    )


# A pure function of what is compiled in: its cache holds no state. What falls out is found again in Triton's own cache.
@lru_cache(maxsize=256)
def launcher(variant: DecodeVariant, device: torch.device, *compiled_in: Any) -> ToLaunch:
    split, combine = (Loaded(kernel, device) for kernel in compiled_wide_decode(variant, *compiled_in))
    return ToLaunch(split, combine, num_processors(device) * variant.per_processor)


def compiled_wide_decode(
    variant: DecodeVariant,
    dtype: torch.dtype,
    out: PointerClass,
    sinks: None,
    cu_seqlens_q: PointerClass,
    context_lens: PointerClass,
    table: PointerClass,
    out_strides: tuple[int, int],
) -> tuple[Any, Any]:
    """Compile both kernels for tensors of these dtypes and alignments."""
    queries = any_map(dtype, [variant.heads, variant.queries, variant.members, variant.chunk_d])
    pages = any_map(dtype, [1, variant.heads, variant.block_n, variant.chunk_d])
    lengths = (any_tensor(cu_seqlens_q), any_tensor(context_lens))
    result = (any_tensor(out), AnyTensor(torch.float32, 0), sinks, *lengths)
    split = hallmark_gluon_wide_decode.warmup(
        queries, pages, pages, any_tensor(out), AnyTensor(torch.float32, 0), *lengths, any_tensor(table), *out_strides,
        0, 0, 0, 0.0, variant, grid=(1,), num_warps=variant.warps, launch_pdl=True,
    )  # fmt: skip
    combine = hallmark_gluon_decode_combine.warmup(
        *result, *out_strides, 0, 0, 0, _PARTS, variant, grid=(1,), num_warps=_COMBINE_WARPS, launch_pdl=True,
    )  # fmt: skip
    return split, combine
