"""The shadow check: now and then, something that a client's step computed is computed again in fp64 and compared.

A due check has the next step launched kernel by kernel. After one random layer a tap copies what attention's path read
and wrote for one sequence and one KV head; or after one random product, or one layer's experts, some rows; or, of one
layer's recurrence or convolution, the state that a sequence's tokens read, and their results in one head, or in some
channels. The copy is judged later, when the engine is idle or between two steps. Of several ranks one is drawn: another
than the first takes and judges the copy by itself, behind the step.
docs/limits.md ("In service") derives how seldom a right path is quarantined.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import Any

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch
from kernels.calls.rows import SequenceRows
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.recurrence_operator import EVERY_OPERATOR
from kernels.vocabulary.shape import PLANNED_PHASES, Phase
from server.engine.operators.attention_table import Choice
from server.engine.operators.convolution import ConvolutionCall
from server.engine.operators.dispatch import Dispatcher, PhasePart
from server.engine.operators.experts import ExpertsCall
from server.engine.operators.linear import ProductCall
from server.engine.operators.recurrence import RecurrenceCall
from server.engine.operators.state_table import StateTable
from server.engine.operators.step_attention import TakeCall
from server.engine.operators.table import OperatorChoice
from server.engine.proof.convolution_sample import ConvolutionSample, before_convolution
from server.engine.proof.product_sample import ExpertsSample, ProductSample, take_experts, take_product
from server.engine.proof.rank_check import JudgedCall, NamedCall, RankAnswers
from server.engine.proof.recurrence_sample import RecurrenceSample, SampledRow, before_recurrence
from server.engine.proof.seen_spans import Places
from server.engine.proof.shadow_sample import Judgement, Sample, take_sample, take_tower_sample
from server.engine.scheduling.sequence import Batch
from server.protocol.messages import ShadowReport
from server.protocol.plan_rows import TOWER

logger = logging.getLogger(__name__)

OF_STEP = "none"  # the path of a report on what a step has told a path: no path is wrong
MEMORY_S = 3600.0  # two mismatches of one path and phase within so long quarantine it
ALERT_S = 60.0  # so long after a mismatch its phase or operator is checked as often as the budget allows,
ALERT_INTERVAL_S = 0.1  # but no more often than this, and beside the checks of the interval, which look at all others
_PATIENCE_S = 1.0  # a sample waits so long for an idle engine, then it is judged between two steps
_SAVED_S = 600.0  # what was not spent is kept for so long: no burst of checks after a quiet night


class TowerLane(Enum):
    """The calls of a tower, which are checked apart from a step's."""

    TOWER = TOWER


Lane = Phase | Operator | TowerLane
_LANES: dict[str, Lane] = {it.value: it for it in (*Phase, *EVERY_OPERATOR, *TowerLane)}


class ShadowBudget:
    """The time that checks may take: a share of the time that passes. What is overdrawn is paid back first."""

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        self._share = share
        self._clock = clock
        self._credit_s = 0.0
        self._at = clock()
        self._latest_s = 0.0  # what the latest check has cost so far

    @property
    def allows(self) -> bool:
        """Return whether a check that costs as much as the latest one is paid for."""
        now, most_s = self._clock(), self._share * _SAVED_S
        self._credit_s = min(most_s, self._credit_s + self._share * (now - self._at))
        self._at = now
        return self._credit_s > 0 and self._credit_s >= min(self._latest_s, most_s)

    def pays(self, seconds: float) -> bool:
        """Return whether a replay is paid for, beside a check that costs as much as the latest one."""
        return self.allows and self._credit_s >= seconds + self._latest_s

    def begin(self) -> None:
        """A check begins."""
        self._latest_s = 0.0

    def spend(self, seconds: float) -> None:
        """Charge the budget with the seconds of the latest check."""
        self._credit_s -= seconds
        self._latest_s += seconds

    def spend_idle(self, seconds: float) -> None:
        """Charge the budget with the seconds of a replay."""
        self._credit_s -= seconds


AnySample = Sample | ProductSample | ExpertsSample | RecurrenceSample | ConvolutionSample


