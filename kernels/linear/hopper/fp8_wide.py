"""The sm_90 kernel of `fp8_wide_path.py`: products of many rows with weights of 8 bits, multiplied as they are.

One persistent program per multiprocessor, in roles:

  consumers  4 warps each  64 or 128 rows of x each of a tile; what wgmma sums ends after some columns
  producer   1 warp        copies weights and x by TMA into a shared ring, ahead of the consumers

wgmma cuts sums of 8 bits to 13 bits behind the first one: its sums of a box of columns are added up in fp32, times
the scales of a block where there are such. For SwiGLU a tile holds 8 rows of the gate, the same rows of the up
projection, and so on: a thread's accumulators hold both. Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.hopper.pipeline import hardware_arrive, hardware_sync
from kernels.linear.hopper.fp8_wide_tilings import BOX as _BOX
from kernels.linear.hopper.fp8_wide_tilings import Fp8WideTiling
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid
from kernels.tma.pointers import AnyTensor

BOX = gl.constexpr(_BOX)
FREE = gl.constexpr(9)  # hardware barriers from 9 on: stages given back; Triton 3.6 uses 0, 1 and one a partition
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@jit
def place_of(tile, down, across, TILING: gl.constexpr):
    """(index of the tile of rows, index of the tile of columns): rows vary fastest, so that weights stay in L2."""
    GROUP: gl.constexpr = TILING.group
    first = tile // (GROUP * across) * GROUP
    height = gl.minimum(down - first, GROUP)
    within = tile % (GROUP * across)
    return first + within % height, within // height


@jit
def load_weights(w_desc, w_smem, bar, stage, n, step, TILING: gl.constexpr):
    """Begin a stage: its barrier expects all of it, and its weights are on their way."""
    COLUMNS: gl.constexpr = TILING.columns
    HEIGHT: gl.constexpr = TILING.rows
    SCALES: gl.constexpr = HEIGHT * 4 if TILING.is_blocks else 0
    mbarrier.expect(bar, (COLUMNS + HEIGHT) * BOX + SCALES)
    if TILING.parts == 2:
        box = w_smem.index(stage).reshape([COLUMNS // 16, 2, 8, BOX])
        tma.async_copy_global_to_shared(w_desc, [n * (COLUMNS // 16), 0, 0, step * BOX], bar, box)
    else:
        tma.async_copy_global_to_shared(w_desc, [n * COLUMNS, step * BOX], bar, w_smem.index(stage))


@jit
def produce(x_desc, w_desc, xs, padded, down, across, num_steps, smem, TILING: gl.constexpr):
    """Fill the ring for one tile after the other; its first weights without waiting for the kernel before this one."""
    STAGES: gl.constexpr = TILING.stages
    HEIGHT: gl.constexpr = TILING.rows
    CONSUMERS: gl.constexpr = TILING.consumers
    BOX_ROWS: gl.constexpr = TILING.consumer_rows
    THREADS: gl.constexpr = TILING.consumers * 128 + 32
    x_smem, w_smem, xs_smem, full = smem
    _, n = place_of(gl.program_id(0), down, across, TILING)
    ahead = gl.minimum(STAGES, num_steps)
    for step in range(ahead):
        load_weights(w_desc, w_smem, full.index(step), step, n, step, TILING)
    wait_for_previous_grid()
    last_box = gl.maximum(padded - BOX_ROWS, 0)
    fill = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        m, n = place_of(tile, down, across, TILING)
        for step in range(num_steps):
            stage = fill % STAGES
            bar = full.index(stage)
            if fill >= ahead:
                if fill >= STAGES:
                    hardware_sync(FREE + stage, THREADS)
                load_weights(w_desc, w_smem, bar, stage, n, step, TILING)
            for c in gl.static_range(CONSUMERS):
                row = gl.minimum(m * HEIGHT + c * BOX_ROWS, last_box)
                tma.async_copy_global_to_shared(x_desc, [row, step * BOX], bar, x_smem.index(stage * CONSUMERS + c))
                if TILING.is_blocks:
                    tma.async_copy_global_to_shared(xs, [step, row], bar, xs_smem.index(stage * CONSUMERS + c))
            fill += 1
    for i in range(gl.maximum(fill - STAGES, 0), fill):  # no arrival stays behind
        hardware_sync(FREE + i % STAGES, THREADS)


@jit
def added(acc, x, w, scale, TILING: gl.constexpr):
    """acc [64, columns] fp32 and the products of a box, times its scale where there is one of a block."""
    COLUMNS: gl.constexpr = TILING.columns
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    part = gl.zeros([64, COLUMNS], gl.float32, ACC)
    part = warpgroup_mma(x, w.permute((1, 0)), part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    if TILING.is_blocks:
        acc += part * scale
    else:
        acc += part
    return acc


@jit
def weight_scales(ws_ptr, n, runs, size_out, step, ACC: gl.constexpr, TILING: gl.constexpr):
    """Scales of a box's weights: of one block, or of the gate's and the up projection's, 8 columns in turn."""
    OUT: gl.constexpr = TILING.columns // TILING.parts
    at = ws_ptr + (n * OUT) // BOX * runs + step
    if TILING.parts == 2:
        gate = gl.load(at)
        up = gl.load(at + size_out // BOX * runs)
        column = gl.arange(0, TILING.columns, gl.SliceLayout(0, ACC))
        scales = gl.where(column // 8 % 2 == 0, gate, up)[None, :]
    else:
        scales = gl.load(at)
    return scales


@jit
def consume(
    W: gl.constexpr, xs, ws_ptr, bias_ptr, y_ptr, num_rows, size_out, down, across, num_steps, smem,
    TILING: gl.constexpr,
):  # fmt: skip
    """One consumer: its rows of every tile of this program."""
    STAGES: gl.constexpr = TILING.stages
    WAVES: gl.constexpr = TILING.waves
    COLUMNS: gl.constexpr = TILING.columns
    THREADS: gl.constexpr = TILING.consumers * 128 + 32
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    x_smem, w_smem, xs_smem, full = smem
    wait_for_previous_grid()
    fill = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        m, n = place_of(tile, down, across, TILING)
        first = m * TILING.rows + W * (64 * WAVES)
        rows = first + gl.arange(0, 64, gl.SliceLayout(1, ACC))
        acc = gl.zeros([64, COLUMNS], gl.float32, ACC)
        low = gl.zeros([64, COLUMNS], gl.float32, ACC)
        if TILING.is_blocks:
            w_next = weight_scales(ws_ptr, n, num_steps, size_out, 0, ACC, TILING)
        for step in range(num_steps):
            stage = fill % STAGES
            mbarrier.wait(full.index(stage), (fill // STAGES) & 1)
            x = x_smem.index(stage * TILING.consumers + W)
            w = w_smem.index(stage)
            if TILING.is_blocks:
                of_rows = xs_smem.index(stage * TILING.consumers + W).slice(0, 64, dim=1).permute((1, 0))
                scale = of_rows.load(ACC) * w_next
                if WAVES == 2:
                    of_rows = xs_smem.index(stage * TILING.consumers + W).slice(64, 64, dim=1).permute((1, 0))
                    low_scale = of_rows.load(ACC) * w_next
                w_next = weight_scales(ws_ptr, n, num_steps, size_out, gl.minimum(step + 1, num_steps - 1), ACC, TILING)
            else:
                scale = 1.0
                low_scale = 1.0
            acc = added(acc, x.slice(0, 64, dim=0), w, scale, TILING)
            if WAVES == 2:
                low = added(low, x.slice(64, 64, dim=0), w, low_scale, TILING)
            hardware_arrive(FREE + stage, THREADS)
            fill += 1
        store(acc, rows, first, xs, ws_ptr, bias_ptr, y_ptr, n, num_rows, size_out, TILING)
        if WAVES == 2:
            store(low, rows + 64, first + 64, xs, ws_ptr, bias_ptr, y_ptr, n, num_rows, size_out, TILING)


@jit
def store(acc, rows, first, xs, ws_ptr, bias_ptr, y_ptr, n, num_rows, size_out, TILING: gl.constexpr):
    """y's 64 rows from `first` on, of one tile's columns, with scales of rows and what is fused into it."""
    OUT: gl.constexpr = TILING.columns // TILING.parts
    if TILING.parts == 2:
        halves = acc.reshape([64, OUT // 8, 2, 8]).permute([0, 1, 3, 2])
        gate, up = gl.split(halves)
        gate = gate.reshape([64, OUT])
        up = up.reshape([64, OUT])
        column = n * OUT + gl.arange(0, OUT, gl.SliceLayout(0, gate.type.layout))
        if not TILING.is_blocks:
            row = first + gl.arange(0, 64, gl.SliceLayout(1, gate.type.layout))
            of_row = gl.load(xs) if TILING.is_static else gl.load(xs + row, mask=row < num_rows, other=0.0)[:, None]
            gate = gate * gl.load(ws_ptr + column, mask=column < size_out, other=0.0)[None, :] * of_row
            up = up * gl.load(ws_ptr + size_out + column, mask=column < size_out, other=0.0)[None, :] * of_row
        decay = gl.exp(-gl.abs(gate))  # never overflows
        out = gate * (gl.where(gate >= 0, 1.0, decay) / (1.0 + decay)) * up
    else:
        out = acc
        column = n * OUT + gl.arange(0, OUT, gl.SliceLayout(0, acc.type.layout))
        if not TILING.is_blocks:
            of_row = gl.load(xs) if TILING.is_static else gl.load(xs + rows, mask=rows < num_rows, other=0.0)[:, None]
            out = out * gl.load(ws_ptr + column, mask=column < size_out, other=0.0)[None, :] * of_row
        if TILING.has_bias:
            out += gl.load(bias_ptr + column, mask=column < size_out, other=0.0).to(gl.float32)[None, :]
    out = gl.convert_layout(out.to(y_ptr.dtype.element_ty), STORED)
    row = first + gl.arange(0, 64, gl.SliceLayout(1, STORED))[:, None]
    column = n * OUT + gl.arange(0, OUT, gl.SliceLayout(0, STORED))[None, :]
    gl.store(y_ptr + row.to(gl.int64) * size_out + column, out, mask=(row < num_rows) & (column < size_out))


@jit(do_not_specialize=["num_rows", "padded", "down", "across", "num_steps"])
def hallmark_fp8_wide_matmul(
    x_desc, w_desc, xs, ws_ptr, bias_ptr, y_ptr, num_rows, padded, size_out, down, across, num_steps,
    TILING: gl.constexpr,
):  # fmt: skip
    """One program of a persistent grid. x_desc [padded, K] codes, w_desc [N, K] or [N / 8, 2, 8, K].

    xs, ws: as `portable/fp8_matmul.py` has them. What a descriptor has no rows or columns for arrives as zeros. Weights
    of the first stages are read before the wait for the kernel before this one; all else is read, and y written, after.
    """
    STAGES: gl.constexpr = TILING.stages
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * TILING.consumers, 64 * TILING.waves, BOX], SWIZZLED)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILING.columns, BOX], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    xs_smem = full  # never allocate what no role uses
    if TILING.is_blocks:
        xs_smem = gl.allocate_shared_memory(
            gl.float32, [STAGES * TILING.consumers, 1, 64 * TILING.waves], gl.NVMMASharedLayout(0, 32, rank=2)
        )
    smem = x_smem, w_smem, xs_smem, full
    launch_next_grid()
    if TILING.consumers == 2:
        gl.warp_specialize([
            (consume, (0, xs, ws_ptr, bias_ptr, y_ptr, num_rows, size_out, down, across, num_steps, smem, TILING)),
            (consume, (1, xs, ws_ptr, bias_ptr, y_ptr, num_rows, size_out, down, across, num_steps, smem, TILING)),
            (produce, (x_desc, w_desc, xs, padded, down, across, num_steps, smem, TILING)),
        ], [4, 1], [TILING.registers, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, xs, ws_ptr, bias_ptr, y_ptr, num_rows, size_out, down, across, num_steps, smem, TILING)),
            (consume, (1, xs, ws_ptr, bias_ptr, y_ptr, num_rows, size_out, down, across, num_steps, smem, TILING)),
            (consume, (2, xs, ws_ptr, bias_ptr, y_ptr, num_rows, size_out, down, across, num_steps, smem, TILING)),
            (produce, (x_desc, w_desc, xs, padded, down, across, num_steps, smem, TILING)),
        ], [4, 4, 1], [TILING.registers, TILING.registers, 24])  # fmt: skip


def launch_fp8_wide(
    codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor, bias: Tensor | None, y: Tensor,
    tiling: Fp8WideTiling,
) -> None:  # fmt: skip
    """Fill y [M, N] with the product of rounded inputs and a weight [parts * N, K].

    codes, scales  of M rows, as `padded_codes` makes them

    The weight is read without waiting for the kernel before this call, so it must not have come from there.
    """
    num_rows, size_out = y.shape
    padded, columns = codes.shape
    size_in = weight_codes.shape[1]
    kernel = launcher(tiling, y.dtype, None if bias is None else bias.dtype, y.device)
    w_map: tuple[tuple[int, ...], tuple[int, ...]] = ((size_out, size_in), (size_in, 1))
    if tiling.parts == 2:
        w_map = (size_out // 8, 2, 8, size_in), (8 * size_in, size_out * size_in, size_in, 1)
    x_map = (padded, columns), (columns, 1)
    x_box, w_box, *of_scales = kernel.boxes
    xs: tuple[Any, ...] = (scales.data_ptr(),)
    if of_scales:
        s_map = (columns // _BOX, padded), (scales.stride(0), 1)
        xs = kernel.encode(scales.data_ptr(), *of_scales[0], *s_map, 0), *s_map[0], *s_map[1]
    down, across = -(-num_rows // tiling.rows), -(-size_out * tiling.parts // tiling.columns)
    arguments = (
        kernel.encode(codes.data_ptr(), *x_box, *x_map, 0), *x_map[0], *x_map[1],
        kernel.encode(weight_codes.data_ptr(), *w_box, *w_map, 0), *w_map[0], *w_map[1],
        *xs, weight_scales.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        num_rows, padded, size_out, down, across, columns // _BOX,
    )  # fmt: skip
    kernel((min(num_processors(y.device), down * across), 1, 1), arguments)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(
    tiling: Fp8WideTiling, dtype_out: torch.dtype, of_bias: torch.dtype | None, device: torch.device
) -> Loaded:
    """`compiled_fp8_wide`, ready to launch past Triton's binder."""
    return Loaded(compiled_fp8_wide(tiling, dtype_out, of_bias), device)


def compiled_fp8_wide(tiling: Fp8WideTiling, dtype_out: torch.dtype, of_bias: torch.dtype | None = None) -> Any:
    """`hallmark_fp8_wide_matmul` for sm_90; no GPU is needed."""
    weights = [tiling.columns // 16, 2, 8, _BOX] if tiling.parts == 2 else [tiling.columns, _BOX]
    scales = AnyTensor(torch.float32, 0)
    of_x = any_scales(64 * tiling.waves) if tiling.is_blocks else scales
    return hallmark_fp8_wide_matmul.warmup(
        any_codes([64 * tiling.waves, _BOX]), any_codes(weights), of_x, scales,
        None if of_bias is None else AnyTensor(of_bias, 0), AnyTensor(dtype_out, 0),
        1, 1, 16, 1, 1, 1, tiling, grid=(1,), num_warps=4, launch_pdl=True,
    )  # fmt: skip


def any_codes(box: list[int]) -> TensorDescriptor:
    """Return a stand-in for every tensor map of codes of this box: what Triton compiles in of one."""
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float8e4nv)
    dtype = torch.float8_e4m3fn
    return TensorDescriptor(AnyTensor(dtype, 0), [1] * len(box), [16] * (len(box) - 1) + [1], box, layout)


def any_scales(rows: int) -> TensorDescriptor:
    """Return a stand-in for every tensor map of the scales of so many rows of x."""
    layout = gl.NVMMASharedLayout(0, 32, rank=2)
    return TensorDescriptor(AnyTensor(torch.float32, 0), [1, 1], [4, 1], [1, rows], layout)
