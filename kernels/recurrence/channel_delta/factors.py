"""Blocks of 16 tokens of the delta rule of channels, in Triton: all that needs no state, of all blocks at once.

What a token takes from an earlier one is a product of keys and of the channels' decays between the two. A decay is the
product of those before and behind a place between them: the middle of the smallest of the block's halves, quarters,
eighths or pairs that holds both. Each is the exponential of an exact sum, which is 0 at most: none overflows, however
large the gates are. So the products of all pairs are four of matrices. One tile serves all phases: a token has the same
factors in a prompt, in a part of one and alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.portable.pieces import add_product, exact_logs, key_rows, product


@triton.jit
def parts_of(x, dtype: tl.constexpr):
    """x fp32 as two numbers of 16 bits, the larger one first."""
    large = x.to(dtype)
    return large, (x - large.to(tl.float32)).to(dtype)


@triton.jit
def num_blocks(starts_ptr, stops_ptr, firsts_ptr, folded_ptr, rows, num_rows, BLOCK: tl.constexpr):
    """Blocks of each row, from the border that its state is folded up to; none of a row without tokens."""
    is_row = rows < num_rows
    start, stop = tl.load(starts_ptr + rows, mask=is_row, other=0), tl.load(stops_ptr + rows, mask=is_row, other=0)
    first, begin = tl.load(firsts_ptr + rows, mask=is_row, other=0), tl.load(folded_ptr + rows, mask=is_row, other=0)
    return tl.where(stop > start, tl.cdiv(first + stop - start - begin, BLOCK), 0)


@triton.jit
def _store_parts(to, numbers, SIZE: tl.constexpr, IS_HALF: tl.constexpr):
    """Write fp32 numbers as they are, or as two of 16 bits, the smaller ones SIZE behind the larger."""
    if IS_HALF:
        large, small = parts_of(numbers, to.dtype.element_ty)
        tl.store(to, large)
        tl.store(to + SIZE, small)
    else:
        tl.store(to, numbers)


@triton.jit(do_not_specialize=["num_rows"])
def hallmark_recurrence_channels_factors(
    queries_ptr, keys_ptr, decays_ptr, betas_ptr, read_ptr, turned_ptr, near_ptr, of_queries_ptr, totals_ptr,
    starts_ptr, stops_ptr, firsts_ptr, folded_ptr, sources_ptr, keys_ring_ptr, decays_ring_ptr, num_rows,
    stride_keys_ring, stride_decays_ring, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    RING: tl.constexpr, IS_HALF: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a value head of one block, of those of all rows, one row's behind another's.

    Of each block and value head, numbers of 16 bits in two parts:
    read        [2, parts, BLOCK, BLOCK_K]: keys, then queries, times their decays from the block's first token on
    turned      [parts, BLOCK, BLOCK_K]: keys times the decays behind them, to the block's end
    near        [BLOCK, BLOCK] fp32: of each token what it takes from each token behind it, that is not known
    of_queries  [parts, BLOCK, BLOCK]: of each token what it gives to each token from itself on
    totals      [BLOCK_K] fp32: the decays of the block
    Blocks whose tokens are all known have the last two alone.
    """
    unit, head = tl.program_id(0), tl.program_id(1)
    found, its, before = 0, 0, 0
    for begin in range(0, num_rows, BLOCK_R):
        rows = begin + tl.arange(0, BLOCK_R)
        counts = num_blocks(starts_ptr, stops_ptr, firsts_ptr, folded_ptr, rows, num_rows, BLOCK)
        ends = before + tl.cumsum(counts, 0)
        is_own = (unit >= ends - counts) & (unit < ends)
        found += tl.sum(tl.where(is_own, rows + 1, 0), axis=0)
        its += tl.sum(tl.where(is_own, unit - ends + counts, 0), axis=0)
        before += tl.sum(counts, axis=0)
    if found > 0:
        row = found - 1
        start, stop = tl.load(starts_ptr + row).to(tl.int64), tl.load(stops_ptr + row)
        first, source = tl.load(firsts_ptr + row), tl.load(sources_ptr + row)
        border, last = tl.load(folded_ptr + row) + its * BLOCK, first + (stop - start).to(tl.int32)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        steps, dims = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
        positions = border + steps
        keys_ring = keys_ring_ptr + source * stride_keys_ring + key_head * KEY_DIM
        decays_ring = decays_ring_ptr + source * stride_decays_ring + head * KEY_DIM
        new_keys, new_decays = keys_ptr + key_head * KEY_DIM, decays_ptr + head * KEY_DIM
        keys = key_rows(
            keys_ring, new_keys, positions, start, first, last, KEY_HEADS * KEY_DIM, RING, KEY_DIM, BLOCK_K
        ).to(tl.float32)
        decays = key_rows(
            decays_ring, new_decays, positions, start, first, last, VALUE_HEADS * KEY_DIM, RING, KEY_DIM, BLOCK_K
        )
        logs = exact_logs(decays)
        sums, total = tl.cumsum(logs, 0), tl.sum(logs, axis=0)  # fp64: from the block's first token on
        own = (unit * VALUE_HEADS + head).to(tl.int64)
        SIZE: tl.constexpr = BLOCK * BLOCK_K
        PARTS: tl.constexpr = 2 if IS_HALF else 1
        of_tile = steps[:, None] * BLOCK_K + dims[None, :]
        turned = keys * tl.exp((total[None, :] - sums).to(tl.float32))
        _store_parts(turned_ptr + own * PARTS * SIZE + of_tile, turned, SIZE, IS_HALF)
        tl.store(totals_ptr + own * BLOCK_K + dims, tl.exp(total.to(tl.float32)))
        if border + BLOCK > first:
            is_new = (positions >= first) & (positions < last)
            tokens = start + positions - first
            queries = tl.load(
                queries_ptr + (tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + dims[None, :],
                mask=is_new[:, None] & (dims < KEY_DIM)[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            betas = tl.load(betas_ptr + tokens * VALUE_HEADS + head, mask=is_new, other=0.0)
            until = tl.exp(sums.to(tl.float32))
            read = read_ptr + own * 2 * PARTS * SIZE + of_tile
            _store_parts(read, keys * until, SIZE, IS_HALF)
            _store_parts(read + PARTS * SIZE, queries * until, SIZE, IS_HALF)
            dtype: tl.constexpr = keys_ptr.dtype.element_ty
            by_keys = tl.zeros([BLOCK, BLOCK], tl.float32)
            same = tl.sum(queries * keys, axis=1)[:, None]
            by_queries = by_keys + tl.where(steps[:, None] == steps[None, :], same, 0.0)
            for level in tl.static_range(1, 5):  # a block is 2 ** 4 tokens
                by_keys, by_queries = _with_pairs(
                    by_keys, by_queries, keys, queries, logs, BLOCK >> level, BLOCK, BLOCK_K, dtype, IS_HALF
                )
            of_pairs = steps[:, None] + steps[None, :] * BLOCK
            near = tl.where(is_new[:, None], betas[:, None] * by_keys, 0.0)
            tl.store(near_ptr + own * BLOCK * BLOCK + of_pairs, near)
            given = of_queries_ptr + own * PARTS * BLOCK * BLOCK + of_pairs
            _store_parts(given, by_queries, BLOCK * BLOCK, IS_HALF)


@triton.jit
def _with_pairs(
    by_keys, by_queries, keys, queries, logs, HALF: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    dtype: tl.constexpr, IS_HALF: tl.constexpr,
):  # fmt: skip
    """Both sums [BLOCK, BLOCK] with pairs of tokens whose smallest common part of the block is of 2 * HALF tokens."""
    steps = tl.arange(0, BLOCK)
    is_later = (steps // HALF % 2 == 1)[:, None]
    parts = tl.reshape(logs, (BLOCK // HALF, HALF, BLOCK_K))
    until = tl.cumsum(parts, 1)
    behind = tl.reshape(tl.sum(parts, axis=1)[:, None, :] - until, (BLOCK, BLOCK_K))
    between = tl.exp(tl.where(is_later, tl.reshape(until, (BLOCK, BLOCK_K)), behind).to(tl.float32))
    earlier = tl.where(is_later, 0.0, keys * between)
    is_pair = steps[:, None] // (2 * HALF) == steps[None, :] // (2 * HALF)
    of_keys = _pairs(tl.where(is_later, keys * between, 0.0), earlier, dtype, IS_HALF)
    of_queries = _pairs(tl.where(is_later, queries * between, 0.0), earlier, dtype, IS_HALF)
    return by_keys + tl.where(is_pair, of_keys, 0.0), by_queries + tl.where(is_pair, of_queries, 0.0)


@triton.jit
def _pairs(later, earlier, dtype: tl.constexpr, IS_HALF: tl.constexpr):
    """[BLOCK, BLOCK] fp32: products of each row of one with each row of the other; of parts without the small ones'."""
    if IS_HALF:
        large, small = parts_of(later, dtype)
        right_large, right_small = parts_of(earlier, dtype)
        found = add_product(large, tl.trans(right_small), product(small, tl.trans(right_large)))
        found = add_product(large, tl.trans(right_large), found)
    else:
        found = product(later, tl.trans(earlier))
    return found
