"""The order of tiles: a batch's plan, made on the device, and the scheduler that hands out its tiles.

A tile is block_m query rows of one head. Tiles with the most keys come first, inside groups of KV heads (and, where
one head's keys are too many, of sequences) whose keys and values fit in L2 together. The order of the row blocks is the
same for every head, so the plan lists row blocks only: HEADER integers, then ITEM integers a row block.

    header  0 next tile to take, 2 row blocks listed
    item    0 first query row, 1 rows, 2 position of the first row, 3 keys of the sequence, 4 first key row (of pages:
            the sequence), 5 first key seen, 6 end of the keys seen, 7 with parts: where the part goes, -1 for a whole
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded, is_interpreted
from kernels.hopper.variants import Variant
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class

HEADER = gl.constexpr(8)
ITEM = gl.constexpr(8)
RING = gl.constexpr(2)  # posted tiles
# A tile is taken this many key blocks before the end of the one before: a tile held early is work that an idle
# neighbour cannot take, one taken late is waited for. 2 gives 1-2 % over the earliest at 128, 5-9 % at 256 (H200).
AHEAD = gl.constexpr(2)
_MAX_WINDOW = 1 << 30  # int32 arithmetic on positions must not overflow
L2_BYTES = 24 << 20  # of keys and values in one group: 8 to 48 MiB measured, 24 best or equal (H200, 50 MiB of L2)


@triton.jit(do_not_specialize=["num_seqs", "window", "keys_per_group"])
def hallmark_gluon_plan(
    plan_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, spans_ptr, num_seqs, window, keys_per_group,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr,
    SEQS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCKS row blocks of one sequence, each written to its place in the order of work."""
    sequence = tl.program_id(0)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    is_first = (sequence == 0) & (tl.program_id(1) == 0)
    first_row = tl.load(cu_seqlens_q_ptr + sequence)
    num_rows = tl.load(cu_seqlens_q_ptr + sequence + 1) - first_row
    first_key = tl.load(cu_seqlens_k_ptr + sequence)
    num_keys = tl.load(cu_seqlens_k_ptr + sequence + 1) - first_key
    if (tl.program_id(1) * BLOCKS * BLOCK_M >= num_rows) & (is_first == 0):
        return

    # Before a block: all of earlier groups; of its own group later blocks, and the same block of earlier sequences.
    group = first_key // keys_per_group
    place = tl.zeros([BLOCKS], tl.int32)
    num_blocks = 0
    for start in range(0, num_seqs, SEQS):
        others = start + tl.arange(0, SEQS)
        inside = others < num_seqs
        starts = tl.load(cu_seqlens_q_ptr + others, mask=inside, other=0)
        ends = tl.load(cu_seqlens_q_ptr + others + 1, mask=inside, other=0)
        groups = tl.load(cu_seqlens_k_ptr + others, mask=inside, other=0) // keys_per_group
        counts = (ends - starts + BLOCK_M - 1) // BLOCK_M
        num_blocks += tl.sum(counts)
        later = tl.maximum(counts[None, :] - blocks[:, None] - 1, 0)
        tied = ((counts[None, :] > blocks[:, None]) & (others < sequence)[None, :]).to(tl.int32)
        before = tl.where((groups == group)[None, :], later + tied, tl.where(groups < group, counts, 0)[None, :])
        place += tl.sum(before, axis=1)
    if is_first:
        tl.store(plan_ptr, 0)
        tl.store(plan_ptr + 2, num_blocks)

    start_row = blocks * BLOCK_M
    position = num_keys - num_rows + start_row
    end = tl.minimum(position + BLOCK_M, num_keys)
    begin = tl.maximum(position - window + 1, 0) if HAS_WINDOW else tl.zeros_like(position)
    if HAS_SPANS:  # the union over the tile's rows: a span widens what is read, not only what is seen
        rows = start_row[:, None] + tl.arange(0, BLOCK_M)[None, :]
        inside = rows < num_rows
        lo = tl.load(spans_ptr + (first_row + rows).to(tl.int64) * 2, mask=inside, other=0)
        hi = tl.minimum(tl.load(spans_ptr + (first_row + rows).to(tl.int64) * 2 + 1, mask=inside, other=0), num_keys)
        end = tl.maximum(end, tl.max(tl.where(lo < hi, hi, 0), axis=1))
        begin = tl.minimum(begin, tl.maximum(tl.min(tl.where(lo < hi, lo, 2147483647), axis=1), 0))
    end = tl.maximum(end, 1)  # a tile without keys still has a block, all of it masked
    begin = tl.minimum(begin, end - 1)

    listed = start_row < num_rows
    item_ptr = plan_ptr + PLAN_HEADER + place * PLAN_ITEM
    tl.store(item_ptr, first_row + start_row, mask=listed)
    tl.store(item_ptr + 1, tl.minimum(num_rows - start_row, BLOCK_M), mask=listed)
    tl.store(item_ptr + 2, position, mask=listed)
    tl.store(item_ptr + 3, tl.zeros_like(position) + num_keys, mask=listed)
    tl.store(item_ptr + 4, tl.zeros_like(position) + first_key, mask=listed)
    tl.store(item_ptr + 5, begin, mask=listed)
    tl.store(item_ptr + 6, end, mask=listed)


