"""`triton.latent.indexed`: the choice of keys and the attention to them, in every phase, on any GPU since Ampere.

Three kernels, of which each has the rows of all sequences: scores of the indexer; the choice, by the bits of the
border's score and then in the order of positions, without atomics; attention to the chosen rows, of which a program
gathers as many as a tile has, for as many heads as one has. A layer that reads an earlier one's choice launches the
last alone. Chosen keys are cut at fixed places of the choice, and parts are folded from the first to the last: where
queries are few each is a program, and a fourth kernel folds them. So a row's bits depend on its own keys alone. Grids
depend on shapes and host bounds, so that a CUDA graph can hold the launches. Source: DeepSeek-AI 2025,
"DeepSeek-V3.2-Exp", section 2.1.
"""

import triton
import triton.language as tl
from torch import Tensor, empty, float32

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import Index, IndexedFlags
from kernels.calls.page_table import page_table_argument
from kernels.calls.processors import shared_bytes
from kernels.indexed.launch_config import CHOICE_WARPS, choice_block, num_parts, row_chunk, score_tiles
from kernels.latent.launch_config import latent_tiles
from kernels.latent.ordered import FEW_QUERIES, hallmark_latent_ordered_combine, latent_scores
from kernels.portable.launch_config import flag_arguments, padded_head_dim
from kernels.portable.ordered import fold, normalised
from kernels.portable.tile import key_offsets, start_softmax

_MOST_ROWS = 64  # of a tile
_BLOCK_SEQS = 128  # sequences that a program looks at together for the one of its row


@triton.jit
def _sequence_of(row, cu_seqlens_q_ptr, num_seqs, BLOCK_SEQS: tl.constexpr):
    """Return the sequence that a row of q belongs to; `num_seqs` for a row behind all of them."""
    sequence = row * 0
    for start in range(0, num_seqs, BLOCK_SEQS):
        places = start + tl.arange(0, BLOCK_SEQS)
        ends = tl.load(cu_seqlens_q_ptr + 1 + places, mask=places < num_seqs, other=2147483647)
        sequence += tl.sum((ends <= row).to(tl.int32), 0)
    return sequence


@triton.jit
def _num_visible(row, sequence, cu_seqlens_q_ptr, cu_seqlens_k_ptr, context_lens_ptr, PAGE_SIZE: tl.constexpr):
    """Return how many keys a row of q sees: those at its own position and before."""
    if PAGE_SIZE == 0:
        num_keys = tl.load(cu_seqlens_k_ptr + sequence + 1) - tl.load(cu_seqlens_k_ptr + sequence)
    else:
        num_keys = tl.load(context_lens_ptr + sequence)
    return tl.maximum(num_keys - (tl.load(cu_seqlens_q_ptr + sequence + 1) - row) + 1, 0)


