"""Kernels by which each rank writes its part into the inbox of every other one, and then needs only its own memory.

An inbox is [2, world, capacity, unit of exchange] bytes: two buffers by turns, and in each a place for every rank and
every row (or chunk of columns). All words are EMPTY but for those that arrived and were not read yet.

Why two buffers suffice. Program p of a call exchanges with program p of the same call on the other ranks only, in
places that no other program ever uses, and counts its calls in `turns[p]`, in device memory, so that replays of a CUDA
graph count too. Let call n be the n-th of program p, which writes into buffer n mod 2. Rank r begins n + 2 after it
ended n + 1, in which it waited until all that rank q sent in n + 1 had arrived. Rank q sent that after its call n had
ended: calls of a rank are kernels in stream order, and one that starts early waits for the one before it ahead of any
access to an inbox. So q had read, and had made EMPTY again, its buffer of call n before r writes into it for n + 2.
With a single buffer r could write for n + 1 while q still reads or clears that of n. For this to hold, every program
sends at least one word to each rank in each of its calls, and waits for one of each.

Why no program waits for ever. A program sends all that it has before it waits for anything, and at most PROGRAMS run,
which fit the GPU at once: program p of every rank will run, whatever the others wait for. The ranks must call the same
kernels with the same sizes in the same order, on one stream.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.collective.words import (
    add8,
    await_unit,
    clear_unit,
    load_unit,
    multiply8,
    packed,
    scale8,
    send_unit,
    sendable,
    store_unit,
    sum_of_squares,
    unpacked,
)


@triton.jit
def _weights(weight_ptr, at, inside, DTYPE: tl.constexpr):
    """The norm's eight weights of each unit, as fp32."""
    base = weight_ptr.to(tl.int64)
    if weight_ptr.dtype.element_ty == tl.float32:
        a, b, c, d = load_unit(base + at * 2, inside)
        e, f, g, h = load_unit(base + at * 2 + 16, inside)
        return (
            a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True),
            c.to(tl.float32, bitcast=True), d.to(tl.float32, bitcast=True),
            e.to(tl.float32, bitcast=True), f.to(tl.float32, bitcast=True),
            g.to(tl.float32, bitcast=True), h.to(tl.float32, bitcast=True),
        )  # fmt: skip
    return unpacked(load_unit(base + at, inside), DTYPE)


@triton.jit
def _send(inboxes_ptr, place, words, inside, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Write the words to this place, in bytes, of every other rank's inbox, the next rank's first."""
    for step in tl.static_range(1, WORLD):
        send_unit(tl.load(inboxes_ptr + (RANK + step) % WORLD) + place, words, inside)


@triton.jit
def _clear(place, rank_bytes: tl.constexpr, inside, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Empty what every other rank has sent to this place of one's own inbox, when all threads have read it.

    place       address of rank 0's unit there; the next rank's is rank_bytes behind it
    """
    tl.debug_barrier()  # every thread has read what it waited for
    for step in tl.static_range(1, WORLD):
        clear_unit(place + ((RANK + step) % WORLD) * rank_bytes, inside)


@triton.jit
def _end_turn(turns_ptr, turn):
    """Count this program's call."""
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turns_ptr + tl.program_id(0), turn + 1)