class PlanConstants(NamedTuple):
    """The constexprs of `hallmark_gluon_plan`, in its order."""

    header: int
    item: int
    block_m: int
    blocks: int
    seqs: int
    has_window: bool
    has_spans: bool


def plan_tiles(num_tokens: int, batch: AttentionBatch, flags: AttentionFlags, variant: Variant) -> Tensor:
    """The order of work of a batch, see schedule.py: int32 on the device, good for launches one after another."""
    starts_q, starts_k, spans = batch.cu_seqlens_q, batch.cu_seqlens_k, flags.spans
    assert starts_k is not None, "a prefill batch is packed"
    num_seqs, device = batch.num_seqs, starts_q.device
    plan = torch.empty(
        HEADER.value + ITEM.value * (num_tokens // variant.tiling.block_m + num_seqs), dtype=torch.int32, device=device
    )
    kernel, constants = compiled_plan(
        variant.tiling.block_m,
        variant.window,
        device,
        pointer_class(starts_q),
        pointer_class(starts_k),
        pointer_class(spans),
    )
    rows = constants.block_m * constants.blocks  # of one program
    grid = (num_seqs, max(1, (batch.max_seqlen_q + rows - 1) // rows), 1)
    numbers = (num_seqs, bounded_window(flags), keys_per_group(variant))
    if kernel is None:
        hallmark_gluon_plan[grid](plan, starts_q, starts_k, spans, *numbers, *constants)
    else:
        spans_at = None if spans is None else spans.data_ptr()
        kernel(grid, (plan.data_ptr(), starts_q.data_ptr(), starts_k.data_ptr(), spans_at, *numbers))
    return plan


# A pure function of what is compiled in: its cache holds no state. What falls out is found again in Triton's own cache.
@lru_cache(maxsize=256)
def compiled_plan(
    block_m: int,
    window: bool,
    device: torch.device,
    starts_q: PointerClass,
    starts_k: PointerClass,
    spans: PointerClass | None,
) -> tuple[Loaded | None, PlanConstants]:
    """`hallmark_gluon_plan` for such tensors, None where it is interpreted, and the last of its arguments."""
    blocks = 64 if spans is None else 8  # spans are read row by row
    constants = PlanConstants(HEADER.value, ITEM.value, block_m, blocks, 64, window, spans is not None)
    if is_interpreted():
        return None, constants
    tensors = (AnyTensor(torch.int32, 0), any_tensor(starts_q), any_tensor(starts_k), any_tensor(spans))
    return Loaded(hallmark_gluon_plan.warmup(*tensors, 0, 0, 0, *constants, grid=(1,)), device), constants


def keys_per_group(variant: Variant) -> int:
    """Keys of one head that fit in a group's share of L2 beside their values."""
    return L2_BYTES // (2 * 2 * variant.head_dim)


def bounded_window(flags: AttentionFlags) -> int:
    return 0 if flags.window is None else min(flags.window, _MAX_WINDOW)


# The ring of posted tiles. Gluon has no scalar shared-memory access: one-element tensors stand in (their max is free).
@gluon.jit
def post(ring, index, value):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ring.index(index).store(gl.full([1], 0, gl.int32, ONE) + value)


@gluon.jit
def read(ring, index):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(ring.index(index).load(ONE), axis=0)


@gluon.jit
def first_of(low, VARIANT: gl.constexpr):
    """The first block of a tile, of its first box."""
    if VARIANT.box != VARIANT.tiling.block_n:
        low = low // (VARIANT.tiling.block_n // VARIANT.box)
    return low


@gluon.jit
def schedule(plan, num_heads, heads_per_group, tiles, VARIANT: gl.constexpr):
    """The scheduler's role: takes tiles by an atomic counter and posts them; a first row of -1 ends every role."""
    ring, ring_full, ring_free, want = tiles
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    num_blocks = gl.load(plan + 2)
    num_tiles = num_blocks * num_heads
    tile = gl.program_id(0)
    n = 0
    go = True
    while go:
        if n > 0:
            mbarrier.wait(want, (n - 1) & 1)
            tile = gl.atomic_add(plan, 1) + gl.num_programs(0)
            # Of num_tiles asked for in all the last: leaves the counter as the next launch of this plan wants it.
            gl.store(plan, 0, mask=tile == num_tiles + gl.num_programs(0) - 1)
        go = tile < num_tiles
        # head groups outermost, row blocks inside, the heads of a group innermost: they share keys
        per_group = gl.maximum(num_blocks * heads_per_group, 1)
        group = gl.where(go, tile, 0) // per_group
        inside = gl.where(go, tile, 0) - group * per_group
        width = gl.minimum(num_heads - group * heads_per_group, heads_per_group)
        block = inside // width
        entry = plan + HEADER + block * ITEM
        slot = n % RING
        row = gl.where(go, gl.load(entry), -1)
        rows = gl.where(go, gl.load(entry + 1), 0)
        position = gl.where(go, gl.load(entry + 2), 0)
        keys = gl.load(entry + 3)
        first_key = gl.load(entry + 4)
        top = (gl.where(go, gl.load(entry + 6), 1) - 1) // BLOCK_N
        mbarrier.wait(ring_free.index(slot), ((n // RING) & 1) ^ 1)
        post(ring, slot * VARIANT.fields, row)
        post(ring, slot * VARIANT.fields + 1, rows)
        post(ring, slot * VARIANT.fields + 2, position)
        post(ring, slot * VARIANT.fields + 3, keys)
        post(ring, slot * VARIANT.fields + 4, group * heads_per_group + inside - block * width)
        post(ring, slot * VARIANT.fields + 5, first_key)
        post(ring, slot * VARIANT.fields + 6, top)
        if VARIANT.starts_anywhere:
            post(ring, slot * VARIANT.fields + 7, gl.where(go, gl.load(entry + 5), 0) // VARIANT.box)
        if VARIANT.parts:
            post(ring, slot * VARIANT.fields + 8, gl.load(entry + 7))
        mbarrier.arrive(ring_full.index(slot), count=1)
        n += 1


@gluon.jit
def take_tile(tiles, n, VARIANT: gl.constexpr):
    """The n-th tile: first query row (-1: no more), rows, position, keys, head, first key row, first box, last block,
    where its part goes (-1: it is whole)."""
    ring, ring_full, ring_free, _want = tiles
    slot = n % RING
    mbarrier.wait(ring_full.index(slot), (n // RING) & 1)
    row = read(ring, slot * VARIANT.fields)
    rows = read(ring, slot * VARIANT.fields + 1)
    position = read(ring, slot * VARIANT.fields + 2)
    keys = read(ring, slot * VARIANT.fields + 3)
    head = read(ring, slot * VARIANT.fields + 4)
    first_key = read(ring, slot * VARIANT.fields + 5)
    top = read(ring, slot * VARIANT.fields + 6)
    low = top * 0
    if VARIANT.starts_anywhere:
        low = read(ring, slot * VARIANT.fields + 7)
    part = top * 0 - 1
    if VARIANT.parts:
        part = read(ring, slot * VARIANT.fields + 8)
    mbarrier.arrive(ring_free.index(slot), count=1)
    return row, rows, position, keys, head, first_key, low, top, part
