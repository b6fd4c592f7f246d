"""The sm_90 kernels of `launch.py`: grouped products of a mixture, weights by TMA, multiplied by wgmma.

One persistent program per multiprocessor, in roles:

  consumers  4 warps each  64 rows each of a tile of rows that visit one expert; the activation in registers
  producer   4 warps       copies weights by TMA and rows into a shared ring, ahead of the consumers: of the first
                           product rows gathered from the tokens by cp.async, of the second ones that lie together

A consumer whose 64 rows are all past the expert's last only gives the ring's stages back. For an activated product a
tile holds 8 rows of the gate, the same rows of the up projection, and so on: a thread's accumulators hold both.
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

from kernels.experts.hopper import tilings as hopper_tilings
from kernels.hopper.pipeline import hardware_arrive, hardware_sync
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid

ROWS = gl.constexpr(hopper_tilings.ROWS)
STEP = gl.constexpr(hopper_tilings.STEP)
COLUMNS = gl.constexpr(hopper_tilings.COLUMNS)
FREE = gl.constexpr(9)  # hardware barriers from 9 on: stages given back; Triton 3.6 uses 0, 1 and one a partition
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # rows of 256 bytes, 16 a thread


@jit
def place_of(tile, num_rows, across, TILING: gl.constexpr):
    """(index of the tile of rows, index of the tile of columns): rows vary fastest, so that weights stay in L2."""
    GROUP: gl.constexpr = TILING.group
    first = tile // (GROUP * across) * GROUP
    height = gl.minimum(num_rows - first, GROUP)
    within = tile % (GROUP * across)
    return first + within % height, within // height


@jit
def produce(w_desc, x, x_desc, stride_x, num_active, order_ptr, table_ptr, across, size_in, smem, TILING: gl.constexpr):
    """Fill the ring for one tile after the other."""
    STAGES: gl.constexpr = TILING.stages
    HEIGHT: gl.constexpr = TILING.consumers * ROWS
    THREADS: gl.constexpr = TILING.consumers * 128 + 128
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    w_smem, x_smem, full = smem
    num_rows = gl.load(table_ptr)
    num_steps = gl.cdiv(size_in, STEP)
    fill = 0
    for tile in range(gl.program_id(0), num_rows * across, gl.num_programs(0)):
        m, n = place_of(tile, num_rows, across, TILING)
        entry = table_ptr + 3 + m * 3
        expert = gl.load(entry)
        first = gl.load(entry + 1)
        last = gl.load(entry + 2) - 1
        if TILING.gathers:
            rows = gl.minimum(first + gl.arange(0, HEIGHT, gl.SliceLayout(1, GATHER)), last)
            tokens = gl.load(order_ptr + rows) // num_active
            at = x + tokens.to(gl.int64)[:, None] * stride_x + gl.arange(0, STEP, gl.SliceLayout(0, GATHER))[None, :]
        for step in range(num_steps):
            stage = fill % STAGES
            if fill >= STAGES:
                hardware_sync(FREE + stage, THREADS)
            bar = full.index(stage)
            if TILING.gathers:
                mbarrier.expect(bar, COLUMNS * STEP * 2)
            else:
                mbarrier.expect(bar, (COLUMNS + HEIGHT) * STEP * 2)
            if TILING.parts == 2:
                box = w_smem.index(stage).reshape([1, COLUMNS // 16, 2, 8, STEP])
                where = [expert, n * (COLUMNS // 16), 0, 0, step * STEP]
                tma.async_copy_global_to_shared(w_desc, where, bar, box)
            else:
                box = w_smem.index(stage).reshape([1, COLUMNS, STEP])
                tma.async_copy_global_to_shared(w_desc, [expert, n * COLUMNS, step * STEP], bar, box)
            if TILING.gathers:
                async_copy.async_copy_global_to_shared(x_smem.index(stage), at + step * STEP)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                tma.async_copy_global_to_shared(x_desc, [first, step * STEP], bar, x_smem.index(stage))
            fill += 1
    for i in range(gl.maximum(fill - STAGES, 0), fill):  # no arrival stays behind
        hardware_sync(FREE + i % STAGES, THREADS)
    async_copy.wait_group(0)


@jit
def products(W: gl.constexpr, is_active, num_steps, fill, smem, TILING: gl.constexpr):
    """A tile's [64, 256] fp32, and the count of stages filled; stages are given back as they are read."""
    STAGES: gl.constexpr = TILING.stages
    THREADS: gl.constexpr = TILING.consumers * 128 + 128
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    w_smem, x_smem, full = smem
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, ACC)
    if is_active:
        for step in range(num_steps):
            stage = fill % STAGES
            mbarrier.wait(full.index(stage), (fill // STAGES) & 1)
            if TILING.gathers:
                fence_async_shared()
            x = x_smem.index(stage).slice(W * ROWS, ROWS, dim=0)
            acc = warpgroup_mma(x, w_smem.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # those of the step before
            if step > 0:
                hardware_arrive(FREE + (fill - 1) % STAGES, THREADS)
            fill += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        hardware_arrive(FREE + (fill - 1) % STAGES, THREADS)
    else:
        for _ in range(num_steps):
            stage = fill % STAGES
            mbarrier.wait(full.index(stage), (fill // STAGES) & 1)
            hardware_arrive(FREE + stage, THREADS)
            fill += 1
    return acc, fill


@jit
def activated(gate, up, limit, alpha, ACTIVATION: gl.constexpr):
    """activation(gate) * up in fp32, or gpt-oss's clamped kind; compare `products.activated`."""
    if ACTIVATION == "gelu":
        return 0.5 * (1.0 + gl.erf(gate * 0.7071067811865476)) * gate * up
    argument = gate
    if ACTIVATION == "clamped":
        gate = gl.where(gate > limit, limit, gate)  # NaN stays
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up)) + 1.0
        argument = alpha * gate
    elif ACTIVATION == "gelu_pytorch_tanh":  # (1 + tanh(x)) / 2 is sigmoid(2 x)
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * up / (1.0 + gl.exp(-argument))  # an infinite divisor gives the limit, 0


@jit
def consume(
    W: gl.constexpr, bias_ptr, out_ptr, order_ptr, table_ptr, across, size_in, size_out, limit, alpha, smem,
    TILING: gl.constexpr,
):  # fmt: skip
    """One consumer: 64 rows of every tile of this program."""
    HALF: gl.constexpr = COLUMNS // 2
    ACTIVATION: gl.constexpr = TILING.activation
    num_rows = gl.load(table_ptr)
    num_steps = gl.cdiv(size_in, STEP)
    fill = 0
    for tile in range(gl.program_id(0), num_rows * across, gl.num_programs(0)):
        m, n = place_of(tile, num_rows, across, TILING)
        entry = table_ptr + 3 + m * 3
        expert = gl.load(entry)
        first = gl.load(entry + 1) + W * ROWS
        end = gl.load(entry + 2)
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
        is_row = rows < end
        to = rows
        if not TILING.gathers:
            to = gl.load(order_ptr + rows, mask=is_row, other=0)
        acc, fill = products(W, first < end, num_steps, fill, smem, TILING)
        if first < end:
            if TILING.parts == 2:
                halves = acc.reshape([ROWS, COLUMNS // 16, 2, 8]).permute([0, 1, 3, 2])
                gate, up = gl.split(halves)
                gate = gate.reshape([ROWS, HALF])
                up = up.reshape([ROWS, HALF])
                if TILING.has_bias:
                    column = n * HALF + gl.arange(0, HALF, gl.SliceLayout(0, gate.type.layout))
                    at = bias_ptr + expert.to(gl.int64) * 2 * size_out + column
                    gate += gl.load(at, mask=column < size_out, other=0.0).to(gl.float32)[None, :]
                    up += gl.load(at + size_out, mask=column < size_out, other=0.0).to(gl.float32)[None, :]
                out = activated(gate, up, limit, alpha, ACTIVATION)
                store_half(out, out_ptr, to, is_row, n * HALF, size_out)
            else:
                halves = acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1])
                left, right = gl.split(halves)
                for h in gl.static_range(2):
                    out = left if h == 0 else right
                    if TILING.has_bias:
                        column = n * COLUMNS + h * HALF + gl.arange(0, HALF, gl.SliceLayout(0, out.type.layout))
                        at = bias_ptr + expert.to(gl.int64) * size_out + column
                        out += gl.load(at, mask=column < size_out, other=0.0).to(gl.float32)[None, :]
                    store_half(out, out_ptr, to, is_row, n * COLUMNS + h * HALF, size_out)


@jit
def store_half(out, out_ptr, to, is_row, first, size_out):
    """[64, 128] to the rows `to`, from column `first` on."""
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), STORED)
    column = first + gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, STORED))
    at = out_ptr + to.to(gl.int64)[:, None] * size_out + column[None, :]
    gl.store(at, out, mask=is_row[:, None] & (column < size_out)[None, :])


