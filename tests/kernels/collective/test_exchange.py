"""Sums of many rows over two ranks: what both send and wait for, in any order of their streams; and what is added."""

import ctypes
from collections import deque
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.collective.boxes import MOST_PIECES, WORD_BYTES, Boxes, BoxPeers, num_bytes, pieces
from kernels.collective.exchange_path import run_exchange
from kernels.fused.norm import add_rms_norm

COLUMNS = 8
WAIT = 1  # CU_STREAM_MEM_OP_WAIT_VALUE_32


class Stream:
    """A queue of operations; each says whether it could run."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.queue: deque[Callable[[], bool]] = deque()

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: list[bool]) -> None:
        self.queue.append(lambda: bool(event))

    def record_event(self) -> list[bool]:
        event: list[bool] = []
        self.queue.append(lambda: event.append(True) or True)
        return event


class Rank:
    """One rank with its streams and a driver of its own, in this process's memory."""

    def __init__(self, index: int, memories: list[Any], *, is_one_queue: bool) -> None:
        self.main, copies = self.streams = [Stream(number) for number in range(2)]
        if is_one_queue:
            copies.queue = self.main.queue
        addresses = [ctypes.addressof(memory) for memory in memories]
        self.boxes = Boxes(
            index,
            COLUMNS * 4,
            SimpleNamespace(addresses=addresses),  # type: ignore[arg-type]
            copies,  # type: ignore[arg-type]
            current=lambda: self.main,  # type: ignore[arg-type, return-value]
            cuda=self,
        )

    def _queue(self, stream: ctypes.c_void_p) -> "deque[Callable[[], bool]]":
        return self.streams[stream.value or 0].queue

    def cuStreamBatchMemOp_v2(self, stream: Any, _: Any, operations: Any, __: Any) -> int:
        for it in operations:
            word, value = ctypes.c_uint32.from_address(it.address), it.value
            if it.operation == WAIT:
                self._queue(stream).append(lambda word=word, value=value: word.value == value)
            else:
                self._queue(stream).append(lambda word=word, value=value: setattr(word, "value", value) is None)
        return 0

    def cuMemcpyAsync(self, to: Any, source: Any, size: Any, stream: Any) -> int:
        self._queue(stream).append(lambda: ctypes.memmove(to.value, source.value, size.value) is not None)
        return 0

    def multiply(self, rows: Tensor, values: Tensor) -> None:
        """Fill rows, on the main stream."""
        self.main.queue.append(lambda: rows.copy_(values) is not None)

    def add(self, part: Tensor) -> None:
        """Add up all rows that were started, in place, each when it may."""
        boxes, first = self.boxes, 0
        for index, rows in enumerate(boxes.started):
            words = [boxes.words + (2 * index + it) * WORD_BYTES for it in range(2)]
            buffer = (ctypes.c_float * rows.numel()).from_address(boxes.other + first * boxes.row_bytes)
            other = torch.frombuffer(buffer, dtype=torch.float32).view_as(rows)

            def kernel(rows: Tensor = rows, words: list[int] = words, other: Tensor = other) -> bool:
                may_run = not any(ctypes.c_uint32.from_address(word).value for word in words)
                return may_run and rows.add_(other) is not None

            self.main.queue.append(kernel)
            first += rows.shape[0]
        assert first == part.shape[0]
        boxes.finish()


def call(rank: Rank, part: Tensor, values: Tensor, *, is_early: bool) -> None:
    """Multiply a part and sum it over the ranks, by pieces that are sent early or not."""
    rows = part.split_with_sizes(list(pieces(part.shape[0])))
    if is_early:
        for piece, value in zip(rows, values.split_with_sizes([len(it) for it in rows]), strict=True):
            rank.multiply(piece, value)
            rank.boxes.start(piece)
    else:
        rank.multiply(part, values)
        for piece in rows:
            rank.boxes.start(piece)
    rank.add(part)


