"""The engine's process: `python -m server.engine.process SOCKET`, started by server/supervisor/client.py.

The main thread steps the engine, and reads and writes the socket between two steps. It also sends the heartbeat, on a
CPU within steps too, before and after each layer's attention, so that a heartbeat proves progress and not just a living
process, and a slow step is no hang. Another thread waits for the API process to end.
"""

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from kernels.system.device_lost import DeviceLost
from kernels.system.hang_up import leave_with
from qualification.measure.trials.failures import QualificationAborted
from server.engine.execution.followers import RankListener
from server.engine.link import EXIT_PROTOCOL, Inbox, Link
from server.engine.operators.launch_errors import is_device_lost
from server.engine.proof.attestation import Attestor
from server.engine.proof.operator_quarantine import OperatorQuarantine
from server.engine.proof.replay import Replay
from server.engine.proof.shadow_check import ShadowCheck
from server.engine.scheduling.engine import Engine
from server.engine.startup.builder import BuiltEngine, build_engine
from server.engine.startup.plan import Unservable
from server.engine.startup.start_progress import StartProgress
from server.errors import StartError
from server.log import configure_logging
from server.protocol.messages import (
    Attest,
    Cancel,
    ChangeQuarantine,
    Configure,
    EngineFailed,
    EngineProgress,
    EngineRefused,
    FromEngine,
    Heartbeat,
    ReplayReport,
    Shutdown,
    StartBeat,
    Submit,
)
from server.settings import Settings

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
_EXIT_REFUSED = 3
_EXIT_FAULT = 70  # EX_SOFTWARE


