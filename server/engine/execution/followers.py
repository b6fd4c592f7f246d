"""The other ranks as rank 0 sees them: processes that it starts, that get its commands, and without which it ends."""

import logging
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.child_process import python_command
from qualification.common.hang_up import leave_with
from qualification.measure.qualify import DeviceLost
from server.engine.attention.dispatch import Dispatcher
from server.engine.attention.step_attention import StepAttention
from server.engine.execution.capture import Capture
from server.engine.execution.commands import (
    Allocate,
    Begin,
    Command,
    CompareMemory,
    ComputeLogits,
    CopyPages,
    Decide,
    Declare,
    Launch,
    Record,
    RecordStep,
    Repeat,
    Replay,
    RunPadding,
    ShareTokens,
    frame_of,
    send,
)
from server.engine.execution.graph_keys import GraphKey, GraphSizes
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.step_buffer import StepBuffer, StepLayout
from server.engine.execution.worker import LaunchFailed, Worker
from server.engine.operators.launch_errors import is_device_lost
from server.errors import SettingsError
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.ranks import Ranks
from server.settings import Settings

logger = logging.getLogger(__name__)

EXIT_RANK_LOST = 71  # EX_OSERR
FOLLOWER = "server.engine.follower"


class Tells(Protocol):
    """Part of `Followers` that rank 0's worker uses."""

    def tell(self, command: Command, buffer: StepBuffer | None = None) -> None: ...


class RankIdentity(msgspec.Struct, frozen=True):
    """What must be the same on all ranks of a model.

    fingerprint  the machine's, by field
    weights      digest of the model's files, see server/model/load/digests.py
    refusal      why this rank cannot serve at all
    """

    fingerprint: dict[str, str | int | None]
    weights: str | None
    refusal: str | None = None


class Followers:
    """Ranks 1 to world - 1, each a process with a socket. They end with this process, and it ends with any of them."""

    def __init__(self, world: int, program: str = FOLLOWER) -> None:
        """Start the processes, each `python -m program DESCRIPTOR`, which wait for `begin`."""
        self.world = world
        self._is_closed = False
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._folder = tempfile.TemporaryDirectory(prefix="hallmark-ranks-")
        for rank in range(1, world):
            ours, theirs = socket.socketpair()
            with theirs:
                # With the environment of this process, which the supervisor has given it.
                command = python_command(program, str(theirs.fileno()))
                self.processes.append(subprocess.Popen(command, pass_fds=(theirs.fileno(),)))
            self._connections.append(ours)
            threading.Thread(target=self._watch, args=(rank, ours), name=f"rank-{rank}-watch", daemon=True).start()

    def begin(self, settings: Settings, dispatcher: Dispatcher, identity: RankIdentity) -> Ranks:
        """Have every rank load its part, and meet them; this process loads its own behind it.

        Raises SettingsError where another rank has another machine or other weights than `identity`, which is ours.
        """
        meeting, decisions = str(Path(self._folder.name, "meeting")), decisions_of(dispatcher)
        for rank, connection in enumerate(self._connections, start=1):
            send(connection, frame_of(Begin(settings, rank, meeting, decisions)))
        return meet(meeting, 0, self.world, identity)

    def tell(self, command: Command, buffer: StepBuffer | None = None) -> None:
        """Send a command to every rank, after all earlier ones, with the inputs of its step."""
        inputs = memoryview(b"") if buffer is None else buffer.data.numpy().data
        frame = frame_of(command, len(inputs))
        for connection in self._connections:
            send(connection, frame, inputs)

    def close(self) -> None:
        """End the ranks, and wait for them."""
        self._is_closed = True
        for process in self.processes:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _watch(self, rank: int, connection: socket.socket) -> None:
        def leave(_: int) -> None:
            if not self._is_closed:
                logger.critical("rank %d is gone, and the engine ends: it cannot compute without it", rank)
                self._folder.cleanup()  # which an end without Python's own clean-up leaves behind
                os._exit(EXIT_RANK_LOST)

        leave_with(connection, leave)


