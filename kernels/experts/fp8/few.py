"""The sm_90 kernels of `launch.py` for few rows an expert, at the speed at which memory yields the weights.

One persistent program per multiprocessor, in roles:

  consumers  4 warps each  64 of a tile's 128 rows of weights, which wgmma's M takes; its N are a tile's sorted slots
  producer   4 warps       copies weights by TMA and codes of x into a shared ring: of the first product rows gathered
                           from the tokens by cp.async, of the second one ones that lie together; and scales of blocks,
                           by which consumers would wait for each step of a busy memory if they read them themselves

wgmma sums 128 columns of codes, with less than fp32's bits; these sums are added up in fp32, in blocks each by its
scales. For an activated product a tile holds 8 rows of the gate, the same rows of the up projection, and so on.

With programmatic dependent launch the second product fills its ring with weights while x is still being rounded.
Written in Gluon for Triton 3.6.0.
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

from kernels.experts.fp8 import tilings as fp8_tilings
from kernels.experts.hopper.many import activated
from kernels.hopper.pipeline import hardware_arrive, hardware_sync
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid

STEP = gl.constexpr(fp8_tilings.STEP)
ROWS = gl.constexpr(fp8_tilings.ROWS)
HEIGHT = gl.constexpr(fp8_tilings.HEIGHT)  # rows of weights of a tile
THREADS = gl.constexpr(384)
FREE = gl.constexpr(4)  # hardware barriers from 4 on: stages given back; Triton 3.6 uses 0, 1 and one a partition


@jit
def tile_at(tile, across, table_ptr):
    """(expert, first row, end of rows, index of the tile of columns)."""
    entry = table_ptr + 3 + tile // across * 3
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), tile % across


@jit
def load_weights(w_desc, expert, n, column, box, bar, TILING: gl.constexpr):
    """Bring 128 columns of a tile's rows of weights."""
    ALL: gl.constexpr = TILING.height
    if TILING.parts == 2:
        where = [expert, n * (ALL // 16), 0, 0, column]
        tma.async_copy_global_to_shared(w_desc, where, bar, box.reshape([1, ALL // 16, 2, 8, STEP]))
    else:
        tma.async_copy_global_to_shared(w_desc, [expert, n * ALL, column], bar, box.reshape([1, ALL, STEP]))


@jit
def scales_of_tile(
    scales_ptr, x_scales_ptr, num_active, order_ptr, expert, first, end, n, num_steps, size_out, TILING: gl.constexpr
):
    """Addresses of the scales of a tile's rows of weights and of x [rows], at the first step.

    Of few slots those of each row of weights [128]; of many those of gate and up, or of both blocks of rows, in turn.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    r = gl.arange(0, TILING.num_scales, LINE)
    if TILING.is_many:
        if TILING.parts == 2:
            w_row = (expert * 2 + r % 2) * size_out + n * TILING.columns
        else:
            w_row = expert * size_out + gl.minimum(n * TILING.columns + r % 2 * STEP, size_out - 1)
    elif TILING.parts == 2:
        w_row = (expert * 2 + r // 8 % 2) * size_out + n * (HEIGHT // 2) + r // 16 * 8 + r % 8
    else:
        w_row = expert * size_out + n * HEIGHT + r
    x_row = gl.minimum(first + gl.arange(0, TILING.rows, LINE), end - 1)
    if TILING.gathers:
        x_row = gl.load(order_ptr + x_row) // num_active
    return scales_ptr + w_row // STEP * num_steps, x_scales_ptr + x_row


@jit
def produce(
    w_desc, x_ptr, x_desc, scales_ptr, x_scales_ptr, num_active, num_scaled, order_ptr, table_ptr, across, size_in,
    size_out, smem, TILING: gl.constexpr,
):  # fmt: skip
    """Fill the ring for one tile after the other."""
    STAGES: gl.constexpr = TILING.stages
    PAD: gl.constexpr = TILING.rows
    GATHER: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    BYTES: gl.constexpr = HEIGHT * STEP if TILING.gathers else (HEIGHT + PAD) * STEP
    w_smem, x_smem, w_scales, x_scales, full = smem
    num_steps = size_in // STEP
    total = gl.load(table_ptr) * across
    start = gl.program_id(0)
    if TILING.parts == 1:
        for s in gl.static_range(STAGES):
            tile = start + s // num_steps * gl.num_programs(0)
            if tile < total:
                expert, first, end, n = tile_at(tile, across, table_ptr)
                mbarrier.expect(full.index(s), BYTES)
                load_weights(w_desc, expert, n, s % num_steps * STEP, w_smem.index(s), full.index(s), TILING)
        wait_for_previous_grid()
    fill = 0
    for tile in range(start, total, gl.num_programs(0)):
        expert, first, end, n = tile_at(tile, across, table_ptr)
        if TILING.gathers:
            rows = gl.minimum(first + gl.arange(0, PAD, gl.SliceLayout(1, GATHER)), end - 1)
            tokens = gl.load(order_ptr + rows) // num_active
            column = gl.arange(0, STEP, gl.SliceLayout(0, GATHER))[None, :]
            at = x_ptr + tokens.to(gl.int64)[:, None] * size_in + column
        if TILING.in_blocks:
            w_at, x_at = scales_of_tile(
                scales_ptr, x_scales_ptr, num_active, order_ptr, expert, first, end, n, num_steps, size_out, TILING
            )
        for step in range(num_steps):
            stage = fill % STAGES
            bar = full.index(stage)
            if fill >= STAGES:
                hardware_sync(FREE + stage, THREADS)
            if TILING.parts == 2 or fill >= STAGES:
                mbarrier.expect(bar, BYTES)
                load_weights(w_desc, expert, n, step * STEP, w_smem.index(stage), bar, TILING)
            if TILING.gathers:
                async_copy.async_copy_global_to_shared(x_smem.index(stage), at + step * STEP)
            else:
                tma.async_copy_global_to_shared(x_desc, [first, step * STEP], bar, x_smem.index(stage))
            if TILING.in_blocks:
                async_copy.async_copy_global_to_shared(w_scales.index(stage), w_at + step)
                async_copy.async_copy_global_to_shared(x_scales.index(stage), x_at + step * num_scaled)
            if TILING.gathers or TILING.in_blocks:
                async_copy.mbarrier_arrive(bar, increment_count=False)
            fill += 1
    for i in range(gl.maximum(fill - STAGES, 0), fill):  # no arrival stays behind
        hardware_sync(FREE + i % STAGES, THREADS)
    async_copy.wait_group(0)


@jit
def consume(
    W: gl.constexpr, scales_ptr, x_scales_ptr, out_ptr, num_active, order_ptr, table_ptr, across, size_in, size_out,
    limit, alpha, smem, TILING: gl.constexpr,
):  # fmt: skip
    """One consumer: 64 rows of weights of every tile of this program."""
    STAGES: gl.constexpr = TILING.stages
    PAD: gl.constexpr = TILING.rows
    IN_BLOCKS: gl.constexpr = TILING.in_blocks
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAD, 32])
    w_smem, x_smem, w_scales, x_scales, full = smem
    num_steps = size_in // STEP
    total = gl.load(table_ptr) * across
    if TILING.parts == 1 and not IN_BLOCKS:
        wait_for_previous_grid()  # which wrote the scales of x
    r = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    zeros = gl.zeros([ROWS, PAD], gl.float32, ACC)
    fill = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, end, n = tile_at(tile, across, table_ptr)
        if not IN_BLOCKS:
            if TILING.parts == 2:
                column = n * (HEIGHT // 2) + W * (ROWS // 2) + r // 16 * 8 + r % 8
                w_row = (expert * 2 + r // 8 % 2) * size_out + column
            else:
                w_row = expert * size_out + n * HEIGHT + W * ROWS + r
            x_row = gl.minimum(first + gl.arange(0, PAD, gl.SliceLayout(0, ACC)), end - 1)
            if TILING.gathers:
                x_row = gl.load(order_ptr + x_row) // num_active
            w_scale = gl.load(scales_ptr + w_row)
            x_scale = gl.load(x_scales_ptr + x_row)
        sums = zeros
        for _ in range(num_steps):
            stage = fill % STAGES
            mbarrier.wait(full.index(stage), (fill // STAGES) & 1)
            if TILING.gathers:
                fence_async_shared()
            w = w_smem.index(stage).slice(W * ROWS, ROWS, dim=0)
            part = warpgroup_mma(w, x_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            if IN_BLOCKS:
                w_scale = w_scales.index(stage).slice(W * ROWS, ROWS, dim=0).load(gl.SliceLayout(1, ACC))
                x_scale = x_scales.index(stage).load(gl.SliceLayout(0, ACC))
            part = warpgroup_mma_wait(0, deps=[part])
            hardware_arrive(FREE + stage, THREADS)
            if IN_BLOCKS:
                sums += part * (w_scale[:, None] * x_scale[None, :])
            else:
                sums += part
            fill += 1
        if not IN_BLOCKS:
            sums *= w_scale[:, None] * x_scale[None, :]
        store_rows(W, sums, out_ptr, order_ptr, first, end, n, size_out, limit, alpha, TILING)


@jit
def store_rows(W: gl.constexpr, sums, out_ptr, order_ptr, first, end, n, size_out, limit, alpha, TILING: gl.constexpr):
    """A consumer's part of a tile of sorted slots, [64, rows] as wgmma leaves it."""
    ACTIVATION: gl.constexpr = TILING.activation
    PAD: gl.constexpr = TILING.rows
    OUT: gl.constexpr = ROWS // TILING.parts
    if TILING.parts == 2:
        gate, up = gl.split(sums.reshape([4, 2, 8, PAD]).permute([0, 2, 3, 1]))
        out = activated(gate.reshape([OUT, PAD]), up.reshape([OUT, PAD]), limit, alpha, ACTIVATION)
    else:
        out = sums
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [OUT // 8, 256 // OUT], [1, 4], [0, 1])
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), STORED)
    column = n * (HEIGHT // TILING.parts) + W * OUT + gl.arange(0, OUT, gl.SliceLayout(1, STORED))[:, None]
    rows = first + gl.arange(0, PAD, gl.SliceLayout(0, STORED))
    to = rows
    if TILING.parts == 1:
        to = gl.load(order_ptr + rows, mask=rows < end, other=0)
    at = out_ptr + to.to(gl.int64)[None, :] * size_out + column
    gl.store(at, out, mask=(rows < end)[None, :])


@jit
def ring(dtype: gl.constexpr, TILING: gl.constexpr):
    """Shared memory: stages of weights, of rows, and the barriers that say a stage is full."""
    STAGES: gl.constexpr = TILING.stages
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, TILING.height, STEP], SWIZZLED)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, TILING.rows, STEP], SWIZZLED)
    if TILING.in_blocks:
        w_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TILING.num_scales], LINE)
        x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TILING.rows], LINE)
    else:  # never allocate what no role uses: Triton would lay it over the others
        w_scales = w_smem
        x_scales = x_smem
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        # A stage with copies of cp.async is full when each of the producer's threads says so too.
        mbarrier.init(full.index(s), count=129 if TILING.gathers or TILING.in_blocks else 1)
    return w_smem, x_smem, w_scales, x_scales, full


