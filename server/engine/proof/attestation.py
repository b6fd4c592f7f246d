"""Attestation: what forward passes of the real model launch, compared with what the evidence promises.

The batches belong to no request: one for each (phase, path) of the plan, two where a batch chooses its kernels, over
the page of the cache that no sequence owns, through the same runner, dispatcher and graphs as a client's; of a draft
head likewise, by passes of its own, launched kernel by kernel. One is run
at a time, between two steps of the engine, so that no step waits for more than one of them. On a GPU the driver's
record of captured calls and graphs names the kernels, on a CPU the profiler (`kernels/driver/driver_record.py`
says why). The time of each step is then explained: how much of it ran in kernels that evidence or a list names.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kernels.vocabulary.shape import Phase
from qualification.model.draft_head import DRAFT_HEAD
from server.engine.operators.decisions import NoPathError
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.launch_errors import is_device_lost
from server.engine.proof.judgement import Judge, Judgement
from server.engine.proof.step_record import NothingSeen, StepRecord, StepRecords
from server.engine.proof.tower_attestation import TowerProbes
from server.engine.scheduling.runner_api import BatchError
from server.engine.scheduling.sequence import Batch
from server.model.vision.geometry import Grid
from server.protocol.messages import AttestationReport, AttestedBatch, ExplainedTime
from server.protocol.plan_rows import TOWER

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadProbes:
    """Passes of a draft head to attest, in place of steps: what runs and records them, and their rows."""

    records: StepRecords
    batches: tuple[Batch, ...]


class Attestor:
    """Has batches recorded and judged, and takes paths that are wrong out of service.

    Only the stepping thread may call it.
    """

    def __init__(
        self,
        records: StepRecords,
        judge: Judge,
        dispatcher: Dispatcher,
        *,
        probes: Iterable[Batch],
        towers: TowerProbes | None = None,
        head: HeadProbes | None = None,
        is_quarantining: bool,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interval_s` 0: only when asked. `towers`: of a model that sees images; `head`: of one that drafts."""
        self.records = records
        self.judge = judge
        self._dispatcher = dispatcher
        self._probes = tuple(probes)
        self.towers = towers
        self._head = head
        self._is_quarantining = is_quarantining
        self._interval_s = interval_s
        self._clock = clock
        self._waiting: deque[tuple[StepRecords, Batch] | Grid] = deque()
        self._done: list[AttestedBatch] = []
        self._quarantined: list[tuple[str, str]] = []
        self._trigger = ""
        self._busy_s = 0.0
        self._last_at = clock()

    @property
    def is_busy(self) -> bool:
        """Return whether an attestation is under way."""
        return bool(self._waiting)

    @property
    def is_due(self) -> bool:
        """Return whether `poll` would run a batch. It must not while a batch's result is not read."""
        return self.is_busy or bool(self._interval_s and self._clock() - self._last_at >= self._interval_s)

    def ask(self, trigger: str) -> None:
        """Begin, unless one is under way: its report then answers this one too."""
        if not self._waiting:
            self._trigger, self._busy_s = trigger, 0.0
            self._done, self._quarantined = [], []
            self._waiting = deque((self.records, batch) for batch in self._probes)
            if self._head is not None:
                self._waiting.extend((self._head.records, batch) for batch in self._head.batches)
            self._waiting.extend(() if self.towers is None else self.towers.grids)

    def poll(self) -> AttestationReport | None:
        """Run one batch, if an attestation is under way or due; the report when that was the last one."""
        if not self.is_due:
            return None
        if not self._waiting:
            self.ask("timer")
        started = self._clock()
        match self._waiting.popleft():
            case StepRecords() as records, Batch() as batch:
                self._done.append(self._attest(records, batch))
            case grid:
                self._done.append(self._attest_tower(grid))
        self._busy_s += self._clock() - started
        return None if self._waiting else self._report()

    def attest_all(self, trigger: str, progress: Callable[[int, int], None] = lambda _, __: None) -> AttestationReport:
        """Attest all batches at once: before the engine is ready, when no request waits.

        `progress` gets how many are done, and of how many.
        """
        self.ask(trigger)
        while (report := self.poll()) is None:
            progress(len(self._done), len(self._done) + len(self._waiting))
        return report

    def _report(self) -> AttestationReport:
        self._last_at = self._clock()
        results = {batch.result for batch in self._done}
        result = next((each for each in ("mismatch", "error") if each in results), "match")
        if result != "match":
            details = "; ".join(batch.detail for batch in self._done if batch.detail is not None)
            logger.error("attestation (%s): %s: %s", self._trigger, result, details)
        else:
            logger.info("attestation (%s): %d batches match in %.3f s", self._trigger, len(self._done), self._busy_s)
        unexplained = {name for batch in self._done if batch.explained for name in batch.explained.unexplained}
        if unexplained:
            logger.warning("attestation (%s): no list names %s", self._trigger, ", ".join(sorted(unexplained)))
        return AttestationReport(
            trigger=self._trigger,
            result=result,
            at=time.time(),
            busy_s=self._busy_s,
            batches=self._done,
            quarantined=self._quarantined,
        )

    def _attest(self, records: StepRecords, batch: Batch) -> AttestedBatch:
        phase = next(phase.value for phase in Phase if batch.rows_of(phase))
        phase = phase if records is self.records else DRAFT_HEAD
        try:
            step = records.record(batch)
        except (BatchError, NoPathError, NothingSeen, RuntimeError) as error:
            if is_device_lost(error):
                raise
            return AttestedBatch(phase, [], False, {}, "error", f"{type(error).__name__}: {error}"[:300])
        finally:
            self._quarantined += records.take_quarantined()
        judgement = self.judge.judge(step)
        self._quarantine(judgement)
        return AttestedBatch(
            phase=phase,
            paths=list(dict.fromkeys(choice.use.path for choice, _ in step.served)),
            is_replay=not step.choices,
            kernels=judgement.kernels,
            result="mismatch" if judgement.details else "match",
            detail="; ".join(judgement.details) or None,
            explained=self._explain(records, batch, step, judgement),
        )

    def _attest_tower(self, grid: Grid) -> AttestedBatch:
        assert self.towers is not None
        try:
            found, wrong = self.towers.attest(grid)
        except (NoPathError, NothingSeen, RuntimeError) as error:
            if is_device_lost(error):
                raise
            return AttestedBatch(TOWER, [], False, {}, "error", f"{type(error).__name__}: {error}"[:300])
        for path, lane in wrong if self._is_quarantining else ():
            self._quarantined += self._dispatcher.quarantine(path, lane)
        return found

    def _explain(
        self, records: StepRecords, batch: Batch, step: StepRecord, judgement: Judgement
    ) -> ExplainedTime | None:
        """Explain the time of the batch, which ran last."""
        try:
            seconds = step.seen.seconds or records.time_step(batch)
        except (NoPathError, RuntimeError) as error:
            if is_device_lost(error):
                raise
            logger.warning("attestation (%s): the time of a step cannot be explained: %s", self._trigger, error)
            return None
        return self.judge.explain(step, judgement, seconds) if seconds else None

    def _quarantine(self, judgement: Judgement) -> None:
        """Take a path that launched unproven kernels from all shapes of its phase or operator."""
        if not self._is_quarantining:
            return
        for path, operator in dict.fromkeys(
            (it.path, it.operator) for it in judgement.wrong_operators if it.path is not None
        ):
            self._quarantined += self._dispatcher.quarantine(path, operator)
        for path, phase in dict.fromkeys(
            (choice.use.path, choice.decision.shape.phase) for choice, _ in judgement.wrong_choices
        ):
            self._quarantined += self._dispatcher.quarantine(path, phase)
