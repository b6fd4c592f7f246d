"""The sm_90 kernels of `launch.py` for few rows an expert, at the speed at which memory yields the weights.

Programs, roles and the ring are those of hopper.py, with the operands' sides changed: wgmma's M of 64 takes the
weights, its N the few rows of x. A tile is 128 rows of an expert's weights and up to `pad` sorted slots. Of very few
tokens a tile is one slot, which needs no sorting, and 64 rows of which each fourth of the inner dim ("folds") gives 16:
finer tiles keep all multiprocessors busy. The products of one fold's weights with another fold's x are dropped.

With programmatic dependent launch the second product fills its ring with weights while the first one still runs: the
experts are known before that one begins. Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.experts.hopper import tilings as hopper_tilings
from kernels.experts.hopper.many import activated
from kernels.hopper.pipeline import hardware_arrive, hardware_sync
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid

BOX = gl.constexpr(hopper_tilings.STEP)  # columns, and rows of a consumer
FREE = gl.constexpr(4)  # hardware barriers from 4 on: stages given back; Triton 3.6 uses 0, 1 and one a partition


@jit
def tile_at(tile, across, table_ptr, TILING: gl.constexpr):
    """(expert, first row, end of rows, index of the tile of columns). Unsorted: a slot is a row, table its experts."""
    m = tile // across
    if TILING.folds == 1:
        entry = table_ptr + 3 + m * 3
        expert = gl.load(entry)
        first = gl.load(entry + 1)
        end = gl.load(entry + 2)
    else:
        expert = gl.load(table_ptr + m)
        first = m
        end = m + 1
    return expert, first, end, tile % across


@jit
def num_tiles(table_ptr, num_slots, across, TILING: gl.constexpr):
    if TILING.folds == 1:
        count = gl.load(table_ptr)
    else:
        count = num_slots
    return count * across


@jit
def load_weights(w_desc, expert, n, column, w_smem, bar, stage, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    ROWS: gl.constexpr = TILING.rows
    PAIRS: gl.constexpr = [1, ROWS // 8, 2, 8, BOX]
    PLAIN: gl.constexpr = [1, ROWS, BOX]
    FOLDED_PAIRS: gl.constexpr = [1, TILING.folds, 2, ROWS, BOX]
    FOLDED: gl.constexpr = [1, TILING.folds, ROWS, BOX]
    for c in gl.static_range(BOXES):
        box = w_smem.index(stage * BOXES + c)
        at = column + c * BOX
        if TILING.folds == 1:
            if TILING.parts == 2:
                tma.async_copy_global_to_shared(w_desc, [expert, n * (ROWS // 8), 0, 0, at], bar, box.reshape(PAIRS))
            else:
                tma.async_copy_global_to_shared(w_desc, [expert, n * ROWS, at], bar, box.reshape(PLAIN))
        elif TILING.parts == 2:
            tma.async_copy_global_to_shared(w_desc, [expert, 0, 0, n * ROWS, at], bar, box.reshape(FOLDED_PAIRS))
        else:
            tma.async_copy_global_to_shared(w_desc, [expert, 0, n * ROWS, at], bar, box.reshape(FOLDED))


@jit
def produce(
    w_desc, x_ptr, x_desc, stride_x, num_active, num_slots, order_ptr, table_ptr, across, size_in, smem,
    TILING: gl.constexpr,
):  # fmt: skip
    """Fill the ring for one tile after the other."""
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    STEP: gl.constexpr = BOXES * BOX
    PAD: gl.constexpr = TILING.pad
    THREADS: gl.constexpr = TILING.consumers * 128 + 128
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    W_BYTES: gl.constexpr = TILING.consumers * BOX * STEP * 2
    BYTES: gl.constexpr = W_BYTES if TILING.gathers else W_BYTES + TILING.columns * STEP * 2
    FOLDED: gl.constexpr = [PAD, TILING.folds, BOX]
    w_smem, x_smem, full = smem
    num_steps = gl.cdiv(size_in // TILING.folds, STEP)
    total = num_tiles(table_ptr, num_slots, across, TILING)
    start = gl.program_id(0)
    if TILING.parts == 1:
        for s in gl.static_range(STAGES):
            tile = start + s // num_steps * gl.num_programs(0)
            if tile < total:
                expert, first, end, n = tile_at(tile, across, table_ptr, TILING)
                mbarrier.expect(full.index(s), BYTES)
                load_weights(w_desc, expert, n, s % num_steps * STEP, w_smem, full.index(s), s, TILING)
        wait_for_previous_grid()
    fill = 0
    for tile in range(start, total, gl.num_programs(0)):
        expert, first, end, n = tile_at(tile, across, table_ptr, TILING)
        if TILING.gathers:
            rows = gl.minimum(first + gl.arange(0, PAD, gl.SliceLayout(1, GATHER)), end - 1)
            tokens = gl.load(order_ptr + rows) // num_active
            column = gl.arange(0, BOX, gl.SliceLayout(0, GATHER))[None, :]
            at = x_ptr + tokens.to(gl.int64)[:, None] * stride_x + column
        for step in range(num_steps):
            stage = fill % STAGES
            bar = full.index(stage)
            if fill >= STAGES:
                hardware_sync(FREE + stage, THREADS)
            if TILING.parts == 2 or fill >= STAGES:
                mbarrier.expect(bar, BYTES)
                load_weights(w_desc, expert, n, step * STEP, w_smem, bar, stage, TILING)
            for c in gl.static_range(BOXES):
                inputs = step * STEP + c * BOX
                if TILING.gathers:
                    box = x_smem.index(stage * BOXES + c)
                    if TILING.is_even:
                        async_copy.async_copy_global_to_shared(box, at + inputs)
                    else:
                        async_copy.async_copy_global_to_shared(box, at + inputs, mask=inputs + column < size_in)
                elif TILING.folds == 1:
                    tma.async_copy_global_to_shared(x_desc, [first, inputs], bar, x_smem.index(stage * BOXES + c))
                else:
                    box = x_smem.index(stage * BOXES + c).reshape(FOLDED)
                    tma.async_copy_global_to_shared(x_desc, [first // num_active, 0, inputs], bar, box)
            if TILING.gathers:
                async_copy.mbarrier_arrive(bar, increment_count=False)
            fill += 1
    for i in range(gl.maximum(fill - STAGES, 0), fill):  # no arrival stays behind
        hardware_sync(FREE + i % STAGES, THREADS)
    async_copy.wait_group(0)


@jit
def consume(
    W: gl.constexpr, bias_ptr, out_ptr, num_slots, order_ptr, table_ptr, across, size_in, size_out, limit, alpha, smem,
    TILING: gl.constexpr,
):  # fmt: skip
    """One consumer: 64 rows of weights of every tile of this program."""
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    COLUMNS: gl.constexpr = TILING.columns
    THREADS: gl.constexpr = TILING.consumers * 128 + 128
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    w_smem, x_smem, full = smem
    num_steps = gl.cdiv(size_in // TILING.folds, BOXES * BOX)
    total = num_tiles(table_ptr, num_slots, across, TILING)
    fill = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, end, n = tile_at(tile, across, table_ptr, TILING)
        acc = gl.zeros([BOX, COLUMNS], gl.float32, ACC)
        for step in range(num_steps):
            stage = fill % STAGES
            mbarrier.wait(full.index(stage), (fill // STAGES) & 1)
            if TILING.gathers:
                fence_async_shared()
            for c in gl.static_range(BOXES):
                w = w_smem.index(stage * BOXES + c).slice(W * BOX, BOX, dim=0)
                x = x_smem.index(stage * BOXES + c).permute((1, 0))
                acc = warpgroup_mma(w, x, acc, is_async=True)
            acc = warpgroup_mma_wait(BOXES, deps=[acc])  # those of the step before
            if step > 0:
                hardware_arrive(FREE + (fill - 1) % STAGES, THREADS)
            fill += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        hardware_arrive(FREE + (fill - 1) % STAGES, THREADS)
        if TILING.folds == 1:
            store_rows(W, acc, bias_ptr, out_ptr, order_ptr, expert, first, end, n, size_out, limit, alpha, TILING)
        else:
            store_slot(acc, bias_ptr, out_ptr, expert, first, n, size_out, limit, alpha, TILING)


@jit
def store_rows(
    W: gl.constexpr, acc, bias_ptr, out_ptr, order_ptr, expert, first, end, n, size_out, limit, alpha,
    TILING: gl.constexpr,
):  # fmt: skip
    """A consumer's part of a tile of sorted slots, [64, pad] as wgmma leaves it."""
    ACTIVATION: gl.constexpr = TILING.activation
    PAD: gl.constexpr = TILING.pad
    OUT: gl.constexpr = BOX // TILING.parts
    if TILING.parts == 2:
        gate, up = gl.split(acc.reshape([4, 2, 8, PAD]).permute([0, 2, 3, 1]))
        gate = gate.reshape([OUT, PAD])
        up = up.reshape([OUT, PAD])
        if TILING.has_bias:
            column = n * TILING.rows + W * OUT + gl.arange(0, OUT, gl.SliceLayout(1, gate.type.layout))
            at = bias_ptr + expert.to(gl.int64) * 2 * size_out + column
            gate += gl.load(at, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
            up += gl.load(at + size_out, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
        out = activated(gate, up, limit, alpha, ACTIVATION)
    else:
        out = acc
        if TILING.has_bias:
            column = n * TILING.rows + W * OUT + gl.arange(0, OUT, gl.SliceLayout(1, out.type.layout))
            at = bias_ptr + expert.to(gl.int64) * size_out + column
            out += gl.load(at, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [OUT // 8, 256 // OUT], [1, 4], [0, 1])
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), STORED)
    column = n * TILING.rows + W * OUT + gl.arange(0, OUT, gl.SliceLayout(1, STORED))[:, None]
    rows = first + gl.arange(0, PAD, gl.SliceLayout(0, STORED))
    to = rows
    if TILING.parts == 1:
        to = gl.load(order_ptr + rows, mask=rows < end, other=0)
    at = out_ptr + to.to(gl.int64)[None, :] * size_out + column
    gl.store(at, out, mask=(rows < end)[None, :] & (column < size_out))


@jit
def store_slot(acc, bias_ptr, out_ptr, expert, slot, n, size_out, limit, alpha, TILING: gl.constexpr):
    """A tile of one slot, [64, folds * pad]: each fold's own product with the slot's x, summed over folds."""
    ACTIVATION: gl.constexpr = TILING.activation
    FOLDS: gl.constexpr = TILING.folds
    ROWS: gl.constexpr = TILING.rows
    of_row = gl.arange(0, BOX, gl.SliceLayout(1, acc.type.layout)) // (BOX // FOLDS)
    of_column = gl.arange(0, TILING.columns, gl.SliceLayout(0, acc.type.layout))
    own = gl.where(of_row[:, None] == of_column[None, :], acc, 0.0)  # selects: what is dropped may be NaN
    sums = gl.sum(gl.sum(own, axis=1).reshape([FOLDS, BOX // FOLDS]), axis=0)
    if TILING.parts == 2:
        HALVES: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])
        gate, up = gl.split(gl.convert_layout(sums.reshape([2, ROWS]).permute([1, 0]), HALVES))
        column = n * ROWS + gl.arange(0, ROWS, gate.type.layout)
        if TILING.has_bias:
            at = bias_ptr + expert.to(gl.int64) * 2 * size_out + column
            gate += gl.load(at, mask=column < size_out, other=0.0).to(gl.float32)
            up += gl.load(at + size_out, mask=column < size_out, other=0.0).to(gl.float32)
        out = activated(gate, up, limit, alpha, ACTIVATION)
    else:
        out = gl.convert_layout(sums, gl.BlockedLayout([1], [32], [4], [0]))
        column = n * ROWS + gl.arange(0, ROWS, out.type.layout)
        if TILING.has_bias:
            at = bias_ptr + expert.to(gl.int64) * size_out + column
            out += gl.load(at, mask=column < size_out, other=0.0).to(gl.float32)
    at = out_ptr + slot.to(gl.int64) * size_out + column
    gl.store(at, out.to(out_ptr.dtype.element_ty), mask=column < size_out)


@jit
def ring(dtype: gl.constexpr, TILING: gl.constexpr):
    STAGES: gl.constexpr = TILING.stages
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * TILING.boxes, TILING.consumers * BOX, BOX], SWIZZLED)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * TILING.boxes, TILING.columns, BOX], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=129 if TILING.gathers else 1)
    return w_smem, x_smem, full


