"""The interface between scheduling and execution: a runner launches a batch, the launched batch has a result."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.vocabulary.shape import Phase
from server.engine.scheduling.sequence import Batch
from server.engine.scheduling.tower_run import TowerRun
from server.protocol.messages import AttentionSample, DispatchCount, PathUse, TokenScores, TowerTime


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """Measurements since the step before, for its record.

    attention_samples     timings of sampled steps, read by now
    peak_temporary_bytes  phase -> what a sampled step took beside weights and cache
    matmul_fallbacks      products that PyTorch's matmuls computed in place of ours, by reason
    tower_times           images that the tower has computed
    head_dispatches       each decision that served a pass of the draft head, with its launches
    """

    attention_samples: list[AttentionSample] = field(default_factory=list)
    peak_temporary_bytes: dict[str, int] = field(default_factory=dict)
    matmul_fallbacks: dict[MatmulFallback, int] = field(default_factory=dict)
    tower_times: list[TowerTime] = field(default_factory=list)
    head_dispatches: list[DispatchCount] = field(default_factory=list)


TakeStatistics = Callable[[], StepStatistics]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a computed batch.

    tokens     of each of the batch's drawn sequences: one, or of one that verifies drafted tokens one behind each of
               its own, up to the first that cannot be chosen; none where that is the only one
    nonfinite  places in `tokens` without a token, where the logits held no finite number
    exhausted  those where the request's own limits leave no token
    drafted    the batch's drafted tokens that were PENDING, in their order
    """

    tokens: list[list[int]]
    dispatches: list[DispatchCount] = field(default_factory=list)
    uses: dict[Phase, list[PathUse]] = field(default_factory=dict)
    quarantined: list[tuple[str, str]] = field(default_factory=list)
    oom_stage: str | None = None  # prefill or decode, where the device ran out of memory
    prompt_scores: dict[int, TokenScores] = field(default_factory=dict)  # by row, of the prompts' tokens, if asked for
    token_scores: dict[int, TokenScores] = field(default_factory=dict)  # by place in `tokens`
    pooled: dict[int, bytes] = field(default_factory=dict)  # by row, fp32 of prompts that are pooled
    nonfinite: tuple[int, ...] = ()
    exhausted: tuple[int, ...] = ()
    tower: TowerRun | None = None  # of the images that were computed for this step
    drafted: list[int] = field(default_factory=list)


class StepError(Exception):
    """A step has no result."""

    def __init__(
        self, code: str, message: str, quarantined: list[tuple[str, str]], *, oom_stage: str | None = None
    ) -> None:
        """`oom_stage`: prefill or decode, where the device ran out of memory."""
        super().__init__(message)
        self.code = code
        self.oom_stage = oom_stage
        self.quarantined = quarantined


class BatchError(StepError):
    """Some rows of a batch cannot be computed. No row of it counts as computed; the other rows are planned again."""

    def __init__(
        self,
        code: str,
        message: str,
        rows: range,
        quarantined: list[tuple[str, str]],
        *,
        oom_stage: str | None = None,
    ) -> None:
        """`rows` cannot be computed."""
        super().__init__(code, message, quarantined, oom_stage=oom_stage)
        self.rows = rows


class ChoiceError(StepError):
    """The tokens of a launched batch cannot be chosen. Its keys and values are computed."""


class Pending(Protocol):
    """A launched batch whose result may not be there yet."""

    def choose(self) -> None:
        """Choose the tokens that grammars bind. Call this when the tokens of every earlier batch are settled.

        Needed where a sequence of the batch has a grammar, before the next launch. Raises ChoiceError, after which the
        batch is waited for no more.
        """

    def result(self) -> StepResult:
        """Wait for the batch. Call this once for each batch, in the order of the launches."""


class Runner(Protocol):
    """Computes batches on a device; see server/engine/execution/runner.py."""

    def launch(self, batch: Batch) -> Pending:
        """Start a batch; at most one earlier batch may be unfinished. Raises BatchError."""
