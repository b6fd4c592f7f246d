"""The sm_90 kernels of `launch.py` for many rows an expert: rows by wgmma's M, weights by its N.

Roles and the ring are those of few.py, tiles 128 rows of x by 256 of weights: smaller ones would wait for L2. A
consumer multiplies 64 rows of x by a half of a step's weights, adds what wgmma summed of 128 columns to its sums in
fp32 while the other one multiplies, and then does the other half: 128 sums and 64 numbers of wgmma's in a thread.

In blocks, a tile of gate and up is a whole run of 128 of each row's inputs of the second product, and is stored as
that is rounded. Written in Gluon for Triton 3.6.0.
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

from kernels.experts.fp8.few import ROWS, STEP, THREADS, load_weights, ring, scales_of_tile
from kernels.experts.fp8.slots import rounded, scale_of
from kernels.experts.hopper.many import activated, place_of
from kernels.hopper.pipeline import hardware_arrive, hardware_sync
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid

FREE = gl.constexpr(9)  # hardware barriers from 9 on: stages given back; Triton 3.6 uses 0, 1 and one a partition
HALF = gl.constexpr(128)  # rows of weights that are multiplied at once
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # halves of rows of 128 bytes
STORED_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
STORED_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))


@jit
def produce(
    w_desc, x_ptr, x_desc, scales_ptr, x_scales_ptr, num_active, num_scaled, order_ptr, table_ptr, across, size_in,
    size_out, smem, TILING: gl.constexpr,
):  # fmt: skip
    """Fill the ring for one tile after the other."""
    STAGES: gl.constexpr = TILING.stages
    TILE: gl.constexpr = TILING.rows
    GATHER: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    BYTES: gl.constexpr = TILING.height * STEP if TILING.gathers else (TILING.height + TILE) * STEP
    w_smem, x_smem, w_scales, x_scales, full = smem
    num_rows = gl.load(table_ptr)
    num_steps = size_in // STEP
    fill = 0
    for tile in range(gl.program_id(0), num_rows * across, gl.num_programs(0)):
        m, n = place_of(tile, num_rows, across, TILING)
        entry = table_ptr + 3 + m * 3
        expert = gl.load(entry)
        first = gl.load(entry + 1)
        last = gl.load(entry + 2) - 1
        if TILING.gathers:
            rows = gl.minimum(first + gl.arange(0, TILE, gl.SliceLayout(1, GATHER)), last)
            tokens = gl.load(order_ptr + rows) // num_active
            at = x_ptr + tokens.to(gl.int64)[:, None] * size_in + gl.arange(0, STEP, gl.SliceLayout(0, GATHER))[None, :]
        if TILING.in_blocks:
            w_at, x_at = scales_of_tile(
                scales_ptr, x_scales_ptr, num_active, order_ptr, expert, first, last + 1, n, num_steps, size_out, TILING
            )
        for step in range(num_steps):
            stage = fill % STAGES
            if fill >= STAGES:
                hardware_sync(FREE + stage, THREADS)
            bar = full.index(stage)
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
def scaled(part, x_scale, first, second, H: gl.constexpr, PARTS: gl.constexpr):
    """One half of a tile, wgmma's sums of 128 columns, by its scales: of gate and up in turn, or of its block."""
    if PARTS == 2:
        c = gl.arange(0, HALF, gl.SliceLayout(0, part.type.layout))
        of_gate = (x_scale * first)[:, None]
        of_up = (x_scale * second)[:, None]
        return part * gl.where((c // 8 % 2 == 0)[None, :], of_gate, of_up)
    if H == 0:
        return part * (x_scale * first)[:, None]
    return part * (x_scale * second)[:, None]


@jit
def by_rows(sums, x_scale, scales_ptr, expert, n, size_out, H: gl.constexpr, TILING: gl.constexpr):
    """One half of a tile by the scales of its rows of weights and of x."""
    c = gl.arange(0, HALF, gl.SliceLayout(0, sums.type.layout))
    if TILING.parts == 2:
        w_row = (expert * 2 + c // 8 % 2) * size_out + n * TILING.columns + H * (HALF // 2) + c // 16 * 8 + c % 8
    else:
        w_row = expert * size_out + gl.minimum(n * TILING.columns + H * HALF + c, size_out - 1)
    return sums * (x_scale[:, None] * gl.load(scales_ptr + w_row)[None, :])


@jit
def gated(sums, limit, alpha, ACTIVATION: gl.constexpr):
    """activation(gate) * up of one half of a tile, [64, 64]."""
    gate, up = gl.split(sums.reshape([ROWS, HALF // 16, 2, 8]).permute([0, 1, 3, 2]))
    return activated(gate.reshape([ROWS, HALF // 2]), up.reshape([ROWS, HALF // 2]), limit, alpha, ACTIVATION)


@jit
def largest_in(x):
    """The largest magnitude of each row, NaN where one is."""
    has_nan = gl.max((x != x).to(gl.int32), axis=1)  # noqa: PLR0124 -- true of NaN alone
    return gl.where(has_nan > 0, float("nan"), gl.max(gl.abs(x), axis=1))


@jit
def larger(a, b):
    """The larger of each two, NaN where one is."""
    return gl.where((a > b) | (a != a), a, b)  # noqa: PLR0124


@jit
def store_codes(x, scale, codes_ptr, rows_from, end, first, size_out):
    """Store [64, 64] rounded, from column `first` on."""
    codes = rounded(x, scale[:, None] + gl.zeros_like(x))
    codes = gl.convert_layout(codes, STORED_CODES)
    rows = rows_from + gl.arange(0, ROWS, gl.SliceLayout(1, STORED_CODES))
    column = first + gl.arange(0, HALF // 2, gl.SliceLayout(0, STORED_CODES))
    at = codes_ptr + rows.to(gl.int64)[:, None] * size_out + column[None, :]
    gl.store(at, codes, mask=(rows < end)[:, None])


@jit
def store_half(out, out_ptr, order_ptr, rows_from, end, first, size_out, TILING: gl.constexpr):
    """Store one half of a tile, from column `first` on: in the order of rows, or of the second product at its slots."""
    WIDTH: gl.constexpr = HALF // TILING.parts
    TO: gl.constexpr = STORED if TILING.parts == 2 else STORED_WIDE
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), TO)
    rows = rows_from + gl.arange(0, ROWS, gl.SliceLayout(1, TO))
    to = rows
    if not TILING.gathers:
        to = gl.load(order_ptr + rows, mask=rows < end, other=0)
    column = first + gl.arange(0, WIDTH, gl.SliceLayout(0, TO))
    at = out_ptr + to.to(gl.int64)[:, None] * size_out + column[None, :]
    gl.store(at, out, mask=(rows < end)[:, None] & (column < size_out)[None, :])


@jit
def consume(
    W: gl.constexpr, scales_ptr, x_scales_ptr, out_ptr, out_scales_ptr, num_active, num_slots, order_ptr, table_ptr,
    across, size_in, size_out, limit, alpha, smem, TILING: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One consumer: 64 rows of every tile of this program. DTYPE: of the model."""
    STAGES: gl.constexpr = TILING.stages
    IN_BLOCKS: gl.constexpr = TILING.in_blocks
    PARTS: gl.constexpr = TILING.parts
    ACTIVATION: gl.constexpr = TILING.activation
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    w_smem, x_smem, w_scales, x_scales, full = smem
    num_rows = gl.load(table_ptr)
    num_steps = size_in // STEP
    zeros = gl.zeros([ROWS, HALF], gl.float32, ACC)
    fill = 0
    for tile in range(gl.program_id(0), num_rows * across, gl.num_programs(0)):
        m, n = place_of(tile, num_rows, across, TILING)
        entry = table_ptr + 3 + m * 3
        expert = gl.load(entry)
        first = gl.load(entry + 1) + W * ROWS
        end = gl.load(entry + 2)
        if first < end:
            left = zeros
            right = zeros
            for _ in range(num_steps):
                stage = fill % STAGES
                mbarrier.wait(full.index(stage), (fill // STAGES) & 1)
                if TILING.gathers:
                    fence_async_shared()
                x = x_smem.index(stage).slice(W * ROWS, ROWS, dim=0)
                w = w_smem.index(stage).slice(0, HALF, dim=0).permute((1, 0))
                part = warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
                if IN_BLOCKS:
                    x_scale = x_scales.index(stage).slice(W * ROWS, ROWS, dim=0).load(gl.SliceLayout(1, ACC))
                    each = w_scales._reinterpret(gl.float32, [STAGES * TILING.num_scales, 1], LINE)
                    of_first = gl.sum(each.index(stage * TILING.num_scales).load(ONE), axis=0)
                    of_second = gl.sum(each.index(stage * TILING.num_scales + 1).load(ONE), axis=0)
                part = warpgroup_mma_wait(0, deps=[part])
                if IN_BLOCKS:
                    left += scaled(part, x_scale, of_first, of_second, 0, PARTS)
                else:
                    left += part
                w = w_smem.index(stage).slice(HALF, HALF, dim=0).permute((1, 0))
                part = warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                hardware_arrive(FREE + stage, THREADS)
                if IN_BLOCKS:
                    right += scaled(part, x_scale, of_first, of_second, 1, PARTS)
                else:
                    right += part
                fill += 1
            if not IN_BLOCKS:
                x_row = gl.minimum(first + gl.arange(0, ROWS, gl.SliceLayout(1, ACC)), end - 1)
                if TILING.gathers:
                    x_row = gl.load(order_ptr + x_row) // num_active
                x_scale = gl.load(x_scales_ptr + x_row)
            column = n * TILING.columns
            if TILING.rounds:
                near = gated(left, limit, alpha, ACTIVATION).to(DTYPE).to(gl.float32)  # as the model has them
                far = gated(right, limit, alpha, ACTIVATION).to(DTYPE).to(gl.float32)
                scale = scale_of(larger(largest_in(near), largest_in(far)))
                rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, near.type.layout))
                gl.store(out_scales_ptr + n * num_slots + rows, scale, mask=rows < end)
                store_codes(near, scale, out_ptr, first, end, column, size_out)
                store_codes(far, scale, out_ptr, first, end, column + HALF // 2, size_out)
            else:
                for h in gl.static_range(2):
                    out = left if h == 0 else right
                    if not IN_BLOCKS:
                        out = by_rows(out, x_scale, scales_ptr, expert, n, size_out, h, TILING)
                    if PARTS == 2:
                        out = gated(out, limit, alpha, ACTIVATION)
                    store_half(out, out_ptr, order_ptr, first, end, column + h * HALF // PARTS, size_out, TILING)
        else:
            for _ in range(num_steps):
                stage = fill % STAGES
                mbarrier.wait(full.index(stage), (fill // STAGES) & 1)
                hardware_arrive(FREE + stage, THREADS)
                fill += 1


@jit(do_not_specialize=["num_active", "num_scaled", "num_slots", "across"])
def hallmark_gluon_experts_fp8_gate_up(
    w_desc, x_ptr, scales_ptr, x_scales_ptr, out_ptr, out_scales_ptr, order_ptr, table_ptr, num_active, num_scaled,
    num_slots, across, size_in, size_out, limit, alpha, TILING: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """activation(gate) * up of the tokens' rows, in the order of rows: in blocks rounded, with scales [.., num_slots].

    w_desc [E, width / 8, 2, 8, hidden], scales of its rows or blocks; x [tokens, hidden], its scales [.., num_scaled].
    """
    smem = ring(w_desc.dtype, TILING)
    wait_for_previous_grid()
    launch_next_grid()  # not before the wait: what is launched reads the table at once
    gl.warp_specialize([
        (consume, (0, scales_ptr, x_scales_ptr, out_ptr, out_scales_ptr, num_active, num_slots, order_ptr, table_ptr,
                   across, size_in, size_out, limit, alpha, smem, TILING, DTYPE)),
        (consume, (1, scales_ptr, x_scales_ptr, out_ptr, out_scales_ptr, num_active, num_slots, order_ptr, table_ptr,
                   across, size_in, size_out, limit, alpha, smem, TILING, DTYPE)),
        (produce, (w_desc, x_ptr, 0, scales_ptr, x_scales_ptr, num_active, num_scaled, order_ptr, table_ptr, across,
                   size_in, size_out, smem, TILING)),
    ], [4, 4], [216, 72])  # fmt: skip


@jit(do_not_specialize=["num_scaled", "across"])
def hallmark_gluon_experts_fp8_down(
    w_desc, x_desc, scales_ptr, x_scales_ptr, out_ptr, order_ptr, table_ptr, num_scaled, across, size_in, size_out,
    TILING: gl.constexpr,
):  # fmt: skip
    """Products of the rows x, stored at the rows' slots. w_desc [E, hidden, width], x_desc [slots, width]."""
    smem = ring(w_desc.dtype, TILING)
    wait_for_previous_grid()
    launch_next_grid()
    gl.warp_specialize([
        (consume, (0, scales_ptr, x_scales_ptr, out_ptr, 0, 1, 1, order_ptr, table_ptr, across, size_in, size_out, 0.0,
                   0.0, smem, TILING, 0)),
        (consume, (1, scales_ptr, x_scales_ptr, out_ptr, 0, 1, 1, order_ptr, table_ptr, across, size_in, size_out, 0.0,
                   0.0, smem, TILING, 0)),
        (produce, (w_desc, 0, x_desc, scales_ptr, x_scales_ptr, 1, num_scaled, order_ptr, table_ptr, across, size_in,
                   size_out, smem, TILING)),
    ], [4, 4], [216, 72])  # fmt: skip