@jit
def roles(
    w_desc, x_ptr, x_desc, out_ptr, bias_ptr, order_ptr, table_ptr, stride_x, num_active, num_slots, across, size_in,
    size_out, limit, alpha, TILING: gl.constexpr,
):  # fmt: skip
    smem = ring(w_desc.dtype, TILING)
    if TILING.parts == 2:
        wait_for_previous_grid()
    launch_next_grid()  # of the first product not before the wait: the second one reads the experts at once
    if TILING.consumers == 2:
        gl.warp_specialize([
            (consume, (0, bias_ptr, out_ptr, num_slots, order_ptr, table_ptr, across, size_in, size_out, limit, alpha,
                       smem, TILING)),
            (consume, (1, bias_ptr, out_ptr, num_slots, order_ptr, table_ptr, across, size_in, size_out, limit, alpha,
                       smem, TILING)),
            (produce, (w_desc, x_ptr, x_desc, stride_x, num_active, num_slots, order_ptr, table_ptr, across, size_in,
                       smem, TILING)),
        ], [4, 4], [168, 96])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, bias_ptr, out_ptr, num_slots, order_ptr, table_ptr, across, size_in, size_out, limit, alpha,
                       smem, TILING)),
            (produce, (w_desc, x_ptr, x_desc, stride_x, num_active, num_slots, order_ptr, table_ptr, across, size_in,
                       smem, TILING)),
        ], [4], [128])  # fmt: skip