def _of_states(dispatcher: Dispatcher, lane: Lane) -> StateTable[Any, Any, Any, Any] | None:
    """Return the table of an operator whose layers keep a state; None of others, and of a model without such layers."""
    return next((it for it in dispatcher.of_states if it.operator is lane), None)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Result of a tap. `sample` None: nothing was taken, because of `problem`."""

    path: str
    lane: Lane
    layer: int | None
    at: float
    sample: AnySample | None
    problem: str | None = None


class Tap:
    """Taker of one sample of one step: of a random attention, product, mixture, recurrence or convolution."""

    def __init__(
        self,
        check: "ShadowCheck",
        dispatcher: Dispatcher,
        lane: Lane,
        *,
        index: int,
        sequence: SequenceRows | None = None,
        row: SampledRow | None = None,
        rank: int = 0,
        images: Places = (),
    ) -> None:
        """`index`: which call of the step is taken, from 0: of attention the layer, of whose rows `sequence`.

        row   of a recurrence or a convolution, the sequence
        images  of `sequence`, whose tokens see each other both ways
        rank  whose call it is; of another than the first nothing is taken here
        """
        self.call = None if rank == 0 else NamedCall(rank, lane.value, index, sequence, row, images)
        self._check = check
        self._dispatcher = dispatcher
        self._lane = lane
        self._left = index
        self._layer = index
        self._sequence = sequence
        self._images = images
        self._row = row
        self._begun: Callable[[str, int, Tensor], RecurrenceSample | ConvolutionSample] | None = None
        self._problem: torch.OutOfMemoryError | None = None

    @property
    def attention(self) -> TakeCall | None:
        """Return what StepAttention calls after each layer; None where attention is not the one to check."""
        return None if self._sequence is None or self.call is not None else self._take_attention

    def launched(self) -> None:
        """Note that the step is launched: a rank that its call was named to will answer."""
        if self.call is not None:
            self._check.wait_for_answer()

    @property
    def is_of_tower(self) -> bool:
        """Return whether a call of the tower is the one to check: the step itself may be a CUDA graph."""
        return self._lane is TowerLane.TOWER

    @contextmanager
    def watching_images(self) -> Iterator[None]:
        """Have the tower's calls for the images that are computed inside shown to this."""
        tower = self._dispatcher.tower
        if tower is None or not self.is_of_tower:
            yield
            return
        tower.tap, tower.linear.tap = self._take_tower_attention, self._take_product
        try:
            yield
        finally:
            tower.tap = tower.linear.tap = None

    def _take_tower_attention(
        self, choice: Choice, batch: AttentionBatch, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """Take an image's or a window's q, k, v and out of the path that has just run."""
        if self._left == 0:
            tower = self._dispatcher.tower
            assert tower is not None
            flags = tower.flags
            self._check.take_sample(
                choice.use.path,
                self._lane,
                layer,
                lambda rng: take_tower_sample(choice, batch, layer, tensors=(q, k, v, out), flags=flags, rng=rng),
            )
        self._left -= 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have products, experts or layers with a state of the step that is launched inside shown to this."""
        linear, experts = self._dispatcher.linear, self._dispatcher.experts
        of_states = _of_states(self._dispatcher, self._lane)
        if self.call is not None:
            yield
            return
        try:
            if self._lane is Operator.LINEAR and linear is not None:
                linear.tap = self._take_product
            elif self._lane is Operator.EXPERTS and experts is not None:
                experts.tap = self._take_experts
            elif of_states is not None:
                of_states.before, of_states.tap = self._before_state, self._take_state
            yield
        finally:
            if of_states is not None:
                of_states.before = None
            for table in self._dispatcher.tables:
                table.tap = None

    def _take_attention(
        self, choice: Choice, part: PhasePart, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """Take q, k, v and out of the path that has just run."""
        if layer == self._layer and part.phase is self._lane and self._sequence is not None:
            self._check.take(choice, part, layer, self._sequence, tensors=(q, k, v, out), images=self._images)

    def _take_product(self, choice: OperatorChoice[Any, Any], call: ProductCall) -> None:
        if self._left == 0:
            layer, path = call.product.layer, choice.use.path
            self._check.take_sample(path, self._lane, layer, lambda rng: take_product(call, path, rng))
        self._left -= 1

    def _take_experts(self, choice: OperatorChoice[Any, Any], call: ExpertsCall) -> None:
        if self._left == 0:
            assert self._dispatcher.experts is not None
            layer, path = self._dispatcher.experts.layers[self._layer], choice.use.path
            self._check.take_sample(path, self._lane, layer, lambda rng: take_experts(call, path, layer, rng))
        self._left -= 1

    def _before_state(self, call: RecurrenceCall | ConvolutionCall) -> None:
        if call.place == self._layer and self._row is not None:
            try:
                if isinstance(call, RecurrenceCall):
                    self._begun = before_recurrence(call, self._row, self._check.rng)
                else:
                    self._begun = before_convolution(call, self._row, self._check.rng)
            except torch.OutOfMemoryError as error:
                self._problem = error

    def _take_state(self, choice: OperatorChoice[Any, Any], call: RecurrenceCall | ConvolutionCall) -> None:
        if call.place != self._layer or (self._begun is None and self._problem is None):
            return
        of_states = _of_states(self._dispatcher, self._lane)
        assert of_states is not None
        layer, path = of_states.layers[self._layer], choice.use.path
        begun, problem = self._begun, self._problem

        def sample(rng: Random) -> RecurrenceSample | ConvolutionSample:  # noqa: ARG001
            if begun is None:
                assert problem is not None
                raise problem
            return begun(path, layer, call.out)

        self._check.take_sample(path, self._lane, layer, sample)


class ShadowCheck:
    """Only the stepping thread may call it."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        budget: float,
        interval_s: float,
        is_quarantining: bool,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
        others: RankAnswers | None = None,
    ) -> None:
        """`budget`: the share of time that checks may take; 0: no check. `interval_s`: the least time between two.

        `others`: where there are several ranks, of which this is the first.
        """
        self._others = others
        self._is_waiting = False  # for another rank's answer
        self._dispatcher = dispatcher
        self._is_on = budget > 0
        self._interval_s = interval_s
        self._is_quarantining = is_quarantining
        self._clock = clock
        self.rng = Random() if rng is None else rng  # not the settings' seed: replicas must not draw alike
        self.budget = ShadowBudget(budget, clock)
        self._next_at = clock()
        of_rows = (Operator.LINEAR, dispatcher.linear), (Operator.EXPERTS, dispatcher.experts)
        self._operators = (
            *(lane for lane, table in of_rows if table is not None),
            *(table.operator for table in dispatcher.of_states),
        )
        of_tower = () if dispatcher.tower is None else (TowerLane.TOWER,)
        self._all_lanes: tuple[Lane, ...] = (*PLANNED_PHASES, *self._operators, *of_tower)
        self._wanted = self.rng.choice(self._all_lanes)  # in the next check, or any after an interval
        self._taken: _Taken | None = None
        self._alerts: dict[Lane, float] = {}  # phases and operators with a mismatch, checked more often until then
        self._alert_next_at = clock()
        self._mismatches: dict[tuple[str, Lane], list[tuple[float, str]]] = {}  # when, and of which input
        self._unreported_s = 0.0

    @property
    def has_sample(self) -> bool:
        """Return whether a sample waits to be judged, here or on another rank."""
        return self._taken is not None or self._is_waiting

    @property
    def is_due(self) -> bool:
        """Return whether the waiting sample is to be judged although the engine has work."""
        if self._is_waiting and self._others is not None:
            return self._others.has_one
        return self._taken is not None and (self._is_alert or self._clock() - self._taken.at >= _PATIENCE_S)

    @property
    def _is_alert(self) -> bool:
        return any(self._clock() < until for until in self._alerts.values())

    def begin(self, batch: Batch) -> Tap | None:
        """A tap for the batch that is about to be launched, with its images, if a check is due."""
        now = self._clock()
        is_too_early = now < self._next_at and not (self._alerts and now >= self._alert_next_at)
        if not self._is_on or self.has_sample or is_too_early or not self.budget.allows:
            return None
        has_images = self._dispatcher.tower is not None and any(it.span.image is not None for it in batch.embeddings)
        lanes: tuple[Lane, ...] = (*batch.phases, *self._operators, *((TowerLane.TOWER,) if has_images else ()))
        lane = self._lane_of_interval(lanes, now) or self._lane_of_alert(lanes, now)
        if lane is None:
            return None
        self.budget.begin()
        if isinstance(lane, TowerLane):
            assert self._dispatcher.tower is not None
            return Tap(self, self._dispatcher, lane, index=self.rng.randrange(self._dispatcher.tower.num_calls))
        if (of_states := _of_states(self._dispatcher, lane)) is not None:
            return self._state_tap(lane, batch, len(of_states.layers))
        if isinstance(lane, Operator):
            return self._tap(lane, self.rng.randrange(self._num_calls(lane, batch)))
        rows = batch.rows_of(lane)
        row = self.rng.choice(rows)
        start = sum(batch.query_lens[rows.start : row])
        # In prefill keys are packed as queries are: their first row is the same.
        sequence = SequenceRows(
            row - rows.start, start, start + batch.query_lens[row], batch.context_lens[row], key_start=start
        )
        layer = self.rng.randrange(len(self._dispatcher.flags))
        chunk = self._dispatcher.chunks[layer]
        if chunk is not None and lane is not Phase.PREFILL:
            sequence = replace(sequence, num_keys=(sequence.num_keys - 1) % chunk + 1)
        images = tuple([(it.start, it.stop) for it in batch.sequences[row].embedded if it.image is not None])
        return self._tap(lane, layer, sequence, images=images)

    def _tap(
        self,
        lane: Lane,
        index: int,
        sequence: SequenceRows | None = None,
        row: SampledRow | None = None,
        images: Places = (),
    ) -> Tap:
        """Return a tap for a call of a rank that is drawn."""
        rank = 0 if self._others is None else self.rng.randrange(self._others.num_ranks)
        return Tap(self, self._dispatcher, lane, index=index, sequence=sequence, row=row, rank=rank, images=images)

    def tap_of(self, call: NamedCall) -> Tap:
        """Return a tap for a call of this rank that rank 0 has named."""
        lane, images = _LANES[call.lane], call.images
        return Tap(self, self._dispatcher, lane, index=call.index, sequence=call.sequence, row=call.row, images=images)

    def wait_for_answer(self) -> None:
        """Begin no other check until the rank has answered that a call was named to."""
        self._is_waiting = True

    def _state_tap(self, lane: Lane, batch: Batch, num_layers: int) -> Tap:
        row = self.rng.randrange(len(batch.query_lens))
        num_tokens = batch.query_lens[row]
        of_step = SampledRow(row, sum(batch.query_lens[:row]), num_tokens, batch.context_lens[row] - num_tokens)
        return self._tap(lane, self.rng.randrange(num_layers), row=of_step)

    def _lane_of_interval(self, lanes: tuple[Lane, ...], now: float) -> Lane | None:
        """Draw what a check of the interval looks at, of all phases and operators; None where it is not due yet."""
        if now < self._next_at:
            return None
        if self._wanted in lanes:
            lane = self._wanted
        elif now - self._next_at < self._interval_s:  # or the first step after a quiet time would always be checked
            return None
        else:
            lane = self.rng.choice(lanes)
        self._wanted = self.rng.choice(self._all_lanes)
        self._next_at = now + self._interval_s
        return lane

    def _lane_of_alert(self, lanes: tuple[Lane, ...], now: float) -> Lane | None:
        """Draw what to check again of that which had a mismatch within the latest minute; None where it is too early.

        Where nothing is quarantined a mismatch may last: the checks of the interval go on beside these.
        """
        self._alerts = {lane: until for lane, until in self._alerts.items() if now < until}
        alerted = [lane for lane in lanes if lane in self._alerts]
        if now < self._alert_next_at or not alerted:
            return None
        self._alert_next_at = now + ALERT_INTERVAL_S
        return self.rng.choice(alerted)

    def _num_calls(self, operator: Operator, batch: Batch) -> int:
        """Return how many products, or mixtures, the batch computes; the head is the last product."""
        linear, experts = self._dispatcher.linear, self._dispatcher.experts
        if operator is Operator.EXPERTS and experts is not None:
            return len(experts.layers)
        assert linear is not None
        return linear.num_launches - (not batch.sampled_rows)

    def take(
        self,
        choice: Choice,
        part: PhasePart,
        layer: int,
        sequence: SequenceRows,
        *,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        images: Places = (),
    ) -> None:
        """Copy what a call of attention read and wrote. Where memory does not suffice the check counts as skipped.

        `layer`: a place among those that attend; a report names the layer of the model. `images` of the sequence.
        """
        flags, of_model = self._dispatcher.flags[layer], self._dispatcher.layers[layer]
        own = images if self._dispatcher.sees_spans[layer] else None
        self.take_sample(
            choice.use.path,
            part.phase,
            of_model,
            lambda rng: take_sample(
                choice, part, of_model, sequence, tensors=tensors, flags=flags, rng=rng, images=own
            ),
        )

    def take_sample(self, path: str, lane: Lane, layer: int | None, copy: Callable[[Random], AnySample]) -> None:
        """Keep the sample that `copy` makes, if it does: torch.OutOfMemoryError skips the check."""
        started_at = self._clock()
        sample, problem = None, None
        try:
            sample = copy(self.rng)
        except torch.OutOfMemoryError as error:
            problem = f"no memory for the copy: {error}"[:200]
        self._taken = _Taken(path, lane, layer, started_at, sample, problem)
        self.spend(self._clock() - started_at)

    def spend(self, seconds: float) -> None:
        """Charge time to the budget: of a step too, that a check kept from being replayed as a CUDA graph."""
        self.budget.spend(seconds)
        self._unreported_s += seconds

    def judge(self) -> ShadowReport | None:
        """Judge the waiting sample, or take another rank's judgement; None where there is neither.

        Waits for the device: no step should be on its way.
        """
        found = self.judged()
        if found is None and self._is_waiting and self._others is not None:
            found = self._others.take()
            self._is_waiting = found is None
        if found is None:
            return None
        detail = found.detail if found.detail is None or not found.rank else f"on rank {found.rank}: {found.detail}"
        quarantined: list[tuple[str, str]] = []
        if found.is_mismatch:
            logger.error("shadow check: %s", detail)
            quarantined = [] if found.is_of_step else self._note_mismatch(found)
        self.spend(found.seconds)
        spent_s, self._unreported_s = self._unreported_s, 0.0
        return ShadowReport(
            result="skipped" if found.factor is None else "mismatch" if found.is_mismatch else "match",
            at=time.time(),
            phase=found.lane,
            path=OF_STEP if found.is_of_step else found.path,
            layer=found.layer,
            weight=found.weight,
            head=found.head,
            position=found.position,
            num_rows=found.num_rows,
            factor=found.factor,
            detail=detail,
            spent_s=spent_s,
            quarantined=quarantined,
            rank=found.rank,
        )

    def judged(self, rank: int = 0) -> JudgedCall | None:
        """Judge the waiting sample, which is of this rank; None where there is none. Waits for the device."""
        taken, self._taken = self._taken, None
        if taken is None:
            return None
        started_at, sample = self._clock(), taken.sample
        found = Judgement(None, detail=taken.problem) if sample is None else self._judge(sample)
        return JudgedCall(
            rank=rank,
            path=taken.path,
            lane=taken.lane.value,
            served=(taken.lane if sample is None else sample.lane).value,
            layer=taken.layer,
            weight=None if sample is None else sample.weight,
            factor=found.factor,
            num_rows=found.num_rows,
            head=found.head,
            position=found.position,
            detail=found.detail,
            is_of_step=found.is_of_step,
            digest=sample.digest if sample is not None and found.is_mismatch else "",
            seconds=self._clock() - started_at,
        )

    def _judge(self, sample: AnySample) -> Judgement:
        try:
            return sample.judge(self.rng)
        except torch.OutOfMemoryError as error:
            return Judgement(None, detail=f"no memory to judge the sample: {error}"[:200])

    def _note_mismatch(self, found: JudgedCall) -> list[tuple[str, str]]:
        """Remember a mismatch. The second of a path and lane quarantines: the (path, shape) pairs are returned.

        One of the same input as an earlier one is a repetition of it, and counts once: kernels are deterministic.
        """
        now, digest, lane, served = self._clock(), found.digest, _LANES[found.lane], _LANES[found.served]
        assert not isinstance(served, TowerLane), "a tower's calls are of a phase or an operator"
        self._alerts[lane] = now + ALERT_S
        self._alert_next_at = max(self._alert_next_at, now + ALERT_INTERVAL_S)
        of_path = found.path, served
        known = [(at, other) for at, other in self._mismatches.get(of_path, []) if now - at <= MEMORY_S]
        is_second = any(other != digest for _, other in known)
        self._mismatches[of_path] = [*known, (now, digest)]
        if not is_second:
            return []
        if not self._is_quarantining:
            logger.error("%s serves %s although shadow checks call it wrong: --on-unproven degrade", *_words(of_path))
            return []
        del self._mismatches[of_path]
        del self._alerts[lane]
        logger.error("%s is quarantined for %s: shadow checks call it wrong", *_words(of_path))
        return self._dispatcher.quarantine(*of_path)


def _words(of_path: tuple[str, Lane]) -> tuple[str, str]:
    return of_path[0], of_path[1].value
