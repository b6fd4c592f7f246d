"""Frames on the socket between the two processes: a length (uint32, little endian), then that many bytes of msgpack."""

import struct

import msgspec

from server.engine.messages import FromEngine, ToEngine

MAX_FRAME_BYTES = 32 * 1024 * 1024  # a prompt of 1M tokens takes 5 MB
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


def body_length(header: bytes) -> int:
    """The length that a header announces, in bytes. Raises WireError above the limit."""
    length: int = HEADER.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes is announced, the limit is {MAX_FRAME_BYTES}")
    return length


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
