"""Runs each phase of a batch on the path that was decided for its shape, and counts every launch by path."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from kernels.attention.batch import AttentionBatch, AttentionFlags
from kernels.path import KernelPath, RunAttention
from kernels.shape import AttentionShape, Phase
from qualification.decision import Decision
from server.engine.attention_timer import AttentionTimer
from server.engine.failures import LAUNCH_ERRORS, launch_failure
from server.engine.lengths import LengthKey, bucket_index, key_of_shape
from server.engine.messages import AttentionSample, AttentionUse, DispatchCount
from server.engine.sequence import Batch

logger = logging.getLogger(__name__)

# Decides a shape again without the (path, shape) pairs that broke.
Redecide = Callable[[AttentionShape, frozenset[tuple[str, str]]], Decision]
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

    decision: Decision
    run: RunAttention
    use: AttentionUse
    is_capturable: bool  # whether a CUDA graph can hold it


@dataclass(slots=True)
class _Lane:
    """The choice for the layers of one window in one phase of a step, and how often it ran."""

    choice: Choice
    num_launches: int = 0


@dataclass(slots=True)
class _Part:
    part: PhasePart
    lanes: dict[int | None, _Lane] = field(default_factory=dict)  # by window
    retired: list[_Lane] = field(default_factory=list)  # ran some layers, then failed to launch


class Dispatcher:
    """The decisions of the plan as a table. Changed only by a launch failure, which quarantines (path, shape)."""

    def __init__(
        self,
        decisions: Mapping[AttentionShape, Decision],
        paths: Iterable[KernelPath],
        flags: tuple[AttentionFlags, ...],
        *,
        redecide: Redecide,
        timer: AttentionTimer | None = None,
        quarantined: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        """`flags`: one a layer. `quarantined`: the (path, shape) pairs that `decisions` were already made without."""
        self.flags = flags
        self.windows = tuple(dict.fromkeys(layer.window for layer in flags))
        self._paths = {path.name: path for path in paths}
        self._redecide = redecide
        self._quarantined = quarantined
        self._news: list[tuple[str, str]] = []
        self._watch: Watch | None = None
        self.timer = timer
        self._choices: dict[Phase, dict[LengthKey, Choice]] = {phase: {} for phase in Phase}
        for shape, decision in decisions.items():
            if decision.path is not None:
                self._choices[shape.phase][key_of_shape(shape)] = self._resolve(decision)
        self._decode = self._choices[Phase.DECODE]

    @property
    def decisions(self) -> dict[AttentionShape, Decision]:
        """What serves each shape now."""
        return {choice.decision.shape: choice.decision for choice in self.choices}

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What serves each shape now, resolved."""
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
        """What the timer has measured since the last call."""
        return ([], {}) if self.timer is None else self.timer.take()

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Every call of a path, until the end of the context, is made inside of what `watch` gives for it."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def call(self, choice: Choice, q: Tensor, k: Tensor, v: Tensor, part: PhasePart, layer: int, out: Tensor) -> None:
        """Run a choice for one layer."""
        flags = self.flags[layer]
        if self._watch is not None:
            with self._watch(choice):
                choice.run(q, k, v, part.batch, flags, out)
        elif self.timer is not None and self.timer.measures(part.phase, layer):
            work = partial(choice.run, q, k, v, part.batch, flags, out)
            self.timer.around(work, choice.decision.shape, layer, part.batch)
        else:
            choice.run(q, k, v, part.batch, flags, out)

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

        A shape that no other path may serve is left without one: its requests end with an error.
        """
        broken = [it for it in self.choices if it.use.path == path and it.decision.shape.phase is phase]
        for choice in broken:
            self._next(choice)
        return [(path, str(choice.decision.shape)) for choice in broken]

    def _next(self, choice: Choice) -> Choice | None:
        """Quarantine a choice, and decide its shape again; None where no path is left."""
        shape, path = choice.decision.shape, choice.use.path
        self._quarantined |= {(path, str(shape))}
        self._news.append((path, str(shape)))
        self._choices[shape.phase].pop(key_of_shape(shape), None)
        decision = self._redecide(shape, self._quarantined)
        if decision.path is None or (decision.path, str(shape)) in self._quarantined:
            logger.error("no path is left for %s", shape)
            return None
        logger.warning("%s serves %s from now on", decision.path, shape)
        self._choices[shape.phase][key_of_shape(shape)] = found = self._resolve(decision)
        return found

    def _resolve(self, decision: Decision) -> Choice:
        assert decision.path is not None
        reasons = [reason.value for reason in decision.fallback_reasons]
        use = AttentionUse(decision.shape.phase.value, decision.path, decision.status.value, reasons)
        path = self._paths[decision.path]
        assert path.run is not None
        return Choice(decision, path.run, use, path.is_capturable)


class StepAttention:
    """Attention of one step: what the decoder calls for each layer. Its decisions are made here, before the first."""

    def __init__(
        self, dispatcher: Dispatcher, parts: list[PhasePart], k_pages: list[Tensor], v_pages: list[Tensor]
    ) -> None:
        """`k_pages`, `v_pages`: one [num_pages, page_size, kv_heads, head_dim] a layer. Raises NoPathError."""
        self._dispatcher = dispatcher
        self._k_pages = k_pages
        self._v_pages = v_pages
        self._parts = [
            _Part(part, {window: _Lane(dispatcher.choice(part, window)) for window in dispatcher.windows})
            for part in parts
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Fill `out` [tokens, heads, head_dim] for q of its shape and packed k, v [tokens, kv_heads, head_dim]."""
        for entry in self._parts:
            tokens = entry.part.tokens
            if entry.part.phase is Phase.PREFILL:
                self._run(entry, layer, q[tokens], k[tokens], v[tokens], out[tokens])
            else:
                self._run(entry, layer, q[tokens], self._k_pages[layer], self._v_pages[layer], out[tokens])

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What serves now, one for each part and window."""
        return tuple(lane.choice for entry in self._parts for lane in entry.lanes.values())

    @property
    def launches(self) -> tuple[dict[int | None, int], ...]:
        """How often the choice of each window ran, for each part."""
        return tuple({window: lane.num_launches for window, lane in entry.lanes.items()} for entry in self._parts)

    def count_replay(self, launches: Iterable[Mapping[int | None, int]]) -> None:
        """Count what a replayed CUDA graph launched: the `launches` of the step that it captured."""
        for entry, counts in zip(self._parts, launches, strict=True):
            for window, num_launches in counts.items():
                entry.lanes[window].num_launches += num_launches
        for entry, lane in self._lanes():
            self._dispatcher.replayed(lane.choice, entry.part)

    def uses(self, phase: Phase) -> list[AttentionUse]:
        """The distinct decisions that served this phase of the step."""
        return [lane.choice.use for entry, lane in self._lanes() if entry.part.phase is phase]

    def counts(self) -> list[DispatchCount]:
        """Each decision that served, with how often its path was launched."""
        return [_count(entry.part, lane) for entry, lane in self._lanes()]

    def served(self) -> list[tuple[Choice, int]]:
        """Each choice that ran in this step, with its launches."""
        return [(lane.choice, lane.num_launches) for _, lane in self._lanes()]

    def suspects(self) -> list[tuple[str, str]]:
        """Every (path, shape) of this step: whom to blame when the device is lost in it."""
        return [(lane.choice.use.path, str(lane.choice.decision.shape)) for _, lane in self._lanes()]

    def _lanes(self) -> list[tuple[_Part, _Lane]]:
        return [(entry, lane) for entry in self._parts for lane in (*entry.retired, *entry.lanes.values())]

    def _run(self, entry: _Part, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        flags = self._dispatcher.flags[layer]
        lane = entry.lanes[flags.window]
        while True:
            try:
                self._dispatcher.call(lane.choice, q, k, v, entry.part, layer, out)
            except LAUNCH_ERRORS as error:
                if lane.num_launches:
                    entry.retired.append(lane)
                lane = entry.lanes[flags.window] = _Lane(self._dispatcher.replace(lane.choice, error))
            else:
                lane.num_launches += 1
                return


def _count(part: PhasePart, lane: _Lane) -> DispatchCount:
    decision = lane.choice.decision
    return DispatchCount(
        phase=part.phase.value,
        bucket=decision.shape.context_bucket.label,
        path=lane.choice.use.path,
        status=lane.choice.use.status,
        wanted=decision.wanted,
        fallback_reasons=lane.choice.use.fallback_reasons,
        num_sequences=part.num_sequences,
        num_tokens=part.num_tokens,
        num_launches=lane.num_launches,
    )
