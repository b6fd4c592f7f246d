"""The other ranks of an engine as rank 0 sees them: processes that get its commands, and without which it ends."""

import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.system.child_process import python_command
from kernels.system.device_lost import DeviceLost
from kernels.system.rank_processes import RankProcesses, Store, meet
from server.engine.execution.commands import (
    Begin,
    Command,
    CompareMemory,
    ComputeLogits,
    Decide,
    Declare,
    FollowStep,
    Launch,
    RankChecked,
    RankDecided,
    RankFailed,
    RankFallbacks,
    RankProgress,
    Record,
    RecordStep,
    Repeat,
    Replay,
    RunPadding,
    ShareTokens,
    frame_of,
    reports_of,
    send,
)
from server.engine.execution.graph_keys import GraphKey, GraphSizes
from server.engine.execution.step_buffer import StepBuffer, StepLayout
from server.engine.execution.worker import LaunchFailed
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.launch_errors import is_device_lost
from server.engine.operators.rows_table import StepSizes
from server.engine.proof.rank_check import NamedCall, RankAnswers
from server.errors import SettingsError, StartError
from server.model.ranks import Ranks
from server.protocol.liveness import START_KILLED_AFTER_S
from server.settings import Settings

logger = logging.getLogger(__name__)

EXIT_RANK_LOST = 71  # EX_OSERR
# Longer than the supervisor lets a start make no progress: it ends the start with the stage of each rank, where torch's
# five minutes would end it with the name of a key.
MEET_S = 2 * START_KILLED_AFTER_S
FOLLOWER = "server.engine.follower"

Send = Callable[[Command, StepBuffer | None], None]  # to every other rank, with the inputs of a step


class RankIdentity(msgspec.Struct, frozen=True):
    """Identity of a rank's part, which must be the same on all ranks of a model.

    fingerprint  the machine's, by field
    weights      digest of the model's files, see server/model/load/digests.py
    refusal      why this rank cannot serve at all
    """

    fingerprint: dict[str, str | int | None]
    weights: str | None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class RankListener:
    """Called on a thread of each rank.

    on_progress  gets the rank, and how far it is in a start
    on_failure   gets what a rank died of, before this process ends
    on_refusal   gets code and message in its place where no start with these settings can succeed
    """

    on_progress: Callable[[int, RankProgress], None] = lambda _, __: None
    on_failure: Callable[[DeviceLost], None] = lambda _: None
    on_refusal: Callable[[str, str], None] = lambda _, __: None


_SILENT = RankListener()