def meet(meeting: str, rank: int, world: int, identity: RankIdentity) -> Ranks:
    """Wait until every rank of this host is here, by a file that all may write.

    Raises SettingsError on rank 0 where another rank's identity differs from its own.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = dist.FileStore(meeting, world)  # type: ignore[attr-defined]
    if rank:
        _introduce(store, rank, identity)
    else:
        for other in range(1, world):
            found = msgspec.json.decode(store.get(f"identity {other}"), type=RankIdentity)
            check_same(other, found, identity)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    return Ranks(rank, world)


def refuse(meeting: str, rank: int, world: int, reason: str) -> None:
    """Tell rank 0 why this rank cannot serve, which ends the start."""
    store = dist.FileStore(meeting, world)  # type: ignore[attr-defined]
    _introduce(store, rank, RankIdentity({}, None, reason))


def _introduce(store: Any, rank: int, identity: RankIdentity) -> None:
    store.set(f"identity {rank}", msgspec.json.encode(identity).decode())


def check_same(rank: int, found: RankIdentity, ours: RankIdentity) -> None:
    """Raise SettingsError where a rank's identity differs from rank 0's: its proofs or its sums would not hold."""
    if found.refusal is not None:
        raise SettingsError(f"rank {rank} cannot serve: {found.refusal}")
    machine = [
        f"{name} is {found.fingerprint.get(name)} there and {ours.fingerprint.get(name)} on rank 0"
        for name in sorted(found.fingerprint.keys() | ours.fingerprint.keys())
        if found.fingerprint.get(name) != ours.fingerprint.get(name)
    ]
    if machine:
        advice = "all ranks need the same GPU and software; CUDA_VISIBLE_DEVICES chooses GPUs"
        raise SettingsError(f"rank {rank} runs on another machine than rank 0: {'; '.join(machine)}; {advice}")
    if found.weights != ours.weights:
        advice = "the model's files changed while the ranks started; start again when they are whole"
        raise SettingsError(f"rank {rank} reads other weights than rank 0: {advice}")


def decisions_of(dispatcher: Dispatcher) -> list[tuple[str, str | None]]:
    """Return (shape, path) of every shape, those that have no path any more included.

    Tables find a shape of mixtures or sums by its place among the others.
    """
    return [(str(it.shape), it.path) for it in dispatcher.all_decisions]


class LeadingWorker(Worker):
    """Rank 0 of several: the others compute each of its steps too, with the same graphs and the same tokens.

    What fails on one rank leaves the others in the middle of a step, so that the engine's process ends and all ranks
    start again, without what failed.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        dispatcher: Dispatcher,
        tokens: SampledTokens,
        *,
        rank: Ranks,
        followers: Tells,
    ) -> None:
        super().__init__(decoder, kv, dispatcher, tokens, rank=rank)
        self._followers = followers
        self._told = dispatcher, dispatcher.revision
        self._index_of: dict[GraphKey, int] = {}
        self._timed: int | None = None  # of the graph that `others_repeat` names; None: the recorded step
        self._is_announced = False  # whether the others compute what `_ending` is about
        followers.tell(Allocate(kv.num_pages, tokens.latest.numel()))

    def least_of(self, num_bytes: int) -> int:
        """Return the least of `num_bytes`, which rank 0 has left beside the largest step, and of the others' memory."""
        self._followers.tell(CompareMemory())
        return self.rank.least(num_bytes)

    def declare(self, sizes: GraphSizes, max_context: int) -> dict[GraphKey, StepLayout]:
        """As of every worker."""
        self._followers.tell(Declare(sizes, max_context))
        layouts = super().declare(sizes, max_context)
        self._index_of = {key: index for index, key in enumerate(layouts)}
        return layouts

    def run_padding(self, key: GraphKey) -> None:
        """As of every worker. Raises DeviceLost where this rank fails."""
        self._tell_decisions()
        self._followers.tell(RunPadding(self._index_of[key]))
        with self._ending():
            super().run_padding(key)

    def capture(self, key: GraphKey, capture: Capture) -> StepAttention:
        """As of every worker, while the other ranks record theirs. Raises DeviceLost where this rank fails."""
        self._tell_decisions()
        self._followers.tell(Record(self._index_of[key]))
        with self._ending():
            return super().capture(key, capture)

    def graph(self, key: GraphKey) -> torch.cuda.CUDAGraph | None:
        """As of every worker; `others_repeat` is about this graph from now on."""
        self._timed = self._index_of[key]
        return super().graph(key)

    @contextmanager
    def others_repeat(self) -> Iterator[None]:
        """Have the others replay the graph that `graph` or `record` gave last, as this rank does inside.

        Raises DeviceLost where this rank fails to.
        """
        with self._ending():
            self._followers.tell(Repeat(self._timed))
            self._is_announced = True
            yield

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Compute logits as every worker does: the others have the same hidden states, but not the choice of rows.

        Raises NoPathError before they are asked, and DeviceLost where this rank fails behind that.
        """
        num_rows = hidden_rows.shape[0]
        if self.dispatcher.products is not None:
            self.dispatcher.products.check(0, num_rows)
        with self._ending():
            self._followers.tell(ComputeLogits(num_rows))
            self._is_announced = True
            return super().logits(self.rank.share(hidden_rows.contiguous()))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages on every rank, as a worker does on its own."""
        self._followers.tell(CopyPages(tuple(copies)))
        super().copy_pages(copies)

    def launch(self, *given: Any, **named: Any) -> Tensor:
        """Launch a step as every worker does. Raises DeviceLost where this rank fails in the middle of the step."""
        with self._ending():
            return super().launch(*given, **named)

    def _announce(self, buffer: StepBuffer) -> None:
        self._is_announced = True
        if buffer.key is not None:  # whose graph holds its decisions
            self._followers.tell(Replay(self._index_of[buffer.key]), buffer)
            return
        self._tell_decisions()
        layout = buffer.layout
        self._followers.tell(Launch(layout.parts, layout.num_sampled, buffer.has_pending), buffer)

    def _announce_record(self, buffer: StepBuffer) -> None:
        self._timed = None
        self._tell_decisions()
        layout = buffer.layout
        self._followers.tell(RecordStep(layout.parts, layout.num_sampled, buffer.has_pending), buffer)

    def _share_choice(self, num_rows: int) -> None:
        self._followers.tell(ShareTokens(num_rows))
        self.rank.share(self.tokens.latest[:num_rows])

    def _tell_decisions(self) -> None:
        now = self.dispatcher, self.dispatcher.revision
        if now != self._told:
            self._told = now
            self._followers.tell(Decide(decisions_of(self.dispatcher)))

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Turn what keeps this rank from a step that the others compute into DeviceLost: all start again.

        An error before the step is announced passes, unless it is a failed launch or a lack of memory.
        """
        self._is_announced = False
        try:
            yield
        except LaunchFailed as failed:
            blamed = (failed.choice.use.path, str(failed.choice.decision.shape))
            message = f"{blamed[0]} could not be launched on rank 0 of {self.rank.world}: {failed.error}"
            raise DeviceLost(message, [blamed]) from failed
        except torch.OutOfMemoryError as error:
            raise DeviceLost(f"out of memory on rank 0 of {self.rank.world}: {error}") from error
        except Exception as error:
            if is_device_lost(error) or not self._is_announced:
                raise
            message = f"rank 0 of {self.rank.world} left a step that the others compute: {error}"
            raise DeviceLost(message) from error
