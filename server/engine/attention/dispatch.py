"""Runs each phase of a batch on the path that was decided for its shape, and counts every launch by path."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.operators import AnyShape
from kernels.path import KernelPath, RunAttention
from kernels.shape import AttentionShape, Phase
from qualification.decision.decision import Decision, Pairs
from server.engine.attention.dispatch_key import LengthKey, bucket_index, key_of_shape
from server.engine.attention.launch_errors import launch_failure
from server.engine.attention.timer import AttentionTimer
from server.engine.products.experts import ExpertsTable
from server.engine.scheduling.sequence import Batch
from server.protocol.messages import AttentionSample, AttentionUse

logger = logging.getLogger(__name__)

# Decides a shape again without the (path, shape) pairs that broke, and without those that an operator took out.
Redecide = Callable[[AttentionShape, Pairs, Pairs], Decision[AttentionShape]]
# Gives the context in which a choice is run for one layer: the profiler's mark.
Watch = Callable[["Choice"], AbstractContextManager[object]]


class NoPathError(Exception):
    """No path is left (or none was planned) that may serve a phase of the batch. The other phases can be served."""

    def __init__(self, phase: Phase, message: str) -> None:
        super().__init__(message)
        self.phase = phase


@dataclass(frozen=True, slots=True)
class PhasePart:
    """The rows of one phase in a step's tensors. `tokens` are rows of q; k and v are pages unless it is a prefill."""

    phase: Phase
    tokens: slice
    batch: AttentionBatch
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision with what is needed to run it, resolved once."""

    decision: Decision[AttentionShape]
    run: RunAttention
    use: AttentionUse
    is_capturable: bool  # whether a CUDA graph can hold it


class Dispatcher:
    """The decisions of the plan as a table.

    A launch or an attestation that fails quarantines (path, shape) pairs, an operator's order takes them out.
    """

    def __init__(
        self,
        decisions: Mapping[AttentionShape, Decision[AttentionShape]],
        paths: Iterable[KernelPath],
        flags: tuple[AttentionFlags, ...],
        *,
        redecide: Redecide,
        timer: AttentionTimer | None = None,
        quarantined: Pairs = frozenset(),
        overridden: Pairs = frozenset(),
        experts: ExpertsTable | None = None,
    ) -> None:
        """`flags`: one a layer. `decisions` were already made without the pairs `quarantined` and `overridden`.

        experts  the choices of a model with mixtures, whose layers have them by `join_weights`
        """
        self.flags = flags
        self.experts = experts
        self.windows = tuple(dict.fromkeys(layer.window for layer in flags))
        self._paths = {path.name: path for path in paths}
        self._redecide = redecide
        self._quarantined = quarantined
        self._overridden = overridden
        self._news: list[tuple[str, str]] = []
        self._watch: Watch | None = None
        self.timer = timer
        self._choices: dict[Phase, dict[LengthKey, Choice]] = {phase: {} for phase in Phase}
        self._decisions = dict(decisions)
        for shape, decision in decisions.items():
            if decision.path is not None:
                self._choices[shape.phase][key_of_shape(shape)] = self._resolve(decision)
        self._decode = self._choices[Phase.DECODE]

    @property
    def decisions(self) -> dict[AttentionShape, Decision[AttentionShape]]:
        """Return the decision that serves each shape now."""
        return {choice.decision.shape: choice.decision for choice in self.choices}

    @property
    def plan(self) -> dict[AttentionShape, Decision[AttentionShape]]:
        """Return the decision for each shape now, shapes that no path serves any more included."""
        return dict(self._decisions)

    @property
    def all_decisions(self) -> list[Decision[AnyShape]]:
        """Return the decision for each shape now, those of other operators behind attention's."""
        return [*self._decisions.values(), *([] if self.experts is None else self.experts.decisions)]

    @property
    def overridden(self) -> Pairs:
        """The (path, shape) pairs that an operator took out of service."""
        return self._overridden

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the choice that serves each shape now, resolved."""
        return tuple(choice for of_phase in self._choices.values() for choice in of_phase.values())

    def take_quarantined(self) -> list[tuple[str, str]]:
        """The (path, shape) pairs quarantined since the last call."""
        news, self._news = self._news, []
        return news

    def choice(self, part: PhasePart, window: int | None) -> Choice:
        """One dictionary hit. Raises NoPathError for a shape without a path, which no start-up lets through."""
        batch = part.batch
        if part.phase is Phase.DECODE:
            found = self._decode.get((window, 0, bucket_index(batch.max_context)))
        else:
            key = (window, bucket_index(batch.max_seqlen_q), bucket_index(batch.max_context))
            found = self._choices[part.phase].get(key)
        if found is None:
            lengths = f"{batch.max_seqlen_q} of {batch.max_context} tokens"
            raise NoPathError(part.phase, f"no path for {part.phase.value}, window {window}, {lengths}")
        return found

    def begin(self, batch: Batch) -> None:
        """A step is about to be launched."""
        if self.timer is not None and self._watch is None:
            self.timer.begin(batch)

    def replayed(self, choice: Choice, part: PhasePart) -> None:
        """A graph that holds this choice was replayed."""
        if self.timer is not None and self._watch is None:
            self.timer.replayed(choice.decision.shape, part.batch)

    def take_samples(self) -> tuple[list[AttentionSample], dict[str, int]]:
        """Return what the timer has measured since the last call."""
        return ([], {}) if self.timer is None else self.timer.take()

    @property
    def is_watched(self) -> bool:
        """Return whether calls are made for an attestation now."""
        return self._watch is not None

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Every call of a path, until the end of the context, is made inside of what `watch` gives for it."""
        if self.timer is not None:
            self.timer.finish()  # a replay of the same graph would record the same events again
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Time no call until the end of the context: what is captured in it serves nobody."""
        timer, self.timer = self.timer, None
        try:
            yield
        finally:
            self.timer = timer

    def call(
        self, choice: Choice, q: Tensor, k: Tensor, v: Tensor, part: PhasePart, layer: int, out: Tensor, *,
        planned: AttentionBatch,
    ) -> None:  # fmt: skip
        """Run a choice for one layer. `planned`: the part's batch, with what its step has planned.

        A call that is watched plans for itself: it is judged, and may be captured, without the others.
        """
        flags = self.flags[layer]
        if self._watch is not None:
            with self._watch(choice):
                choice.run(q, k, v, part.batch, flags, out)
        elif self.timer is not None and self.timer.measures(part.phase, layer):
            work = partial(choice.run, q, k, v, planned, flags, out)
            self.timer.around(work, choice.decision.shape, layer, part.batch)
        else:
            choice.run(q, k, v, planned, flags, out)

    def replace(self, choice: Choice, error: Exception) -> Choice:
        """The next path for a choice that failed to launch. Raises NoPathError, or `error` when it is another kind."""
        reason = launch_failure(error)
        if reason is None:
            raise error
        shape, path = choice.decision.shape, choice.use.path
        logger.error("%s failed to launch for %s (%s): %s", path, shape, reason.value, error)
        found = self._next(choice)
        if found is None:
            raise NoPathError(shape.phase, f"no path is left for {shape}")
        return found

    def quarantine(self, path: str, phase: Phase) -> list[tuple[str, str]]:
        """Serve no shape of the phase on this path any more. Returns the (path, shape) pairs that it served.

        `take_quarantined` no longer returns them. A shape that no other path may serve is left without one, and its
        requests end with an error.
        """
        broken = [it for it in self.choices if it.use.path == path and it.decision.shape.phase is phase]
        for choice in broken:
            self._next(choice)
        return self.take_quarantined()

    def override(self, pairs: Pairs) -> list[AttentionShape]:
        """Serve without these (path, shape) pairs, and with those again that earlier calls had named, from now on.

        Returns the shapes that would be left without a path; when there are any, nothing has changed.
        """
        known = {str(shape): shape for shape in self._decisions}
        concerned = {known[name] for _, name in pairs ^ self._overridden if name in known}
        decisions = {shape: self._redecide(shape, self._quarantined, pairs) for shape in concerned}
        stranded = [it.shape for it in decisions.values() if it.path is None and self._decisions[it.shape].path]
        if stranded:
            return stranded
        self._overridden = pairs
        for shape, decision in decisions.items():
            self._decisions[shape] = decision
            if decision.path is not None:
                self._choices[shape.phase][key_of_shape(shape)] = self._resolve(decision)
        return []

    def _next(self, choice: Choice) -> Choice | None:
        """Quarantine a choice, and decide its shape again; None where no path is left."""
        shape, path = choice.decision.shape, choice.use.path
        self._quarantined |= {(path, str(shape))}
        self._news.append((path, str(shape)))
        self._choices[shape.phase].pop(key_of_shape(shape), None)
        decision = self._redecide(shape, self._quarantined, self._overridden)
        if decision.path is None or (decision.path, str(shape)) in self._quarantined:
            logger.error("no path is left for %s", shape)
            self._decisions[shape] = replace(decision, path=None)
            return None
        logger.warning("%s serves %s from now on", decision.path, shape)
        self._decisions[shape] = decision
        self._choices[shape.phase][key_of_shape(shape)] = found = self._resolve(decision)
        return found

    def _resolve(self, decision: Decision[AttentionShape]) -> Choice:
        assert decision.path is not None
        reasons = [reason.value for reason in decision.fallback_reasons]
        use = AttentionUse(decision.shape.phase.value, decision.path, decision.status.value, reasons)
        path = self._paths[decision.path]
        assert path.run is not None
        return Choice(decision, path.run, use, path.is_capturable)
