"""`triton.decode`: attention of one query token a sequence over paged context, each context split among programs.

The grid depends on shapes and host bounds only, never on the lengths, so that a CUDA graph can hold the launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.processors import num_processors, shared_bytes
from kernels.portable.launch_config import Tiles, decode_tiles, flag_arguments, padded_head_dim
from kernels.portable.tile import attend_keys, start_softmax, visible_range

_MAX_SPLITS = 32


@triton.jit(do_not_specialize=["stride_table", "num_splits", "window"])
def hallmark_decode(
    q_ptr, k_ptr, v_ptr, part_ptr, part_largest_ptr, part_denominator_ptr, cu_seqlens_q_ptr, page_table_ptr,
    context_lens_ptr, spans_ptr, stride_q_token, stride_q_head, stride_k_page, stride_k_token, stride_k_head,
    stride_v_page, stride_v_token, stride_v_head, stride_table, num_splits, scale, softcap, window,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of one KV head of one sequence over one split of its keys.

    Writes its unnormalised part, its largest score and its denominator: 0, -inf and 0 for a split without keys.
    """
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    row = tl.load(cu_seqlens_q_ptr + sequence).to(tl.int64)
    if tl.load(cu_seqlens_q_ptr + sequence + 1) == row:
        return
    num_keys = tl.load(context_lens_ptr + sequence)
    members = tl.arange(0, BLOCK_M)
    heads = (kv_head * GROUP + members).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    is_stored = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_ptrs = q_ptr + row * stride_q_token + heads[:, None] * stride_q_head + dims[None, :]
    q = tl.load(q_ptrs, mask=is_stored, other=0.0)
    positions = members * 0 + num_keys - 1
    span_lo, span_hi = positions, positions  # unused without spans
    if HAS_SPANS:
        span_lo = members * 0 + tl.load(spans_ptr + row * 2)
        span_hi = members * 0 + tl.load(spans_ptr + row * 2 + 1)
    lo, hi = visible_range(
        num_keys - 1, num_keys - 1, num_keys, window, span_lo, span_hi, CAUSAL, HAS_WINDOW, HAS_SPANS
    )
    keys_each = tl.cdiv(tl.cdiv(hi - lo, num_splits), BLOCK_N) * BLOCK_N
    lo += split * keys_each
    hi = tl.minimum(hi, lo + keys_each)

    largest, denominator = start_softmax(heads, q_ptr, BLOCK_M, False)  # sinks join once, when the splits do
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    page_table_ptr += sequence.to(tl.int64) * stride_table
    k_ptr += kv_head.to(tl.int64) * stride_k_head
    v_ptr += kv_head.to(tl.int64) * stride_v_head
    acc, largest, denominator = attend_keys(
        q, acc, largest, denominator, positions, span_lo, span_hi, lo, hi, k_ptr, v_ptr, page_table_ptr,
        stride_k_page, stride_k_token, stride_v_page, stride_v_token, scale, softcap, window,
        PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SPANS,
    )  # fmt: skip
    num_heads = tl.num_programs(1) * GROUP
    part = (sequence.to(tl.int64) * num_heads + heads) * num_splits + split
    tl.store(part_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_stored)
    tl.store(part_largest_ptr + part, largest, mask=members < GROUP)
    tl.store(part_denominator_ptr + part, denominator, mask=members < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def hallmark_decode_combine(
    part_ptr, part_largest_ptr, part_denominator_ptr, out_ptr, cu_seqlens_q_ptr, sinks_ptr,
    stride_out_token, stride_out_head, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One program: one head of one sequence. Splits weigh by their largest score; one without keys weighs 0."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    row = tl.load(cu_seqlens_q_ptr + sequence).to(tl.int64)
    if tl.load(cu_seqlens_q_ptr + sequence + 1) == row:
        return
    splits = tl.arange(0, BLOCK_SPLITS)
    is_split = splits < num_splits
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    parts = (sequence.to(tl.int64) * tl.num_programs(0) + head) * num_splits + splits
    split_largest = tl.load(part_largest_ptr + parts, mask=is_split, other=float("-inf"))
    split_denominator = tl.load(part_denominator_ptr + parts, mask=is_split, other=0.0)
    acc = tl.load(
        part_ptr + parts[:, None] * HEAD_DIM + dims[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0
    )
    sink, sink_weight = start_softmax(head + tl.arange(0, 1), sinks_ptr, 1, HAS_SINKS)
    largest = tl.maximum(tl.max(split_largest), tl.max(sink))
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(split_largest - reference)
    denominator = tl.sum(weights * split_denominator) + tl.sum(sink_weight * tl.exp2(sink - reference))
    out = tl.sum(weights[:, None] * acc, 0) / tl.where(denominator == 0.0, 1.0, denominator)
    out_ptrs = out_ptr + row * stride_out_token + head.to(tl.int64) * stride_out_head + dims
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_dim)


def num_splits_for(batch: AttentionBatch, num_kv_heads: int, tiles: Tiles, processors: int) -> int:
    """Programs a context is split among: enough for two a processor, none with less than one tile of keys."""
    num_wanted = -(-2 * processors // max(1, batch.num_seqs * num_kv_heads))
    return max(1, min(_MAX_SPLITS, num_wanted, -(-batch.max_context // tiles.block_n)))


def run_decode(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Launch twice (splits, then their combination) for the whole batch, without waiting for the device.

    q, out [tokens, heads, head_dim], at most one row a sequence; k, v [num_pages, page_size, kv_heads, head_dim].
    Slots past a context may hold anything, NaN too; page-table entries past a sequence's last page are not read.
    """
    assert batch.page_table is not None, "decode reads pages"
    num_heads, head_dim = q.shape[1:]
    _, page_size, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    tiles = decode_tiles(head_dim, q.element_size(), group, shared_bytes(q.device))
    num_splits = num_splits_for(batch, num_kv_heads, tiles, num_processors(q.device))
    part = torch.empty(batch.num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    part_largest, part_denominator = torch.empty(2, *part.shape[:-1], dtype=torch.float32, device=q.device)
    arguments = flag_arguments(flags)
    has_sinks = arguments.pop("HAS_SINKS")
    hallmark_decode[num_splits, num_kv_heads, batch.num_seqs](
        q, k, v, part, part_largest, part_denominator, batch.cu_seqlens_q, batch.page_table, batch.context_lens,
        flags.spans, q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1),
        v.stride(2), batch.page_table.stride(0), num_splits, **arguments,
        GROUP=group, PAGE_SIZE=page_size, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    hallmark_decode_combine[num_heads, batch.num_seqs](
        part, part_largest, part_denominator, out, batch.cu_seqlens_q, flags.sinks, out.stride(0), out.stride(1),
        num_splits, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim), BLOCK_SPLITS=_MAX_SPLITS, HAS_SINKS=has_sinks,
    )  # fmt: skip
