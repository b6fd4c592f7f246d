"""Places on every GPU of a host that all ranks can write to, and the counts of calls by which they take turns."""

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

PROGRAMS = 128  # that run at once, at most: fewer than any GPU of sm_80 or newer holds, so that all of them do run
_EMPTY_BYTE = 255
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Handle(ctypes.Structure):
    """CUDA's name of memory for other processes."""

    _fields_ = (("bytes", ctypes.c_char * 64),)


class PeerMemoryError(RuntimeError):
    """CUDA lets the ranks' processes share no memory, though their GPUs can address each other: raised on all ranks.

    In containers that share no IPC namespace, in slices of a GPU and in WSL.
    """


class SharedMemory:
    """Memory of one size on each rank's GPU, mapped by all of them. All bits are ones.

    By CUDA's handles, not by PyTorch's symmetric memory, which keeps a store by the name of a group and would ask a
    group that has ended, where a process has met others before.
    """

    def __init__(self, index: int, world: int, num_bytes: int, cuda: Any = None) -> None:
        """Every rank calls it, in the same order; no rank returns before all of them have mapped all of it.

        cuda  the driver's library; None: this machine's
        Raises PeerMemoryError on all ranks where CUDA refuses on one, whose memory is then released, and RuntimeError
        on this one where it has no memory.
        """
        self._cuda, self._index = ctypes.CDLL("libcuda.so.1") if cuda is None else cuda, index
        self._own = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(num_bytes))
        self._call("cuMemsetD8_v2", self._own, ctypes.c_ubyte(_EMPTY_BYTE), ctypes.c_size_t(num_bytes))
        self._mapped: dict[int, int] = {}  # addresses here of the other ranks' memory
        handles = self._agreed(self._exported, world)
        self._agreed(lambda: self._map(handles), world)
        self.addresses = [self._mapped.get(rank, self._own.value) for rank in range(world)]

    def free(self) -> None:
        """Give this rank's memory back. Only where no other rank is left that writes to it."""
        self._call("cuMemFree_v2", self._own)

    def release(self, world: int) -> None:
        """Give the memory of all ranks back. Every rank calls it, in the same order, when none writes any more.

        Where CUDA refuses to unmap memory on one rank, the ranks whose memory that is keep it until they end.
        """
        kept: list[int] = []  # ranks whose memory stays mapped here
        for rank, address in self._mapped.items():
            try:
                self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
            except _Refused as refused:
                logger.warning("%s: the memory of rank %d stays allocated until that rank ends", refused, rank)
                kept.append(rank)
        self._mapped.clear()
        # Memory that is freed must be mapped nowhere. A rank that did not come here would hold up all others.
        if not any(self._index in ranks for ranks in _exchanged(kept, world)):
            self.free()

    def _agreed(self, share: Callable[[], T], world: int) -> list[T]:
        """Return what `share` gives on each rank. Raises PeerMemoryError on all where it raises _Refused on one."""
        mine: T | _Refused
        try:
            mine = share()
        except _Refused as refused:
            mine = refused
        found: list[T] = []
        for rank, it in enumerate(_exchanged(mine, world)):
            if isinstance(it, _Refused):
                self.release(world)
                raise PeerMemoryError(f"{it} on rank {rank} of {world}")
            found.append(it)
        return found

    def _exported(self) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        return bytes(handle)

    def _map(self, handles: Sequence[bytes]) -> None:
        for rank, handle in enumerate(handles):
            if rank != self._index:
                address, opened = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
                self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
                self._mapped[rank] = address.value

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            message = f"{name} failed with CUDA's error {code}"
            raise _Refused(message) if "Ipc" in name else RuntimeError(message)


class _Refused(RuntimeError):
    """CUDA's answer to one rank."""


def _exchanged(mine: T, world: int) -> list[T]:
    """Return every rank's own, which all of them wait for."""
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine)
    return found


@dataclass(frozen=True, slots=True)
class Inboxes:
    """Inboxes of all ranks, as one rank addresses them.

    addresses   [world] int64 on the device; each rank's inbox is [2, world, capacity, place_bytes], all bits ones
    turns       [PROGRAMS] int32 on the device: calls of each program
    capacity    places of each rank: rows, or chunks of columns
    memory      of this rank's inbox, and those of the others
    """

    index: int
    world: int
    addresses: Tensor
    turns: Tensor
    capacity: int
    place_bytes: int
    memory: SharedMemory


def make_inboxes(index: int, world: int, capacity: int, place_bytes: int, device: torch.device) -> Inboxes:
    """Allocate this rank's inbox, and map those of the others. Every rank calls it, in the same order.

    Waits for all ranks of torch.distributed's default group. Raises PeerMemoryError on all of them alike.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # the device's context is current from here on
        memory = SharedMemory(index, world, 2 * world * capacity * place_bytes)
    addresses = torch.tensor(memory.addresses, dtype=torch.int64, device=device)
    turns = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    dist.barrier()  # no rank sends before all inboxes are empty
    return Inboxes(index, world, addresses, turns, capacity, place_bytes, memory)


@dataclass(frozen=True, slots=True)
class ColumnInboxes:
    """Inboxes for the columns of a row that the ranks share.

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
