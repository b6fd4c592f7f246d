"""Ranks that share memory by drivers, one after the other: `sharing_rank.py FOLDER WORLD DRIVER...`.

A driver is the calls that it refuses, each on one rank, `CALL:RANK+CALL:RANK`; none where it is empty. A rank writes to
`FOLDER/RANK` for each driver what it got and what the driver holds at the end.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kernels.collective.inboxes import PeerMemoryError, SharedMemory

OUT_OF_MEMORY, NOT_SUPPORTED = 2, 801


class Driver:
    """The calls of libcuda by which processes share memory. `refused`: those that fail."""

    def __init__(self, rank: int, refused: frozenset[str]) -> None:
        self._rank, self._refused = rank, refused
        self.held: set[int] = set()
        self.mapped: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name in self._refused:
            return lambda *_: OUT_OF_MEMORY if name == "cuMemAlloc_v2" else NOT_SUPPORTED
        return super().__getattribute__(name)

    def cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> int:
        own = 1000 * (self._rank + 1) + size.value
        pointed(address, ctypes.c_uint64).value = own
        self.held.add(own)
        return 0

    def cuMemsetD8_v2(self, address: ctypes.c_uint64, value: ctypes.c_ubyte, _: ctypes.c_size_t) -> int:
        assert (value.value, address.value in self.held) == (255, True)
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> int:
        pointed(handle, ctypes.c_char * 64).value = str(address.value).encode()
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, _: ctypes.c_uint) -> int:
        there = 100_000 + int(handle.bytes)
        pointed(address, ctypes.c_uint64).value = there
        self.mapped.add(there)
        return 0

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> int:
        self.mapped.remove(address.value)
        return 0

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> int:
        self.held.remove(address.value)
        return 0


def pointed(reference: Any, kind: type[Any]) -> Any:
    """Return what a reference points to."""
    return ctypes.cast(reference, ctypes.POINTER(kind)).contents


def shared(rank: int, world: int, driver: Driver) -> dict[str, object]:
    try:
        found: dict[str, object] = {"addresses": SharedMemory(rank, world, 16, driver).addresses}
    except PeerMemoryError as error:
        found = {"error": str(error)}
    return found | {"held": len(driver.held), "mapped": len(driver.mapped)}


def be_rank(folder: Path, rank: int, world: int, refused: list[str]) -> None:
    store = dist.FileStore(str(folder / "meeting"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    refusals = ([it.split(":") for it in each.split("+") if it] for each in refused)
    drivers = [Driver(rank, frozenset(call for call, on in each if int(on) == rank)) for each in refusals]
    (folder / str(rank)).write_text(json.dumps([shared(rank, world, driver) for driver in drivers]))
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks: torch is imported once."""
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    for rank in range(world):
        if os.fork() == 0:
            be_rank(folder, rank, world, sys.argv[3:])
            os._exit(0)
    for _ in range(world):
        if os.wait()[1]:
            sys.exit(1)


if __name__ == "__main__":
    main()
