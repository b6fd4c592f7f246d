"""The key blocks of a tile, as each consumer meets them: where they begin, their matmuls, and those it skips."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from kernels.attention import gluon_pipeline
from kernels.attention.gluon_pipeline import free_key, free_value, pass_turn, take_turn, wait_fill

ROWS = gluon_pipeline.ROWS
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
        held = queries[0].index(buffer).slice(0, COLUMNS, dim=1).load(Q_LAYOUT)
    return held


@jit
def issue_scores(queries, buffer, keys, fill, zero, held, VARIANT: gl.constexpr):
    """S = Q K^T of one key block."""
    COLUMNS: gl.constexpr = VARIANT.tiling.q_columns
    q_smem = queries[0].index(buffer)
    k_smem = keys[0].index(fill % VARIANT.tiling.stages)
    if COLUMNS == 0:
        s = warpgroup_mma(q_smem, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        s = warpgroup_mma(held, k_smem.slice(0, COLUMNS, dim=1).permute((1, 0)), zero, use_acc=False, is_async=True)
        for i in gl.static_range(VARIANT.tiling.block_d.bit_length() - COLUMNS.bit_length()):
            k = k_smem.slice(COLUMNS << i, COLUMNS << i, dim=1)
            s = warpgroup_mma(q_smem.slice(COLUMNS << i, COLUMNS << i, dim=1), k.permute((1, 0)), s, is_async=True)
    return s


@jit
def issue_output(p16, values, fill, acc, VARIANT: gl.constexpr):
    """O += P V of a block whose values have arrived."""
    return warpgroup_mma(p16, values[0].index(fill % VARIANT.tiling.stages), acc, is_async=True)


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
