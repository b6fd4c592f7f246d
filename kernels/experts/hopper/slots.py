"""The sm_90 kernel of `ordered.py` for one or two tokens: products of single slots in the order "k16".

A slot is one token's visit to one expert. As few slots as these need no sorting: a tile is some rows of one expert's
weights times the one row of its slot. wgmma's M takes the weights, its N of 8 the slot and rows behind it, whose
products are dropped. Tiles are as high as all multiprocessors have one; rows of wgmma's 128 behind a tile's last are
dropped, too. One fp32 accumulator takes 16 columns of the inner dim at a time, as in `few.py` of sorted slots and in
`many.py`, and the results are activated and rounded as there: the bits are the same.

The second product fills its ring with weights while the first one still runs: the experts are known before that one
begins. Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.experts.hopper import slots_tilings
from kernels.experts.hopper.many import activated
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid

BOX = gl.constexpr(slots_tilings.BOX)
PAD = gl.constexpr(slots_tilings.PAD)


@jit
def load_weights(w_desc, w_smem, bar, slot, expert, tile, column, TILING: gl.constexpr):
    """Bring one stage of a tile's units, boxes one below the other."""
    BOXES: gl.constexpr = TILING.boxes
    UNITS: gl.constexpr = TILING.units
    UNIT: gl.constexpr = TILING.unit
    for c in gl.static_range(BOXES):
        for u in gl.static_range(UNITS):
            box = w_smem.index((slot * BOXES + c) * UNITS + u)
            at = column + c * BOX
            if TILING.parts == 2:
                where = [expert, (tile * UNITS + u) * (UNIT // 16), 0, 0, at]
                tma.async_copy_global_to_shared(w_desc, where, bar, box.reshape([1, UNIT // 16, 2, 8, BOX]))
            else:
                where = [expert, (tile * UNITS + u) * UNIT, at]
                tma.async_copy_global_to_shared(w_desc, where, bar, box.reshape([1, UNIT, BOX]))


@jit
def load_inputs(x_desc, x_smem, bar, slot, row, column, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    for c in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(x_desc, [row, column + c * BOX], bar, x_smem.index(slot * BOXES + c))


@jit
def store(acc, out_ptr, bias_ptr, expert, slot, tile, size_out, limit, alpha, TILING: gl.constexpr):
    """Store the first column of acc [rows, 8], the slot's own, activated where TILING.parts is 2."""
    ACTIVATION: gl.constexpr = TILING.activation
    OUT: gl.constexpr = TILING.rows // TILING.parts
    COLUMNS: gl.constexpr = TILING.columns
    if TILING.parts == 2:
        gate, up = gl.split(acc.reshape([OUT // 8, 2, 8, PAD]).permute([0, 2, 3, 1]))
        gate = gate.reshape([OUT, PAD])
        up = up.reshape([OUT, PAD])
        if TILING.has_bias:
            column = tile * COLUMNS + gl.arange(0, OUT, gl.SliceLayout(1, gate.type.layout))
            at = bias_ptr + expert.to(gl.int64) * 2 * size_out + column
            gate += gl.load(at, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
            up += gl.load(at + size_out, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
        out = activated(gate, up, limit, alpha, ACTIVATION)
    else:
        out = acc
        if TILING.has_bias:
            column = tile * COLUMNS + gl.arange(0, OUT, gl.SliceLayout(1, out.type.layout))
            at = bias_ptr + expert.to(gl.int64) * size_out + column
            out += gl.load(at, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
    r = gl.arange(0, OUT, gl.SliceLayout(1, out.type.layout))[:, None]
    row = gl.arange(0, PAD, gl.SliceLayout(0, out.type.layout))[None, :]
    column = tile * COLUMNS + r
    at = out_ptr + slot.to(gl.int64) * size_out + column + row
    is_own = (r < COLUMNS) & (column < size_out)
    gl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_own & (row == 0))


@jit(do_not_specialize=["num_active"])
def hallmark_gluon_experts_slots(
    w_desc, x_desc, out_ptr, bias_ptr, experts_ptr, num_active, size_in, size_out, limit, alpha, TILING: gl.constexpr
):
    """One program: of the first axis a tile of an expert's rows, of the second one a slot.

    gate and up  w_desc [E, width / 8, 2, 8, hidden], x_desc [tokens, hidden]
    down         w_desc [E, hidden, width], x_desc [slots, width] with a num_active of 1
    """
    dtype: gl.constexpr = w_desc.dtype
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    UNITS: gl.constexpr = TILING.units
    UNIT: gl.constexpr = TILING.unit
    ROWS: gl.constexpr = TILING.rows
    STEP: gl.constexpr = BOXES * BOX
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, PAD, 16])
    BYTES: gl.constexpr = (TILING.height + PAD) * STEP * 2
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES * UNITS + TILING.slack, UNIT, BOX], SWIZZLED)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES, PAD, BOX], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    if TILING.parts == 2:
        wait_for_previous_grid()
    launch_next_grid()  # of the first product not before the wait: the second one reads the experts at once

    tile = gl.program_id(0)
    slot = gl.program_id(1)
    expert = gl.load(experts_ptr + slot)
    row = slot // num_active
    num_steps = gl.cdiv(size_in, STEP)
    for s in gl.static_range(STAGES):
        if s < num_steps:
            mbarrier.expect(full.index(s), BYTES)
            load_weights(w_desc, w_smem, full.index(s), s, expert, tile, s * STEP, TILING)
    if TILING.parts == 1:
        wait_for_previous_grid()
    for s in gl.static_range(STAGES):
        if s < num_steps:
            load_inputs(x_desc, x_smem, full.index(s), s, row, s * STEP, TILING)

    acc = gl.zeros([ROWS, PAD], gl.float32, ACC)
    for i in range(num_steps):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        for c in gl.static_range(BOXES):
            w = w_smem.index((stage * BOXES + c) * UNITS)._reinterpret(dtype, [ROWS, BOX], SWIZZLED)
            acc = warpgroup_mma(w, x_smem.index(stage * BOXES + c).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(BOXES, deps=[acc])  # those of the step before
        if (i >= 1) & (i - 1 + STAGES < num_steps):
            free = (i - 1) % STAGES
            gl.thread_barrier()  # every warp has read the stage
            mbarrier.expect(full.index(free), BYTES)
            column = (i - 1 + STAGES) * STEP
            load_weights(w_desc, w_smem, full.index(free), free, expert, tile, column, TILING)
            load_inputs(x_desc, x_smem, full.index(free), free, row, column, TILING)
    acc = warpgroup_mma_wait(0, deps=[acc])
    store(acc, out_ptr, bias_ptr, expert, slot, tile, size_out, limit, alpha, TILING)