@jit
def ring(dtype: gl.constexpr, TILING: gl.constexpr):
    """Shared memory: stages of weights, of rows, and the barriers that say a stage is full."""
    STAGES: gl.constexpr = TILING.stages
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, STEP], SWIZZLED)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, TILING.consumers * ROWS, STEP], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        # A gathered stage is full when each of the producer's threads says so too.
        mbarrier.init(full.index(s), count=129 if TILING.gathers else 1)
    return w_smem, x_smem, full


@jit(do_not_specialize=["num_active", "across"])
def hallmark_gluon_experts_gate_up(
    w_desc, x_ptr, out_ptr, bias_ptr, order_ptr, table_ptr, stride_x, num_active, across, size_in, size_out, limit,
    alpha, TILING: gl.constexpr,
):  # fmt: skip
    """activation(gate) * up of the tokens' rows, in the order of rows. w_desc [E, width / 8, 2, 8, hidden].

    order, table: those of routing/sorting.py.
    """
    smem = ring(w_desc.dtype, TILING)
    wait_for_previous_grid()
    launch_next_grid()  # not before the wait: what is launched reads the table at once
    gl.warp_specialize([
        (consume, (0, bias_ptr, out_ptr, order_ptr, table_ptr, across, size_in, size_out, limit, alpha, smem, TILING)),
        (consume, (1, bias_ptr, out_ptr, order_ptr, table_ptr, across, size_in, size_out, limit, alpha, smem, TILING)),
        (produce, (w_desc, x_ptr, 0, stride_x, num_active, order_ptr, table_ptr, across, size_in, smem, TILING)),
    ], [4, 4], [216, 72])  # fmt: skip


@jit(do_not_specialize=["across"])
def hallmark_gluon_experts_down(
    w_desc, x_desc, out_ptr, bias_ptr, order_ptr, table_ptr, across, size_in, size_out, TILING: gl.constexpr
):
    """Products of the rows x, stored at the rows' slots. w_desc [E, hidden, width], x_desc [slots, width]."""
    smem = ring(w_desc.dtype, TILING)
    wait_for_previous_grid()
    launch_next_grid()  # not before the wait: what is launched reads the table at once
    gl.warp_specialize([
        (consume, (0, bias_ptr, out_ptr, order_ptr, table_ptr, across, size_in, size_out, 0.0, 0.0, smem, TILING)),
        (consume, (1, bias_ptr, out_ptr, order_ptr, table_ptr, across, size_in, size_out, 0.0, 0.0, smem, TILING)),
        (produce, (w_desc, 0, x_desc, 0, 1, order_ptr, table_ptr, across, size_in, smem, TILING)),
    ], [4, 4], [216, 72])  # fmt: skip
