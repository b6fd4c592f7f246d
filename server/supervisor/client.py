"""The API process's side of the engine: starts it, feeds it, watches it, and answers for it when it dies."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from kernels.system.locked_folder import LockedFolder
from server.errors import DeadlyPrompt, StartError
from server.protocol.images import PromptImages
from server.protocol.liveness import KILLED_AFTER_S, START_KILLED_AFTER_S, DeathCause, death_of, kill_limit_s
from server.protocol.messages import (
    AttestationReport,
    Cancel,
    Configure,
    EngineFailed,
    EngineListener,
    EngineProgress,
    EngineReady,
    EngineRefused,
    FinishReason,
    FromEngine,
    Heartbeat,
    PlanChanged,
    QuarantineChanged,
    ReplayReport,
    SamplingParams,
    ShadowReport,
    Shutdown,
    StartBeat,
    StepOutput,
    Submit,
    ToEngine,
    TokenDelta,
)
from server.settings import Settings
from server.supervisor.choices import Choices
from server.supervisor.connection import EngineConnection
from server.supervisor.deadly_prompts import DeadlyPrompts
from server.supervisor.engine_command import ENGINE_COMMAND
from server.supervisor.requests import AttestationRequests, QuarantineRequests
from server.supervisor.socket_folder import PREFIX, SOCKET_NAME, make_socket_folder
from server.supervisor.start_watch import StartWatch
from server.supervisor.streams import Streams, Take, error_delta

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 120.0  # importing torch from a cold disk takes most of it
_CLOSE_TIMEOUT_S = 3.0
_HEALTHY_AFTER_S = 60.0  # an engine that lived this long restarts without delay
# In a row, none of which blamed a kernel path that the next one does without: a minute of delays, and the starts.
_MOST_FAILED_STARTS = 8
_MOST_STALLED_STARTS = 3  # half an hour without progress is no slow disk


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    REFUSED = "refused"  # final: the same settings would be refused again
    RESTARTING = "restarting"
    CLOSED = "closed"


class EngineClient:
    """One engine process at a time, restarted with back-off until `close` or until too many starts have failed."""

    def __init__(
        self,
        settings: Settings,
        listener: EngineListener,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        stall_after_s: float = KILLED_AFTER_S,
        start_stall_after_s: float = START_KILLED_AFTER_S,
        connect_within_s: float = _CONNECT_TIMEOUT_S,
        backoff_s: tuple[float, float] = (0.5, 30.0),
        max_unread_tokens: int = 4096,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        make_folder: Callable[[], Path] = make_socket_folder,
    ) -> None:
        """`command` gets the socket's path appended. `backoff_s`: a restart's first and longest delay.

        `sleep` waits for these, and from one word about a start that takes long to the next.

        `make_folder` makes the socket's, for each engine process.
        """
        self.state = EngineState.STARTING
        self.ready: EngineReady | None = None
        self.refused: EngineRefused | None = None
        self.last_heartbeat: Heartbeat | None = None
        self._settings = settings
        self._listener = listener
        self._command = tuple(command)
        self._stall_after_s = stall_after_s
        self._start_stall_after_s = start_stall_after_s
        self._connect_within_s = connect_within_s
        self._start = self._new_watch()  # of the latest start
        self._failure: str | None = None  # what the latest engine process said of its end
        self._backoff_s = backoff_s
        self._make_folder = make_folder
        self._sleep = sleep
        self._quarantined: dict[tuple[str, str], None] = {}  # (path, shape), in the order of their failures
        self.attestations = AttestationRequests(self._send)
        self.quarantine = QuarantineRequests(self._send)
        self._streams = Streams(max_unread_tokens)
        self._deadly = DeadlyPrompts()
        self._connection: EngineConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._alive_at = 0.0  # monotonic seconds of the last proof of progress

    @property
    def quarantined(self) -> list[tuple[str, str]]:
        """(path, shape) pairs that broke in service; a restarted engine does without them."""
        return list(self._quarantined)

    async def start(self) -> None:
        """Start the engine process; `state` says later how it went."""
        self._loop = asyncio.get_running_loop()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def close(self) -> None:
        """End the engine within seconds, and every open stream with code shutting_down."""
        patience_s = _CLOSE_TIMEOUT_S if self.state is EngineState.READY else 0.0  # one that starts reads nothing yet
        self.state = EngineState.CLOSED
        self._streams.end_all("shutting_down", "The server is shutting down.")
        self._send(Shutdown())
        if self._supervisor is not None:
            await asyncio.wait([self._supervisor], timeout=patience_s)
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor

    async def stream(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        cache_salt: bytes = b"",
        traceparent: str | None = None,
        priority: int = 0,
        choices: Choices | None = None,
        take: Take | None = None,
        images: PromptImages | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of one request; the last one has a finish_reason. Leaving early cancels the request.

        A prompt that two engines died of is refused, with code deadly_prompt (`server/supervisor/deadly_prompts.py`).

        It shares computed pages with requests of the same `cache_salt` only, and the computation of its prompt with
        the other `choices` of it, which begin when all of them are streamed.
        `images` are those of the prompt; they are taken when they are sent.
        `take` may take deltas on the way, before the last one: they do not come here then.
        `traceparent` (W3C) goes along, so that the engine's log names the trace. Raises ValueError for a request id
        that is open already.
        """
        content = prompt_token_ids if images is None else images.in_ids(prompt_token_ids)
        refusal = self._deadly.refusal(content)
        if refusal is not None:
            yield error_delta(request_id, DeadlyPrompt.code, refusal)
            return
        if self.state is not EngineState.READY:
            yield error_delta(request_id, "not_ready", f"The engine is {self.state.value}.")
            return
        stream = self._streams.open(request_id, take, content)
        is_finished = False
        try:
            submit = Submit(request_id, prompt_token_ids, sampling, cache_salt, traceparent, priority)
            if images is not None:
                submit = msgspec.structs.replace(submit, images=images.take())
            whole = submit if choices is None else choices.join(submit)
            if whole is not None:
                self._send(whole)
            del submit, whole  # they may have images
            while not is_finished:
                delta = await stream.next()
                is_finished = delta.finish_reason is not None
                if is_finished and delta.finish_reason is not FinishReason.ERROR:
                    self._deadly.forgive(content)
                yield delta
        finally:
            self._streams.close(stream)
            if not stream.is_ended:
                self._send(Cancel(request_id))

    def _send(self, message: ToEngine) -> None:
        """Send a message from any thread's loop: the admin port has a loop of its own."""
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            self._loop.call_soon_threadsafe(self._send, message)
            return
        if self._connection is not None:
            self._connection.send(message)

    async def _supervise(self) -> None:
        delay_s, num_failed_starts = self._backoff_s[0], 0
        while True:
            started_at, num_blamed, self._failure = time.monotonic(), len(self._quarantined), None
            try:
                cause = await self._run_once()
            except StartError as error:
                self._handle(EngineRefused(error.code, error.message, [], is_final=True))
                return
            except Exception:  # the edge of the supervisor: whatever broke, no stream may wait for ever
                logger.exception("the engine's supervision failed")
                cause = DeathCause.EXITED
            if self.state in (EngineState.REFUSED, EngineState.CLOSED):
                return
            is_same_start = self.ready is None and len(self._quarantined) == num_blamed
            num_failed_starts = num_failed_starts + 1 if is_same_start else 0
            self.state = EngineState.RESTARTING
            self.ready = None
            self.last_heartbeat = None  # or the next engine would count as stalled from its ready to its first beat
            self._deadly.blame(self._streams.prompts())
            self._streams.end_all("engine_died", "The engine died while it served this request; it is being restarted.")
            self.attestations.give_up()
            self.quarantine.give_up()
            if time.monotonic() - started_at > _HEALTHY_AFTER_S:
                delay_s = self._backoff_s[0]
            is_last = num_failed_starts >= (
                _MOST_STALLED_STARTS if cause is DeathCause.STALLED else _MOST_FAILED_STARTS
            )
            logger.error(
                "engine died (%s); %s", cause.value, "no restart" if is_last else f"restart in {delay_s:.1f} s"
            )
            self._listener.on_death(cause.value)
            if is_last:
                last = self._failure or (str(self._start) if cause is DeathCause.STALLED else "the log says why")
                why = f"{num_failed_starts} starts of the engine failed in a row, the last one ({cause.value}): {last}"
                self._handle(EngineRefused(StartError.code, why, [], is_final=True))
                return
            await self._sleep(delay_s)
            delay_s = min(2 * delay_s, self._backoff_s[1])

    async def _run_once(self) -> DeathCause:
        """One life of an engine process, from its start to its end."""
        folder = LockedFolder(self._make_folder, PREFIX, SOCKET_NAME)
        self._start = self._new_watch()
        connected: asyncio.Future[EngineConnection] = asyncio.get_running_loop().create_future()
        server = None
        try:
            path = folder.path / SOCKET_NAME
            server = await asyncio.get_running_loop().create_unix_server(
                lambda: EngineConnection(self._handle, connected), path
            )
            os.chmod(path, 0o600)
            # Its own session: a signal to the whole process group (timeout, a shell) must not cut streams in a drain.
            self._process = await asyncio.create_subprocess_exec(*self._command, str(path), start_new_session=True)
            waiting = asyncio.create_task(self._report_waiting())
            try:
                return await self._serve_one(self._process, connected)
            finally:
                waiting.cancel()
        finally:
            if server is not None:
                server.close()
            await self._end_process()
            folder.remove()

    async def _report_waiting(self) -> None:
        await self._sleep(1.0)
        while self.state in (EngineState.STARTING, EngineState.RESTARTING):
            self._listener.on_waiting()
            await self._sleep(1.0)

    async def _serve_one(
        self, process: asyncio.subprocess.Process, connected: "asyncio.Future[EngineConnection]"
    ) -> DeathCause:
        exited = asyncio.create_task(process.wait())
        try:
            both: list[asyncio.Future[Any]] = [exited, connected]
            await asyncio.wait(both, timeout=self._connect_within_s, return_when=asyncio.FIRST_COMPLETED)
            if not connected.done():
                if exited.done():
                    return death_of(exited.result())
                logger.error("the engine process has not connected within %.0f s; it is killed", self._connect_within_s)
                return DeathCause.STALLED
            self._connection = connected.result()
            self._start = self._new_watch()  # from here on, not from the process's first import
            self._send(Configure(self._settings, self.quarantined, self.quarantine.by_operator))
            return await self._until_end(self._connection, exited)
        finally:
            exited.cancel()
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    async def _until_end(self, connection: EngineConnection, exited: "asyncio.Task[int]") -> DeathCause:
        watching = asyncio.create_task(self._watch())
        try:
            both: list[asyncio.Future[Any]] = [connection.ended, watching]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not connection.ended.done():
                return watching.result()
            cause = connection.ended.result()
            if cause is None:  # end of file: the process is gone or about to go
                await asyncio.wait([exited], timeout=_CLOSE_TIMEOUT_S)
                return death_of(exited.result()) if exited.done() else DeathCause.EXITED
            return cause
        finally:
            watching.cancel()

    async def _watch(self) -> DeathCause:
        """Returns when a ready engine, or one that starts, has shown no progress for too long."""
        while True:
            await asyncio.sleep(min(1.0, self._stall_after_s / 4, self._start_stall_after_s / 4))
            limit_s = kill_limit_s(self.ready, self._stall_after_s)
            if self.state is EngineState.READY and time.monotonic() - self._alive_at > limit_s:
                logger.error("engine shows no progress for %.1f s; it is killed", limit_s)
                return DeathCause.STALLED
            is_starting = self.state in (EngineState.STARTING, EngineState.RESTARTING)
            if is_starting and self._start.silent_s > self._start_stall_after_s:
                logger.error(
                    "the start shows no progress for %.1f s; it is killed: %s", self._start.silent_s, self._start
                )
                return DeathCause.STALLED

    def _handle(self, message: FromEngine) -> None:
        self._alive_at = time.monotonic()
        if isinstance(message, StepOutput):
            self._quarantined.update(dict.fromkeys(message.record.quarantined))
            is_behind = self._connection is not None and self._connection.is_behind
            for delta in message.deltas:
                if not self._streams.push(delta, is_behind=is_behind):
                    self._send(Cancel(delta.request_id))
            if self._loop is not None:  # after this turn of the loop, at whose end the tokens are written
                self._loop.call_soon(self._loop.call_soon, self._listener.on_step, message.record)
        elif isinstance(message, Heartbeat):
            self.last_heartbeat = message
            self._listener.on_heartbeat(message)
        elif isinstance(message, AttestationReport):
            self._quarantined.update(dict.fromkeys(message.quarantined))
            self._listener.on_attestation(message)
            self.attestations.put(message)
        elif isinstance(message, ShadowReport):
            self._quarantined.update(dict.fromkeys(message.quarantined))
            self._listener.on_shadow(message)
        elif isinstance(message, ReplayReport):
            self._listener.on_replay(message)
        elif isinstance(message, StartBeat):
            self._start.beat(message)
        elif isinstance(message, EngineProgress):
            self._listener.on_progress(message)
        elif isinstance(message, EngineFailed):
            logger.error("the engine cannot go on: %s; quarantined: %s", message.message, message.suspects)
            self._failure = message.message
            self._quarantined.update(dict.fromkeys(message.suspects))
        elif isinstance(message, PlanChanged):
            self.ready = self.ready and msgspec.structs.replace(self.ready, plan=message.plan)
            self._listener.on_plan(message.plan)
        elif isinstance(message, QuarantineChanged):
            self.quarantine.put(message)
        elif isinstance(message, EngineReady):
            self.ready = message
            self.last_heartbeat = Heartbeat(0, self._alive_at, 0, 0)  # or one that hangs before its first beat is ready
            self.state = EngineState.READY
            self._listener.on_ready(message)
        else:
            self.refused = message
            self.state = EngineState.REFUSED
            self._listener.on_refused(message)

    def _new_watch(self) -> StartWatch:
        return StartWatch(self._settings.tensor_parallel_size)

    async def _end_process(self) -> None:
        """Kill what still runs and reap it: no zombie stays."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None
