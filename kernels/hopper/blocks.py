"""The key blocks of a tile, as each consumer meets them: where they begin, their matmuls, and those it skips."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.pipeline import ROWS, columns_of, free_key, free_value, pass_turn, take_turn, wait_fill
from kernels.hopper.softmax import reciprocal, scaled_rows
from kernels.hopper.store import store_tile

LOG2E = gl.constexpr(1.4426950408889634)


@jit
def first_block(position, low, top, W: gl.constexpr, VARIANT: gl.constexpr):
    """The last key block that consumer W sees: its first one."""
    last = top
    if not VARIANT.spans:  # a span may end anywhere
        diagonal = position + (W * ROWS + ROWS - 1) // VARIANT.pack
        if VARIANT.offset:
            diagonal = gl.maximum(diagonal, low * VARIANT.tiling.block_n)
        last = gl.minimum(diagonal // VARIANT.tiling.block_n, top)
    return last


@jit
def lowest_block(position, low, last, window, W: gl.constexpr, VARIANT: gl.constexpr):
    """The first key block that consumer W sees, its last one, of a tile whose first is `low`."""
    if VARIANT.skips_low:
        seen = gl.maximum(position + W * ROWS // VARIANT.pack - window + 1, 0) // VARIANT.tiling.block_n
        low = gl.maximum(low, gl.minimum(seen, last))
    return low


@jit
def own_blocks(position, low, top, window, W: gl.constexpr, VARIANT: gl.constexpr):
    """Return the last and the lowest of a tile's key blocks, from `low` to `top`, that consumer W computes."""
    last = first_block(position, low, top, W, VARIANT)
    return last, lowest_block(position, low, last, window, W, VARIANT)


@jit
def num_masked(position, last, num_more, W: gl.constexpr, VARIANT: gl.constexpr):
    """Return how many of the `num_more` blocks before a consumer's last one some of its rows see only in part."""
    first_masked = gl.maximum(position + W * ROWS // VARIANT.pack + 1, 0) // VARIANT.tiling.block_n
    return gl.minimum(num_more, gl.maximum(last - first_masked, 0))


@jit
def head_sink(sinks, head, ROW: gl.constexpr, VARIANT: gl.constexpr):
    """The head's sink in log2, that of each row where heads are packed; 0 without sinks."""
    sink = 0.0
    if VARIANT.sinks:
        if VARIANT.pack > 1:
            sink = gl.load(sinks + head * VARIANT.pack + gl.arange(0, ROWS, layout=ROW) % VARIANT.pack) * LOG2E
        else:
            sink = gl.load(sinks + head) * LOG2E
    return sink


@jit
def held_queries(queries, buffer, zero, VARIANT: gl.constexpr):
    """The first columns of a consumer's queries as the register operand of Q K^T; `zero` where there are none."""
    COLUMNS: gl.constexpr = VARIANT.tiling.q_columns
    held = zero
    if COLUMNS > 0:
        Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, zero.type.layout, 2)
        held = columns_of(queries[0], buffer, 0, COLUMNS, VARIANT).load(Q_LAYOUT)
    return held


@jit
def issue_scores(queries, buffer, keys, fill, zero, held, VARIANT: gl.constexpr):
    """S = Q K^T of one key block."""
    stage = fill % VARIANT.tiling.stages
    s = zero
    for i in gl.static_range(len(VARIANT.slices)):
        k = columns_of(keys[0], stage, VARIANT.slices[i][0], VARIANT.slices[i][1], VARIANT).permute((1, 0))
        if VARIANT.tiling.q_columns > 0 and i == 0:
            s = warpgroup_mma(held, k, s, use_acc=False, is_async=True)
        else:
            q = columns_of(queries[0], buffer, VARIANT.slices[i][0], VARIANT.slices[i][1], VARIANT)
            s = warpgroup_mma(q, k, s, use_acc=i > 0, is_async=True)
    return s


