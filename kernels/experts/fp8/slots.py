"""The sm_90 kernel of `launch.py` for one or two tokens: products of single slots, whose x each program rounds itself.

A slot is one token's visit to one expert. As few slots as these need no sorting: a tile is some rows of one expert's
weights times the one row of its slot. wgmma's M takes the weights, its N of 8 the slot and rows behind it, whose
products are dropped. Tiles are as high as all multiprocessors have one; rows of wgmma's 128 behind a tile's last are
dropped, too. While the first weights arrive the row is rounded to 8 bits, so that no launch does that alone.

The second product fills its ring with weights while the first one still runs: the experts are known before that one
begins. Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.experts.fp8 import tilings as fp8_tilings
from kernels.experts.hopper.many import activated
from kernels.linear.formats import fp8_weights
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid

STEP = gl.constexpr(fp8_tilings.STEP)
PAD = gl.constexpr(fp8_tilings.PAD)
LARGEST = gl.constexpr(fp8_weights.LARGEST)
LEAST_SCALE = gl.constexpr(fp8_weights.LEAST_SCALE)
LEAST_NORMAL = gl.constexpr(2.0**-6)  # of e4m3: below, numbers are as far apart as there
# A sum with 1.5 * 2^20 times the power of two below a number is rounded where e4m3 rounds that number.
ROUNDING = gl.constexpr(1.5 * 2.0**20)


@jit
def scale_of(largest):
    """The scale by which a largest magnitude becomes 448; of NaN NaN."""
    scale = gl.div_rn(largest, gl.full_like(largest, LARGEST))
    return gl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)


@jit
def rounded(x, scale):
    """The numbers e4m3 nearest to x / scale, those beyond 448 cut off; compare `fp8_inputs.rounded`."""
    values = gl.div_rn(x, scale)
    values = gl.where(values > LARGEST, LARGEST, values)  # NaN stays
    values = gl.where(values < -LARGEST, -LARGEST, values)
    power = (values.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    by = gl.maximum(power, LEAST_NORMAL) * ROUNDING
    return ((values + by) - by).to(gl.float8e4nv)


@jit
def round_inputs(x_at, size_in, x_smem, scales_smem, dtype: gl.constexpr, TILING: gl.constexpr):
    """Round a row into the first of the 8 rows of each of x's boxes. Returns its scale; in blocks it writes them."""
    STEPS: gl.constexpr = TILING.steps
    WARPS: gl.constexpr = TILING.groups * 4
    READ: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    step = gl.arange(0, STEPS, gl.SliceLayout(1, READ))
    columns = step[:, None] * STEP + gl.arange(0, STEP, gl.SliceLayout(0, READ))[None, :]
    x = gl.load(x_at + columns, mask=columns < size_in, other=0.0).to(gl.float32)
    is_nan = gl.max((x != x).to(gl.int32), axis=1)  # noqa: PLR0124 -- true of NaN alone
    largest = gl.where(is_nan > 0, float("nan"), gl.max(gl.abs(x), axis=1))
    whole = 1.0
    if TILING.in_blocks:
        scales = scale_of(largest)
        scales_smem._reinterpret(gl.float32, [STEPS], LINE).store(scales)
    else:
        all_nan = gl.max((largest != largest).to(gl.int32), axis=0)  # noqa: PLR0124
        of_row = gl.where(all_nan > 0, float("nan"), gl.max(largest, axis=0))
        scales = scale_of(gl.zeros_like(largest) + of_row)
        whole = gl.max(scales, axis=0)
        whole = gl.where(all_nan > 0, float("nan"), whole)
    codes = rounded(x, scales[:, None] + gl.zeros_like(x))
    # The first row of a box is the one that 128-byte swizzling leaves in place.
    x_smem._reinterpret(dtype, [STEPS, PAD * STEP], FLAT).slice(0, STEP, dim=1).store(codes)
    return whole