class Loop:
    """Steps the engine while there is work, and waits for messages when there is none."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        send: Callable[[FromEngine], None],
        attestor: Attestor | None = None,
        operator_quarantine: OperatorQuarantine | None = None,
        shadow: ShadowCheck | None = None,
        replay: Replay | None = None,
    ) -> None:
        self._attestor = attestor
        self._shadow = shadow
        self._replay = replay
        self._operator_quarantine = operator_quarantine
        self._engine = engine
        self._inbox = inbox
        self._send = send
        self._beat_at = 0.0  # monotonic seconds

    def run(self) -> None:
        """Run until a Shutdown message."""
        while self._receive():
            is_due = self._attestor is not None and self._attestor.is_due
            is_check_due = self._shadow is not None and self._shadow.is_due
            output = self._engine.step(may_run_ahead=not is_due and not is_check_due)
            if output is not None:
                self._send(output)
                self._send_plan(bool(output.record.quarantined))
            if is_due:
                self._attest()
            if is_check_due or not self._engine.has_work:
                self._check()
            if self._replay is not None and not self._engine.has_work:
                self._send_replay(self._replay.step())
            self.beat()

    def _receive(self) -> bool:
        """Handle all messages; when idle, wait for one until the next heartbeat is due. Return False on Shutdown."""
        is_busy = self._attestor is not None and self._attestor.is_busy
        is_replaying = self._replay is not None and self._replay.is_ready
        is_idle = not self._engine.has_work and not is_busy and not is_replaying
        while True:
            try:
                message = self._inbox.get(block=is_idle, timeout=HEARTBEAT_S)
            except queue.Empty:
                return True
            if isinstance(message, Submit):
                if self._replay is not None:
                    self._send_replay(self._replay.yield_memory())
                self._engine.submit(message)
            elif isinstance(message, Cancel):
                self._engine.cancel(message.request_id)
            elif isinstance(message, Attest):
                self._ask()
            elif isinstance(message, ChangeQuarantine):
                self._change_quarantine(message)
            elif isinstance(message, Shutdown):
                return False
            is_idle = False

    def _ask(self) -> None:
        if self._attestor is not None:
            self._attestor.ask("request")

    def _change_quarantine(self, message: ChangeQuarantine) -> None:
        if self._operator_quarantine is not None:
            answer = self._operator_quarantine.change(message)
            self._send_plan(not answer.stranded)
            self._send(answer)

    def _send_plan(self, is_changed: bool) -> None:
        if is_changed and self._operator_quarantine is not None:
            self._send(self._operator_quarantine.plan())

    def _attest(self) -> None:
        """Run at most one profiled batch. No step is under way."""
        report = None if self._attestor is None else self._attestor.poll()
        if report is not None:
            self._send(report)
            self._send_plan(bool(report.quarantined))

    def _check(self) -> None:
        """Compare the sample of a shadow check, if there is one. No step is under way."""
        report = None if self._shadow is None else self._shadow.judge()
        if report is not None:
            self._send(report)
            self._send_plan(bool(report.quarantined))

    def _send_replay(self, report: ReplayReport | None) -> None:
        if report is not None:
            self._send(report)

    def beat(self) -> None:
        """Send a heartbeat, if none was sent in the latest half second. Called by the thread that steps."""
        if time.monotonic() - self._beat_at >= HEARTBEAT_S:
            self._beat_at = time.monotonic()
            engine = self._engine
            self._send(Heartbeat(engine.step_index, self._beat_at, engine.num_running, engine.num_waiting))


def start(configure: Configure, send: Callable[[FromEngine], None]) -> BuiltEngine | None:
    """Build the engine and send EngineReady; send EngineRefused and return None when it cannot serve."""
    own = StartProgress(lambda stage, count: send(StartBeat(0, stage, count)))

    def progress(stage: str, detail: str) -> None:
        own.note(stage)
        send(EngineProgress(stage, detail))

    others = RankListener(
        on_progress=lambda rank, it: send(StartBeat(rank, it.stage, it.count)),
        on_failure=lambda lost: send(EngineFailed(str(lost), lost.suspects)),
        on_refusal=lambda code, message: send(EngineRefused(code, message, [], is_final=True)),
    )
    try:
        built = build_engine(
            configure.settings,
            frozenset(configure.quarantined),
            progress,
            overridden=frozenset(configure.quarantined_by_operator),
            listener=others,
        )
    except Unservable as error:
        if error.attested is not None:  # it may show the reason
            send(error.attested)
        send(EngineRefused("unproven", str(error), error.plan))
    except QualificationAborted as error:
        send(EngineRefused("qualification_aborted", str(error), []))
    except StartError as error:
        send(EngineRefused(error.code, error.message, [], is_final=True))
    else:
        send(built.ready)
        if built.attested is not None:
            built.quarantine.keeping(send)(built.attested)
        return built
    finally:
        own.end()
    return None


def serve(
    inbox: Inbox, send: Callable[[FromEngine], None], on_settings: Callable[[Settings], None] = lambda _: None
) -> int:
    """Build and run the engine; return the exit status."""
    configure = inbox.get()
    if not isinstance(configure, Configure):
        logger.critical("the first message must be Configure, got %s", type(configure).__name__)
        return EXIT_PROTOCOL
    on_settings(configure.settings)
    built = None
    try:
        built = start(configure, send)
        if built is None:
            return _EXIT_REFUSED
        send = built.quarantine.keeping(send)
        gc.collect()
        gc.freeze()  # objects that live as long as the engine are not scanned again in the middle of a step
        built.runner.shadow = built.shadow
        built.engine.answers = built.replay
        loop = Loop(built.engine, inbox, send, built.attestor, built.operator_quarantine, built.shadow, built.replay)
        if built.runner.worker.device.type == "cpu":
            built.runner.worker.beat = loop.beat
        loop.run()
        if built.followers is not None:
            built.followers.close()
    except DeviceLost as error:
        logger.exception("the engine cannot go on: a device is lost, or one of several ranks has left a step")
        send(EngineFailed(str(error), error.suspects))
        return _EXIT_FAULT
    except Exception as error:  # the edge of the engine: this is logged, and the supervisor starts a new one
        logger.exception("the engine cannot go on")
        if is_device_lost(error):
            send(EngineFailed(str(error).partition("\n")[0], built.runner.suspects() if built else []))
        return _EXIT_FAULT
    return 0


def main() -> None:
    configure_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the API process drains, then ends us
    signal.signal(signal.SIGTERM, _terminate)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        threading.Thread(target=leave_with, args=(connection, os._exit), name="engine-watch", daemon=True).start()
        link = Link(connection, os._exit)
        status = serve(link, link.put, lambda settings: configure_logging(settings.log_format))
        link.close()
    os._exit(status)  # after a device error, CUDA's own clean-up at exit can hang


def _terminate(_: int, __: FrameType | None) -> None:
    os._exit(0)


if __name__ == "__main__":
    main()
