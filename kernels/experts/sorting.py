"""A token's visits ("slots") sorted by expert on the device, and the tiles of rows that the products compute.

A counting sort of fixed order: an expert's slots stand in ascending order, whatever ran first. Nothing waits for the
device, no atomic decides a place, and all sizes are upper bounds that the number of slots alone gives.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.tiles import most_tiles, padded, sorted_at_once, tiles_at_once

_BLOCKS_AT_ONCE = 1024  # blocks of slots that a prefix program sums in one step


@dataclass(frozen=True, slots=True)
class SortedSlots:
    """Slots in the order of their experts, on the device.

    order  [num_slots] int32: the slots; token t's visit j is slot t * k + j
    table  [1 + most_tiles, 3] int32: the number of tiles (and nothing else in its row), behind it the tiles
    """

    order: Tensor
    table: Tensor

    @property
    def tiles(self) -> Tensor:
        """[most_tiles, 3] int32: expert, first row and end of the expert's rows (of `order`); expert -1: no tile."""
        return self.table[1:]


@triton.jit
def one_hot(experts_ptr, first, num_slots, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr):
    """int32 [BLOCK_P, BLOCK_E]: whether a slot's expert is this one; rows past the last slot are zero."""
    slots = first + tl.arange(0, BLOCK_P)
    experts = tl.load(experts_ptr + slots, mask=slots < num_slots, other=BLOCK_E)
    return (experts[:, None] == tl.arange(0, BLOCK_E)[None, :]).to(tl.int32)


@triton.jit
def place_slots(order_ptr, visits, starts, first, num_slots, BLOCK_P: tl.constexpr):
    """Write the slots of a block into the rows of their experts; starts [BLOCK_E]: the block's first row of each."""
    rank = tl.cumsum(visits, 0) - visits
    rows = tl.sum(visits * (rank + starts[None, :]), 1)
    slots = first + tl.arange(0, BLOCK_P)
    tl.store(order_ptr + rows, slots, mask=slots < num_slots)


