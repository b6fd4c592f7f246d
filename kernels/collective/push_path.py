"""Exchange by writes into the other GPUs' memory: sums of rows, columns of all ranks, and rank 0's values."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from kernels.collective.inboxes import PROGRAMS, ColumnInboxes, Inboxes, PeerMemoryError, RankInboxes, make_inboxes
from kernels.collective.most_rows import most_rows
from kernels.collective.peers import AddNorm, Peers
from kernels.collective.push import hallmark_push_columns, hallmark_push_sum, hallmark_push_values
from kernels.fused.backend import Aligned, Loaded, next_power_of_2, overlap, prepare

UNIT_BYTES = 16  # of one access
CHUNK_UNITS = 512  # of columns that one program exchanges at once: one access a thread
_MOST_WARPS = 16
_FEW_RANKS = 4  # with more, and 16 warps, what is sent spills from registers (ptxas unrolls the rows)
_WARP = 32
MOST_COLUMN_ROWS = 16  # of logits, 8 MB: 19 us, and NCCL's 44 (two H200)
_VALUE_PLACES = 8
MOST_VALUES = _VALUE_PLACES * CHUNK_UNITS


@dataclass(frozen=True, slots=True)
class Row:
    """Row that is summed over the ranks."""

    columns: int
    dtype: torch.dtype

    @property
    def is_taken(self) -> bool:
        """Return whether the kernels take the row: eight numbers of 16 bits an access."""
        return self.dtype in (torch.float16, torch.bfloat16) and self.columns % 8 == 0


def run_push(peers: Peers, part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
    """Fill out [rows, columns] with the sum of the ranks' parts, or with the norm that follows.

    part, out  contiguous; out may be part. Raises ValueError for rows that the inboxes have no places for.
    """
    inboxes, (rows, columns) = peers.inboxes, part.shape
    if inboxes is None:
        raise ValueError("the ranks have no inboxes: they are on a CPU, or on GPUs that cannot address each other")
    if rows > inboxes.capacity or columns * part.element_size() != inboxes.place_bytes:
        size = f"{rows} rows of {columns * part.element_size()} bytes"
        raise ValueError(f"the inboxes take {inboxes.capacity} rows of {inboxes.place_bytes} bytes, found {size}")
    if rows == 0:
        return
    weight_dtype = None if follows is None else follows.weight.dtype
    kernel = _sum_kernel(part.device, part.dtype, weight_dtype, columns, inboxes.index, inboxes.world, inboxes.capacity)
    residual, weight, eps = (part, part, 0.0) if follows is None else (follows.residual, follows.weight, follows.eps)
    kernel(
        (min(rows, PROGRAMS), 1, 1),
        (
            part.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
            inboxes.addresses.data_ptr(), inboxes.turns.data_ptr(), rows, eps,
        ),
    )  # fmt: skip


def connect(index: int, world: int, row: Row, columns: Sequence[int], device: torch.device) -> RankInboxes:
    """Make a rank's inboxes. Every rank calls it, in the same order; waits for all of them.

    row      what is summed
    columns  fp32 numbers of each rank, of a row that they share
    Raises PeerMemoryError on all ranks, which then release all of it.
    """
    made: list[Inboxes] = []
    try:
        made.append(make_inboxes(index, world, most_rows(world), row.columns * row.dtype.itemsize, device))
        made.append(make_inboxes(index, world, _VALUE_PLACES, CHUNK_UNITS * UNIT_BYTES, device))
        return RankInboxes(made[0], _column_inboxes(index, world, columns, device), made[1])
    except PeerMemoryError:
        for inboxes in made:
            inboxes.memory.release(world)
        raise


def _column_inboxes(index: int, world: int, sizes: Sequence[int], device: torch.device) -> ColumnInboxes | None:
    numbers = UNIT_BYTES // torch.float32.itemsize
    if any(size % numbers for size in sizes):
        return None
    units = [size // numbers for size in sizes]
    places = num_chunks(MOST_COLUMN_ROWS, max(units))
    inboxes = make_inboxes(index, world, places, CHUNK_UNITS * UNIT_BYTES, device)
    starts = torch.tensor([0, *accumulate(units)], dtype=torch.int32, device=device)
    return ColumnInboxes(inboxes, torch.float32, tuple(sizes), starts, max(units), MOST_COLUMN_ROWS)


def push_columns(columns: ColumnInboxes, part: Tensor, out: Tensor) -> None:
    """Fill out [rows, all columns] with every rank's part [rows, its columns]; both contiguous, at most as many rows as
    there are places for.
    """
    inboxes, num_rows = columns.inboxes, part.shape[0]
    kernel = _columns_kernel(part.device, columns.widest, inboxes.index, inboxes.world, inboxes.capacity)
    addresses = part.data_ptr(), out.data_ptr(), columns.starts.data_ptr(), *_own(inboxes)
    kernel((min(num_chunks(num_rows, columns.widest), PROGRAMS), 1, 1), (*addresses, num_rows))


def push_values(inboxes: Inboxes, values: Tensor) -> None:
    """Give rank 0's values to all ranks, in place: [count] int32 or int64, contiguous, at most 512 a place."""
    count = values.numel()
    kernel = _values_kernel(values.device, values.dtype, inboxes.index, inboxes.world, inboxes.capacity)
    kernel((min(num_chunks(1, count), PROGRAMS), 1, 1), (values.data_ptr(), *_own(inboxes), count))