@jit(do_not_specialize=["num_active", "num_slots", "across"])
def hallmark_gluon_experts_few_gathered(
    w_desc, x_ptr, out_ptr, bias_ptr, order_ptr, table_ptr, stride_x, num_active, num_slots, across, size_in, size_out,
    limit, alpha, TILING: gl.constexpr,
):  # fmt: skip
    """activation(gate) * up of the tokens' rows, in the order of rows. w_desc [E, width / 8, 2, 8, hidden]."""
    roles(
        w_desc, x_ptr, 0, out_ptr, bias_ptr, order_ptr, table_ptr, stride_x, num_active, num_slots, across, size_in,
        size_out, limit, alpha, TILING,
    )  # fmt: skip


@jit(do_not_specialize=["num_active", "num_slots", "across"])
def hallmark_gluon_experts_few(
    w_desc, x_desc, out_ptr, bias_ptr, order_ptr, table_ptr, num_active, num_slots, across, size_in, size_out, limit,
    alpha, TILING: gl.constexpr,
):  # fmt: skip
    """A product whose rows lie together, or are one slot's.

    sorted    the second one. w_desc [E, hidden, width], x_desc [slots, width]
    unsorted  w_desc [E, folds, 2, width, hidden / folds] and x_desc [tokens, folds, hidden / folds], or
              [E, folds, hidden, width / folds] and [slots, folds, width / folds] with a num_active of 1; table: experts
    """
    roles(
        w_desc, 0, x_desc, out_ptr, bias_ptr, order_ptr, table_ptr, 0, num_active, num_slots, across, size_in,
        size_out, limit, alpha, TILING,
    )  # fmt: skip