@triton.jit(do_not_specialize=("rows",))  # one kernel for any number
def hallmark_push_sum(
    part_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    inboxes_ptr,
    turns_ptr,
    rows,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CAPACITY: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):
    """Sum the ranks' rows in the order of the ranks, in fp32, rounded once; with HAS_NORM add that to the residual,
    rounded again, and norm it, as kernels/fused/norm.py.

    part, residual, out   [rows, COLUMNS] of 16-bit floats, contiguous; out may be part. COLUMNS is a multiple of 8
    weight     [COLUMNS] of the same dtype or fp32
    inboxes    [WORLD] int64: addresses of all ranks' inboxes, [2, WORLD, CAPACITY, COLUMNS] of part's dtype
    turns      [PROGRAMS] int32: calls of each program
    rows       at most CAPACITY; program p has the rows p, p + PROGRAMS, ...
    """
    DTYPE: tl.constexpr = part_ptr.dtype.element_ty
    ROW_BYTES: tl.constexpr = COLUMNS * 2
    program = tl.program_id(0)
    unit = tl.arange(0, BLOCK)
    inside = (unit < COLUMNS // 8).to(tl.int32)
    at = unit.to(tl.int64) * 16
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_NORM:
        weight = _weights(weight_ptr, at, inside, DTYPE)
    here = tl.load(inboxes_ptr + RANK)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turns_ptr + program)
    buffer = ((turn & 1) * (WORLD * CAPACITY)).to(tl.int64)
    part = part_ptr.to(tl.int64) + at
    for row in range(program, rows, PROGRAMS):
        words = sendable(load_unit(part + tl.cast(row, tl.int64) * ROW_BYTES, inside))
        place = (buffer + (RANK * CAPACITY + row)) * ROW_BYTES + at
        _send(inboxes_ptr, place, words, inside, RANK, WORLD)
    for row in range(program, rows, PROGRAMS):
        offset = tl.cast(row, tl.int64) * ROW_BYTES
        own = sendable(load_unit(part + offset, inside))
        if HAS_NORM:
            residual = load_unit(residual_ptr.to(tl.int64) + offset + at, inside)
        place = here + (buffer + row) * ROW_BYTES + at
        if RANK == 0:
            total = unpacked(own, DTYPE)
        else:
            total = unpacked(await_unit(place, inside), DTYPE)
        for rank in tl.static_range(1, WORLD):
            if rank == RANK:
                total = add8(total, unpacked(own, DTYPE))
            else:
                arrived = await_unit(place + rank * CAPACITY * ROW_BYTES, inside)
                total = add8(total, unpacked(arrived, DTYPE))
        words = packed(total, DTYPE)
        if HAS_NORM:
            words = packed(add8(unpacked(residual, DTYPE), unpacked(words, DTYPE)), DTYPE)
            store_unit(residual_ptr.to(tl.int64) + offset + at, words, inside)
            total = unpacked(words, DTYPE)  # the next layer reads the rounded sum, and so does this norm
            scale = tl.rsqrt(sum_of_squares(total) / COLUMNS + eps)
            words = packed(multiply8(scale8(total, scale), weight), DTYPE)
        store_unit(out_ptr.to(tl.int64) + offset + at, words, inside)
        _clear(place, CAPACITY * ROW_BYTES, inside, RANK, WORLD)
    _end_turn(turns_ptr, turn)


