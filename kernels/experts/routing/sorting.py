"""A token's visits ("slots") sorted by expert on the device, and the tiles of rows that the products compute.

An expert's slots stand in ascending order, whatever ran first: few are compared with each other, more are counted.
Nothing waits for the device, no atomic decides a place, and all sizes are upper bounds that the number of slots alone
gives.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.routing.dependent import begin, launches_ahead
from kernels.experts.tiles import MOST_COMPARED, most_tiles, padded

_SLOTS_AT_ONCE = 64  # that one program places
_COMPARED_AT_ONCE = 128  # with these
_TILES_AT_ONCE = 64  # of the table, that are written in one step
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
def experts_of(experts_ptr, slots, num_slots, BLOCK_E: tl.constexpr):
    """The slots' experts; past the last slot one that there is not."""
    return tl.load(experts_ptr + slots, mask=slots < num_slots, other=BLOCK_E)


@triton.jit
def counted(experts, BLOCK_E: tl.constexpr):
    """int32 [BLOCK_E]: how many of these are each expert."""
    return tl.sum((experts[:, None] == tl.arange(0, BLOCK_E)[None, :]).to(tl.int32), 0)


@triton.jit
def write_tile(table_ptr, tile, expert, row, end, is_tile):
    at = table_ptr + 3 + tile * 3
    tl.store(at, expert, mask=is_tile)
    tl.store(at + 1, row, mask=is_tile)
    tl.store(at + 2, end, mask=is_tile)


@triton.jit
def write_rest(table_ptr, num_tiles, first, step, most_tiles, BLOCK_T: tl.constexpr):
    """Tiles behind the last, from one of them on, BLOCK_T in every `step`: none."""
    for begin_at in range(num_tiles + first, most_tiles, step):
        tiles = begin_at + tl.arange(0, BLOCK_T)
        tl.store(table_ptr + 3 + tiles * 3, -1, mask=tiles < most_tiles)


@triton.jit(do_not_specialize=["num_slots", "most_tiles"])
def hallmark_experts_sort(
    experts_ptr, order_ptr, table_ptr, num_slots, most_tiles, block_m,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: the rows of BLOCK_P slots, each by comparison with all; the last one writes the table."""
    begin(IS_DEPENDENT)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        slots = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
        experts = experts_of(experts_ptr, slots, num_slots, BLOCK_E)
        rows = tl.zeros([BLOCK_P], tl.int32)
        for first in range(0, num_slots, BLOCK_S):
            others = first + tl.arange(0, BLOCK_S)
            theirs = experts_of(experts_ptr, others, num_slots, BLOCK_E)[None, :]
            is_before = (theirs < experts[:, None]) | (
                (theirs == experts[:, None]) & (others[None, :] < slots[:, None])
            )
            rows += tl.sum(is_before.to(tl.int32), 1)
        tl.store(order_ptr + rows, slots, mask=slots < num_slots)
    else:
        totals = tl.zeros([BLOCK_E], tl.int32)
        for first in range(0, num_slots, BLOCK_P):
            totals += counted(experts_of(experts_ptr, first + tl.arange(0, BLOCK_P), num_slots, BLOCK_E), BLOCK_E)
        of_expert = (totals + block_m - 1) // block_m
        begins = tl.cumsum(of_expert, 0) - of_expert
        ends = tl.cumsum(totals, 0)
        for i in range(tl.max(of_expert)):
            rows = ends - totals + i * block_m
            write_tile(table_ptr, begins + i, tl.arange(0, BLOCK_E), rows, ends, i < of_expert)
        num_tiles = tl.sum(of_expert)
        tl.store(table_ptr, num_tiles)
        write_rest(table_ptr, num_tiles, 0, BLOCK_T, most_tiles, BLOCK_T)


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def hallmark_experts_count(
    experts_ptr, counts_ptr, num_slots, num_blocks,
    NUM_EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: the visits of one block of slots to each expert, as a column of counts [NUM_EXPERTS, blocks]."""
    begin(IS_DEPENDENT)
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_E)
    counts = counted(
        experts_of(experts_ptr, block * BLOCK_P + tl.arange(0, BLOCK_P), num_slots, BLOCK_E), BLOCK_E
    )  # fmt: skip
    tl.store(counts_ptr + lanes * num_blocks + block, counts, mask=lanes < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_blocks"])
def hallmark_experts_prefix(counts_ptr, totals_ptr, num_blocks, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """One program: of one expert. Its counts become the sums of those before; its total is written."""
    begin(IS_DEPENDENT)
    expert = tl.program_id(0)
    total = 0
    for first in range(0, num_blocks, BLOCK):
        blocks = first + tl.arange(0, BLOCK)
        at = counts_ptr + expert * num_blocks + blocks
        counts = tl.load(at, mask=blocks < num_blocks, other=0)
        tl.store(at, total + tl.cumsum(counts, 0) - counts, mask=blocks < num_blocks)
        total += tl.sum(counts)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "most_tiles"])
