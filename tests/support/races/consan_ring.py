"""The ring of posted tiles of the Gluon kernels, by itself under Triton's concurrency sanitizer.

The scheduler's role and `take_tile` are those that are shipped, of which racecheck says nothing (test_races.py). Beside
them stand readers that do nothing but add up what they read. The sanitizer's code for a whole kernel, 11 MB of PTX,
takes a quarter of an hour to compile; the ring's takes half a minute.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators

from typing import Any

import torch
import triton
from triton import knobs
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper import schedule as gluon_schedule
from kernels.hopper.pipeline import barriers
from kernels.hopper.schedule import schedule, take_tile
from kernels.hopper.variants import TILINGS, Variant
from kernels.tma.pointers import AnyTensor

RING = gluon_schedule.RING
HEADS, BLOCKS, PROGRAMS = 8, 40, 16
READERS = 3
VARIANT = Variant(TILINGS[64], 64)


@jit
def follow(tiles, out, READER: gl.constexpr, VARIANT: gl.constexpr):
    """Adds up the first rows and heads of all tiles. The last reader asks for more, as the producer does."""
    n = 0
    total = 0
    row, _rows, _position, _keys, head, _first, _low, _top, _part = take_tile(tiles, 0, VARIANT)
    while row >= 0:
        total += row + head
        if READER == 2:
            mbarrier.arrive(tiles[3], count=1)
        n += 1
        row, _rows, _position, _keys, head, _first, _low, _top, _part = take_tile(tiles, n, VARIANT)
    gl.store(out + gl.program_id(0) * 3 + READER, total)


@jit
def ring_only(out, plan, num_heads, heads_per_group, VARIANT: gl.constexpr):
    tile_full = barriers(RING, 1)
    tile_free = barriers(RING, 3)
    want = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(want, count=1)
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(gl.int32, [RING * VARIANT.fields, 1], LAYOUT)
    tiles = (ring, tile_full, tile_free, want)
    gl.warp_specialize([
        (follow, (tiles, out, 0, VARIANT)),
        (follow, (tiles, out, 1, VARIANT)),
        (follow, (tiles, out, 2, VARIANT)),
        (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
    ], [4, 1, 1], [64, 64, 64])  # fmt: skip


def compiled() -> Any:
    """The kernel under the sanitizer, for sm_90; no GPU is needed."""
    knobs.compilation.instrumentation_mode = "consan"
    anything = AnyTensor(torch.int32, 0)
    return ring_only.warmup(anything, anything, HEADS, HEADS, VARIANT, grid=(1,), num_warps=4)


def main() -> None:
    triton.set_allocator(lambda size, _align, _stream: torch.zeros(size, dtype=torch.int8, device="cuda"))
    items = torch.zeros(BLOCKS, gluon_schedule.ITEM.value, dtype=torch.int32)
    items[:, 0], items[:, 1], items[:, 6] = torch.arange(BLOCKS) * 128, 128, 300
    header = torch.zeros(gluon_schedule.HEADER.value, dtype=torch.int32)
    header[2] = BLOCKS
    plan = torch.cat([header, items.flatten()]).cuda()
    compiled()
    expected = int(items[:, 0].sum()) * HEADS + BLOCKS * sum(range(HEADS))
    for _ in range(5):
        out = torch.zeros(PROGRAMS, READERS, dtype=torch.int32, device="cuda")
        print("launched", flush=True)
        ring_only[(PROGRAMS,)](out, plan, HEADS, HEADS, VARIANT, num_warps=4)
        assert out.sum(0).tolist() == [expected] * READERS, out
    print("all tiles read by all", flush=True)


if __name__ == "__main__":
    main()
