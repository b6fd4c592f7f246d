"""Products of keys and queries, decays and the inverse of a block of 16 tokens, in Triton: all that needs no state."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.portable.pieces import (
    exact_logs,
    inverse,
    is_one_block,
    key_rows,
    known_or_new,
    product,
)


@triton.jit
def hallmark_recurrence_blocks(
    queries_ptr, keys_ptr, decays_ptr, betas_ptr, of_keys_ptr, of_queries_ptr, inverses_ptr, gates_ptr, starts_ptr,
    stops_ptr, firsts_ptr, folded_ptr, sources_ptr, keys_ring_ptr, decays_ring_ptr, betas_ring_ptr,
    stride_keys_ring, stride_decays_ring, stride_betas_ring, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, RING: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: a value head of the only block of a row, by one warp, so that it waits for no other.

    Of each row and value head:
    of_keys, of_queries  [BLOCK, CHUNK]: factors of what the tokens of earlier blocks add, negated, in what each token
                         misses; of what each token before it adds, itself included, in its result
    inverses             [BLOCK, CHUNK]: large parts of the block's inverse, small ones
    gates                [4, BLOCK] fp32: decays from the border, betas
    """
    row, head = tl.program_id(0), tl.program_id(1)
    steps = tl.arange(0, BLOCK)
    start, stop, first = tl.load(starts_ptr + row), tl.load(stops_ptr + row), tl.load(firsts_ptr + row)
    is_wanted = is_one_block(start, stop, first, tl.load(folded_ptr + row), BLOCK, CHUNK)
    block, border = first % CHUNK // BLOCK, first // CHUNK * CHUNK
    if is_wanted:
        last = first + stop - start
        source = tl.load(sources_ptr + row)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        keys_ring = keys_ring_ptr + source * stride_keys_ring + key_head * KEY_DIM
        decays_ring = decays_ring_ptr + source * stride_decays_ring + head
        betas_ring = betas_ring_ptr + source * stride_betas_ring + head
        begin = border + block * BLOCK
        own_positions = begin + steps
        own_keys = key_rows(
            keys_ring, keys_ptr + key_head * KEY_DIM, own_positions, start, first, last, KEY_HEADS * KEY_DIM, RING,
            KEY_DIM, BLOCK_K,
        )  # fmt: skip
        dims = tl.arange(0, BLOCK_K)
        tokens = start + own_positions - first
        is_new = (own_positions >= first) & (own_positions < last)
        queries = tl.load(
            queries_ptr + (tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + dims[None, :],
            mask=is_new[:, None] & (dims < KEY_DIM)[None, :], other=0.0,
        )  # fmt: skip
        keys_0, queries_0 = _products(
            own_keys, queries, keys_ring, keys_ptr, border, start, first, last, begin, key_head, KEY_HEADS, KEY_DIM,
            RING, BLOCK_K, BLOCK,
        )  # fmt: skip
        keys_1, queries_1 = _products(
            own_keys, queries, keys_ring, keys_ptr, border + BLOCK, start, first, last, begin, key_head, KEY_HEADS,
            KEY_DIM, RING, BLOCK_K, BLOCK,
        )  # fmt: skip
        keys_2, queries_2 = _products(
            own_keys, queries, keys_ring, keys_ptr, border + 2 * BLOCK, start, first, last, begin, key_head, KEY_HEADS,
            KEY_DIM, RING, BLOCK_K, BLOCK,
        )  # fmt: skip
        own_products, own_queries = product(own_keys, tl.trans(own_keys)), product(queries, tl.trans(own_keys))
        betas = known_or_new(betas_ring, betas_ptr + head, own_positions, start, first, last, VALUE_HEADS, RING)
        new_decays = decays_ptr + head
        sums_0, total_0 = _sums(decays_ring, new_decays, border, start, first, last, VALUE_HEADS, RING, BLOCK)
        sums_1, total_1 = _sums(decays_ring, new_decays, border + BLOCK, start, first, last, VALUE_HEADS, RING, BLOCK)
        sums_2, total_2 = _sums(
            decays_ring, new_decays, border + 2 * BLOCK, start, first, last, VALUE_HEADS, RING, BLOCK
        )
        own_sums, _ = _sums(decays_ring, new_decays, begin, start, first, last, VALUE_HEADS, RING, BLOCK)
        sums_1 += total_0
        sums_2 += total_0 + total_1
        own_sums += tl.where(block > 0, total_0, 0.0) + tl.where(block > 1, total_1, 0.0)
        own_sums += tl.where(block > 2, total_2, 0.0)
        unit = (row * VALUE_HEADS + head).to(tl.int64)
        gates = gates_ptr + unit * 4 * BLOCK + steps
        tl.store(gates, tl.exp(own_sums.to(tl.float32)))
        tl.store(gates + BLOCK, betas)
        of_rows = unit * BLOCK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
        of_keys, of_queries = of_keys_ptr + of_rows, of_queries_ptr + of_rows
        _store_factors(keys_0, queries_0, sums_0, own_sums, betas, block > 0, of_keys, of_queries)
        _store_factors(keys_1, queries_1, sums_1, own_sums, betas, block > 1, of_keys + BLOCK, of_queries + BLOCK)
        _store_factors(
            keys_2, queries_2, sums_2, own_sums, betas, block > 2, of_keys + 2 * BLOCK, of_queries + 2 * BLOCK
        )
        _store_factors(keys_2, queries_2, sums_2, own_sums, betas, False, of_keys + 3 * BLOCK, of_queries + 3 * BLOCK)
        tl.debug_barrier()
        is_there = steps[:, None] >= steps[None, :]
        within = tl.exp(tl.where(is_there, own_sums[:, None] - own_sums[None, :], 0.0).to(tl.float32))
        factors = tl.where(is_there, within * own_queries, 0.0)
        tl.store(of_queries + block * BLOCK, factors.to(of_queries_ptr.dtype.element_ty))
        near = tl.where(steps[:, None] > steps[None, :], betas[:, None] * within * own_products, 0.0)
        found_inverse = inverse(near)
        large = found_inverse.to(inverses_ptr.dtype.element_ty)
        small = (found_inverse - large.to(tl.float32)).to(inverses_ptr.dtype.element_ty)
        to = inverses_ptr + unit * BLOCK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
        tl.store(to, large)
        tl.store(to + BLOCK, small)


@triton.jit
def _products(
    own_keys, queries, keys_ring, keys_ptr, position, start, first, last, end, key_head, KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, RING: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Products of the block's keys, and queries, with the keys of BLOCK tokens from a position on: [BLOCK, BLOCK].

    Those from position `end` on are not read.
    """
    positions = position + tl.arange(0, BLOCK)
    keys = key_rows(
        keys_ring, keys_ptr + key_head * KEY_DIM, positions, start, tl.minimum(first, end), tl.minimum(last, end),
        KEY_HEADS * KEY_DIM, RING, KEY_DIM, BLOCK_K,
    )  # fmt: skip
    return product(own_keys, tl.trans(keys)), product(queries, tl.trans(keys))


@triton.jit
def _sums(
    decays_ring, decays_ptr, position, start, first, last, VALUE_HEADS: tl.constexpr, RING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(logarithms of the decays of BLOCK tokens from a position on, each with those before it, their sum), fp64."""
    positions = position + tl.arange(0, BLOCK)
    logs = exact_logs(known_or_new(decays_ring, decays_ptr, positions, start, first, last, VALUE_HEADS, RING))
    return tl.cumsum(logs, 0), tl.sum(logs, axis=0)


@triton.jit
def _store_factors(of_keys, of_queries, sums, own_sums, betas, is_before, of_keys_ptr, of_queries_ptr):
    """Write the factors of what the tokens of another block add: of an earlier one, else 0."""
    between = tl.exp(tl.where(is_before, own_sums[:, None] - sums[None, :], 0.0).to(tl.float32))
    factors = tl.where(is_before, -(betas[:, None] * between * of_keys), 0.0)
    tl.store(of_keys_ptr, factors.to(of_keys_ptr.dtype.element_ty))
    factors = tl.where(is_before, between * of_queries, 0.0)
    tl.store(of_queries_ptr, factors.to(of_queries_ptr.dtype.element_ty))