@jit(do_not_specialize=["num_active", "num_scaled", "across"])
def hallmark_gluon_experts_fp8_few_gate_up(
    w_desc, x_ptr, scales_ptr, x_scales_ptr, out_ptr, order_ptr, table_ptr, num_active, num_scaled, across, size_in,
    size_out, limit, alpha, TILING: gl.constexpr,
):  # fmt: skip
    """activation(gate) * up of the tokens' rows, in the order of rows.

    w_desc [E, width / 8, 2, 8, hidden], scales of its rows or blocks; x [tokens, hidden], its scales [.., num_scaled].
    """
    smem = ring(w_desc.dtype, TILING)
    wait_for_previous_grid()
    launch_next_grid()  # not before the wait: what is launched reads the table at once
    gl.warp_specialize([
        (consume, (0, scales_ptr, x_scales_ptr, out_ptr, num_active, order_ptr, table_ptr, across, size_in, size_out,
                   limit, alpha, smem, TILING)),
        (consume, (1, scales_ptr, x_scales_ptr, out_ptr, num_active, order_ptr, table_ptr, across, size_in, size_out,
                   limit, alpha, smem, TILING)),
        (produce, (w_desc, x_ptr, 0, scales_ptr, x_scales_ptr, num_active, num_scaled, order_ptr, table_ptr, across,
                   size_in, size_out, smem, TILING)),
    ], [4, 4], [168, 96])  # fmt: skip


@jit(do_not_specialize=["num_scaled", "across"])
def hallmark_gluon_experts_fp8_few_down(
    w_desc, x_desc, scales_ptr, x_scales_ptr, out_ptr, order_ptr, table_ptr, num_scaled, across, size_in, size_out,
    TILING: gl.constexpr,
):  # fmt: skip
    """Products of the rows x, stored at the rows' slots. w_desc [E, hidden, width], x_desc [slots, width]."""
    smem = ring(w_desc.dtype, TILING)
    launch_next_grid()
    gl.warp_specialize([
        (consume, (0, scales_ptr, x_scales_ptr, out_ptr, 1, order_ptr, table_ptr, across, size_in, size_out, 0.0, 0.0,
                   smem, TILING)),
        (consume, (1, scales_ptr, x_scales_ptr, out_ptr, 1, order_ptr, table_ptr, across, size_in, size_out, 0.0, 0.0,
                   smem, TILING)),
        (produce, (w_desc, 0, x_desc, scales_ptr, x_scales_ptr, 1, num_scaled, order_ptr, table_ptr, across, size_in,
                   size_out, smem, TILING)),
    ], [4, 4], [168, 96])  # fmt: skip
