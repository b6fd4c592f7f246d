"""Stores of a consumer's rows: of a tile, or of one part of the tile's keys."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from kernels.hopper.pipeline import ROWS


@jit
def wide(x):
    """Convert to 64 bits, unsigned: the high halves of sign-extended strides would spill."""
    return x.to(gl.uint32).to(gl.uint64)


@jit
def store_rows(result, row, rows, head, o, W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr):
    """Store rows through 2 KiB of scratch, so that a lane holds 8 neighbours, by 16-byte stores under a row mask.

    Where a tiling has no room for the scratch, and a second part, which is narrow: as it lies, 4 bytes a lane.
    """
    dtype: gl.constexpr = result[0].dtype.element_ty
    main = o[0].to(dtype)
    if not VARIANT.tiling.stored_as_is:
        main = gl.convert_layout(main, STORE)
    store_columns(result, row, rows, head, main, 0, W, VARIANT)
    if len(VARIANT.columns) == 2:
        store_columns(result, row, rows, head, o[1].to(dtype), VARIANT.columns[0], W, VARIANT)


@jit
def store_columns(result, row, rows, head, o, FIRST: gl.constexpr, W: gl.constexpr, VARIANT: gl.constexpr):
    """Columns of a tile's rows from FIRST on."""
    out, stride_row, stride_head = result[0], result[1], result[2]
    STORE: gl.constexpr = o.type.layout
    r = W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    c = FIRST + gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, STORE))
    if VARIANT.pack > 1:
        head = head * VARIANT.pack + r % VARIANT.pack
        r = r // VARIANT.pack
    inside = (r < rows)[:, None]
    if VARIANT.head_dim != VARIANT.tiling.block_d:
        inside = inside & (c < VARIANT.head_dim)[None, :]
    row_ptr = out + wide(head) * wide(stride_head) + wide(row + r) * wide(stride_row)
    gl.store(row_ptr[:, None] + c[None, :], o, mask=inside)


@jit
def store_part(result, part, head, o, m, total, W: gl.constexpr, VARIANT: gl.constexpr):
    """Rows of a part of a tile's keys: fp32, each already divided by its own sum, and the log2 of that sum.

    A row that saw no key has a log of -inf. Columns past the head dim are not written.
    """
    logs, num_heads = result[4], result[5]
    first = (part * num_heads + head) * VARIANT.tiling.block_m + W * ROWS
    store_part_columns(result, first, o[0], 0, VARIANT)
    if len(VARIANT.columns) == 2:
        store_part_columns(result, first, o[1], VARIANT.columns[0], VARIANT)
    at = first + gl.arange(0, ROWS, layout=total.type.layout)
    gl.store(logs + at, gl.convert_layout(m, total.type.layout) + gl.log2(total))


@jit
def store_part_columns(result, first, o, FIRST: gl.constexpr, VARIANT: gl.constexpr):
    """Columns of a part's rows from FIRST on."""
    BLOCK_D: gl.constexpr = VARIANT.tiling.part_d
    r = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o.type.layout))
    c = FIRST + gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, o.type.layout))
    at = result[3] + (r * BLOCK_D)[:, None] + c[None, :]
    if VARIANT.head_dim < FIRST + o.shape[1]:
        gl.store(at, o, mask=(c < VARIANT.head_dim)[None, :])
    else:
        gl.store(at, o)


@jit
def store_tile(result, row, rows, head, part, o, m, total, W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr):
    """A tile's rows, or those of one part of its keys."""
    if VARIANT.parts:
        if part >= 0:
            store_part(result, part, head, o, m, total, W, VARIANT)
        else:
            store_rows(result, row, rows, head, o, W, STORE, VARIANT)
    else:
        store_rows(result, row, rows, head, o, W, STORE, VARIANT)