def num_warps(block: int, world: int) -> int:
    """Return the warps of a program that sums a row of `block` units."""
    return min(block // _WARP, _MOST_WARPS if world <= _FEW_RANKS else _MOST_WARPS // 2)


def num_chunks(num_rows: int, units: int) -> int:
    """Places that so many rows of so many units take."""
    return num_rows * -(-units // CHUNK_UNITS)


def _own(inboxes: Inboxes) -> tuple[int, int]:
    return inboxes.addresses.data_ptr(), inboxes.turns.data_ptr()


# A pure function of what is compiled in: the caches hold no state.
@lru_cache(maxsize=64)
def _sum_kernel(
    device: torch.device,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    columns: int,
    index: int,
    world: int,
    capacity: int,
) -> Loaded:
    """weight_dtype: None where nothing follows the sum."""
    block = max(next_power_of_2(columns * dtype.itemsize // UNIT_BYTES), _WARP)
    rows, longs, ints = Aligned(dtype), Aligned(torch.int64), Aligned(torch.int32)
    weight = rows if weight_dtype is None else Aligned(weight_dtype)
    return prepare(
        hallmark_push_sum, device, rows, rows, weight, rows, longs, ints, 2, 0.0,
        COLUMNS=columns, BLOCK=block, RANK=index, WORLD=world, CAPACITY=capacity, PROGRAMS=PROGRAMS,
        HAS_NORM=weight_dtype is not None, num_warps=num_warps(block, world), **overlap(device),
    )  # fmt: skip


@lru_cache(maxsize=16)
def _columns_kernel(device: torch.device, units: int, index: int, world: int, capacity: int) -> Loaded:
    words = Aligned(torch.int32)
    return prepare(
        hallmark_push_columns, device, words, words, words, Aligned(torch.int64), words, 2,
        UNITS=units, **_places(device, index, world, capacity),
    )  # fmt: skip


@lru_cache(maxsize=16)
def _values_kernel(device: torch.device, dtype: torch.dtype, index: int, world: int, capacity: int) -> Loaded:
    given = Aligned(dtype), Aligned(torch.int64), Aligned(torch.int32)
    return prepare(hallmark_push_values, device, *given, 2, **_places(device, index, world, capacity))


def _places(device: torch.device, index: int, world: int, capacity: int) -> dict[str, int]:
    places = {"BLOCK": CHUNK_UNITS, "RANK": index, "WORLD": world, "CAPACITY": capacity, "PROGRAMS": PROGRAMS}
    return {**places, "num_warps": _MOST_WARPS, **overlap(device)}
