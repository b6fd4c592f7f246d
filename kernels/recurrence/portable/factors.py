"""Products of keys and queries, decays and inverses of chunks of 64 tokens, in Triton: all that needs no state."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.portable.pieces import exact_logs, num_own_chunks, product


@triton.jit(do_not_specialize=["num_rows"])
def hallmark_recurrence_factors(
    queries_ptr, keys_ptr, decays_ptr, betas_ptr, of_keys_ptr, of_queries_ptr, inverses_ptr, gates_ptr, near_ptr,
    starts_ptr, stops_ptr, firsts_ptr, num_rows, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    LEAST: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a key head of one of the chunks that are scanned, with the value heads that read it.

    IS_WIDE  whether the inverses' third and fourth parts are not read

    Of each chunk and value head:
    of_keys, of_queries  [CHUNK, CHUNK]: factors of what the tokens of earlier blocks add, negated, in what each token
                         misses; of what each token before it adds, itself included, in its result
    inverses             [CHUNK, CHUNK]: large parts of the inverse of each block, small ones, large ones again, zeros
    gates                [4, CHUNK] fp32: decays from the border, betas, decays to the next border, the chunk's decay
    near                 [CHUNK, BLOCK] fp32: of this program, read by other threads than wrote it
    """
    chunk, key_head = tl.program_id(0), tl.program_id(1)
    found, its, before = 0, 0, 0
    for begin in range(0, num_rows, BLOCK_R):
        rows = begin + tl.arange(0, BLOCK_R)
        counts = num_own_chunks(starts_ptr, stops_ptr, firsts_ptr, rows, num_rows, CHUNK, LEAST)
        ends = before + tl.cumsum(counts, 0)
        is_own = (chunk >= ends - counts) & (chunk < ends)
        found += tl.sum(tl.where(is_own, rows + 1, 0), axis=0)
        its += tl.sum(tl.where(is_own, chunk - ends + counts, 0), axis=0)
        before += tl.sum(counts, axis=0)
    if found > 0:
        row = found - 1
        start, stop, first = tl.load(starts_ptr + row), tl.load(stops_ptr + row), tl.load(firsts_ptr + row)
        places, dims = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
        tokens = start + tl.cdiv(first, CHUNK) * CHUNK + its * CHUNK - first + places
        is_token = tokens < stop
        of_tokens = (tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + dims[None, :]
        is_key = is_token[:, None] & (dims < KEY_DIM)[None, :]
        keys = tl.load(keys_ptr + of_tokens, mask=is_key, other=0.0)
        queries = tl.load(queries_ptr + of_tokens, mask=is_key, other=0.0)
        of_keys, of_queries = product(keys, tl.trans(keys)), product(queries, tl.trans(keys))
        is_there = places[:, None] >= places[None, :]
        is_before = places[:, None] // BLOCK > places[None, :] // BLOCK
        is_near = (places[:, None] > places[None, :]) & (is_before == 0)
        of_square = places[:, None] * CHUNK + places[None, :]
        GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
        for member in range(0, GROUP):
            head = key_head * GROUP + member
            unit = (chunk * VALUE_HEADS + head).to(tl.int64)
            logs = exact_logs(tl.load(decays_ptr + tokens * VALUE_HEADS + head, mask=is_token, other=0.0))
            betas = tl.load(betas_ptr + tokens * VALUE_HEADS + head, mask=is_token, other=0.0)
            sums, total = tl.cumsum(logs, 0), tl.sum(logs, axis=0)
            gates = gates_ptr + unit * 4 * CHUNK + places
            tl.store(gates, tl.exp(sums.to(tl.float32)))
            tl.store(gates + CHUNK, betas)
            left = total - sums
            tl.store(gates + 2 * CHUNK, tl.exp(left.to(tl.float32)))
            tl.store(gates + 3 * CHUNK, tl.exp((left + sums).to(tl.float32)))
            between = tl.exp(tl.where(is_there, sums[:, None] - sums[None, :], 0.0).to(tl.float32))
            factors = tl.where(is_there, between * of_queries, 0.0)
            square = unit * CHUNK * CHUNK
            tl.store(of_queries_ptr + square + of_square, factors.to(of_queries_ptr.dtype.element_ty))
            near = betas[:, None] * between * of_keys
            factors = tl.where(is_before, -near, 0.0)
            tl.store(of_keys_ptr + square + of_square, factors.to(of_keys_ptr.dtype.element_ty))
            near_block = near_ptr + unit * CHUNK * BLOCK + places[:, None] * BLOCK
            tl.store(near_block + places[None, :] % BLOCK, near, mask=is_near)
        tl.debug_barrier()
        for member in range(0, GROUP):
            unit = (chunk * VALUE_HEADS + key_head * GROUP + member).to(tl.int64)
            _store_inverses(
                near_ptr + unit * CHUNK * BLOCK, inverses_ptr + unit * CHUNK * CHUNK, BLOCK, CHUNK, IS_WIDE
            )  # fmt: skip


@triton.jit
def _store_inverses(near_ptr, inverses_ptr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, IS_WIDE: tl.constexpr):
    """Write the inverses of 1 + near of a chunk's blocks, each row by a thread, in the order of `pieces.inverse`."""
    places = tl.arange(0, CHUNK)
    steps = places % BLOCK
    block = near_ptr + (places - steps) * BLOCK
    row = near_ptr + places * BLOCK
    x = (0.0 - tl.load(row, mask=steps > 0, other=0.0),)
    for column in tl.static_range(1, BLOCK):
        loaded = (0.0 - tl.load(row + column, mask=steps > column, other=0.0),)
        x = x + loaded  # type: ignore[assignment]
    for step in tl.static_range(BLOCK - 1, 0, -1):
        factor = 0.0 - x[step]
        for column in tl.static_range(0, step):
            changed = (tl.fma(factor, tl.load(block + step * BLOCK + column), x[column]),)
            x = x[:column] + changed + x[column + 1 :]
    x_0 = _pair(x, steps, 0)
    x_1 = _pair(x, steps, 1)
    found = tl.reshape(tl.join(x_0, x_1), (CHUNK, BLOCK))
    large = found.to(inverses_ptr.dtype.element_ty)
    small = (found - large.to(tl.float32)).to(inverses_ptr.dtype.element_ty)
    to = inverses_ptr + places[:, None] * CHUNK + tl.arange(0, BLOCK)[None, :]
    tl.store(to, large)
    tl.store(to + BLOCK, small)
    if not IS_WIDE:
        tl.store(to + 2 * BLOCK, large)
        tl.store(to + 3 * BLOCK, tl.zeros([CHUNK, BLOCK], tl.float32).to(inverses_ptr.dtype.element_ty))


@triton.jit
def _own(x, steps, column: tl.constexpr):
    """A column of the inverse, with 1 where it is the row's own."""
    return tl.where(steps == column, 1.0, x[column])


@triton.jit
def _pair(x, steps, lowest: tl.constexpr):
    """The 8 columns whose lowest bit is so, as [CHUNK, 2, 2, 2]."""
    pair_0 = tl.join(_own(x, steps, lowest), _own(x, steps, 8 + lowest))
    pair_1 = tl.join(_own(x, steps, 4 + lowest), _own(x, steps, 12 + lowest))
    pair_2 = tl.join(_own(x, steps, 2 + lowest), _own(x, steps, 10 + lowest))
    pair_3 = tl.join(_own(x, steps, 6 + lowest), _own(x, steps, 14 + lowest))
    return tl.join(tl.join(pair_0, pair_1), tl.join(pair_2, pair_3))
