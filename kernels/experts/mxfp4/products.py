"""The sm_90 kernel of `launch.py`: grouped products whose weights stay codes of 4 bits until they are multiplied.

Roles and ring are those of hopper/few.py: wgmma's M takes the weights, its N the slots of a tile. The ring holds codes;
a consumer takes them apart in registers (unpack.py), from which wgmma reads its first operand, while what it took
apart before is multiplied.

A thread's codes of a row lie together, 32 of them with one scale. wgmma wants them in another order than they stand in,
so x comes in that order: order.py. Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton import constexpr_function
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.experts.hopper.many import activated
from kernels.experts.mxfp4 import tilings as mxfp4_tilings
from kernels.experts.mxfp4 import unpack as mxfp4_unpack
from kernels.hopper.pipeline import hardware_arrive, hardware_sync
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid

BOX = gl.constexpr(mxfp4_tilings.BOX)
BOXES = gl.constexpr(mxfp4_tilings.BOXES)
STEP = gl.constexpr(mxfp4_tilings.STEP)
WORDS = gl.constexpr(mxfp4_tilings.STEP // 4)  # of 16 bits, in a row of a stage: 4 codes each
HEIGHT = gl.constexpr(mxfp4_tilings.ROWS)
LINE = gl.constexpr(128)  # bytes of L2 that are fetched at once
FREE = gl.constexpr(7)  # hardware barriers from 7 on: stages given back; Triton 3.6 uses 0, 1 and one a partition
UNPACK = gl.constexpr(mxfp4_unpack.UNPACK)
UNPACK_LARGE_SCALES = gl.constexpr(mxfp4_unpack.UNPACK_LARGE_SCALES)
REGISTERS = gl.constexpr(mxfp4_unpack.REGISTERS)


@jit
def tile_at(tile, across, table_ptr):
    """(expert, first row, end of rows, index of the tile of columns)."""
    entry = table_ptr + 3 + tile // across * 3
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), tile % across


@jit
def load_codes(w_desc, expert, n, step, bar, w_smem, stage, TILING: gl.constexpr):
    """The codes of one stage: a box for each consumer."""
    CONSUMERS: gl.constexpr = TILING.consumers
    PAIRS: gl.constexpr = [1, HEIGHT // 16, 2, 8, WORDS]
    at = step * WORDS
    for c in gl.static_range(CONSUMERS):
        box = w_smem.index(stage * TILING.consumers + c)
        if TILING.parts == 2:
            first = (n * TILING.consumers + c) * (HEIGHT // 16)
            tma.async_copy_global_to_shared(w_desc, [expert, first, 0, 0, at], bar, box.reshape(PAIRS))
        else:
            first = (n * TILING.consumers + c) * HEIGHT
            tma.async_copy_global_to_shared(w_desc, [expert, first, at], bar, box.reshape([1, HEIGHT, WORDS]))


@jit
def fetch_scales(scales_ptr, expert, n, blocks, size_out, TILING: gl.constexpr):
    """Bring a tile's scales into L2, from which consumers read 4 bytes of a row at a time."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_bytes = gl.minimum(TILING.columns, size_out - n * TILING.columns) * blocks
    PARTS: gl.constexpr = TILING.parts
    for part in gl.static_range(PARTS):
        row = (expert * TILING.parts + part) * size_out + n * TILING.columns
        begin = scales_ptr + row.to(gl.int64) * blocks
        for at in range(0, num_bytes, 32 * LINE):
            prefetch(begin + gl.minimum(at + gl.arange(0, 32, LANES) * LINE, num_bytes - 1))


@jit
def prefetch(pointers):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )


@jit
def produce(w_desc, x_desc, scales_ptr, table_ptr, across, num_steps, blocks, size_out, smem, TILING: gl.constexpr):
    """Fill the ring for one tile after the other. Weights do not depend on the kernel before, and come first."""
    STAGES: gl.constexpr = TILING.stages
    BYTES: gl.constexpr = TILING.bytes_of_stage
    w_smem, x_smem, full = smem
    num_rows = gl.load(table_ptr)
    total = num_rows * across
    start = gl.program_id(0)
    for s in gl.static_range(STAGES):
        tile = start + s // num_steps * gl.num_programs(0)
        if tile < total:
            expert, _first, _end, n = tile_at(tile, across, table_ptr)
            if s == 0:
                fetch_scales(scales_ptr, expert, n, blocks, size_out, TILING)
            mbarrier.expect(full.index(s), BYTES)
            load_codes(w_desc, expert, n, s % num_steps, full.index(s), w_smem, s, TILING)
    wait_for_previous_grid()
    fill = 0
    for tile in range(start, total, gl.num_programs(0)):
        expert, first, _end, n = tile_at(tile, across, table_ptr)
        if tile > start:
            fetch_scales(scales_ptr, expert, n, blocks, size_out, TILING)
        for step in range(num_steps):
            stage = fill % STAGES
            bar = full.index(stage)
            if fill >= STAGES:
                hardware_sync(FREE + stage, TILING.threads)
                mbarrier.expect(bar, BYTES)
                load_codes(w_desc, expert, n, step, bar, w_smem, stage, TILING)
            for c in gl.static_range(BOXES):
                box = x_smem.index(stage * BOXES + c)
                tma.async_copy_global_to_shared(x_desc, [first, step * STEP + c * BOX], bar, box)
            fill += 1
    for i in range(gl.maximum(fill - STAGES, 0), fill):  # no arrival stays behind
        hardware_sync(FREE + i % STAGES, TILING.threads)


@jit
def factors_of(scales):
    """Bits of bf16 of 2^126 times scales [64, 4], int32: what a code is multiplied by, where they are at most 2."""
    return scales.to(gl.int32) * 128 + 126 * 128