@triton.jit(do_not_specialize=["stride_table", "num_seqs", "first_row", "num_columns"])
def hallmark_indexed_scores(
    q_ptr, weights_ptr, k_ptr, scores_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, page_table_ptr, context_lens_ptr,
    stride_q_token, stride_q_head, stride_k_page, stride_k_token, stride_table, num_seqs, first_row,
    num_columns, COUNT: tl.constexpr, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SEQS: tl.constexpr,
):  # fmt: skip
    """One program: the scores of one row and a tile of keys, for rows that see more keys than are chosen.

    scores_ptr  [num_rows, num_columns] fp32, of rows from first_row on
    """
    row = first_row + tl.program_id(0)
    sequence = _sequence_of(row, cu_seqlens_q_ptr, num_seqs, BLOCK_SEQS)
    if sequence >= num_seqs:
        return
    visible = _num_visible(row, sequence, cu_seqlens_q_ptr, cu_seqlens_k_ptr, context_lens_ptr, PAGE_SIZE)
    start = tl.program_id(1) * BLOCK_N
    if (visible <= COUNT) | (start >= visible):
        return
    if PAGE_SIZE == 0:
        k_ptr += tl.load(cu_seqlens_k_ptr + sequence).to(tl.int64) * stride_k_token
    else:
        page_table_ptr += sequence.to(tl.int64) * stride_table
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    keys = start + tl.arange(0, BLOCK_N)
    is_head, is_dim, is_key = heads < HEADS, dims < DIM, keys < visible
    at = row.to(tl.int64)
    q_rows = q_ptr + at * stride_q_token + heads[:, None] * stride_q_head
    q = tl.load(q_rows + dims[None, :], mask=is_head[:, None] & is_dim[None, :], other=0.0)
    weights = tl.load(weights_ptr + at * HEADS + heads, mask=is_head, other=0.0)
    offsets = key_offsets(keys, is_key, page_table_ptr, stride_k_page, stride_k_token, PAGE_SIZE)
    k = tl.load(k_ptr + offsets[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0)
    tl.store(scores_ptr + tl.program_id(0).to(tl.int64) * num_columns + keys, scores, mask=is_key)


@triton.jit
def _in_order(scores):
    """Return scores as unsigned integers of the same order; both zeros are one."""
    bits = (scores + 0.0).to(tl.uint32, bitcast=True)
    return bits ^ tl.where((bits >> 31) == 1, 0xFFFFFFFF, 0x80000000)


@triton.jit(do_not_specialize=["num_seqs", "first_row", "num_columns"])
def hallmark_indexed_choice(
    scores_ptr, chosen_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, context_lens_ptr, num_seqs, first_row,
    num_columns, COUNT: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SEQS: tl.constexpr,
):  # fmt: skip
    """One program: the choice of one row, ascending, -1 behind the last; of equal scores the earlier keys.

    The COUNT-th highest score is found bit by bit: the largest number that so many scores reach.
    """
    row = first_row + tl.program_id(0)
    sequence = _sequence_of(row, cu_seqlens_q_ptr, num_seqs, BLOCK_SEQS)
    if sequence >= num_seqs:
        return
    visible = _num_visible(row, sequence, cu_seqlens_q_ptr, cu_seqlens_k_ptr, context_lens_ptr, PAGE_SIZE)
    chosen_ptr += row.to(tl.int64) * COUNT
    scores_ptr += tl.program_id(0).to(tl.int64) * num_columns
    block = tl.arange(0, BLOCK_N)
    if visible <= COUNT:
        for start in range(0, COUNT, BLOCK_N):
            keys = start + block
            tl.store(chosen_ptr + keys, tl.where(keys < visible, keys, -1), mask=keys < COUNT)
        return
    border = tl.zeros([], tl.uint32)
    for step in range(32):
        tried = border | (tl.full([], 0x80000000, tl.uint32) >> step)
        reached = 0
        for start in range(0, visible, BLOCK_N):
            keys = start + block
            ordered = _in_order(tl.load(scores_ptr + keys, mask=keys < visible, other=0.0))
            reached += tl.sum(((ordered >= tried) & (keys < visible)).to(tl.int32), 0)
        border = tl.where(reached >= COUNT, tried, border)
    num_above = 0
    for start in range(0, visible, BLOCK_N):
        keys = start + block
        ordered = _in_order(tl.load(scores_ptr + keys, mask=keys < visible, other=0.0))
        num_above += tl.sum(((ordered > border) & (keys < visible)).to(tl.int32), 0)
    num_equal = 0  # so far
    num_taken = 0
    for start in range(0, visible, BLOCK_N):
        keys = start + block
        is_key = keys < visible
        ordered = _in_order(tl.load(scores_ptr + keys, mask=is_key, other=0.0))
        is_equal = ((ordered == border) & is_key).to(tl.int32)
        is_early = num_equal + tl.cumsum(is_equal, 0) <= COUNT - num_above
        is_taken = (((ordered > border) & is_key) | ((is_equal == 1) & is_early)).to(tl.int32)
        places = num_taken + tl.cumsum(is_taken, 0) - 1
        tl.store(chosen_ptr + places, keys, mask=is_taken == 1)
        num_equal += tl.sum(is_equal, 0)
        num_taken += tl.sum(is_taken, 0)


@triton.jit
def attend_chosen(
    q, q_rest, lo, hi, chosen_ptr, k_ptr, page_table_ptr, stride_k_page, stride_k_token, scale,
    PAGE_SIZE: tl.constexpr, LATENT: tl.constexpr, REST: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(a, m, l) of some heads of one row over the places [lo, hi) of its choice, of which there is one at least."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    for start in tl.range(lo, hi, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        is_key = places < hi
        keys = tl.load(chosen_ptr + places, mask=is_key, other=0)
        offsets = key_offsets(keys, is_key, page_table_ptr, stride_k_page, stride_k_token, PAGE_SIZE)
        k, scores = latent_scores(q, q_rest, offsets, is_key, k_ptr, scale, LATENT, REST, BLOCK_L, BLOCK_R)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        decay = tl.exp2(largest - new_largest)
        denominator = denominator * decay + tl.sum(weights, 1)
        largest = new_largest
        acc = tl.dot(weights.to(k.dtype), k, acc * decay[:, None], input_precision="ieee")
    return acc, largest, denominator


@triton.jit(do_not_specialize=["stride_table", "num_seqs", "num_tokens", "num_splits", "keys_each"])
def hallmark_indexed_attention(
    q_ptr, k_ptr, out_ptr, part_ptr, stats_ptr, chosen_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, page_table_ptr,
    context_lens_ptr, stride_q_token, stride_q_head, stride_k_page, stride_k_token, stride_out_token, stride_out_head,
    stride_table, num_seqs, num_tokens, num_splits, keys_each, scale,
    HEADS: tl.constexpr, COUNT: tl.constexpr, PAGE_SIZE: tl.constexpr, LATENT: tl.constexpr, REST: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr, BLOCK_SEQS: tl.constexpr,
):  # fmt: skip
    """One program: some heads of one row over its chosen keys, in parts of `keys_each`; IS_SPLIT: over one part.

    IS_SPLIT: axis 1 is tiles of heads times parts; a program writes its unnormalised part, its largest score and its
    denominator: -inf alone for a part without keys.
    part_ptr   [splits, heads, tokens, LATENT] fp32, stats_ptr [splits, heads, tokens, 2] fp32
    """
    row = tl.program_id(0)
    sequence = _sequence_of(row, cu_seqlens_q_ptr, num_seqs, BLOCK_SEQS)
    if sequence >= num_seqs:
        return
    visible = _num_visible(row, sequence, cu_seqlens_q_ptr, cu_seqlens_k_ptr, context_lens_ptr, PAGE_SIZE)
    lo, hi = row * 0, tl.minimum(visible, COUNT)
    tile = tl.program_id(1)
    split = tile * 0
    if IS_SPLIT:
        split = tile % num_splits
        tile = tile // num_splits
        lo = split * keys_each
        hi = tl.minimum(hi, lo + keys_each)
    if PAGE_SIZE == 0:
        k_ptr += tl.load(cu_seqlens_k_ptr + sequence).to(tl.int64) * stride_k_token
    else:
        page_table_ptr += sequence.to(tl.int64) * stride_table
    at = row.to(tl.int64)
    chosen_ptr += at * COUNT
    heads = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_L)
    rests = tl.arange(0, BLOCK_R)
    is_head, is_dim, is_rest = heads < HEADS, dims < LATENT, rests < REST
    is_stored = is_head[:, None] & is_dim[None, :]
    q_rows = q_ptr + at * stride_q_token + heads.to(tl.int64)[:, None] * stride_q_head
    q = tl.load(q_rows + dims[None, :], mask=is_stored, other=0.0)
    q_rest = tl.load(q_rows + LATENT + rests[None, :], mask=is_head[:, None] & is_rest[None, :], other=0.0)
    if IS_SPLIT:
        place = (split.to(tl.int64) * HEADS + heads) * num_tokens + at
        if lo >= hi:
            tl.store(stats_ptr + place * 2, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_head)
            return
        acc, largest, total = attend_chosen(
            q, q_rest, lo, hi, chosen_ptr, k_ptr, page_table_ptr, stride_k_page, stride_k_token, scale, PAGE_SIZE,
            LATENT, REST, BLOCK_L, BLOCK_R, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        tl.store(part_ptr + place[:, None] * LATENT + dims[None, :], acc, mask=is_stored)
        tl.store(stats_ptr + place * 2, largest, mask=is_head)
        tl.store(stats_ptr + place * 2 + 1, total, mask=is_head)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for start in range(lo, hi, keys_each):
            value, found_largest, found = attend_chosen(
                q, q_rest, start, tl.minimum(hi, start + keys_each), chosen_ptr, k_ptr, page_table_ptr, stride_k_page,
                stride_k_token, scale, PAGE_SIZE, LATENT, REST, BLOCK_L, BLOCK_R, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            acc, largest, total = fold(acc, largest, total, value, found_largest, found)
        no_sink, no_weight = start_softmax(heads, None, BLOCK_M, False)
        out = normalised(acc, largest, total, no_sink, no_weight) + 0.0  # no zero is negative
        out_rows = out_ptr + at * stride_out_token + heads.to(tl.int64)[:, None] * stride_out_head
        tl.store(out_rows + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=is_stored)


def run_indexed(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Launch for the whole batch, without waiting for the device; arguments as of `RunAttention`.

    q [tokens, heads, latent + rest], out [tokens, heads, latent]; k [key tokens, 1, row] or [num_pages, page_size, 1,
    row], of whose rows the first numbers are a key's and, where the flags have an indexer's queries, the last ones the
    indexer's; v is the view of k's first `latent` numbers, whose sizes alone are read. Slots past a context may hold
    anything, NaN too; page-table entries past a sequence's last page are not read.
    """
    assert isinstance(flags, IndexedFlags), "the shape has an indexer"
    index = flags.index
    if index.queries is not None:
        _choose(k[..., q.shape[2] :], batch, index)
    num_tokens, num_heads, head_dim = q.shape
    latent, page_size = v.shape[-1], k.shape[1] if batch.is_paged else 0
    is_split = batch.is_paged and batch.max_seqlen_q <= FEW_QUERIES
    tiles = latent_tiles(q.element_size(), min(num_heads, _MOST_ROWS), shared_bytes(q.device))
    num_tiles = triton.cdiv(num_heads, tiles.block_m)
    splits, keys_each = num_parts(index.count, tiles.block_n)
    splits = splits if is_split else 1
    scratch = splits * num_heads * num_tokens if is_split else 0
    parts = empty(max(1, scratch * latent), dtype=float32, device=q.device)
    stats = empty(max(1, scratch * 2), dtype=float32, device=q.device)
    strides = (0, k.stride(0)) if page_size == 0 else k.stride()[:2]
    hallmark_indexed_attention[num_tokens, num_tiles * splits](
        q, k, out, parts, stats, index.chosen, batch.cu_seqlens_q, batch.cu_seqlens_k, page_table_argument(batch),
        batch.context_lens, q.stride(0), q.stride(1), *strides, out.stride(0), out.stride(1),
        0 if batch.page_table is None else batch.page_table.stride(0), batch.num_seqs, num_tokens, splits, keys_each,
        flag_arguments(flags)["scale"],
        HEADS=num_heads, COUNT=index.count, PAGE_SIZE=page_size, LATENT=latent, REST=head_dim - latent,
        BLOCK_L=padded_head_dim(latent), BLOCK_R=padded_head_dim(head_dim - latent), BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, IS_SPLIT=is_split, BLOCK_SEQS=_BLOCK_SEQS, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    if is_split:
        hallmark_latent_ordered_combine[num_heads, num_tokens](
            parts, stats, out, None, batch.cu_seqlens_q, out.stride(0), out.stride(1), splits, num_tokens,
            batch.num_seqs, LATENT=latent, BLOCK_L=padded_head_dim(latent), HAS_SINKS=False,
        )  # fmt: skip


def _choose(index_keys: Tensor, batch: AttentionBatch, index: Index) -> None:
    """Launch the scores and the choice of as many rows at once as the scratch memory of scores has."""
    assert index.queries is not None, "an earlier layer's choice is given"
    num_tokens, num_heads, dim = index.queries.shape
    page_size = index_keys.shape[1] if batch.is_paged else 0
    strides = (0, index_keys.stride(0)) if page_size == 0 else index_keys.stride()[:2]
    tiles = score_tiles(index_keys.element_size(), shared_bytes(index_keys.device))
    num_columns = batch.max_context
    most_rows = min(num_tokens, row_chunk(num_columns))
    scores = empty(most_rows * num_columns, dtype=float32, device=index_keys.device)
    page_table = page_table_argument(batch)
    for first in range(0, num_tokens, most_rows):
        num_rows = min(most_rows, num_tokens - first)
        if num_columns > index.count:
            hallmark_indexed_scores[num_rows, triton.cdiv(num_columns, tiles.block_n)](
                index.queries, index.weights, index_keys, scores, batch.cu_seqlens_q, batch.cu_seqlens_k, page_table,
                batch.context_lens, index.queries.stride(0), index.queries.stride(1), *strides,
                0 if batch.page_table is None else batch.page_table.stride(0), batch.num_seqs, first,
                num_columns, COUNT=index.count, PAGE_SIZE=page_size, HEADS=num_heads, DIM=dim,
                BLOCK_H=padded_head_dim(num_heads), BLOCK_D=padded_head_dim(dim), BLOCK_N=tiles.block_n,
                BLOCK_SEQS=_BLOCK_SEQS, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            )  # fmt: skip
        hallmark_indexed_choice[(num_rows,)](
            scores, index.chosen, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.context_lens, batch.num_seqs, first,
            num_columns, COUNT=index.count, PAGE_SIZE=page_size,
            BLOCK_N=choice_block(shared_bytes(index_keys.device)), BLOCK_SEQS=_BLOCK_SEQS, num_warps=CHOICE_WARPS,
        )  # fmt: skip
