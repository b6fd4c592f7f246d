"""Adds up the parts of tiles whose keys were split: `gluon.extend.hopper`'s last launch, where it splits at all."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["stride_row", "stride_head", "max_blocks", "max_parts", "num_heads"])
def hallmark_gluon_extend_combine(
    plan_ptr, parts_ptr, logs_ptr, out_ptr, sinks_ptr, stride_row, stride_head, max_blocks, max_parts, num_heads,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, TILE_ROWS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PACK: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_ALIGNED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of one row block that is split, of one head (PACK > 1: of one KV head).

    The loads of PARTS parts depend on nothing: one wait for memory. IS_ALIGNED: strides of out are multiples of 8.

    parts_ptr  [parts, num_heads, TILE_ROWS, BLOCK_D] fp32, each row divided by its own sum of weights; only the first
               HEAD_DIM columns are read
    logs_ptr   [parts, num_heads, TILE_ROWS] fp32: log2 of that sum; -inf for a row that saw no key
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    # Not from L1. The plan may be read before the wait: the launch before this one had waited for it when it let this
    # one start. Some programs wait even if nothing is split: this launch must not end before the one before.
    head = tl.program_id(2)
    num_split = tl.load(plan_ptr + 3, cache_modifier=".cg")
    is_split = tl.program_id(0) < num_split
    split_ptr = plan_ptr + 2 * PLAN_HEADER + (2 * max_blocks + max_parts) * PLAN_ITEM + tl.program_id(0) * 4
    first_row = tl.load(split_ptr, mask=is_split, other=0, cache_modifier=".cg")
    num_rows = tl.load(split_ptr + 1, mask=is_split, other=0, cache_modifier=".cg") * PACK
    place = tl.load(split_ptr + 2, mask=is_split, other=0, cache_modifier=".cg")
    num_parts = tl.load(split_ptr + 3, mask=is_split, other=0, cache_modifier=".cg")
    if OVERLAPS:  # noqa: SIM102 -- the outer one is decided by the compiler
        if tl.program_id(0) < tl.maximum(num_split, 1):
            tl.extra.cuda.gdc_wait()
    if tl.program_id(1) * ROWS >= num_rows:
        return
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    stride_part = num_heads * TILE_ROWS
    first = place * stride_part + head * TILE_ROWS

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks_ptr + head * PACK + rows % PACK) * _LOG2E
        total = tl.where(largest > float("-inf"), 1.0, 0.0)
    is_dim = (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, num_parts, PARTS):
        for part in tl.static_range(PARTS):
            is_read = (rows < num_rows) & (start + part < num_parts)
            at = first + (start + part) * stride_part + rows
            log = tl.load(logs_ptr + at, mask=is_read, other=float("-inf"))
            value_ptr = parts_ptr + at[:, None] * BLOCK_D + dims[None, :]
            value = tl.load(value_ptr, mask=is_read[:, None] & is_dim, other=0.0)
            new_largest = tl.maximum(largest, log)
            # A row that has seen no key yet stays at -inf: 0 in its place keeps exp2(-inf + inf) from being NaN.
            reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weight = tl.exp2(log - reference)
            decay = tl.exp2(largest - reference)
            total = total * decay + weight
            acc = acc * decay[:, None] + weight[:, None] * value
            largest = new_largest
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    offset = (first_row + rows // PACK).to(tl.int64) * stride_row + (head * PACK + rows % PACK).to(
        tl.int64
    ) * stride_head
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, [8])
    mask = (rows < num_rows)[:, None] & is_dim
    tl.store(out_ptr + offset[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