@jit
def load_weights(w_desc, w_smem, bar, stage, expert, tile, column, TILING: gl.constexpr):
    """Bring one stage of a tile's units, boxes one below the other."""
    UNITS: gl.constexpr = TILING.units
    UNIT: gl.constexpr = TILING.unit
    for u in gl.static_range(UNITS):
        box = w_smem.index(stage * UNITS + u)
        if TILING.parts == 2:
            where = [expert, (tile * UNITS + u) * (UNIT // 16), 0, 0, column]
            tma.async_copy_global_to_shared(w_desc, where, bar, box.reshape([1, UNIT // 16, 2, 8, STEP]))
        else:
            where = [expert, (tile * UNITS + u) * UNIT, column]
            tma.async_copy_global_to_shared(w_desc, where, bar, box.reshape([1, UNIT, STEP]))


@jit
def store(sums, out_ptr, slot, tile, size_out, limit, alpha, TILING: gl.constexpr):
    """Store the first column of sums [rows, 8], the slot's own, activated where TILING.parts is 2."""
    ACTIVATION: gl.constexpr = TILING.activation
    OUT: gl.constexpr = TILING.rows // TILING.parts
    COLUMNS: gl.constexpr = TILING.columns
    if TILING.parts == 2:
        gate, up = gl.split(sums.reshape([OUT // 8, 2, 8, PAD]).permute([0, 2, 3, 1]))
        out = activated(gate.reshape([OUT, PAD]), up.reshape([OUT, PAD]), limit, alpha, ACTIVATION)
    else:
        out = sums
    r = gl.arange(0, OUT, gl.SliceLayout(1, out.type.layout))[:, None]
    row = gl.arange(0, PAD, gl.SliceLayout(0, out.type.layout))[None, :]
    column = tile * COLUMNS + r
    at = out_ptr + slot.to(gl.int64) * size_out + column + row
    is_own = (r < COLUMNS) & (column < size_out)
    gl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_own & (row == 0))


@jit(do_not_specialize=["num_active"])
def hallmark_gluon_experts_fp8_slots(
    w_desc, x_ptr, scales_ptr, out_ptr, experts_ptr, stride_x, num_active, size_in, size_out, limit, alpha,
    TILING: gl.constexpr,
):  # fmt: skip
    """One program: of the first axis a tile of an expert's rows, of the second one a slot.

    gate and up  w_desc [E, width / 8, 2, 8, hidden], x [tokens, hidden] of 16 bits
    down         w_desc [E, hidden, width], x [slots, width] of 16 bits, with a num_active of 1
    scales       of w's rows, or of its blocks
    """
    dtype: gl.constexpr = w_desc.dtype
    STAGES: gl.constexpr = TILING.stages
    UNITS: gl.constexpr = TILING.units
    UNIT: gl.constexpr = TILING.unit
    ROWS: gl.constexpr = TILING.rows
    IN_BLOCKS: gl.constexpr = TILING.in_blocks
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [TILING.groups * 4], [0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, PAD, 32])
    BYTES: gl.constexpr = TILING.height * STEP
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * UNITS + TILING.slack, UNIT, STEP], SWIZZLED)
    x_smem = gl.allocate_shared_memory(dtype, [TILING.steps, PAD, STEP], SWIZZLED)
    scales_smem = gl.allocate_shared_memory(gl.float32, [TILING.steps, 1], LINE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    if TILING.parts == 2:
        wait_for_previous_grid()
    launch_next_grid()  # of the first product not before the wait: the second one reads the experts at once

    tile = gl.program_id(0)
    slot = gl.program_id(1)
    expert = gl.load(experts_ptr + slot)
    num_steps = size_in // STEP
    for s in gl.static_range(STAGES):
        if s < num_steps:
            mbarrier.expect(full.index(s), BYTES)
            load_weights(w_desc, w_smem, full.index(s), s, expert, tile, s * STEP, TILING)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    if TILING.parts == 2:
        column = tile * TILING.columns + r // 16 * 8 + r % 8
        w_row = (expert * 2 + r // 8 % 2) * size_out + gl.minimum(column, size_out - 1)
    else:
        w_row = expert * size_out + gl.minimum(tile * TILING.columns + r, size_out - 1)
    if IN_BLOCKS:
        w_row = w_row // STEP * num_steps
    w_at = scales_ptr + w_row
    w_scale = gl.load(w_at)
    if TILING.parts == 1:
        wait_for_previous_grid()
    x_at = x_ptr + (slot // num_active).to(gl.int64) * stride_x
    x_scale = round_inputs(x_at, size_in, x_smem, scales_smem, dtype, TILING)
    fence_async_shared()
    gl.thread_barrier()

    zeros = gl.zeros([ROWS, PAD], gl.float32, ACC)
    sums = zeros
    for i in range(num_steps):
        stage = i % STAGES
        if IN_BLOCKS:
            next_w_scale = gl.load(w_at + gl.minimum(i + 1, num_steps - 1))
            x_scale = gl.sum(scales_smem.index(i).load(ONE), axis=0)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        w = w_smem.index(stage * UNITS)._reinterpret(dtype, [ROWS, STEP], SWIZZLED)
        part = warpgroup_mma(w, x_smem.index(i).permute((1, 0)), zeros, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        if i + STAGES < num_steps:
            gl.thread_barrier()  # every warp has read the stage
            mbarrier.expect(full.index(stage), BYTES)
            load_weights(w_desc, w_smem, full.index(stage), stage, expert, tile, (i + STAGES) * STEP, TILING)
        if IN_BLOCKS:
            sums += part * (w_scale * x_scale)[:, None]
            w_scale = next_w_scale
        else:
            sums += part
    if not IN_BLOCKS:
        sums *= (w_scale * x_scale)[:, None]
    store(sums, out_ptr, slot, tile, size_out, limit, alpha, TILING)
