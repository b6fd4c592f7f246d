"""Who is told what the engine reports."""

from typing import Protocol

from server.engine.messages import (
    AttestationReport,
    EngineProgress,
    EngineReady,
    EngineRefused,
    Heartbeat,
    StepRecord,
)


class EngineListener(Protocol):
    """Told of everything the engine reports; called on the event loop, must not block."""

    def on_progress(self, progress: EngineProgress) -> None: ...
    def on_ready(self, ready: EngineReady) -> None: ...
    def on_refused(self, refused: EngineRefused) -> None: ...
    def on_step(self, record: StepRecord) -> None: ...
    def on_heartbeat(self, heartbeat: Heartbeat) -> None: ...
    def on_attestation(self, report: AttestationReport) -> None: ...
    def on_death(self, cause: str) -> None: ...