@pytest.mark.parametrize("is_one_queue", [False, True], ids=["streams", "one queue"])
@pytest.mark.parametrize("seed", range(6))
def test_sums_are_right_in_every_order_that_streams_may_run_in(seed: int, is_one_queue: bool) -> None:
    """Where streams share a queue of the device, each operation waits for those that were launched before it."""
    random, numbers = Random(seed), torch.Generator().manual_seed(seed)
    memories = [ctypes.create_string_buffer(b"\xff" * num_bytes(COLUMNS * 4)) for _ in range(2)]
    ranks = [Rank(index, memories, is_one_queue=is_one_queue) for index in range(2)]
    found = []
    for _ in range(12):
        num_rows, is_early = random.choice((1, 700, 1500, 4100, 8192)), random.random() < 0.6
        values = torch.randn(2, num_rows, COLUMNS, generator=numbers)
        parts = torch.full_like(values, torch.nan)
        for rank in random.sample((0, 1), 2):
            call(ranks[rank], parts[rank], values[rank], is_early=is_early)
        found.append((parts, values.sum(dim=0)))
    queues = list({id(stream.queue): stream.queue for rank in ranks for stream in rank.streams}.values())
    while any(queues):
        ran = [queue for queue in random.sample(queues, len(queues)) if queue and queue[0]()]
        assert ran, "no operation can run: the ranks wait for each other"
        for queue in ran:
            queue.popleft()
    for parts, total in found:
        assert torch.equal(parts, total.expand_as(parts))


def test_more_rows_than_there_are_places_for_are_refused() -> None:
    memories = [ctypes.create_string_buffer(b"\xff" * num_bytes(COLUMNS * 4)) for _ in range(2)]
    rank = Rank(0, memories, is_one_queue=False)
    rank.boxes.start(torch.zeros(8000, COLUMNS))
    for rows in (torch.zeros(193, COLUMNS), torch.zeros(1, 2 * COLUMNS)):
        with pytest.raises(ValueError, match=r"places for 8192 rows of 32 bytes in 4 pieces, found .* behind 8000"):
            rank.boxes.start(rows)
    for _ in range(3):
        rank.boxes.start(torch.zeros(1, COLUMNS))
    with pytest.raises(ValueError, match="in 4 pieces, found 1 rows of 32 behind 8003"):
        rank.boxes.start(torch.zeros(1, COLUMNS))


def test_only_the_rows_that_were_sent_are_summed() -> None:
    """Rows that one rank has sent and does not read would be those of the other rank's next sum."""
    memories = [ctypes.create_string_buffer(b"\xff" * num_bytes(COLUMNS * 4)) for _ in range(2)]
    rank, part = Rank(0, memories, is_one_queue=False), torch.zeros(8, COLUMNS)
    peers = BoxPeers(0, 2, boxes=rank.boxes)
    rank.boxes.start(part[:4])
    with pytest.raises(ValueError, match="but not all of them"):
        run_exchange(peers, part, None, part)
    with pytest.raises(ValueError, match="not those of this sum"):
        run_exchange(peers, torch.zeros_like(part), None, part)
    with pytest.raises(ValueError, match="the ranks have no boxes"):
        run_exchange(BoxPeers(0, 2), part, None, part)


def test_pieces_are_all_rows_of_a_sum() -> None:
    for num_rows in (*range(1, 8192, 7), 8191, 8192):
        found = pieces(num_rows)
        assert sum(found) == num_rows
        assert all(it > 0 for it in found)
        assert len(found) <= MOST_PIECES
    assert [pieces(it) for it in (1024, 2048, 8192)] == [(1024,), (1024, 1024), (2816, 2816, 2560)]


@pytest.mark.parametrize("size", [64, 136])
def test_the_kernel_has_the_bits_of_a_sum_and_the_norm_behind_it(size: int) -> None:
    """In fp16, since Triton's interpreter cuts numbers off to bf16."""
    from kernels.collective.exchange import hallmark_exchange_sum

    random = torch.Generator().manual_seed(size)
    own, other, residual = (torch.randn(5, size, generator=random).half() for _ in range(3))
    weight, total = torch.randn(size, generator=random), own + other
    for has_norm in (False, True):
        out, found = torch.empty_like(own), residual.clone()
        block = 1 << (size - 1).bit_length()
        given = own, other, own, 1, 2, 5, found, weight, out, 1e-5
        hallmark_exchange_sum[(5,)](
            *given, SIZE=size, BLOCK=block, HAS_NORM=has_norm, WORD=32, AWAITS=False, num_warps=1
        )
        expected = residual.clone()
        assert torch.equal(out, add_rms_norm(total.clone(), expected, weight, 1e-5)[0] if has_norm else total)
        assert torch.equal(found, expected)
