"""The sm_90 kernels of `mxfp4_path.py`: grouped products whose weights stay codes of 4 bits until they are multiplied.

Roles and ring are those of hopper_few.py: wgmma's M takes the weights, its N the slots of a tile. The ring holds codes;
a consumer takes them apart in registers, from which wgmma reads its first operand:

    16 bits of the ring   4 codes; an instruction works on 32 bits, the codes i and i + 4 of a word
    a code to bf16        its sign, exponent and mantissa in their places are the number times 2^-126, subnormal ones
                          too; times 2^126, times the scale. All exact but for what bf16 itself rounds

A thread's codes of a row lie together, 32 of them with one scale. wgmma wants them in another order than they stand in,
so x comes in that order: mxfp4_order.py. Written in Gluon for Triton 3.6.0.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from kernels.experts import mxfp4_tilings
from kernels.experts.hopper import activated
from kernels.hopper.pipeline import hardware_arrive, hardware_sync
from kernels.linear.skinny import launch_next_grid, wait_for_previous_grid

BOX = gl.constexpr(mxfp4_tilings.BOX)
BOXES = gl.constexpr(mxfp4_tilings.BOXES)
STEP = gl.constexpr(mxfp4_tilings.STEP)
WORDS = gl.constexpr(mxfp4_tilings.STEP // 4)  # of 16 bits, in a row of a stage: 4 codes each
HEIGHT = gl.constexpr(mxfp4_tilings.ROWS)
FREE = gl.constexpr(7)  # hardware barriers from 7 on: stages given back; Triton 3.6 uses 0, 1 and one a partition

# $4: 8 codes, of which a 16-bit half holds 4; $5: the scale, twice. $i: codes i and i + 4.
_UNPACK = gl.constexpr("""{
.reg .b32 t, u, c;
mov.b32 c, 0x7E807E80;
shl.b32 t, $4, 12;
shl.b32 u, $4, 6;
and.b32 u, u, 0x01C001C0;
lop3.b32 t, t, 0x80008000, u, 0xEA;
mul.bf16x2 t, t, c;
mul.bf16x2 $0, t, $5;
shl.b32 t, $4, 8;
shl.b32 u, $4, 2;
and.b32 u, u, 0x01C001C0;
lop3.b32 t, t, 0x80008000, u, 0xEA;
mul.bf16x2 t, t, c;
mul.bf16x2 $1, t, $5;
shl.b32 t, $4, 4;
shr.u32 u, $4, 2;
and.b32 u, u, 0x01C001C0;
lop3.b32 t, t, 0x80008000, u, 0xEA;
mul.bf16x2 t, t, c;
mul.bf16x2 $2, t, $5;
shr.u32 u, $4, 6;
and.b32 u, u, 0x01C001C0;
lop3.b32 t, $4, 0x80008000, u, 0xEA;
mul.bf16x2 t, t, c;
mul.bf16x2 $3, t, $5;
}""")


@jit
def tile_at(tile, across, table_ptr):
    """(expert, first row, end of rows, index of the tile of columns)."""
    entry = table_ptr + 3 + tile // across * 3
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), tile % across


@jit
def load_codes(w_desc, expert, n, step, bar, w_smem, stage, TILING: gl.constexpr):
    ROWS: gl.constexpr = TILING.rows
    box = w_smem.index(stage)
    at = step * WORDS
    if TILING.parts == 2:
        shape: gl.constexpr = [1, ROWS // 16, 2, 8, WORDS]
        tma.async_copy_global_to_shared(w_desc, [expert, n * (ROWS // 16), 0, 0, at], bar, box.reshape(shape))
    else:
        tma.async_copy_global_to_shared(w_desc, [expert, n * ROWS, at], bar, box.reshape([1, ROWS, WORDS]))


@jit
def produce(w_desc, x_desc, table_ptr, across, num_steps, smem, TILING: gl.constexpr):
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
            mbarrier.expect(full.index(s), BYTES)
            load_codes(w_desc, expert, n, s % num_steps, full.index(s), w_smem, s, TILING)
    wait_for_previous_grid()
    fill = 0
    for tile in range(start, total, gl.num_programs(0)):
        expert, first, _end, n = tile_at(tile, across, table_ptr)
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
    """bf16 of scales [64, 4], int32. 2^-127 is subnormal, and 255 is NaN: both as the format has them."""
    bits = gl.where(scales == 0, 0x0040, gl.where(scales == 255, 0x7FC0, scales << 7))
    return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)


@jit
def numbers(codes, factors, ACC: gl.constexpr):
    """[64, 64] bf16, the first operand of a wgmma. codes [64, 4, 2, 2], factors [64, 4]."""
    LAYOUT: gl.constexpr = codes.type.layout
    factors = gl.convert_layout(factors, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    factors, codes = gl.broadcast(factors.expand_dims(2).expand_dims(3), codes)
    o0, o1, o2, o3 = gl.inline_asm_elementwise(
        _UNPACK, "=r,=r,=r,=r,r,r", [codes, factors], (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip
    # [64, lane, word, half, bit 0 of the place, bit 1]
    places = gl.join(gl.join(o0, o1), gl.join(o2, o3))
    out = places.permute([0, 2, 5, 4, 1, 3]).reshape([HEIGHT, BOX])
    return gl.convert_layout(out, gl.DotOperandLayout(0, ACC, 2))


@jit
def load_scales(scales, step, blocks, lanes, is_row):
    """Scales of one stage, [64, 4]: int32. blocks: of a row."""
    block = step * 4 + lanes
    return gl.load(scales + block, mask=is_row & (block < blocks), other=0).to(gl.int32)


@jit
def consume(
    W: gl.constexpr, scales_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, blocks, size_out,
    stride_out, limit, alpha, smem, TILING: gl.constexpr,
):  # fmt: skip
    """One consumer: 64 rows of weights of every tile of this program."""
    STAGES: gl.constexpr = TILING.stages
    TOKENS: gl.constexpr = TILING.tokens
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    CODES: gl.constexpr = codes_layout()
    SCALES: gl.constexpr = scales_layout()
    w_smem, x_smem, full = smem
    num_rows = gl.load(table_ptr)
    lanes = gl.arange(0, 4, gl.SliceLayout(0, SCALES))[None, :]
    r = W * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, SCALES))[:, None]
    fill = 0
    for tile in range(gl.program_id(0), num_rows * across, gl.num_programs(0)):
        expert, first, end, n = tile_at(tile, across, table_ptr)
        if TILING.parts == 2:
            column = n * TILING.columns + r // 16 * 8 + r % 8
            row = (expert * 2 + r // 8 % 2) * size_out + column
        else:
            column = n * TILING.columns + r
            row = expert * size_out + column
        is_row = column < size_out
        scales = scales_ptr + row.to(gl.int64) * blocks
        ahead = load_scales(scales, 0, blocks, lanes, is_row)
        acc = warpgroup_mma_init(gl.zeros([HEIGHT, TOKENS], gl.float32, ACC))
        before = gl.zeros([HEIGHT, BOX], gl.bfloat16, gl.DotOperandLayout(0, ACC, 2))
        for step in range(num_steps):
            stage = fill % STAGES
            of_stage = ahead
            ahead = load_scales(scales, step + 1, blocks, lanes, is_row)
            mbarrier.wait(full.index(stage), (fill // STAGES) & 1)
            codes = w_smem.index(stage).slice(W * HEIGHT, HEIGHT, dim=0).load(CODES)
            # [64 rows, 4 lanes, 2 words, 2 halves] for each box of x
            chunks = gl.split(codes.reshape([HEIGHT, 4, BOXES, 2, 2]).permute([0, 1, 3, 4, 2]))
            factors = factors_of(of_stage)
            for c in gl.static_range(BOXES):
                w = numbers(chunks[c], factors, ACC)
                # A wgmma in flight reads its registers. A stage's two boxes have them in turn, and none is written
                # before this wait: with one box it would be, for ptxas follows no register around the loop.
                acc, before = warpgroup_mma_wait(0, deps=[acc, before])
                if c == 0 and step > 0:
                    hardware_arrive(FREE + (fill - 1) % STAGES, TILING.threads)
                x = x_smem.index(stage * BOXES + c).permute((1, 0))
                acc = warpgroup_mma(w, x, acc, is_async=True)
                before = w
            fill += 1
        acc, before = warpgroup_mma_wait(0, deps=[acc, before])
        hardware_arrive(FREE + (fill - 1) % STAGES, TILING.threads)
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
    if PIECES == 1:
        pieces = (acc,)
    elif PIECES == 2:
        pieces = halves_of(acc)
    else:
        left, right = halves_of(acc)
        pieces = halves_of(left) + halves_of(right)
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
        # In the order of mxfp4_order.py, in which the next product multiplies. The 32 columns are one lane's: pairs of
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
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, TILING.rows, WORDS], CODES)
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
    """One product of sorted rows x [slots, num_steps * 128], in the order of mxfp4_order.py.

    gate and up  w_desc [E, width / 8, 2, 8, hidden / 4]; out [slots, stride_out] is activation(gate) * up in that order
    down         w_desc [E, hidden, width / 4]; out [slots, hidden] at the rows' slots
    order, table: those of `sorting.py`, which the kernel before the one before has written.
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
            (produce, (w_desc, x_desc, table_ptr, across, num_steps, smem, TILING)),
        ], [4, 1], [R, P])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, scales_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, blocks,
                       size_out, stride_out, limit, alpha, smem, TILING)),
            (consume, (1, scales_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, blocks,
                       size_out, stride_out, limit, alpha, smem, TILING)),
            (consume, (2, scales_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, blocks,
                       size_out, stride_out, limit, alpha, smem, TILING)),
            (consume, (3, scales_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, blocks,
                       size_out, stride_out, limit, alpha, smem, TILING)),
            (produce, (w_desc, x_desc, table_ptr, across, num_steps, smem, TILING)),
        ], [4, 4, 4, 1], [R, R, R, P])  # fmt: skip
