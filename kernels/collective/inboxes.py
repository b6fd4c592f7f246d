"""Places on every GPU of a host that all ranks can write to, and the counts of calls by which they take turns."""

from dataclasses import dataclass
from itertools import permutations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

PROGRAMS = 128  # that run at once, at most: fewer than any GPU of sm_80 or newer holds, so that all of them do run
_EMPTY_BYTE = 255


@dataclass(frozen=True, slots=True)
class Inboxes:
    """Those of all ranks, as one rank addresses them.

    addresses   [world] int64 on the device; each rank's inbox is [2, world, capacity, place_bytes], all bits ones
    turns       [PROGRAMS] int32 on the device: calls of each program
    capacity    places of each rank: rows, or chunks of columns
    memory      what keeps this rank's inbox alive, and mapped on the others
    """

    index: int
    world: int
    addresses: Tensor
    turns: Tensor
    capacity: int
    place_bytes: int
    memory: object


def make_inboxes(index: int, world: int, capacity: int, place_bytes: int, device: torch.device) -> Inboxes:
    """Allocate this rank's inbox, and map those of the others. Every rank calls it, in the same order.

    Waits for all ranks of torch.distributed's default group. Raises RuntimeError where GPUs cannot address each other.
    """
    group = dist.group.WORLD
    assert group is not None, "the ranks have met"
    memory = symmetric_memory.empty(2 * world * capacity * place_bytes, dtype=torch.uint8, device=device)
    memory.fill_(_EMPTY_BYTE)
    handle = symmetric_memory.rendezvous(memory, group)
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    turns = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    dist.barrier()  # no rank sends before all inboxes are empty
    return Inboxes(index, world, addresses, turns, capacity, place_bytes, (memory, handle))


@dataclass(frozen=True, slots=True)
class ColumnInboxes:
    """Those for the columns of a row that the ranks share.

    sizes    columns of each rank
    starts   [world + 1] int32 on the device: where each rank's columns begin, in units of 16 bytes, and the end
    widest   units of the widest rank
    most_rows   of a call
    """

    inboxes: Inboxes
    dtype: torch.dtype
    sizes: tuple[int, ...]
    starts: Tensor
    widest: int
    most_rows: int


@dataclass(frozen=True, slots=True)
class RankInboxes:
    """Every inbox of a rank.

    sums     places for rows
    columns  None where a rank's columns are no whole units of 16 bytes
    values   places of 512 integers
    """

    sums: Inboxes
    columns: ColumnInboxes | None
    values: Inboxes


def num_connected() -> int:
    """Return how many GPUs, the first ones, can all address each other's memory; 1 where there is no such pair."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for count in range(num_gpus, 1, -1):
        if all(torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(count), 2)):
            return count
    return 1
