"""The kernels of one step and its time, by the driver's record or the profiler."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.driver.driver_record import Recorder
from kernels.driver.seen import Seen
from kernels.vocabulary.operators import AnyShape
from qualification.decision.decision import Decision
from qualification.measure.costs.profile import Mark, profiled
from server.engine.operators.attention_table import Choice
from server.engine.operators.dispatch import Dispatcher
from server.engine.scheduling.runner_api import BatchError, Runner
from server.engine.scheduling.sequence import Batch

# Seconds by whole kernel name of the step that ran last; None where they cannot be measured.
TimeStep = Callable[[Batch], Mapping[str, float] | None]


class Served(Protocol):
    """Attention of a step of the model, or of a pass of its draft head, with what serves beside it."""

    def served(self) -> list[tuple[Choice, int]]:
        """Return each choice that ran, with its launches."""

    def other_decisions(self) -> tuple[Decision[AnyShape], ...]:
        """Return the decisions beside attention's that serve it now."""


class NothingSeen(Exception):
    """No kernel was seen at all: nothing is proven, and nothing is disproven."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Kernels that a step launched, by the choices that launched them.

    choices    one for each marked call of attention; none where the step was a replay of a graph
    served     each choice that ran in the step, with its launches
    attention  that served it; None where none did
    """

    choices: list[Choice]
    seen: Seen
    served: list[tuple[Choice, int]]
    attention: Served | None

    @property
    def kernels(self) -> Counter[str]:
        """Return all kernels, by how often they ran."""
        calls, outside = self.seen.calls, self.seen.outside
        return sum(calls, start=outside) if not self.choices else sum(calls[1:], start=calls[0])

    @property
    def is_whole(self) -> bool:
        """Return whether other operators' kernels are in it: not where attention was recorded call by call."""
        return bool(self.seen.outside)


class StepRecords:
    """Runs batches, and records what they launch."""

    def __init__(
        self,
        runner: Runner,
        latest: Callable[[], Served | None],
        dispatcher: Dispatcher,
        *,
        device: torch.device,
        recorder: Recorder | None = None,
        graph_kernels: Callable[[Batch], Counter[str] | None] = lambda _: None,
        time_step: TimeStep = lambda _: None,
    ) -> None:
        """`latest`: attention of the step that `runner` ran last.

        `recorder`: of the driver's word, None for the profiler's; `graph_kernels`: what the CUDA graph of a batch
        holds, by the driver's too; `time_step`: where the driver records.
        """
        self.device = device
        self.time_step = time_step
        self._runner = runner
        self._latest = latest
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._graph_kernels = graph_kernels
        self._warm: list[Batch] = []  # those that ran before, by these choices
        self._warm_by: tuple[Choice, ...] = ()
        self._quarantined: list[tuple[str, str]] = []

    def take_quarantined(self) -> list[tuple[str, str]]:
        """Return and forget the (path, shape) pairs that could not be launched."""
        quarantined, self._quarantined = self._quarantined, []
        return quarantined

    def record(self, batch: Batch) -> StepRecord:
        """Run and record a batch, once more where a path failed to launch: the one in its place is recorded.

        Raises NothingSeen, and what a launch raises.
        """
        choices: list[Choice] = []
        while True:
            num_quarantined = len(self._quarantined)
            seen = self._run(batch, choices)
            if len(self._quarantined) == num_quarantined:
                attention = self._latest()
                return StepRecord(choices, seen, [] if attention is None else attention.served(), attention)
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

    def _record(self, recorder: Recorder, batch: Batch, choices: list[Choice]) -> Seen:
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
