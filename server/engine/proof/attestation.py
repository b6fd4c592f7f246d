"""Attestation: what forward passes of the real model launch, compared with what the evidence promises.

The batches belong to no request: one for each (phase, path) of the plan, two where a batch chooses its kernels, over
the page of the cache that no sequence owns, through the same runner, dispatcher and graphs as a client's. One is run
at a time, between two steps of the engine, so that no step waits for more than one of them. On a GPU the driver's
record of captured calls and graphs names the kernels, on a CPU the profiler (`kernels/driver/driver_record.py`
says why). The time of each step is then explained: how much of it ran in kernels that evidence or a list names.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kernels.driver.seen import Seen
from kernels.vocabulary.operators import AnyShape, Operator
from kernels.vocabulary.path import AnyPath, KernelPath
from kernels.vocabulary.shape import Phase
from qualification.attest.explain import explain
from qualification.attest.operator_promises import OperatorMismatch, OperatorPromises, operator_mismatches
from qualification.attest.promise import (
    Promise,
    attention_markers,
    call_mismatch,
    kernels_promised,
    promise_of,
    replay_mismatch,
)
from qualification.evidence.evidence import Evidence
from qualification.measure.costs.profile import Mark, profiled
from server.engine.operators.decisions import NoPathError
from server.engine.operators.dispatch import Choice, Dispatcher
from server.engine.operators.launch_errors import is_device_lost
from server.engine.operators.step_attention import StepAttention
from server.engine.scheduling.runner_api import BatchError, Runner
from server.engine.scheduling.sequence import Batch
from server.protocol.messages import AttestationReport, AttestedBatch, ExplainedTime

logger = logging.getLogger(__name__)


# Seconds by whole kernel name of the step that ran last; None where they cannot be measured.
TimeStep = Callable[[Batch], Mapping[str, float] | None]


class NothingSeen(Exception):
    """No kernel was seen at all: nothing is proven, and nothing is disproven."""


@dataclass(frozen=True, slots=True)
class Promises:
    """Kernels that each choice may launch."""

    paths: Mapping[str, KernelPath]
    evidence: Mapping[tuple[AnyShape, str], Evidence]
    all_paths: Mapping[str, AnyPath] = field(default_factory=dict)  # of every operator

    def of(self, choice: Choice) -> Promise:
        """Evidence of another source, which serves under DEGRADE alone, names the kernels of that one."""
        path = self.paths[choice.use.path]
        evidence = self.evidence.get((choice.decision.shape, path.name))
        is_of_it = evidence is not None and evidence.source_digest == path.source_digest
        return promise_of(path, evidence if is_of_it else None)

    @property
    def markers(self) -> frozenset[str]:
        return attention_markers(self.paths.values())


class Records(Protocol):
    """Part of a Recorder that an attestation uses."""

    @property
    def mark(self) -> Mark: ...
    def take(self) -> Seen: ...


class Attestor:
    """Only the stepping thread may call it."""

    def __init__(
        self,
        runner: Runner,
        latest: Callable[[], StepAttention | None],
        dispatcher: Dispatcher,
        promises: Promises,
        *,
        probes: Iterable[Batch],
        device: torch.device,
        recorder: Records | None = None,
        graph_kernels: Callable[[Batch], Counter[str] | None] = lambda _: None,
        time_step: TimeStep = lambda _: None,
        others: Callable[[], Mapping[Operator, OperatorPromises]] = dict,
        is_quarantining: bool,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`latest`: attention of the step that `runner` ran last. `interval_s` 0: only when asked.

        `recorder`: of the driver's word, None for the profiler's; `graph_kernels`: what the CUDA graph of a batch
        holds, by the driver's too; `time_step`: where the driver records. `others`: of operators beside attention, by
        the decisions as they stand.
        """
        self._runner = runner
        self._latest = latest
        self._dispatcher = dispatcher
        self.promises = promises
        self._probes = tuple(probes)
        self.device = device
        self._is_quarantining = is_quarantining
        self._recorder = recorder
        self._graph_kernels = graph_kernels
        self._time_step = time_step
        self._others = others
        self._warm: list[Batch] = []  # those that ran before, by these choices
        self._warm_by: tuple[Choice, ...] = ()
        self._interval_s = interval_s
        self._clock = clock
        self._waiting: deque[Batch] = deque()
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
            self._waiting = deque(self._probes)

    def poll(self) -> AttestationReport | None:
        """Run one batch, if an attestation is under way or due; the report when that was the last one."""
        if not self.is_due:
            return None
        if not self._waiting:
            self.ask("timer")
        started = self._clock()
        self._done.append(self._attest(self._waiting.popleft()))
        self._busy_s += self._clock() - started
        return None if self._waiting else self._report()

    def attest_all(self, trigger: str, progress: Callable[[int, int], None] = lambda _, __: None) -> AttestationReport:
        """Attest all batches at once: before the engine is ready, when no request waits.

        `progress` gets how many are done, and of how many.
        """
        self.ask(trigger)
        while (report := self.poll()) is None:
            progress(len(self._done), len(self._probes))
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

    def _attest(self, batch: Batch) -> AttestedBatch:
        phase = next(phase for phase in Phase if batch.rows_of(phase))
        choices: list[Choice] = []
        try:
            seen = self._run_to_end(batch, choices)
        except (BatchError, NoPathError, NothingSeen, RuntimeError) as error:
            if is_device_lost(error):
                raise
            return AttestedBatch(phase.value, [], False, {}, "error", f"{type(error).__name__}: {error}"[:300])
        attention = self._latest()
        served = [] if attention is None else attention.served()
        wrong = self._mismatches(choices, served, seen)
        kernels = sum(seen.calls, start=seen.outside) if not choices else sum(seen.calls[1:], start=seen.calls[0])
        # A step that was recorded call by call, of attention, says nothing of its other operators.
        is_whole = bool(seen.outside)
        wrong_products = [] if attention is None or not is_whole else self._operator_mismatches(attention, kernels)
        self._quarantine([choice for choice, _ in wrong], wrong_products)
        details = [*(detail for _, detail in wrong), *(it.detail for it in wrong_products)]
        return AttestedBatch(
            phase=phase.value,
            paths=list(dict.fromkeys(choice.use.path for choice, _ in served)),
            is_replay=not choices,
            kernels=self._attention_only(kernels, served) if not choices else dict(sorted(kernels.items())),
            result="mismatch" if details else "match",
            detail="; ".join(dict.fromkeys(details)) or None,
            explained=self._explain(batch, served, seen, wrong),
        )

    def _explain(
        self, batch: Batch, served: list[tuple[Choice, int]], seen: Seen, wrong: list[tuple[Choice, str]]
    ) -> ExplainedTime | None:
        """Explain the time of the batch, which ran last. The evidence of choices that are `wrong` does not hold."""
        try:
            seconds = seen.seconds or self._time_step(batch)
        except (NoPathError, RuntimeError) as error:
            if is_device_lost(error):
                raise
            logger.warning("attestation (%s): the time of a step cannot be explained: %s", self._trigger, error)
            return None
        if not seconds:
            return None
        bad = [choice for choice, _ in wrong]
        good = [choice for choice, _ in served if choice not in bad and choice.decision.status.is_valid]
        proven = {operator.value: promises.proven(seconds) for operator, promises in self._others().items()}
        proven[Operator.ATTENTION.value] = kernels_promised((self.promises.of(choice) for choice in good), seconds)
        found = explain(seconds, proven, in_attention=seen.seconds_in_calls)
        return ExplainedTime(
            share=found.share,
            seconds={it.value: time for it, time in found.seconds.items()},
            unproven=dict(found.unproven),
            unexplained=dict(found.unexplained),
        )

    def _run_to_end(self, batch: Batch, choices: list[Choice]) -> Seen:
        """Do `_run`, once more where a path could not be launched: the path that serves in its place is attested."""
        while True:
            num_quarantined = len(self._quarantined)
            seen = self._run(batch, choices)
            if len(self._quarantined) == num_quarantined:
                return seen
            choices.clear()

    def _run(self, batch: Batch, choices: list[Choice]) -> Seen:
        """`choices` gets one for each marked call; none where the step was a replay."""
        if self._recorder is None:
            seen = profiled(lambda mark: self._launch(batch, choices, mark), self.device)
        else:
            self._prepare(batch)
            seen = self._record(self._recorder, batch, choices)
        if not any(seen.calls) and not seen.outside:
            raise NothingSeen("neither the profiler nor the driver names any kernel here")
        return seen

    def _prepare(self, batch: Batch) -> None:
        """Run the batch uncaptured: nothing may compile in a capture, and an order or a quarantine brings new paths."""
        if self._warm_by != self._dispatcher.choices:
            self._warm, self._warm_by = [], self._dispatcher.choices
        if batch not in self._warm:
            self._launch(batch, [], nullcontext)
            self._warm.append(batch)

    def _record(self, recorder: Records, batch: Batch, choices: list[Choice]) -> Seen:
        """Record by the driver, or by the profiler where a path waits for the device and cannot be captured."""
        recorder.take()  # what is left of a step that failed
        self._launch(batch, choices, recorder.mark)
        seen = recorder.take()
        if not choices:
            return Seen((), self._graph_kernels(batch) or Counter())
        if all(choice.is_capturable for choice in choices):  # and if one failed, what serves is recorded again
            return seen
        choices.clear()
        return profiled(lambda mark: self._launch(batch, choices, mark), self.device)

    def _launch(self, batch: Batch, choices: list[Choice], mark: Mark) -> None:
        is_recording = self._recorder is not None and mark == self._recorder.mark

        def watch(choice: Choice) -> AbstractContextManager[object]:
            choices.append(choice)
            return mark() if choice.is_capturable or not is_recording else nullcontext()

        try:
            with self._dispatcher.watched(watch):
                self._quarantined += self._runner.launch(batch).result().quarantined
        except BatchError as error:
            self._quarantined += error.quarantined
            raise

    def _mismatches(
        self, choices: list[Choice], served: list[tuple[Choice, int]], seen: Seen
    ) -> list[tuple[Choice, str]]:
        if not choices:
            promises = [(self.promises.of(choice), count) for choice, count in served]
            detail = replay_mismatch(promises, seen.outside, self.promises.markers)
            return [] if detail is None else [(choice, detail) for choice, _ in served]
        found = []
        for choice, call in zip(choices, seen.calls, strict=True):
            detail = call_mismatch(self.promises.of(choice), call)
            if detail is not None:
                found.append((choice, detail))
        foreign = sorted(set(seen.outside) & self.promises.markers)
        if foreign:
            found += [(choice, f"{', '.join(foreign)} ran outside of every attention call") for choice, _ in served]
        num_counted = sum(count for _, count in served)
        if num_counted != len(choices):
            detail = f"{num_counted} launches were counted, {len(choices)} calls were made"
            found += [(choice, detail) for choice, _ in served]
        return found

    def _operator_mismatches(self, attention: StepAttention, kernels: Mapping[str, int]) -> list[OperatorMismatch]:
        """Compare a step's kernels, as far as they are this project's, with what its other operators' paths promise."""
        promised = []
        for decision in attention.other_decisions():
            if decision.path is not None and decision.path in self.promises.all_paths:
                path = self.promises.all_paths[decision.path]
                evidence = self.promises.evidence.get((decision.shape, path.name))
                is_of_it = evidence is not None and evidence.source_digest == path.source_digest
                promised.append((path, promise_of(path, evidence if is_of_it else None)))
        return operator_mismatches(promised, kernels)

    def _attention_only(self, kernels: Mapping[str, int], served: list[tuple[Choice, int]]) -> dict[str, int]:
        """A replay is profiled as a whole; of all its kernels, the attention's."""
        known = self.promises.markers.union(*(self.promises.of(choice).names for choice, _ in served))
        return {name: count for name, count in sorted(kernels.items()) if name in known}

    def _quarantine(self, choices: list[Choice], mismatches: list[OperatorMismatch]) -> None:
        """Take a path that launched unproven kernels from all shapes of its phase or operator."""
        if not self._is_quarantining:
            return
        for path, operator in dict.fromkeys((it.path, it.operator) for it in mismatches if it.path is not None):
            self._quarantined += self._dispatcher.quarantine(path, operator)
        for path, phase in dict.fromkeys((choice.use.path, choice.decision.shape.phase) for choice in choices):
            self._quarantined += self._dispatcher.quarantine(path, phase)
