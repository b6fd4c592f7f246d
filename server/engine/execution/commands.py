"""Commands of rank 0 to the other ranks of a tensor-parallel engine, and what these report: typed msgpack over a socket
pair, in order.

A step's inputs follow their command as they are, so that neither side copies them to encode or to decode.
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from kernels.linear.library.fallback_reason import MatmulFallback
from server.engine.execution.graph_keys import GraphSizes
from server.engine.execution.step_buffer import PartLayout
from server.engine.proof.rank_check import JudgedCall, NamedCall
from server.settings import Settings

_SIZES = struct.Struct("<II")  # bytes of the command, and of the inputs behind it


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first command: load your part, and meet the others.

    meeting    a file that all ranks may write
    decisions  (shape, path) of every shape; None where no path is left
    shares_memory  whether GPUs that can shall write into each other's memory
    """

    settings: Settings
    rank: int
    meeting: str
    decisions: list[tuple[str, str | None]]
    shares_memory: bool = True


class Started(msgspec.Struct, frozen=True, tag=True):
    """The start is over: report no progress any more."""


class KernelsCompiled(msgspec.Struct, frozen=True, tag=True):
    """Launch kernels from now on: what could be compiled ahead is in Triton's cache."""


class ChooseProducts(msgspec.Struct, frozen=True, tag=True):
    """Multiply by the algorithms that rank 0 has measured and stored in this file."""

    file: str


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Make the KV cache, and room for so many sampled tokens.

    num_slots       of recurrent states, if there are any
    num_embeddings  those that tokens of prompts may have of their own
    """

    num_pages: int
    num_rows: int
    num_slots: int
    num_embeddings: int = 0


class CompareMemory(msgspec.Struct, frozen=True, tag=True):
    """Find the least memory that a rank has left beside the largest step since the cache was made."""


class Decide(msgspec.Struct, frozen=True, tag=True):
    """Serve by these (shape, path) from now on."""

    decisions: list[tuple[str, str | None]]


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Compute a step kernel by kernel. The bytes of its StepBuffer follow, which these lay out, all but has_pending."""

    parts: tuple[PartLayout, ...]
    num_sampled: int | None
    num_state_writes: int | None
    has_pending: bool
    has_embedded: bool = False
    is_observed: bool = False  # hand out your heads of each layer, for rank 0
    checked: NamedCall | None = None  # compute this call of it again in fp64, and answer by RankChecked


class FollowStep(msgspec.Struct, frozen=True, tag=True):
    """Compute a step of the draft head: behind the latest step of the model, or of tokens that it has drafted last.

    The bytes of its StepBuffer follow, which these lay out. `place`: see `Worker.follow`.
    """

    parts: tuple[PartLayout, ...]
    num_sampled: int
    has_pending: bool
    is_first: bool
    place: int
    is_observed: bool = False


class Declare(msgspec.Struct, frozen=True, tag=True):
    """Make room for the graphs of these sizes. Others name a graph by its `index` among the layouts that follow."""

    sizes: GraphSizes
    max_context: int


class RunPadding(msgspec.Struct, frozen=True, tag=True):
    """Compute what a graph will, from what is in its inputs now."""

    index: int


class Record(msgspec.Struct, frozen=True, tag=True):
    """Record a graph."""

    index: int


class Replay(msgspec.Struct, frozen=True, tag=True):
    """Compute a step by its graph. The bytes of its StepBuffer follow."""

    index: int


class RecordStep(msgspec.Struct, frozen=True, tag=True):
    """Record the launches of a step, whose inputs follow, for `Repeat`; nothing of them runs.

    Then find the least of 1 on each rank that could, 0 on one that could not.
    """

    parts: tuple[PartLayout, ...]
    num_sampled: int | None
    num_state_writes: int | None
    has_pending: bool


class Repeat(msgspec.Struct, frozen=True, tag=True):
    """Replay a graph on the inputs that are there; without `index` the one of `RecordStep`."""

    index: int | None


class ShareTokens(msgspec.Struct, frozen=True, tag=True):
    """Take so many tokens of the latest step from rank 0, which has chosen them otherwise."""

    num_rows: int


class ComputeLogits(msgspec.Struct, frozen=True, tag=True):
    """Compute the logits of so many hidden states, which rank 0 shares behind this."""

    num_rows: int


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    """Copy pages of keys and values, each (source, target), behind what was launched."""

    copies: tuple[tuple[int, int], ...]


class WriteEmbeddings(msgspec.Struct, frozen=True, tag=True):
    """Write embeddings, [rows, hidden] fp32, into these rows of the buffer, behind what was launched."""

    rows: list[int]
    values: bytes


