"""Commands of rank 0 to the other ranks of a tensor-parallel engine: typed msgpack over a socket pair, in order."""

import socket
import struct

import msgspec

from server.engine.execution.step_buffer import PartLayout
from server.settings import Settings

_LENGTH = struct.Struct("<Q")


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first command: load your part, and meet the others.

    meeting    a file that all ranks may write
    decisions  (shape, path) of every shape that has a path
    """

    settings: Settings
    rank: int
    meeting: str
    decisions: list[tuple[str, str]]


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Make the KV cache, and room for so many sampled tokens."""

    num_pages: int
    num_rows: int


class Decide(msgspec.Struct, frozen=True, tag=True):
    """Serve by these (shape, path) from now on."""

    decisions: list[tuple[str, str]]


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Compute a step. `data`: the bytes of its StepBuffer, which is laid out by the other two."""

    parts: tuple[PartLayout, ...]
    num_sampled: int | None
    data: bytes


class ComputeLogits(msgspec.Struct, frozen=True, tag=True):
    """Compute the logits of so many hidden states, which rank 0 broadcasts behind this."""

    num_rows: int


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    """Copy pages of keys and values, each (source, target), behind what was launched."""

    copies: tuple[tuple[int, int], ...]


Command = Begin | Allocate | Decide | Launch | ComputeLogits | CopyPages
_DECODER: "msgspec.msgpack.Decoder[Command]" = msgspec.msgpack.Decoder(Command)
_ENCODER = msgspec.msgpack.Encoder()


def frame_of(command: Command) -> bytes:
    """Return the bytes to send."""
    body = _ENCODER.encode(command)
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> Command:
    """Wait for the next command. Raises EOFError when rank 0 is gone."""
    length: int = _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]
    return _DECODER.decode(_exactly(connection, length))


def _exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        num_read = connection.recv_into(view)
        if not num_read:
            raise EOFError("rank 0 is gone")
        view = view[num_read:]
    return data
