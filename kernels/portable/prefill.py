"""`triton.prefill`: attention of fresh prompts, keys and values packed beside the queries. Source: Dao 2023 (FA2)."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.processors import shared_bytes
from kernels.portable.launch_config import flag_arguments, padded_head_dim, query_tiles
from kernels.portable.tile import attend_query_tile


@triton.jit(do_not_specialize=["window"])
def hallmark_prefill(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, sinks_ptr, spans_ptr,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_out_token, stride_out_head, scale, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of packed query rows of one KV head of one sequence. Surplus programs leave at once."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tile sees the most keys: start it first
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(cu_seqlens_q_ptr + sequence)
    num_queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - first_row
    if tile * BLOCK_M >= num_queries * GROUP:
        return
    first_key = tl.load(cu_seqlens_k_ptr + sequence)
    num_keys = tl.load(cu_seqlens_k_ptr + sequence + 1) - first_key
    k_ptr += first_key.to(tl.int64) * stride_k_token + kv_head.to(tl.int64) * stride_k_head
    v_ptr += first_key.to(tl.int64) * stride_v_token + kv_head.to(tl.int64) * stride_v_head
    attend_query_tile(
        tile, kv_head, first_row, num_queries, num_keys, q_ptr, k_ptr, v_ptr, out_ptr, cu_seqlens_k_ptr, sinks_ptr,
        spans_ptr, stride_q_token, stride_q_head, 0, stride_k_token, 0, stride_v_token,
        stride_out_token, stride_out_head, scale, softcap, window,
        GROUP, 0, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_SPANS,
    )  # fmt: skip


def run_prefill(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Launch once for the whole batch, without waiting for the device.

    q, out [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]; last dims contiguous.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    tiles = query_tiles(head_dim, q.element_size(), shared_bytes(q.device))
    num_tiles = triton.cdiv(batch.max_seqlen_q * group, tiles.block_m)
    hallmark_prefill[num_tiles, num_kv_heads, batch.num_seqs](
        q, k, v, out, batch.cu_seqlens_q, batch.cu_seqlens_k, flags.sinks, flags.spans,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        **flag_arguments(flags), GROUP=group, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