@triton.jit(do_not_specialize=("rows",))
def hallmark_push_columns(
    part_ptr,
    out_ptr,
    starts_ptr,
    inboxes_ptr,
    turns_ptr,
    rows,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CAPACITY: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):
    """Copy every rank's columns to all ranks. Sizes are in units of 16 bytes.

    part       [rows, this rank's columns] of floats
    out        [rows, all columns]
    starts     [WORLD + 1] int32: where each rank's columns begin, and the end of the last one's
    inboxes    [WORLD] int64: addresses of all ranks' inboxes, [2, WORLD, CAPACITY, BLOCK] units
    turns      [PROGRAMS] int32: calls of each program
    rows       rows * ceil(UNITS / BLOCK) is at most CAPACITY
    UNITS      columns of the widest rank: a narrower one sends zeros too, for the sake of the turns
    """
    CHUNKS: tl.constexpr = (UNITS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    unit = tl.arange(0, BLOCK)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    here = tl.load(inboxes_ptr + RANK)
    first = tl.load(starts_ptr + RANK)
    size = tl.load(starts_ptr + RANK + 1) - first
    width = tl.load(starts_ptr + WORLD)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turns_ptr + program)
    buffer = ((turn & 1) * (WORLD * CAPACITY)).to(tl.int64)
    at = unit.to(tl.int64) * 16
    for chunk in range(program, rows * CHUNKS, PROGRAMS):
        column = (chunk % CHUNKS) * BLOCK + unit
        row = (chunk // CHUNKS).to(tl.int64)
        is_own = (column < size).to(tl.int32)
        words = sendable(load_unit(part_ptr.to(tl.int64) + (row * size + column) * 16, is_own))
        place = (buffer + (RANK * CAPACITY + chunk)) * (BLOCK * 16) + at
        _send(inboxes_ptr, place, words, (column < UNITS).to(tl.int32), RANK, WORLD)
        store_unit(out_ptr.to(tl.int64) + (row * width + first + column) * 16, words, is_own)
    for chunk in range(program, rows * CHUNKS, PROGRAMS):
        column = (chunk % CHUNKS) * BLOCK + unit
        row = (chunk // CHUNKS).to(tl.int64)
        inside = (column < UNITS).to(tl.int32)
        place = here + (buffer + chunk) * (BLOCK * 16) + at
        for step in tl.static_range(1, WORLD):
            rank = (RANK + step) % WORLD
            words = await_unit(place + rank * CAPACITY * (BLOCK * 16), inside)
            start = tl.load(starts_ptr + rank)
            end = tl.load(starts_ptr + rank + 1)
            out_at = out_ptr.to(tl.int64) + (row * width + start + column) * 16
            store_unit(out_at, words, (column < end - start).to(tl.int32))
        _clear(place, CAPACITY * BLOCK * 16, inside, RANK, WORLD)
    _end_turn(turns_ptr, turn)


@triton.jit(do_not_specialize=("count",))
def hallmark_push_values(
    values_ptr,
    inboxes_ptr,
    turns_ptr,
    count,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CAPACITY: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):
    """Give rank 0's integers to all ranks, in place. Each travels as four words of 16 bits, of which none is EMPTY.

    values     [count] int32 or int64
    inboxes    [WORLD] int64: addresses of all ranks' inboxes, [2, WORLD, CAPACITY, BLOCK] units of 16 bytes
    turns      [PROGRAMS] int32: calls of each program
    count      at most CAPACITY * BLOCK. Every rank sends as many, for the sake of the turns
    """
    program = tl.program_id(0)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    here = tl.load(inboxes_ptr + RANK)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turns_ptr + program)
    buffer = ((turn & 1) * (WORLD * CAPACITY)).to(tl.int64)
    unit = tl.arange(0, BLOCK)
    at = unit.to(tl.int64) * 16
    for chunk in range(program, (count + BLOCK - 1) // BLOCK, PROGRAMS):
        is_value = chunk * BLOCK + unit < count
        inside = is_value.to(tl.int32)
        value = tl.load(values_ptr + chunk * BLOCK + unit, mask=is_value, other=0).to(tl.int64)
        a = (value & 0xFFFF).to(tl.int32)
        b = ((value >> 16) & 0xFFFF).to(tl.int32)
        c = ((value >> 32) & 0xFFFF).to(tl.int32)
        d = ((value >> 48) & 0xFFFF).to(tl.int32)
        place = (buffer + (RANK * CAPACITY + chunk)) * (BLOCK * 16) + at
        _send(inboxes_ptr, place, (a, b, c, d), inside, RANK, WORLD)
    for chunk in range(program, (count + BLOCK - 1) // BLOCK, PROGRAMS):
        is_value = chunk * BLOCK + unit < count
        inside = is_value.to(tl.int32)
        place = here + (buffer + chunk) * (BLOCK * 16) + at
        for step in tl.static_range(1, WORLD):
            rank = (RANK + step) % WORLD
            a, b, c, d = await_unit(place + rank * CAPACITY * (BLOCK * 16), inside)
            if rank == 0:
                value = a.to(tl.int64) | (b.to(tl.int64) << 16) | (c.to(tl.int64) << 32) | (d.to(tl.int64) << 48)
                tl.store(values_ptr + chunk * BLOCK + unit, value.to(values_ptr.dtype.element_ty), mask=is_value)
        _clear(place, CAPACITY * BLOCK * 16, inside, RANK, WORLD)
    _end_turn(turns_ptr, turn)