def hallmark_experts_place(
    experts_ptr, counts_ptr, totals_ptr, order_ptr, table_ptr, num_slots, num_blocks, most_tiles, block_m,
    NUM_EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: places the block of slots, and writes the tiles of the expert, of its number."""
    begin(IS_DEPENDENT)
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_E)
    totals = tl.load(totals_ptr + lanes, mask=lanes < NUM_EXPERTS, other=0)
    ends = tl.cumsum(totals, 0)
    if block < num_blocks:
        starts = ends - totals + tl.load(counts_ptr + lanes * num_blocks + block, mask=lanes < NUM_EXPERTS, other=0)
        within = tl.arange(0, BLOCK_P)
        slots = block * BLOCK_P + within
        experts = experts_of(experts_ptr, slots, num_slots, BLOCK_E)
        # The same experts again: of another address, so that they come in the other layout and none is converted.
        theirs = experts_of(experts_ptr, block * BLOCK_P + tl.arange(0, BLOCK_P), num_slots, BLOCK_E)[None, :]
        is_before = (theirs == experts[:, None]) & (within[None, :] < within[:, None])
        start = tl.sum(tl.where(experts[:, None] == lanes[None, :], starts[None, :], 0), 1)
        tl.store(order_ptr + start + tl.sum(is_before.to(tl.int32), 1), slots, mask=slots < num_slots)
    of_expert = (totals + block_m - 1) // block_m
    num_tiles = tl.sum(of_expert)
    if block < NUM_EXPERTS:
        is_own = lanes == block
        own = tl.sum(tl.where(is_own, of_expert, 0))
        begin_at = tl.sum(tl.where(is_own, tl.cumsum(of_expert, 0), 0)) - own
        end = tl.sum(tl.where(is_own, ends, 0))
        row = end - tl.sum(tl.where(is_own, totals, 0))
        for first in range(0, own, BLOCK_T):
            i = first + tl.arange(0, BLOCK_T)
            write_tile(table_ptr, begin_at + i, block, row + i * block_m, end, i < own)
    if block == 0:
        tl.store(table_ptr, num_tiles)
    write_rest(table_ptr, num_tiles, block * BLOCK_T, tl.num_programs(0) * BLOCK_T, most_tiles, BLOCK_T)


def sort_slots(experts: Tensor, num_experts: int, block_m: int) -> SortedSlots:
    """Sort experts [T, k] int32, contiguous, each below num_experts. One launch for few slots, three for more."""
    num_slots, device = experts.numel(), experts.device
    num_tiles = most_tiles(num_slots, num_experts, block_m)
    order = torch.empty(num_slots, dtype=torch.int32, device=device)
    table = torch.empty(1 + num_tiles, 3, dtype=torch.int32, device=device)
    is_dependent = launches_ahead(device)
    launch = {"IS_DEPENDENT": is_dependent, "launch_pdl": is_dependent, "num_warps": 8}
    sizes = {"BLOCK_P": _SLOTS_AT_ONCE, "BLOCK_E": padded(num_experts)}
    num_blocks = triton.cdiv(num_slots, _SLOTS_AT_ONCE)
    if num_slots <= MOST_COMPARED:
        hallmark_experts_sort[(num_blocks + 1,)](
            experts, order, table, num_slots, num_tiles, block_m, BLOCK_S=_COMPARED_AT_ONCE, BLOCK_T=_TILES_AT_ONCE,
            **sizes, **launch,
        )  # fmt: skip
        return SortedSlots(order, table)
    counts = torch.empty(num_experts, num_blocks, dtype=torch.int32, device=device)
    totals = torch.empty(num_experts, dtype=torch.int32, device=device)
    hallmark_experts_count[(num_blocks,)](
        experts, counts, num_slots, num_blocks, NUM_EXPERTS=num_experts, **sizes, **launch
    )
    hallmark_experts_prefix[(num_experts,)](counts, totals, num_blocks, BLOCK=_BLOCKS_AT_ONCE, **launch)
    hallmark_experts_place[(max(num_blocks, num_experts),)](
        experts, counts, totals, order, table, num_slots, num_blocks, num_tiles, block_m, NUM_EXPERTS=num_experts,
        BLOCK_T=_TILES_AT_ONCE, **sizes, **launch,
    )  # fmt: skip
    return SortedSlots(order, table)