@jit
def first_product(queries, keys, values, num_skipped, zero, W: gl.constexpr, VARIANT: gl.constexpr):
    """S of a consumer's very first block, behind those that it skips: with its queries in registers, and its fill."""
    fill = 0
    if VARIANT.skips:
        fill = skip_keys(keys, fill, num_skipped, W, VARIANT)
        skip_values(values, 0, fill, VARIANT)
    mbarrier.wait(queries[1].index(W), 0)
    wait_fill(keys, fill, True, VARIANT)
    held = held_queries(queries, W, zero, VARIANT)
    take_turn(W, VARIANT)
    s = issue_scores(queries, W, keys, fill, zero, held, VARIANT)
    pass_turn(W, VARIANT)
    s = warpgroup_mma_wait(0, deps=(s,))
    free_key(keys, fill, True, VARIANT)
    return s, held, fill


@jit
def empty_output(VARIANT: gl.constexpr):
    """O before the first block: a tensor for each of VARIANT.columns."""
    MAIN: gl.constexpr = VARIANT.columns[0]
    MAIN_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    acc = (gl.zeros([ROWS, MAIN], gl.float32, MAIN_LAYOUT),)
    if len(VARIANT.columns) == 2:
        TAIL: gl.constexpr = VARIANT.columns[1]
        TAIL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
        acc = (acc[0], gl.zeros([ROWS, TAIL], gl.float32, TAIL_LAYOUT))  # type: ignore[assignment]
    return acc


@jit
def issue_output(p16, values, fill, acc, VARIANT: gl.constexpr):
    """O += P V of a block whose values have arrived."""
    stage = fill % VARIANT.tiling.stages
    v = columns_of(values[0], stage, 0, VARIANT.columns[0], VARIANT)
    main = warpgroup_mma(p16, v, acc[0], is_async=True)
    o = (main,)
    if len(VARIANT.columns) == 2:
        P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc[1].type.layout, 2)  # the same registers
        v_tail = columns_of(values[0], stage, VARIANT.columns[0], VARIANT.columns[1], VARIANT)
        tail = warpgroup_mma(gl.convert_layout(p16, P_LAYOUT), v_tail, acc[1], is_async=True)
        o = (main, tail)  # type: ignore[assignment]
    return o


@jit
def wait_all(acc, s, VARIANT: gl.constexpr):
    """O and S, nothing of which is in flight any more."""
    if len(VARIANT.columns) == 1:
        main, s = warpgroup_mma_wait(0, deps=(acc[0], s))
        o = (main,)
    else:
        main, tail, s = warpgroup_mma_wait(0, deps=(acc[0], acc[1], s))
        o = (main, tail)  # type: ignore[assignment]
    return o, s


@jit
def wait_output(acc, VARIANT: gl.constexpr):
    """Wait until no product is in flight."""
    if len(VARIANT.columns) == 1:
        o = (warpgroup_mma_wait(0, deps=(acc[0],)),)
    else:
        o = warpgroup_mma_wait(0, deps=(acc[0], acc[1]))
    return o


@jit
def finish_tile(
    result, row, rows, head, part, acc, m, total, W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr
):
    """O over what the weights sum to, written; 0 in rows that see nothing."""
    inverse = reciprocal(total)
    if VARIANT.may_see_nothing:
        inverse = gl.where(total > 0.0, inverse, 0.0)
    o = scaled_rows(acc, inverse, VARIANT)
    store_tile(result, row, rows, head, part, o, m, total, W, STORE, VARIANT)


@jit
def skip_keys(keys, fill, count, W: gl.constexpr, VARIANT: gl.constexpr):
    """Give back the keys of blocks that only other consumers of the tile see. Returns the next fill."""
    for _ in range(count):
        wait_fill(keys, fill, True, VARIANT)
        free_key(keys, fill, True, VARIANT)
        take_turn(W, VARIANT)
        pass_turn(W, VARIANT)
        fill += 1
    return fill


@jit
def skip_values(values, start, end, VARIANT: gl.constexpr):
    for fill in range(start, end):
        wait_fill(values, fill, True, VARIANT)
        free_value(values, fill, VARIANT)