class Followers:
    """Ranks 1 to world - 1 of an engine, which get the commands of this process, their rank 0.

    blamed         gives the (path, shape) pairs of steps that are not done: for a device that is lost on another rank
    checked        judgements of calls that a step has named to a rank
    shares_memory  whether GPUs that can shall write into each other's memory; the same on all ranks
    """

    def __init__(
        self, world: int, program: str = FOLLOWER, listener: RankListener = _SILENT, *, shares_memory: bool = True
    ) -> None:
        """Start the processes, each `python -m program DESCRIPTOR`, which wait for `begin`."""
        self.world = world
        self.shares_memory = shares_memory
        self.blamed: Callable[[], list[tuple[str, str]]] = list
        self.checked = RankAnswers(world)
        self._listener = listener
        self._fallbacks = Counter[MatmulFallback]()  # of all ranks, that `take_fallbacks` has not given yet
        self._lock = Lock()  # of these: each rank has a thread here
        # By rank the decisions that it was sent, and has not said yet to serve by.
        self._sent: dict[int, deque[list[tuple[str, str | None]]]] = {rank: deque() for rank in range(1, world)}

        def command(_: int, descriptor: int, __: str) -> Sequence[str]:
            return python_command(program, str(descriptor))

        self._ranks = RankProcesses(world, command, leave=_leave, listen=self._listen)

    def begin(self, settings: Settings, dispatcher: Dispatcher, identity: RankIdentity) -> Ranks:
        """Have every rank load its part, and meet them; this process loads its own behind it.

        Raises SettingsError where another rank has another machine or other weights than `identity`, which is ours.
        """
        meeting, decisions = self._ranks.meeting, decisions_of(dispatcher)
        self._expect(decisions)
        for rank, connection in enumerate(self._ranks.connections, start=1):
            send(connection, frame_of(Begin(settings, rank, meeting, decisions, self.shares_memory)))
        return meet_ranks(meeting, 0, self.world, identity)

    def send(self, command: Command, buffer: StepBuffer | None = None) -> None:
        """Send a command to every rank, after all earlier ones, with the inputs of its step."""
        if isinstance(command, Decide):
            self._expect(command.decisions)
        inputs = memoryview(b"") if buffer is None else buffer.data.numpy().data
        frame = frame_of(command, len(inputs))
        for connection in self._ranks.connections:
            send(connection, frame, inputs)

    def take_fallbacks(self) -> dict[MatmulFallback, int]:
        """Return and forget the products that other ranks have reported as left to PyTorch, by reason."""
        if not self._fallbacks:
            return {}
        with self._lock:
            counts, self._fallbacks = dict(self._fallbacks), Counter()
        return counts

    def close(self) -> None:
        """End the ranks, and wait for them."""
        self._ranks.close()

    def _expect(self, decisions: list[tuple[str, str | None]]) -> None:
        for sent in self._sent.values():
            sent.append(decisions)

    def _listen(self, rank: int, connection: socket.socket) -> None:
        """Return when a rank is gone, or has failed: it waits for this process's end then, as the others do."""
        for report in reports_of(connection):
            if isinstance(report, RankProgress):
                self._listener.on_progress(rank, report)
                continue
            if isinstance(report, RankFallbacks):
                with self._lock:
                    self._fallbacks.update(report.counts)
                continue
            if isinstance(report, RankChecked):
                self.checked.put(report.judged)
                continue
            if isinstance(report, RankDecided):
                why = why_stale(rank, self.world, report.paths, self._sent[rank].popleft())
                if why is None:
                    continue
                self._fail(RankFailed(why, [], False))
            elif report.refused is not None:
                self._listener.on_refusal(report.refused, report.message)
            else:
                self._fail(report)
            return

    def _fail(self, report: RankFailed) -> None:
        suspects = report.suspects or (self.blamed() if report.is_device_lost else [])
        logger.critical("%s; suspects: %s", report.message, suspects)
        self._listener.on_failure(DeviceLost(report.message, suspects))


def _leave(rank: int) -> None:
    logger.critical("rank %d is gone, and the engine ends: it cannot compute without it", rank)
    os._exit(EXIT_RANK_LOST)


def meet_ranks(meeting: str, rank: int, world: int, identity: RankIdentity, *, patience_s: float = MEET_S) -> Ranks:
    """Wait until every rank of this host is here, `patience_s` at most for what each of them says.

    Raises SettingsError on rank 0 where another rank's identity differs from its own.
    """

    def compare(store: Store) -> None:
        store.set_timeout(timedelta(seconds=patience_s))
        if rank:
            _introduce(store, rank, identity)
            return
        for other in range(1, world):
            found = msgspec.json.decode(store.get(f"identity {other}"), type=RankIdentity)
            check_same(other, found, identity)

    meet(meeting, rank, world, "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", before=compare)
    return Ranks(rank, world)


def refuse(meeting: str, rank: int, world: int, reason: str) -> None:
    """Send rank 0 the reason for which this rank cannot serve, which ends the start."""
    store = dist.FileStore(meeting, world)  # type: ignore[attr-defined]
    _introduce(store, rank, RankIdentity({}, None, reason))


def _introduce(store: Store, rank: int, identity: RankIdentity) -> None:
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


