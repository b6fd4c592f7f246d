"""The sm_90 kernel of `launch.py`: grouped products whose weights stay codes of 4 bits until they are multiplied.

Roles, ring, and the order in which x comes are those of mxfp4/products.py. A code is a number's low four bits in bf16
of 128 + code, so that one instruction makes a pair of two codes, and a second one takes 128 and the zero point away:
small whole numbers, exact in bf16. A step of the ring is a group of 128 columns: wgmma sums it alone, and its sums are
added up in fp32 times the group's scale. Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.experts.mxfp4 import tilings as mxfp4_tilings
from kernels.experts.mxfp4.products import load_codes, load_stage, ring, scales_layout, store_tile, tile_at
from kernels.experts.mxfp4.unpack import REGISTERS as _REGISTERS
from kernels.hopper.pipeline import hardware_arrive, hardware_sync
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid

BOX = gl.constexpr(mxfp4_tilings.BOX)
BOXES = gl.constexpr(mxfp4_tilings.BOXES)
STEP = gl.constexpr(mxfp4_tilings.STEP)  # a group
HEIGHT = gl.constexpr(mxfp4_tilings.ROWS)
FREE = gl.constexpr(7)  # hardware barriers from 7 on: stages given back; Triton 3.6 uses 0, 1 and one a partition
BASE = gl.constexpr(0x4300)  # 128 in bf16, of whose numbers up to 255 the last bit is 1
REGISTERS = gl.constexpr(_REGISTERS)


def _unpacked() -> str:
    """Return PTX: words $16 to $19 of 8 codes each become pairs of bf16 numbers, pair i of word w $(4 * i + w).

    Codes i and i + 4 of a word are its pair i. $20 to $23: of each word 128 and the zero point, twice.
    """
    lines = []
    for word in range(4):
        for pair in range(4):
            source = f"${16 + word}"
            if pair:
                lines.append(f"shr.b32 t, {source}, {4 * pair};")
                source = "t"
            lines.append(f"lop3.b32 t, {source}, 0x000F000F, 0x43004300, 0xEA;")  # (a & b) | c
            lines.append(f"sub.bf16x2 ${4 * pair + word}, t, ${20 + word};")
    return "\n".join(["{", ".reg .b32 t;", *lines, "}"])


UNPACK = gl.constexpr(_unpacked())


@jit
def produce(w_desc, x_desc, table_ptr, across, num_steps, smem, TILING: gl.constexpr):
    """Fill the ring for one tile after the other. Weights do not depend on the kernel before, and come first."""
    STAGES: gl.constexpr = TILING.stages
    BYTES: gl.constexpr = TILING.bytes_of_stage
    w_smem, x_smem, full = smem
    total = gl.load(table_ptr) * across
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
def numbers_of(codes, zeros, BOX_OF: gl.constexpr, ACC: gl.constexpr):
    """The numbers of one box of columns, [64, 64] bf16, the first operand of a wgmma. zeros [64]: bits of bf16."""
    # [64 rows, 4 lanes, 2 words, 2 halves] for each box of x
    chunks = gl.split(codes.reshape([HEIGHT, 4, BOXES, 2, 2]).permute([0, 1, 3, 4, 2]))
    chunk = chunks[BOX_OF]
    LAYOUT: gl.constexpr = chunk.type.layout
    of_lanes = zeros[:, None] + gl.zeros([HEIGHT, 4], gl.int16, scales_layout())
    of_lanes = gl.convert_layout(of_lanes, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    of_lanes, chunk = gl.broadcast(of_lanes.expand_dims(2).expand_dims(3), chunk)
    o0, o1, o2, o3 = gl.inline_asm_elementwise(
        UNPACK, REGISTERS, [chunk, of_lanes], (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=8,
    )  # fmt: skip
    # [64, lane, word, half, bit 0 of the place, bit 1]
    places = gl.join(gl.join(o0, o1), gl.join(o2, o3))
    out = places.permute([0, 2, 5, 4, 1, 3]).reshape([HEIGHT, BOX])
    return gl.convert_layout(out, gl.DotOperandLayout(0, ACC, 2))


@jit
def group_at(tile, across, table_ptr, groups, size_out, W: gl.constexpr, LAYOUT: gl.constexpr, TILING: gl.constexpr):
    """Places of the first groups of this consumer's rows of a tile, [64]; of rows behind the last one, its own."""
    expert, _first, _end, n = tile_at(tile, across, table_ptr)
    r = W * HEIGHT + gl.arange(0, HEIGHT, LAYOUT)
    if TILING.parts == 2:
        column = gl.minimum(n * TILING.columns + r // 16 * 8 + r % 8, size_out - 1)
        row = (expert * 2 + r // 8 % 2) * size_out + column
    else:
        row = expert * size_out + gl.minimum(n * TILING.columns + r, size_out - 1)
    return row * groups


@jit
def load_zeros(zeros_ptr, at, step, groups):
    """Bits of bf16 of 128 and the zero points of one stage, int16."""
    return gl.load(zeros_ptr + at + gl.minimum(step, groups - 1)).to(gl.int16) + BASE


@jit
def load_scales(scales_ptr, at, step, groups):
    return gl.load(scales_ptr + at + gl.minimum(step, groups - 1))


@jit
def consume(
    W: gl.constexpr, scales_ptr, zeros_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, size_out, stride_out,
    limit, alpha, smem, TILING: gl.constexpr,
):  # fmt: skip
    """One consumer: 64 rows of weights of every tile of this program.

    While a stage's first box is multiplied the second one's codes become numbers, and while the second is, those of the
    next stage's first. Zero points and scales are loaded two stages ahead.
    """
    STAGES: gl.constexpr = TILING.stages
    TOKENS: gl.constexpr = TILING.tokens
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    OF_CODES: gl.constexpr = gl.SliceLayout(1, scales_layout())
    w_smem, x_smem, full = smem
    total = gl.load(table_ptr) * across
    start = gl.program_id(0)
    zero_sums = gl.zeros([HEIGHT, TOKENS], gl.float32, ACC)
    stage = 0
    phase = 0
    for tile in range(start, total, gl.num_programs(0)):
        expert, first, end, n = tile_at(tile, across, table_ptr)
        z_at = group_at(tile, across, table_ptr, num_steps, size_out, W, OF_CODES, TILING)
        s_at = group_at(tile, across, table_ptr, num_steps, size_out, W, OF_ROWS, TILING)
        zeros = load_zeros(zeros_ptr, z_at, 0, num_steps)
        scales = load_scales(scales_ptr, s_at, 0, num_steps)
        next_zeros = load_zeros(zeros_ptr, z_at, 1, num_steps)
        next_scales = load_scales(scales_ptr, s_at, 1, num_steps)
        mbarrier.wait(full.index(stage), phase)
        codes = load_stage(w_smem, stage, W, TILING)
        first_box = numbers_of(codes, zeros, 0, ACC)
        sums = zero_sums
        for step in range(num_steps):
            current = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            x = x_smem.index(current * BOXES).permute((1, 0))
            part = warpgroup_mma(first_box, x, zero_sums, use_acc=False, is_async=True)
            second_box = numbers_of(codes, zeros, 1, ACC)
            mbarrier.wait(full.index(stage), phase, pred=step + 1 < num_steps)
            codes = load_stage(w_smem, stage, W, TILING)  # behind a tile's last stage: not used
            zeros = next_zeros
            next_zeros = load_zeros(zeros_ptr, z_at, step + 2, num_steps)
            x = x_smem.index(current * BOXES + 1).permute((1, 0))
            part = warpgroup_mma(second_box, x, part, is_async=True)
            part, first_box = warpgroup_mma_wait(1, deps=[part, first_box])  # a wgmma in flight reads its registers
            first_box = numbers_of(codes, zeros, 0, ACC)
            part, second_box = warpgroup_mma_wait(0, deps=[part, second_box])
            hardware_arrive(FREE + current, TILING.threads)
            sums += part * scales[:, None]
            scales = next_scales
            next_scales = load_scales(scales_ptr, s_at, step + 2, num_steps)
        store_tile(W, sums, 0, out_ptr, order_ptr, expert, first, end, n, size_out, stride_out, limit, alpha, TILING)


@jit(do_not_specialize=["across", "num_steps"])
def hallmark_gluon_experts_int4(
    w_desc, x_desc, out_ptr, scales_ptr, zeros_ptr, order_ptr, table_ptr, across, num_steps, size_out, stride_out,
    limit, alpha, TILING: gl.constexpr,
):  # fmt: skip
    """One product of sorted rows x [slots, num_steps * 128], in the order of mxfp4/order.py.

    gate and up  w_desc [E, width / 8, 2, 8, hidden / 4]; out [slots, stride_out] is activation(gate) * up in that order
    down         w_desc [E, hidden, width / 4]; out [slots, hidden] at the rows' slots
    scales, zeros [rows of w, num_steps]; order, table: those of routing/sorting.py, which the kernel before the one
    before has written.
    """
    R: gl.constexpr = TILING.registers[0]
    P: gl.constexpr = TILING.registers[1]
    smem = ring(w_desc.dtype, TILING)
    launch_next_grid()
    gl.warp_specialize([
        (consume, (0, scales_ptr, zeros_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, size_out, stride_out,
                   limit, alpha, smem, TILING)),
        (consume, (1, scales_ptr, zeros_ptr, out_ptr, order_ptr, table_ptr, across, num_steps, size_out, stride_out,
                   limit, alpha, smem, TILING)),
        (produce, (w_desc, x_desc, table_ptr, across, num_steps, smem, TILING)),
    ], [4, 1], [R, P])  # fmt: skip
