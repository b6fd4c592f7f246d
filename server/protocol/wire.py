"""Frames on the socket between the two processes: a length (uint32, little endian), then that many bytes of msgpack."""

import struct
from collections.abc import Iterator

import msgspec

from server.protocol.messages import FromEngine, ToEngine

MAX_FRAME_BYTES = 128 * 1024 * 1024  # a prompt of 1M tokens takes 5 MB, its images 96 MiB at most
HEADER = struct.Struct("<I")

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: "msgspec.msgpack.Decoder[ToEngine]" = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: "msgspec.msgpack.Decoder[FromEngine]" = msgspec.msgpack.Decoder(FromEngine)


class WireError(Exception):
    """The other side sent what no message is. Nothing after it can be trusted: the connection ends."""


def frame(message: ToEngine | FromEngine) -> bytes:
    """The bytes to send. Raises WireError when the message is larger than the other side takes."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


class Frames:
    """Bodies out of bytes that come in any pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of a frame
        self._num_needed = 0  # bytes of `_rest` without which nothing is complete

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that `data` completes. Raises WireError for a length above the limit, and is of no use then."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._num_needed:
                return
            data = bytes(self._rest)
            self._rest.clear()
        start, self._num_needed = 0, HEADER.size
        while (begin := start + HEADER.size) <= len(data):
            length: int = HEADER.unpack_from(data, start)[0]
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes is announced, the limit is {MAX_FRAME_BYTES}")
            if begin + length > len(data):
                self._num_needed = HEADER.size + length
                break
            start = begin + length
            yield data[begin:start]
        self._rest += data[start:]


def to_engine(body: bytes) -> ToEngine:
    """Raises WireError."""
    try:
        return _TO_ENGINE.decode(body)
    except msgspec.DecodeError as error:
        raise WireError(f"not a message to the engine: {error}") from error


def from_engine(body: bytes) -> FromEngine:
    """Raises WireError."""
    try:
        return _FROM_ENGINE.decode(body)
    except msgspec.DecodeError as error:
        raise WireError(f"not a message of the engine: {error}") from error