def why_stale(
    rank: int, world: int, paths: Mapping[str, str | None], decisions: Sequence[tuple[str, str | None]]
) -> str | None:
    """Return which shapes a rank serves otherwise than rank 0 has decided; None where it serves all as decided.

    paths      by shape, as the rank launches them
    decisions  (shape, path), as they were sent to it
    """
    wanted = dict(decisions)
    differing = [it for it in (*wanted, *(paths.keys() - wanted.keys())) if paths.get(it, "") != wanted.get(it, "")]
    if not differing:
        return None
    first = differing[0]
    there, here = (of.get(first, "nothing that it was sent") or "no path" for of in (paths, wanted))
    return (
        f"stale decisions on rank {rank} of {world}: it serves {len(differing)} of {len(wanted)} shapes otherwise than "
        f"rank 0, the first {first} by {there}, rank 0 by {here}"
    )


def decisions_of(dispatcher: Dispatcher) -> list[tuple[str, str | None]]:
    """Return (shape, path) of every shape, those that have no path any more included."""
    return [(str(it.shape), it.path) for it in dispatcher.all_decisions]


class LedRanks:
    """Others that compute each step of rank 0 too, with the same graphs and the same tokens.

    What fails on one rank leaves the others in the middle of a step, so that the engine's process ends and all ranks
    start again, without what failed.
    """

    def __init__(self, ranks: Ranks, dispatcher: Dispatcher, send: Send) -> None:
        """`dispatcher`: with the decisions that the ranks have begun with."""
        self._ranks = ranks
        self._send = send
        self._sent_decisions = dispatcher, dispatcher.revision
        self._index_of: dict[GraphKey, int] = {}
        self._timed: int | None = None  # of the graph that `repeating` names; None: the recorded step
        self._is_announced = False  # whether the others compute what `_ending` is about

    def send(self, command: Command, buffer: StepBuffer | None = None) -> None:
        """Send a command to every other rank, with the inputs of its step."""
        self._send(command, buffer)

    def least(self, num_bytes: int) -> int:
        self.send(CompareMemory())
        return self._ranks.least(num_bytes)

    def declare(self, sizes: GraphSizes, max_context: int, layouts: Mapping[GraphKey, StepLayout]) -> None:
        self.send(Declare(sizes, max_context))
        self._index_of = {key: index for index, key in enumerate(layouts)}

    @contextmanager
    def padding(self, key: GraphKey, dispatcher: Dispatcher) -> Iterator[None]:
        """Surround a run of a graph's padding. Raises DeviceLost where this rank fails."""
        self._send_decisions(dispatcher)
        self.send(RunPadding(self._index_of[key]))
        with self.launching():
            yield

    @contextmanager
    def capturing(self, key: GraphKey, dispatcher: Dispatcher) -> Iterator[None]:
        """Surround the capture of a graph. Raises DeviceLost where this rank fails."""
        self._send_decisions(dispatcher)
        self.send(Record(self._index_of[key]))
        with self.launching():
            yield

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Turn what keeps this rank from a step that the others compute into DeviceLost: all start again.

        An error before the step is announced passes, unless it is a failed launch or a lack of memory.
        """
        self._is_announced = False
        try:
            yield
        except (LaunchFailed, torch.OutOfMemoryError) as error:
            raise loss_of_step(error, self._ranks.index, self._ranks.world) from error
        except Exception as error:
            if is_device_lost(error) or not self._is_announced:
                raise
            raise loss_of_step(error, self._ranks.index, self._ranks.world) from error

    def announce(
        self,
        buffer: StepBuffer,
        dispatcher: Dispatcher,
        *,
        is_observed: bool = False,
        checked: NamedCall | None = None,
    ) -> None:
        self._is_announced = True
        if buffer.key is not None:  # whose graph holds its decisions
            self.send(Replay(self._index_of[buffer.key]), buffer)
            return
        self._send_decisions(dispatcher)
        layout = buffer.layout
        lengths = layout.parts, layout.num_sampled, layout.num_state_writes
        self.send(Launch(*lengths, buffer.has_pending, layout.has_embedded, is_observed, checked), buffer)

    def announce_head(
        self, buffer: StepBuffer, dispatcher: Dispatcher, *, is_first: bool, place: int, is_observed: bool = False
    ) -> None:
        self._is_announced = True
        self._send_decisions(dispatcher)
        layout = buffer.layout
        lengths = layout.parts, layout.num_sampled or 0, buffer.has_pending
        self.send(FollowStep(*lengths, is_first, place, is_observed), buffer)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Surround the record of a step. Raises RuntimeError where another rank cannot record it."""
        self._is_announced = False
        try:
            yield
        except Exception:
            if self._is_announced:
                self._ranks.least(0)
            raise
        if self._is_announced and not self._ranks.least(1):
            raise RuntimeError("another rank could not record the step")

    def announce_record(self, buffer: StepBuffer, dispatcher: Dispatcher) -> None:
        self._timed = None
        self._send_decisions(dispatcher)
        layout = buffer.layout
        self.send(RecordStep(layout.parts, layout.num_sampled, layout.num_state_writes, buffer.has_pending), buffer)
        self._is_announced = True

    def choose_timed(self, key: GraphKey) -> None:
        self._timed = self._index_of[key]

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Surround a replay for its times. Raises DeviceLost where this rank fails to repeat it."""
        with self.launching():
            self.send(Repeat(self._timed))
            self._is_announced = True
            yield

    @contextmanager
    def computing_logits(self, hidden_rows: Tensor, dispatcher: Dispatcher) -> Iterator[Tensor]:
        """Surround the logits of some rows: the others have the same hidden states, but not the choice of rows.

        Raises NoPathError before they are asked, and DeviceLost where this rank fails behind that.
        """
        num_rows = hidden_rows.shape[0]
        dispatcher.check_others(StepSizes(0, num_rows))
        with self.launching():
            self.send(ComputeLogits(num_rows))
            self._is_announced = True
            yield self._ranks.share(hidden_rows.contiguous())

    def share_choice(self, tokens: Tensor) -> None:
        """Give them tokens. Raises DeviceLost where this rank lacks memory: they wait for the tokens by then."""
        self.send(ShareTokens(tokens.shape[0]))
        try:
            self._ranks.share(tokens)
        except torch.OutOfMemoryError as error:
            raise loss_of_step(error, self._ranks.index, self._ranks.world) from error

    def _send_decisions(self, dispatcher: Dispatcher) -> None:
        now = dispatcher, dispatcher.revision
        if now != self._sent_decisions:
            self._sent_decisions = now
            self.send(Decide(decisions_of(dispatcher)))


def loss_of_step(error: Exception, rank: int, world: int) -> DeviceLost:
    """Return what ends all ranks where this error has kept one of them from a step that the others compute."""
    where = f"rank {rank} of {world}"
    if isinstance(error, LaunchFailed):
        blamed = (error.choice.use.path, str(error.choice.decision.shape))
        return DeviceLost(f"{blamed[0]} could not be launched on {where}: {error.error}", [blamed])
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceLost(f"out of memory on {where}: {error}")
    return DeviceLost(f"{where} left a step that the others compute: {error}")


def report_of(error: Exception, rank: int, world: int) -> RankFailed:
    """Return what another rank than the first reports of its end, which is decided as rank 0 decides its own."""
    if isinstance(error, DeviceLost):  # a product that could not be launched
        return RankFailed(f"on rank {rank} of {world}: {error}", error.suspects, False)
    if not isinstance(error, LaunchFailed) and is_device_lost(error):
        return RankFailed(f"the device is lost on rank {rank} of {world}: {str(error).partition(chr(10))[0]}", [], True)
    if isinstance(error, StartError):  # of the files that it loads
        return RankFailed(f"rank {rank} of {world} cannot serve: {error.message}", [], False, error.code)
    lost = loss_of_step(error, rank, world)
    return RankFailed(str(lost), lost.suspects, False)
