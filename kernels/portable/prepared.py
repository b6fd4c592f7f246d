"""Prepared calls of the Triton paths: the launches of prefill.py, extend.py and decode.py past Triton's binder.

The binder finds each kernel once, for a form's tensors and numbers, which it may compile in.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded, is_interpreted
from kernels.calls.prepared import PreparedCall, steady_range, step_of
from kernels.calls.processors import num_processors, shared_bytes
from kernels.portable import decode
from kernels.portable.extend import hallmark_extend
from kernels.portable.launch_config import Tiles, decode_tiles, flag_arguments, padded_head_dim, query_tiles
from kernels.portable.prefill import hallmark_prefill
from kernels.tma.pointers import AnyTensor

_ALIGNMENT = 32  # floats, 128 bytes: where a new tensor of a call's scratch memory begins


def prepare_queries(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> PreparedCall | None:
    """The launch of a packed batch, or of chunks over pages."""
    if is_interpreted() or q.shape[0] == 0:
        return None
    (_, num_heads, head_dim), num_kv_heads = q.shape, k.shape[-2]
    group, table = num_heads // num_kv_heads, batch.page_table
    strides: tuple[int, ...] = (*q.stride()[:-1], *k.stride()[:-1], *v.stride()[:-1], *out.stride()[:-1])
    keys: tuple[Tensor | None, ...] = (batch.cu_seqlens_k,)
    tiles = query_tiles(head_dim, q.element_size(), shared_bytes(q.device))
    grid = (triton.cdiv(batch.max_seqlen_q * group, tiles.block_m), num_kv_heads, batch.num_seqs)
    constants = _constants(flags, group, head_dim, tiles)
    numbers = {name: constants.pop(name) for name in ("scale", "softcap", "window")}
    kernel = hallmark_prefill
    if table is not None:
        kernel, keys, strides = hallmark_extend, (table, batch.context_lens), (*strides, table.stride(0))
        constants["PAGE_SIZE"] = k.shape[1]
    tensors = (q, k, v, out, batch.cu_seqlens_q, *keys, flags.sinks, flags.spans)
    loaded = _loaded(kernel, q.device, *tensors, *strides, *numbers.values(), **constants)
    attend, stream = step_of(loaded, grid, (*strides, *numbers.values())), loaded.stream
    is_paged = table is not None

    def launch(
        _beside: Tensor, q_at: int, k_at: int, v_at: int, starts_at: int, keys_at: int, lengths_at: int | None,
        sinks_at: int | None, spans_at: int | None, out_at: int,
    ) -> None:  # fmt: skip
        keys = (keys_at, lengths_at) if is_paged else (keys_at,)
        attend.launch(
            *attend.grid, stream(), *attend.options, q_at, k_at, v_at, out_at, starts_at, *keys, sinks_at, spans_at,
            *attend.rest,
        )  # fmt: skip

    return PreparedCall(launch, 0, float("inf"))


def prepare_decode(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> PreparedCall | None:
    """Prepare both launches of tokens over pages."""
    table = batch.page_table
    if is_interpreted() or q.shape[0] == 0 or table is None:
        return None
    (_, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, k.shape
    group, device = num_heads // num_kv_heads, q.device
    tiles = decode_tiles(head_dim, q.element_size(), group, shared_bytes(device))

    def splits_at(max_context: int) -> int:
        bounded = replace(batch, max_context=max_context)
        return decode.num_splits_for(bounded, num_kv_heads, tiles, num_processors(device))

    num_splits = splits_at(batch.max_context)
    # Parts, then their largest scores, then their denominators, which `run` has in one tensor with these.
    num_parts = batch.num_seqs * num_heads * num_splits
    largest_from = -(-num_parts * head_dim // _ALIGNMENT) * _ALIGNMENT
    denominators_from = largest_from + num_parts
    size = denominators_from + num_parts
    scratch = tuple(AnyTensor(torch.float32, at % 16) for at in (0, 0, 4 * num_parts))

    constants = _constants(flags, group, head_dim, tiles)
    numbers = {name: constants.pop(name) for name in ("scale", "softcap", "window")}
    has_sinks = constants.pop("HAS_SINKS")
    strides = (*q.stride()[:-1], *k.stride()[:-1], *v.stride()[:-1], table.stride(0))
    attend_numbers = (*strides, num_splits, *numbers.values())
    lengths = (batch.cu_seqlens_q, table, batch.context_lens, flags.spans)
    loaded = _loaded(
        decode.hallmark_decode, device, q, k, v, *scratch, *lengths, *attend_numbers, PAGE_SIZE=page_size, **constants
    )
    attend, stream = step_of(loaded, (num_splits, num_kv_heads, batch.num_seqs), attend_numbers), loaded.stream
    combine_numbers = (*out.stride()[:-1], num_splits)
    loaded = _loaded(
        decode.hallmark_decode_combine, device, *scratch, out, batch.cu_seqlens_q, flags.sinks, *combine_numbers,
        HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim), BLOCK_SPLITS=decode._MAX_SPLITS, HAS_SINKS=has_sinks,
    )  # fmt: skip
    combine = step_of(loaded, (num_heads, batch.num_seqs, 1), combine_numbers)

    def launch(
        beside: Tensor, q_at: int, k_at: int, v_at: int, starts_at: int, table_at: int, lengths_at: int | None,
        sinks_at: int | None, spans_at: int | None, out_at: int,
    ) -> None:  # fmt: skip
        held = beside.new_empty(size)
        part_at, now = held.data_ptr(), stream()
        parts = (part_at, part_at + 4 * largest_from, part_at + 4 * denominators_from)
        attend.launch(
            *attend.grid, now, *attend.options, q_at, k_at, v_at, *parts, starts_at, table_at, lengths_at, spans_at,
            *attend.rest,
        )  # fmt: skip
        combine.launch(*combine.grid, now, *combine.options, *parts, out_at, starts_at, sinks_at, *combine.rest)

    return PreparedCall(launch, *steady_range(batch.max_context, table.shape[1] * page_size, splits_at))


def _constants(flags: AttentionFlags, group: int, head_dim: int, tiles: Tiles) -> dict[str, Any]:
    """The arguments by name of an attention kernel, but the size of pages."""
    return {
        **flag_arguments(flags), "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }  # fmt: skip


def _loaded(kernel: Any, device: torch.device, *arguments: object, **constants: object) -> Loaded:
    """The kernel that Triton's binder finds for these arguments."""
    return Loaded(kernel.warmup(*arguments, grid=(1,), **constants), device)