@jit
def numbers(codes, factors, ACC: gl.constexpr, TILING: gl.constexpr):
    """[64, 64] bf16, the first operand of a wgmma. codes [64, 4, 2, 2], factors [64, 4]."""
    LAYOUT: gl.constexpr = codes.type.layout
    PTX: gl.constexpr = UNPACK_LARGE_SCALES if TILING.has_large_scales else UNPACK
    factors = gl.convert_layout(factors.to(gl.int16), gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    factors, codes = gl.broadcast(factors.expand_dims(2).expand_dims(3), codes)
    o0, o1, o2, o3 = gl.inline_asm_elementwise(
        PTX, REGISTERS, [codes, factors], (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=8,
    )  # fmt: skip
    # [64, lane, word, half, bit 0 of the place, bit 1]
    places = gl.join(gl.join(o0, o1), gl.join(o2, o3))
    out = places.permute([0, 2, 5, 4, 1, 3]).reshape([HEIGHT, BOX])
    return gl.convert_layout(out, gl.DotOperandLayout(0, ACC, 2))


@jit
def scales_at(tile, across, table_ptr, scales_ptr, blocks, size_out, W: gl.constexpr, TILING: gl.constexpr):
    """Pointers to the first scales of this consumer's rows of a tile, [64, 1]; of rows behind the last one, its own."""
    expert, _first, _end, n = tile_at(tile, across, table_ptr)
    r = W * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, scales_layout()))[:, None]
    if TILING.parts == 2:
        column = gl.minimum(n * TILING.columns + r // 16 * 8 + r % 8, size_out - 1)
        row = (expert * 2 + r // 8 % 2) * size_out + column
    else:
        column = gl.minimum(n * TILING.columns + r, size_out - 1)
        row = expert * size_out + column
    return scales_ptr + row.to(gl.int64) * blocks


@jit
def load_scales(scales, step, blocks):
    """Scales of one stage, [64, 4] uint8; of blocks behind a row's last one, its own: their codes are zeros."""
    block = gl.minimum(step * 4 + gl.arange(0, 4, gl.SliceLayout(0, scales_layout())), blocks - 1)
    return gl.load(scales + block[None, :])


@jit
def load_stage(w_smem, stage, W: gl.constexpr, TILING: gl.constexpr):
    """This consumer's codes of one stage, [64, 32] of 16 bits."""
    return w_smem.index(stage * TILING.consumers + W).load(codes_layout())


@jit
def numbers_of(codes, factors, BOX_OF: gl.constexpr, ACC: gl.constexpr, TILING: gl.constexpr):
    """The numbers of one box of columns."""
    # [64 rows, 4 lanes, 2 words, 2 halves] for each box of x
    chunks = gl.split(codes.reshape([HEIGHT, 4, BOXES, 2, 2]).permute([0, 1, 3, 4, 2]))
    return numbers(chunks[BOX_OF], factors, ACC, TILING)


@jit
def consume(
    W: gl.constexpr, scales_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, blocks, size_out,
    stride_out, limit, alpha, smem, TILING: gl.constexpr,
):  # fmt: skip
    """One consumer: 64 rows of weights of every tile of this program.

    While a stage's first box is multiplied the second one's codes become numbers, and while the second is, those of the
    next stage's first. No wait stands between the first two: ptxas moves what need not come before a wait behind it.
    None is in flight where the loop turns: ptxas would wait for it at once.
    """
    STAGES: gl.constexpr = TILING.stages
    TOKENS: gl.constexpr = TILING.tokens
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    w_smem, x_smem, full = smem
    total = gl.load(table_ptr) * across
    start = gl.program_id(0)
    stage = 0
    phase = 0
    if start < total:
        pointers = scales_at(start, across, table_ptr, scales_ptr, blocks, size_out, W, TILING)
        scales = load_scales(pointers, 0, blocks)
        for tile in range(start, total, gl.num_programs(0)):
            expert, first, end, n = tile_at(tile, across, table_ptr)
            ahead = load_scales(pointers, 1, blocks)
            mbarrier.wait(full.index(stage), phase)
            codes = load_stage(w_smem, stage, W, TILING)
            factors = factors_of(scales)
            first_box = numbers_of(codes, factors, 0, ACC, TILING)
            acc = gl.zeros([HEIGHT, TOKENS], gl.float32, ACC)
            for step in range(num_steps):
                current = stage
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
                acc = warpgroup_mma(first_box, x_smem.index(current * BOXES).permute((1, 0)), acc, is_async=True)
                second_box = numbers_of(codes, factors, 1, ACC, TILING)
                mbarrier.wait(full.index(stage), phase, pred=step + 1 < num_steps)
                codes = load_stage(w_smem, stage, W, TILING)  # behind a tile's last stage: not used
                factors = factors_of(ahead)
                ahead = load_scales(pointers, step + 2, blocks)
                x = x_smem.index(current * BOXES + 1).permute((1, 0))
                acc = warpgroup_mma(second_box, x, acc, is_async=True)
                acc, first_box = warpgroup_mma_wait(1, deps=[acc, first_box])  # a wgmma in flight reads its registers
                first_box = numbers_of(codes, factors, 0, ACC, TILING)
                acc, second_box = warpgroup_mma_wait(0, deps=[acc, second_box])
                hardware_arrive(FREE + current, TILING.threads)
            behind = gl.minimum(tile + gl.num_programs(0), total - 1)
            pointers = scales_at(behind, across, table_ptr, scales_ptr, blocks, size_out, W, TILING)
            scales = load_scales(pointers, 0, blocks)  # arrives while results are stored
            store_tile(
                W, acc, bias_ptr, out_ptr, order_ptr, expert, first, end, n, size_out, stride_out, limit, alpha, TILING
            )


@jit
def store_tile(
    W: gl.constexpr, acc, bias_ptr, out_ptr, order_ptr, expert, first, end, n, size_out, stride_out, limit, alpha,
    TILING: gl.constexpr,
):  # fmt: skip
    """A consumer's part of a tile, [64, tokens] as wgmma leaves it, `stored_together` slots at a time."""
    PIECE: gl.constexpr = TILING.stored_together
    PIECES: gl.constexpr = TILING.tokens // PIECE
    pieces = (acc,)
    for level in gl.static_range(PIECES.bit_length() - 1):
        finer = halves_of(pieces[0])
        for i in gl.static_range(1, 2**level):
            finer = finer + halves_of(pieces[i])
        pieces = finer
    for p in gl.static_range(PIECES):
        if first + p * PIECE < end:
            store_piece(
                W, pieces[p], bias_ptr, out_ptr, order_ptr, expert, first + p * PIECE, end, n, size_out, stride_out,
                limit, alpha, TILING,
            )  # fmt: skip


@jit
def halves_of(x):
    """The left and the right half of the columns."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.split(x.reshape([ROWS, 2, COLUMNS // 2]).permute([0, 2, 1]))


@jit
def store_piece(
    W: gl.constexpr, acc, bias_ptr, out_ptr, order_ptr, expert, first, end, n, size_out, stride_out, limit, alpha,
    TILING: gl.constexpr,
):  # fmt: skip
    ACTIVATION: gl.constexpr = TILING.activation
    PIECE: gl.constexpr = TILING.stored_together
    OUT: gl.constexpr = HEIGHT // TILING.parts
    begin = n * TILING.columns + W * OUT
    if TILING.parts == 2:
        gate, up = gl.split(acc.reshape([HEIGHT // 16, 2, 8, PIECE]).permute([0, 2, 3, 1]))
        gate = gate.reshape([OUT, PIECE])
        up = up.reshape([OUT, PIECE])
        if TILING.has_bias:
            column = begin + gl.arange(0, OUT, gl.SliceLayout(1, gate.type.layout))
            at = bias_ptr + expert.to(gl.int64) * 2 * size_out + column
            gate += gl.load(at, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
            up += gl.load(at + size_out, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
        out = activated(gate, up, limit, alpha, ACTIVATION)
    else:
        out = acc
        if TILING.has_bias:
            column = begin + gl.arange(0, OUT, gl.SliceLayout(1, out.type.layout))
            at = bias_ptr + expert.to(gl.int64) * size_out + column
            out += gl.load(at, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
    out = out.to(out_ptr.dtype.element_ty)
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [OUT // 8, 256 // OUT], [1, 4], [0, 1])
    rows = first + gl.arange(0, PIECE, gl.SliceLayout(0, STORED))
    is_row = (rows < end)[None, :]
    i = gl.arange(0, OUT, gl.SliceLayout(1, STORED))
    if TILING.parts == 2:
        # In the order of order.py, in which the next product multiplies. The 32 columns are one lane's: pairs of
        # theirs stand 8 places apart.
        ordered = out.reshape([OUT // 8, 2, 4, PIECE]).permute([0, 2, 1, 3]).reshape([OUT, PIECE])
        place = begin // STEP * STEP + begin % STEP // OUT * 2 + i // 2 * 8 + i % 2
        at = out_ptr + rows.to(gl.int64)[None, :] * stride_out + place[:, None]
        gl.store(at, gl.convert_layout(ordered, STORED), mask=is_row & (begin < size_out))
    else:
        to = gl.load(order_ptr + rows, mask=rows < end, other=0)
        column = (begin + i)[:, None]
        at = out_ptr + to.to(gl.int64)[None, :] * stride_out + column
        gl.store(at, gl.convert_layout(out, STORED), mask=is_row & (column < size_out))


@constexpr_function
def codes_layout():
    """[64, 32]: a thread holds 8 neighbours of a row, 32 codes, and those of the 8th row after it."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 32])


@constexpr_function
def scales_layout():
    """[64, 4]: the rows and lanes of `codes_layout`."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@jit
def ring(dtype: gl.constexpr, TILING: gl.constexpr):
    """Shared memory: stages of codes, of x, and the barriers that say a stage is full."""
    STAGES: gl.constexpr = TILING.stages
    CODES: gl.constexpr = gl.NVMMASharedLayout(WORDS * 2, 16, rank=2)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * TILING.consumers, HEIGHT, WORDS], CODES)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES, TILING.tokens, BOX], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    return w_smem, x_smem, full


@jit(do_not_specialize=["across", "num_steps", "blocks"])
def hallmark_gluon_experts_codes(
    w_desc, x_desc, out_ptr, scales_ptr, bias_ptr, order_ptr, table_ptr, across, num_steps, blocks, size_out,
    stride_out, limit, alpha, TILING: gl.constexpr,
):  # fmt: skip
    """One product of sorted rows x [slots, num_steps * 128], in the order of order.py.

    gate and up  w_desc [E, width / 8, 2, 8, hidden / 4]; out [slots, stride_out] is activation(gate) * up in that order
    down         w_desc [E, hidden, width / 4]; out [slots, hidden] at the rows' slots
    order, table: those of routing/sorting.py, which the kernel before the one before has written.
    """
    R: gl.constexpr = TILING.registers[0]
    P: gl.constexpr = TILING.registers[1]
    smem = ring(w_desc.dtype, TILING)
    launch_next_grid()
    if TILING.consumers == 2:
        gl.warp_specialize([
            (consume, (0, scales_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, blocks,
                       size_out, stride_out, limit, alpha, smem, TILING)),
            (consume, (1, scales_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, blocks,
                       size_out, stride_out, limit, alpha, smem, TILING)),
            (produce, (w_desc, x_desc, scales_ptr, table_ptr, across, num_steps, blocks, size_out, smem, TILING)),
        ], [4, 1], [R, P])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, scales_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, blocks,
                       size_out, stride_out, limit, alpha, smem, TILING)),
            (consume, (1, scales_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, blocks,
                       size_out, stride_out, limit, alpha, smem, TILING)),
            (consume, (2, scales_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, blocks,
                       size_out, stride_out, limit, alpha, smem, TILING)),
            (produce, (w_desc, x_desc, scales_ptr, table_ptr, across, num_steps, blocks, size_out, smem, TILING)),
        ], [4, 4, 1], [R, R, P])  # fmt: skip
