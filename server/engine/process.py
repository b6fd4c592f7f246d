"""The engine's process: `python -m server.engine.process SOCKET`, started and supervised by client.py.

The main thread steps the engine, and reads and writes the socket between two steps. It also sends the heartbeat, so
that a heartbeat proves steps and not just a living process. Another thread only waits for the API process to go.
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
from typing import Protocol

from qualification.measure.qualify import DeviceLost, QualificationAborted
from server.engine.attention.launch_errors import is_device_lost
from server.engine.link import EXIT_PROTOCOL, Inbox, Link, leave_with
from server.engine.scheduling.engine import Engine
from server.engine.startup.attention_plan import Unservable
from server.engine.startup.builder import BuiltEngine, build_engine
from server.errors import StartError
from server.log import configure_logging
from server.protocol.messages import (
    Attest,
    AttestationReport,
    Cancel,
    ChangeQuarantine,
    Configure,
    EngineFailed,
    EngineProgress,
    EngineRefused,
    FromEngine,
    Heartbeat,
    PlanChanged,
    QuarantineChanged,
    ShadowReport,
    Shutdown,
    Submit,
)
from server.settings import Settings

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
_EXIT_REFUSED = 3
_EXIT_FAULT = 70  # EX_SOFTWARE


class Attests(Protocol):
    """What the loop uses of an Attestor."""

    @property
    def is_busy(self) -> bool: ...
    @property
    def is_due(self) -> bool: ...
    def ask(self, trigger: str) -> None: ...
    def poll(self) -> AttestationReport | None: ...


class Checks(Protocol):
    """What the loop uses of a ShadowCheck."""

    @property
    def is_due(self) -> bool: ...
    def judge(self) -> ShadowReport | None: ...


class ChangesQuarantine(Protocol):
    """What the loop uses of OperatorQuarantine."""

    def change(self, message: ChangeQuarantine) -> QuarantineChanged: ...
    def plan(self) -> PlanChanged: ...


class Loop:
    """Steps the engine while there is work, and waits for messages when there is none."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        send: Callable[[FromEngine], None],
        attestor: Attests | None = None,
        operator_quarantine: ChangesQuarantine | None = None,
        shadow: Checks | None = None,
    ) -> None:
        self._attestor = attestor
        self._shadow = shadow
        self._operator_quarantine = operator_quarantine
        self._engine = engine
        self._inbox = inbox
        self._send = send
        self._beat_at = 0.0  # monotonic seconds

    def run(self) -> None:
        """Returns on Shutdown."""
        while self._receive():
            is_due = self._attestor is not None and self._attestor.is_due
            is_check_due = self._shadow is not None and self._shadow.is_due
            output = self._engine.step(may_run_ahead=not is_due and not is_check_due)
            if output is not None:
                self._send(output)
                self._tell_plan(bool(output.record.quarantined))
            if is_due:
                self._attest()
            if is_check_due or not self._engine.has_work:
                self._check()
            self._beat()

    def _receive(self) -> bool:
        """Handle every message there is; when idle, wait for one until the next heartbeat. False on Shutdown."""
        is_idle = not self._engine.has_work and not (self._attestor is not None and self._attestor.is_busy)
        while True:
            try:
                message = self._inbox.get(block=is_idle, timeout=HEARTBEAT_S)
            except queue.Empty:
                return True
            if isinstance(message, Submit):
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
            self._tell_plan(not answer.stranded)
            self._send(answer)

    def _tell_plan(self, is_changed: bool) -> None:
        if is_changed and self._operator_quarantine is not None:
            self._send(self._operator_quarantine.plan())

    def _attest(self) -> None:
        """At most one profiled batch between two steps, neither of which is under way."""
        report = None if self._attestor is None else self._attestor.poll()
        if report is not None:
            self._send(report)
            self._tell_plan(bool(report.quarantined))

    def _check(self) -> None:
        """Judge the sample that waits, if one does. No step is under way."""
        report = None if self._shadow is None else self._shadow.judge()
        if report is not None:
            self._send(report)
            self._tell_plan(bool(report.quarantined))

    def _beat(self) -> None:
        if time.monotonic() - self._beat_at >= HEARTBEAT_S:
            self._beat_at = time.monotonic()
            engine = self._engine
            self._send(Heartbeat(engine.step_index, self._beat_at, engine.num_running, engine.num_waiting))


def start(configure: Configure, send: Callable[[FromEngine], None]) -> BuiltEngine | None:
    """Build the engine and say that it is ready; None when it refuses, which is said too."""
    try:
        built = build_engine(
            configure.settings,
            frozenset(configure.quarantined),
            lambda stage, detail: send(EngineProgress(stage, detail)),
            overridden=frozenset(configure.quarantined_by_operator),
        )
    except Unservable as error:
        if error.attested is not None:  # in which the reason may be
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
    return None


def serve(
    inbox: Inbox, send: Callable[[FromEngine], None], on_settings: Callable[[Settings], None] = lambda _: None
) -> int:
    """One life of the engine; returns the exit status."""
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
        gc.freeze()  # what lives as long as the engine is not looked at again, in the middle of some step
        built.runner.shadow = built.shadow
        Loop(built.engine, inbox, send, built.attestor, built.operator_quarantine, built.shadow).run()
    except DeviceLost as error:
        logger.exception("the device is lost at the start")
        send(EngineFailed(str(error), error.suspects))
        return _EXIT_FAULT
    except Exception as error:  # the edge of the engine: the log says what happened, the supervisor starts a new one
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
