"""Memory of two ranks into which each copies its part of many rows, by its GPU's copy engines and beside its kernels.

Each rank has places for as many of the other's rows as are summed at once, which travel in a few pieces. Words beside
them are set by what is done, and unset by who has waited for it, so that a CUDA graph that is replayed does what its
capture did, whatever ran between:

  arrived, a piece  set by the other rank, when its rows are in their places here
  sent, a piece     set by this rank, when its own rows may be written over
  busy              set by this rank when it begins to send, unset by the other one when it has read all pieces

Why no rank waits for ever. Both make the same calls in the same order: `start` of each piece of a sum, then a kernel
that waits for all of them, then `finish`. The first `start` waits for the `finish` of the sum before on the other rank,
the kernel for what its own rank was given before and for what `start` of the same piece does on the other rank, which
needs no multiprocessor. So the calls can be run one after the other as they were made, on one stream too: several
streams only let them run at the same time. In a graph, where branches have no such order, the kernel comes behind all
that is sent.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.collective.inboxes import SharedMemory
from kernels.collective.peers import Peers

MOST_ROWS = 8192  # of a sum
MOST_PIECES = 4
WORD_BYTES = 128  # apart, so that no two words share a line of a cache
_UNSET, _SET = 0xFFFFFFFF, 0  # memory is shared with all bits ones
# Rows from which there are two pieces, and of a piece at most: of a 70B's 8,192 rows a layer's products and sums take
# 6.57 ms with three pieces, 6.72 with four (two H200).
_LEAST_SPLIT, _PIECE_ROWS, _TILE_ROWS = 1024, 3072, 256
_WAIT_32, _WRITE_32 = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32 and _WRITE_VALUE_32
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, of a word of 32 bits."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 2),
    )


@dataclass(frozen=True, slots=True)
class BoxPeers(Peers):
    """Ranks that have boxes too; None where there are none."""

    boxes: "Boxes | None" = None


class Boxes:
    """One rank's places, and the other's as this one addresses them. Only the thread that launches may call it.

    other    address of the other rank's rows, here
    words    address of the first piece's words `arrived` and `sent`, WORD_BYTES apart; the next piece's follow
    started  rows that are on their way, a piece each
    """

    def __init__(
        self,
        index: int,
        row_bytes: int,
        memory: SharedMemory,
        copies: torch.cuda.Stream,
        *,
        current: Callable[[], torch.cuda.Stream] = torch.cuda.current_stream,
        cuda: Any = None,
    ) -> None:
        """`memory`: of `num_bytes(row_bytes)`. `copies`: a stream of its own; `current`: gives the one of all else.

        cuda  the driver's library; None: this machine's
        """
        self.row_bytes = row_bytes
        self.memory = memory
        self.other, there = memory.addresses[index], memory.addresses[1 - index]
        self.words = self.other + MOST_ROWS * row_bytes
        self.started: list[Tensor] = []
        self._there = there
        self._copies, self._current = copies, current
        library = ctypes.CDLL("libcuda.so.1") if cuda is None else cuda
        self._run, self._copy = library.cuStreamBatchMemOp_v2, library.cuMemcpyAsync
        theirs = there + MOST_ROWS * row_bytes
        places = [2 * piece * WORD_BYTES for piece in range(MOST_PIECES)]
        busy = 2 * MOST_PIECES * WORD_BYTES
        self._begin = _operations([(_WAIT_32, self.words + busy, _UNSET), (_WRITE_32, self.words + busy, _SET)])
        self._sent = [
            _operations([(_WRITE_32, theirs + at, _SET), (_WRITE_32, self.words + at + WORD_BYTES, _SET)])
            for at in places
        ]
        unset = [(_WRITE_32, self.words + at + word, _UNSET) for at in places for word in (0, WORD_BYTES)]
        self._end = _operations([*unset, (_WRITE_32, theirs + busy, _UNSET)])

    def start(self, rows: Tensor) -> None:
        """Copy the next rows [count, columns] of a sum to the other rank, behind what the current stream was given.

        The sum's first where none is on its way. Raises ValueError for rows that there is no place for.
        """
        count, row_bytes = rows.shape[0], rows.shape[1] * rows.element_size()
        index, first = len(self.started), sum(it.shape[0] for it in self.started)
        if index == MOST_PIECES or first + count > MOST_ROWS or row_bytes != self.row_bytes or not rows.is_contiguous():
            places = f"{MOST_ROWS} rows of {self.row_bytes} bytes in {MOST_PIECES} pieces"
            raise ValueError(f"there are places for {places}, found {count} rows of {row_bytes} behind {first}")
        stream = ctypes.c_void_p(self._copies.cuda_stream)
        self._copies.wait_stream(self._current())
        if index == 0:
            _check("cuStreamBatchMemOp_v2", self._run(stream, len(self._begin), self._begin, 0))
        to, source = ctypes.c_uint64(self._there + first * row_bytes), ctypes.c_uint64(rows.data_ptr())
        _check("cuMemcpyAsync", self._copy(to, source, ctypes.c_size_t(count * row_bytes), stream))
        sent = self._sent[index]
        _check("cuStreamBatchMemOp_v2", self._run(stream, len(sent), sent, 0))
        self.started.append(rows)

    def join(self) -> None:
        """Have the current stream wait until all pieces are sent: where it is captured, a graph must hold all of it."""
        self._current().wait_stream(self._copies)

    def finish(self) -> None:
        """Give all places back to the other rank, behind what the current stream was given."""
        self.started.clear()
        stream = ctypes.c_void_p(self._current().cuda_stream)
        _check("cuStreamBatchMemOp_v2", self._run(stream, len(self._end), self._end, 0))


def _check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name} failed with CUDA's error {code}")


def _operations(given: Sequence[tuple[int, int, int]]) -> "ctypes.Array[_Operation]":
    """(operation, address, value) of each, in order."""
    found = (_Operation * len(given))()
    for it, (operation, address, value) in zip(found, given, strict=True):
        it.operation, it.address, it.value = operation, address, value
        it.flags = _EQUAL if operation == _WAIT_32 else 0
    return found


def num_bytes(row_bytes: int) -> int:
    """Return the memory of one rank."""
    return MOST_ROWS * row_bytes + (2 * MOST_PIECES + 1) * WORD_BYTES


def make_boxes(index: int, row_bytes: int, device: torch.device) -> Boxes:
    """Allocate this rank's places, and map the other's. Both ranks call it, in the same order.

    Waits for the other rank. Raises PeerMemoryError on both alike.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # the device's context is current from here on
        memory = SharedMemory(index, 2, num_bytes(row_bytes))
        torch.cuda.synchronize()
    dist.barrier()  # neither sends before all words are unset
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return Boxes(index, row_bytes, memory, copies)


def pieces(num_rows: int) -> tuple[int, ...]:
    """Return the rows of each piece of a sum of at most MOST_ROWS rows, of about the same size.

    Multiples of 256 rows but for the last, as tiles of products have them.
    """
    count = 1 if num_rows <= _LEAST_SPLIT else max(2, -(-num_rows // _PIECE_ROWS))
    size = -(-num_rows // (count * _TILE_ROWS)) * _TILE_ROWS
    whole, rest = divmod(num_rows, size)
    return (size,) * whole + ((rest,) if rest else ())