@triton.jit
def write_tiles(
    table_ptr, totals, first, num_tiles, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Tiles [first, first + BLOCK_T) of the table, with the first of them their number; totals: rows of each expert."""
    tiles_ptr = table_ptr + 3
    of_expert = (totals + BLOCK_M - 1) // BLOCK_M
    if first == 0:
        tl.store(table_ptr, tl.sum(of_expert))
    tile_ends = tl.cumsum(of_expert, 0)
    row_ends = tl.cumsum(totals, 0)
    tiles = first + tl.arange(0, BLOCK_T)
    lanes = tl.arange(0, BLOCK_E)
    begins = (tile_ends - of_expert)[None, :]
    is_own = (begins <= tiles[:, None]) & (tiles[:, None] < tile_ends[None, :])
    rows = (row_ends - totals)[None, :] + (tiles[:, None] - begins) * BLOCK_M
    is_tile = tl.sum(is_own.to(tl.int32), 1) > 0
    expert = tl.where(is_tile, tl.sum(tl.where(is_own, lanes[None, :], 0), 1), -1)
    row = tl.sum(tl.where(is_own, rows, 0), 1)
    end = tl.sum(tl.where(is_own, row_ends[None, :], 0), 1)
    is_stored = tiles < num_tiles
    tl.store(tiles_ptr + tiles * 3, expert, mask=is_stored)
    tl.store(tiles_ptr + tiles * 3 + 1, row, mask=is_stored)
    tl.store(tiles_ptr + tiles * 3 + 2, end, mask=is_stored)


@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def hallmark_experts_sort(
    experts_ptr, order_ptr, table_ptr, num_slots, num_tiles,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program sorts all slots, which are at most BLOCK_P, and writes the whole table."""
    visits = one_hot(experts_ptr, 0, num_slots, BLOCK_P, BLOCK_E)
    totals = tl.sum(visits, 0)
    place_slots(order_ptr, visits, tl.cumsum(totals, 0) - totals, 0, num_slots, BLOCK_P)
    for first in range(0, num_tiles, BLOCK_T):
        write_tiles(table_ptr, totals, first, num_tiles, BLOCK_M, BLOCK_T, BLOCK_E)


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def hallmark_experts_count(
    experts_ptr, counts_ptr, num_slots, num_blocks,
    NUM_EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: the visits of one block of slots to each expert, as a column of counts [NUM_EXPERTS, blocks]."""
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_E)
    counts = tl.sum(one_hot(experts_ptr, block * BLOCK_P, num_slots, BLOCK_P, BLOCK_E), 0)
    tl.store(counts_ptr + lanes * num_blocks + block, counts, mask=lanes < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_blocks"])
def hallmark_experts_prefix(counts_ptr, totals_ptr, num_blocks, BLOCK: tl.constexpr):
    """One program: of one expert. Its counts become the sums of those before; its total is written."""
    expert = tl.program_id(0)
    total = 0
    for first in range(0, num_blocks, BLOCK):
        blocks = first + tl.arange(0, BLOCK)
        at = counts_ptr + expert * num_blocks + blocks
        counts = tl.load(at, mask=blocks < num_blocks, other=0)
        tl.store(at, total + tl.cumsum(counts, 0) - counts, mask=blocks < num_blocks)
        total += tl.sum(counts)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "num_tiles"])
def hallmark_experts_place(
    experts_ptr, counts_ptr, totals_ptr, order_ptr, table_ptr, num_slots, num_blocks, num_tiles,
    NUM_EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program: places one block of slots, and writes BLOCK_T rows of the tile table."""
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_E)
    is_expert = lanes < NUM_EXPERTS
    totals = tl.load(totals_ptr + lanes, mask=is_expert, other=0)
    before = tl.load(counts_ptr + lanes * num_blocks + block, mask=is_expert & (block < num_blocks), other=0)
    starts = tl.cumsum(totals, 0) - totals + before
    visits = one_hot(experts_ptr, block * BLOCK_P, num_slots, BLOCK_P, BLOCK_E)
    place_slots(order_ptr, visits, starts, block * BLOCK_P, num_slots, BLOCK_P)
    write_tiles(table_ptr, totals, block * BLOCK_T, num_tiles, BLOCK_M, BLOCK_T, BLOCK_E)


def sort_slots(experts: Tensor, num_experts: int, block_m: int) -> SortedSlots:
    """Sort experts [T, k] int32, contiguous, each below num_experts. One launch for few slots, three for more."""
    num_slots, device = experts.numel(), experts.device
    num_tiles = most_tiles(num_slots, num_experts, block_m)
    order = torch.empty(num_slots, dtype=torch.int32, device=device)
    table = torch.empty(1 + num_tiles, 3, dtype=torch.int32, device=device)
    block_p, block_e = sorted_at_once(num_experts), padded(num_experts)
    tile_sizes = {"BLOCK_M": block_m, "BLOCK_T": tiles_at_once(num_tiles)}
    sizes = {"BLOCK_P": block_p, "BLOCK_E": block_e, "num_warps": 8}
    if num_slots <= block_p:
        hallmark_experts_sort[(1,)](experts, order, table, num_slots, num_tiles, **tile_sizes, **sizes)
        return SortedSlots(order, table)
    num_blocks = triton.cdiv(num_slots, block_p)
    counts = torch.empty(num_experts, num_blocks, dtype=torch.int32, device=device)
    totals = torch.empty(num_experts, dtype=torch.int32, device=device)
    hallmark_experts_count[(num_blocks,)](
        experts, counts, num_slots, num_blocks, NUM_EXPERTS=num_experts, **sizes
    )  # fmt: skip
    hallmark_experts_prefix[(num_experts,)](counts, totals, num_blocks, BLOCK=_BLOCKS_AT_ONCE)
    num_programs = max(num_blocks, triton.cdiv(num_tiles, tile_sizes["BLOCK_T"]))
    hallmark_experts_place[(num_programs,)](
        experts, counts, totals, order, table, num_slots, num_blocks, num_tiles, NUM_EXPERTS=num_experts,
        **tile_sizes, **sizes,
    )  # fmt: skip
    return SortedSlots(order, table)
