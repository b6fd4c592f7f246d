"""The engine's end of the socket, over a real pair of them."""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from kernels.system.hang_up import leave_with
from server.engine.link import Link
from server.protocol import wire
from server.protocol.messages import Cancel, EngineProgress, SamplingParams, Shutdown, Submit, ToEngine


class Left(Exception):
    """The process would have ended."""


def leave(status: int) -> None:
    raise Left(status)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


Pair = tuple[socket.socket, socket.socket]


def test_messages_come_in_order_whatever_pieces_they_arrive_in(pair: Pair) -> None:
    link = Link(pair[0], leave)
    long = Submit("a", list(range(1000)), SamplingParams(max_tokens=1))
    messages: list[ToEngine] = [Cancel("first"), long, Shutdown()]
    data = b"".join([wire.frame(message) for message in messages])
    got: list[ToEngine] = []
    for start in range(0, len(data), 7):
        pair[1].sendall(data[start : start + 7])
        with contextlib.suppress(queue.Empty):
            got.append(link.get(block=False))
    while len(got) < len(messages):  # a look may do without reading, and one piece may end two messages
        got.append(link.get(timeout=30))
    assert got == messages


def test_who_waits_is_woken_by_a_message_and_by_the_time(pair: Pair) -> None:
    link = Link(pair[0], leave)
    began_at = time.monotonic()
    with pytest.raises(queue.Empty):
        link.get(timeout=0.05)
    assert time.monotonic() - began_at > 0.04
    timer = threading.Timer(0.05, pair[1].sendall, [wire.frame(Cancel("a"))])
    timer.start()
    assert link.get() == Cancel("a")
    timer.join()


def drain(link: Link) -> None:
    while True:
        link.get()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 0),
        (wire.frame(Cancel("a")) + b"\1\0", 0),
        (wire.HEADER.pack(wire.MAX_FRAME_BYTES + 1), 76),
        (wire.frame(Cancel("a")) + wire.HEADER.pack(3) + b"???", 76),
    ],
)
def test_it_leaves_when_the_stream_ends_or_breaks(pair: Pair, data: bytes, status: int) -> None:
    link = Link(pair[0], leave)
    pair[1].sendall(data)
    pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(Left, match=f"^{status}$"):
        drain(link)


def test_what_the_socket_does_not_take_is_sent_later(pair: Pair) -> None:
    link = Link(pair[0], leave)
    sent = [EngineProgress("loading", str(i) * 1000) for i in range(500)]
    for message in sent:  # some 0.5 MB: more than a socket holds, and nobody reads yet
        link.put(message)
    got: list[object] = []

    def read() -> None:
        frames = wire.Frames()
        while len(got) < len(sent):
            got.extend(map(wire.from_engine, frames.feed(pair[1].recv(65536))))
        pair[1].sendall(wire.frame(Shutdown()))

    reader = threading.Thread(target=read)
    reader.start()
    assert link.get(timeout=20) == Shutdown()  # sends while it waits
    reader.join()
    assert got == sent


def test_closing_sends_what_is_left(pair: Pair) -> None:
    link = Link(pair[0], leave)
    message = EngineProgress("loading", "x" * 2_000_000)
    link.put(message)
    closer = threading.Thread(target=link.close, args=[20.0])
    closer.start()
    with pair[1].makefile("rb") as stream:
        (length,) = struct.unpack("<I", stream.read(4))
        assert wire.from_engine(stream.read(length)) == message
    closer.join()


def test_the_watch_ends_with_the_other_side_and_reads_nothing(pair: Pair) -> None:
    left: list[int] = []
    watch = threading.Thread(target=leave_with, args=(pair[0], left.append))
    watch.start()
    pair[1].sendall(wire.frame(Cancel("a")))
    watch.join(0.1)
    assert watch.is_alive()
    assert Link(pair[0], leave).get() == Cancel("a")
    pair[1].close()
    watch.join(10)
    assert left == [0]
