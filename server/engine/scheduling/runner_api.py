"""What becomes of a batch, and who computes it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kernels.shape import Phase
from server.engine.scheduling.sequence import Batch
from server.protocol.messages import AttentionSample, AttentionUse, DispatchCount, TokenScores

TakeSamples = Callable[[], tuple[list[AttentionSample], dict[str, int]]]  # and peaks of memory by phase, in bytes


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a computed batch gives."""

    token_ids: list[int | None]  # one for each sampled row; None where its logits held no finite number
    dispatches: list[DispatchCount] = field(default_factory=list)
    uses: dict[Phase, list[AttentionUse]] = field(default_factory=dict)
    quarantined: list[tuple[str, str]] = field(default_factory=list)
    oom_stage: str | None = None  # of a step that the device's memory did not suffice for
    scores: dict[int, TokenScores] = field(default_factory=dict)  # by row, of prompts whose scores are asked for


class BatchError(Exception):
    """Some rows of a batch cannot be computed; nothing of the batch counts as computed, the other rows try again."""

    def __init__(
        self,
        code: str,
        message: str,
        rows: range,
        quarantined: list[tuple[str, str]],
        *,
        oom_stage: str | None = None,
    ) -> None:
        """`oom_stage`: prefill or decode, where the device's memory did not suffice."""
        super().__init__(message)
        self.code = code
        self.oom_stage = oom_stage
        self.rows = rows
        self.quarantined = quarantined


class Pending(Protocol):
    """A launched batch."""

    def result(self) -> StepResult:
        """Wait for it. Call it once, in the order of the launches."""


class Runner(Protocol):
    """Computes batches; server/engine/execution/runner.py on a device, a few lines in the tests."""

    def launch(self, batch: Batch) -> Pending:
        """Start a batch, at most one before it being on its way. Raises BatchError."""