class ImageRows(msgspec.Struct, frozen=True, array_like=True):
    """An image, [height * patch_size, width * patch_size, 3] uint8, and the row of the buffer of each of its tokens."""

    grid: tuple[int, int]
    pixels: bytes
    rows: list[int]


class WriteImages(msgspec.Struct, frozen=True, tag=True):
    """Compute what the tokens of images read, and write it into the buffer, behind what was launched."""

    images: tuple[ImageRows, ...]


Command = (
    Begin
    | Started
    | KernelsCompiled
    | ChooseProducts
    | Allocate
    | CompareMemory
    | Decide
    | Launch
    | FollowStep
    | Declare
    | RunPadding
    | Record
    | Replay
    | RecordStep
    | Repeat
    | ShareTokens
    | ComputeLogits
    | CopyPages
    | WriteEmbeddings
    | WriteImages
)


class RankProgress(msgspec.Struct, frozen=True, tag=True):
    """Sent while the engine starts, when either has changed: what this rank does, and a number that grows with it."""

    stage: str
    count: int


class RankFallbacks(msgspec.Struct, frozen=True, tag=True):
    """Products of many rows that this rank left to PyTorch since its last report of them, by reason."""

    counts: dict[MatmulFallback, int]


class RankDecided(msgspec.Struct, frozen=True, tag=True):
    """Sent behind `Begin` and each `Decide`: the path that this rank launches for each shape from now on, or None."""

    paths: dict[str, str | None]


class RankChecked(msgspec.Struct, frozen=True, tag=True):
    """The judgement of the call that `Launch` has named to this rank."""

    judged: JudgedCall


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The last report: this rank cannot go on.

    suspects        (path, shape) pairs, one of which is to blame, as far as this rank knows
    is_device_lost  whether what is blamed may have been launched long before
    refused         the code of an error that every start with these settings would have; None for others
    """

    message: str
    suspects: list[tuple[str, str]]
    is_device_lost: bool
    refused: str | None = None


Report = RankProgress | RankFallbacks | RankDecided | RankChecked | RankFailed


class OtherSideGone(Exception):
    """The process at the other end of the socket pair has ended."""


_SIZE = struct.Struct("<I")  # bytes of a report
_REPORTS: "msgspec.msgpack.Decoder[Report]" = msgspec.msgpack.Decoder(Report)
_DECODER: "msgspec.msgpack.Decoder[Command]" = msgspec.msgpack.Decoder(Command)
_ENCODER = msgspec.msgpack.Encoder()
_NOTHING = memoryview(b"")


def frame_of(command: Command, num_bytes: int = 0) -> bytes:
    """Return what to send ahead of `num_bytes` of a step's inputs."""
    body = _ENCODER.encode(command)
    return _SIZES.pack(len(body), num_bytes) + body


def send(connection: socket.socket, frame: bytes, inputs: memoryview = _NOTHING) -> None:
    """Send a frame, and the inputs that follow it, in one call where the socket takes all."""
    num_sent = connection.sendmsg((frame, inputs))
    if num_sent < len(frame):
        connection.sendall(frame[num_sent:])
        num_sent = len(frame)
    if num_sent < len(frame) + len(inputs):
        connection.sendall(inputs[num_sent - len(frame) :])


def receive(
    connection: socket.socket, memory: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size))
) -> tuple[Command, memoryview]:
    """Wait for the next command; return it with the inputs that follow it, in what `memory` gives for their size.

    Raises OtherSideGone when rank 0 is.
    """
    size, num_bytes = _SIZES.unpack(_filled(connection, memoryview(bytearray(_SIZES.size))))
    command = _DECODER.decode(_filled(connection, memoryview(bytearray(size))))
    return command, _filled(connection, memory(num_bytes)) if num_bytes else _NOTHING


class Reports:
    """Reports of this rank to rank 0, from any of its threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, report: Report) -> None:
        """Send a report; where rank 0 is gone it is lost, and this process ends."""
        body = _ENCODER.encode(report)
        with self._lock, suppress(OSError):
            self._connection.sendall(_SIZE.pack(len(body)) + body)


def reports_of(connection: socket.socket) -> Iterator[Report]:
    """Wait for each report of another rank, until that is gone."""
    with suppress(OtherSideGone, OSError):
        while True:
            (size,) = _SIZE.unpack(_filled(connection, memoryview(bytearray(_SIZE.size))))
            yield _REPORTS.decode(_filled(connection, memoryview(bytearray(size))))


def _filled(connection: socket.socket, view: memoryview) -> memoryview:
    rest = view
    while rest:
        num_read = connection.recv_into(rest)
        if not num_read:
            raise OtherSideGone
        rest = rest[num_read:]
    return view
