"""Replay, the second shadow check: an answer that was served is computed again alone, and compared.

Answers are drawn when they are queued: the log probabilities of their tokens are recorded from then on. When the
engine has nothing to do, and the budget of shadow checks pays for it, the oldest of the route that was compared least
is computed again, a chunk between two looks at the socket. A request that comes takes all its memory back at once.
docs/limits.md ("Replay") says what is seen so, and how far right log probabilities may be apart.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random

import msgspec
import torch

from server.engine.proof.forced_row import OWNER, Forced, ForcedRow
from server.engine.proof.shadow_check import ShadowBudget
from server.engine.scheduling.runner_api import BatchError
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import PENDING, AnswerRecord, Sequence
from server.log import trace_fields
from server.protocol.messages import ReplayReport
from server.protocol.served_answer import Route, ServedAnswer

logger = logging.getLogger(__name__)

_MOST_WAITING = 4  # answers that are recorded or wait, each of at most the model's context
_MOST_TRIES = 3  # of an answer that requests came in between of
_SPREAD = 4.0  # of two right computations of one answer: so many times it is added to the limits


class Cause(Enum):
    """Where the first difference is."""

    LOGITS = "logits"  # the model's own logits differ
    SAMPLING = "sampling"  # they do not, and another token is chosen by them
    CACHE = "cache"  # the logits differ, and the answer read pages that it had not computed itself


@dataclass(slots=True)
class _Waiting:
    """An answer that waits to be compared."""

    answer: ServedAnswer
    route: Route
    request_id: str
    traceparent: str | None
    num_tries: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an answer that differs, and where that comes from."""

    place: int
    cause: Cause
    row: ForcedRow


@dataclass(frozen=True, slots=True)
class _Compared:
    """The tokens of an answer that were compared, up to the first that differs."""

    rows: list[ForcedRow]
    difference: Difference | None


class Replay:
    """Takes answers of the engine and compares them. Only the stepping thread may call it."""

    def __init__(
        self,
        forced: Forced,
        scheduler: Scheduler,
        budget: ShadowBudget,
        *,
        share: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        """`share` of the answers that is recorded; None: as many as the budget pays for."""
        self._forced = forced
        self._scheduler = scheduler
        self._budget = budget
        self._share = share
        self._clock = clock
        self._rng = Random() if rng is None else rng  # not the settings' seed: replicas must not draw alike
        self._recording: list[Sequence] = []
        self._num_queued = 0  # answers that were queued since one was chosen to be compared
        self._waiting: list[_Waiting] = []
        self._num_compared: Counter[Route] = Counter()
        self._seconds_a_token = 0.0  # of the latest replay
        self._current: _Waiting | None = None
        self._comparing: Iterator[ReplayReport | None] | None = None
        self._spent_s = 0.0  # on the current one

    # --- what the engine calls ---

    def begin(self, seq: Sequence) -> None:
        """Give a sequence that is queued a record, if its answer is wanted.

        Where there is no room, the nth answer takes the place of one of the others with a probability of their number
        over n: all that were queued are equally likely to be compared, and those that are in vain become rare.
        """
        # A prompt with embeddings of its own would have to be kept with them; a pooled one has no answer.
        if seq.embedded or seq.sampling.pooling is not None:
            return
        if self._share is not None and self._rng.random() >= self._share:
            return
        self._num_queued += 1
        if len(self._recording) + len(self._waiting) >= _MOST_WAITING:
            place = self._rng.randrange(self._num_queued)
            if place < len(self._recording):
                self._recording.pop(place).record = None
            elif place < _MOST_WAITING:
                del self._waiting[place - len(self._recording)]
            else:
                return
        seq.record = AnswerRecord(seq.sampling, seq.seed)
        self._recording.append(seq)

    def end(self, seq: Sequence, *, is_sound: bool) -> None:
        """Take a recorded answer; unless `is_sound` it is no answer."""
        record, seq.record = seq.record, None
        assert record is not None
        self._recording.remove(seq)
        tokens = seq.tokens[seq.num_prompt : len(seq.tokens) - seq.num_drafted]
        while tokens and tokens[-1] == PENDING:
            tokens.pop()
        if not is_sound or not tokens:
            return
        answer = ServedAnswer(
            prompt_token_ids=tuple(seq.tokens[: seq.num_prompt]),
            token_ids=tuple(tokens),
            sampling=record.sampling,
            seed=record.seed,
            stop_ids=seq.stop_ids,
            logprobs=bytes(record.logprobs[: 4 * len(tokens)]),
        )
        self._waiting.append(_Waiting(answer, route_of(seq, record), seq.request_id, seq.traceparent))

    # --- what the loop calls ---

    @property
    def has_waiting(self) -> bool:
        """Return whether there is something to compute."""
        return self._comparing is not None or bool(self._waiting)

    @property
    def is_ready(self) -> bool:
        """Return whether there is something to compute, and the budget pays for it."""
        if self._comparing is not None:
            return True
        return bool(self._waiting) and self._budget.pays(self._seconds_a_token * _num_tokens(self._next()))

    def step(self) -> ReplayReport | None:
        """Compute a chunk of an answer. Return the report of one that is done. No batch may be on its way."""
        if self._comparing is None:
            if not self.is_ready:
                return None
            self._current = self._next()
            self._waiting.remove(self._current)
            self._num_queued = 0
            self._comparing = self._steps(self._current)
            self._spent_s = 0.0
        started_at = self._clock()
        try:
            report = next(self._comparing)
        except (BatchError, torch.OutOfMemoryError) as error:
            report = self._report("skipped", detail=f"it cannot be computed again: {error}"[:200])
        seconds = self._clock() - started_at
        self._budget.spend_idle(seconds)
        self._spent_s += seconds
        if report is None:
            return None
        self._end()
        return msgspec.structs.replace(report, spent_s=self._spent_s)

    def yield_memory(self) -> ReplayReport | None:
        """Give back at once what a replay holds: a request has come. Return the report of one that is given up."""
        waiting = self._current
        if waiting is None:
            return None
        waiting.num_tries += 1
        report = None
        if waiting.num_tries < _MOST_TRIES:
            self._waiting.insert(0, waiting)
        else:
            report = self._report("preempted", detail=f"requests came in between, {_MOST_TRIES} times")
        self._end()
        return report

    def _end(self) -> None:
        self._scheduler.give_back(OWNER)
        self._current = self._comparing = None

    def _next(self) -> _Waiting:
        """Return the oldest of the route that was compared least."""
        return min(self._waiting, key=lambda it: self._num_compared[it.route])

    def _steps(self, waiting: _Waiting) -> Iterator[ReplayReport | None]:
        """Yield None after each chunk, and the report at the end."""
        answer, started_at = waiting.answer, self._clock()
        borrowed = self._scheduler.borrow(OWNER, len(answer.prompt_token_ids) + len(answer.token_ids))
        if borrowed is None:
            yield self._report("skipped", detail="too few pages are free")
            return

        def compared(*, more: float = 0.0, divisor: int = 1) -> Iterator[_Compared | None]:
            rows: list[ForcedRow] = []
            for part in self._forced.rows(answer, borrowed, more=more, divisor=divisor):
                rows += part
                yield None
            yield _Compared(rows, first_difference(rows, waiting.route, most_apart=self._forced.most_apart))

        found = yield from _result(compared())
        if found.difference is not None and not self._forced.is_exact:
            again = yield from _result(compared(divisor=3))
            apart = [abs(a.logprob - b.logprob) for a, b in zip(found.rows, again.rows, strict=True)]
            found = yield from _result(compared(more=_SPREAD * max(apart)))
        self._num_compared[waiting.route] += 1
        self._seconds_a_token = (self._clock() - started_at) / _num_tokens(waiting)
        yield self._judged(found)

    def _judged(self, found: _Compared) -> ReplayReport:
        num_tokens, difference, is_exact = len(found.rows), found.difference, self._forced.is_exact
        factor = None if is_exact else max(row.factor for row in found.rows)
        if difference is None:
            return self._report("match", num_tokens=num_tokens, factor=factor)
        place, row = difference.place, difference.row
        detail = f"token {place} of an answer of {num_tokens}: "
        if difference.cause is Cause.SAMPLING:
            detail += "its logits are those that served it, and another token is chosen by them"
        else:
            detail += f"its log probability is {row.logprob:.6g} alone"
            detail += "" if row.served is None else f", {row.served:.6g} was served"
            detail += "" if is_exact else f", they may be {row.limit:.2g} apart"
        assert self._current is not None
        ids = trace_fields(self._current.request_id, self._current.traceparent)
        logger.error("replay: %s", detail, extra={"route": self._current.route.value, **ids})
        result = "mismatch" if is_exact else "beyond_limits"
        return self._report(
            result, cause=difference.cause, place=place, num_tokens=num_tokens, factor=factor, detail=detail
        )

    def _report(
        self,
        result: str,
        *,
        cause: Cause | None = None,
        place: int | None = None,
        num_tokens: int = 0,
        factor: float | None = None,
        detail: str | None = None,
    ) -> ReplayReport:
        assert self._current is not None
        return ReplayReport(
            result=result,
            at=time.time(),
            route=self._current.route.value,
            cause=None if cause is None else cause.value,
            place=place,
            num_tokens=num_tokens,
            factor=factor,
            detail=detail,
            spent_s=self._spent_s,
            traceparent=self._current.traceparent,
            request_id=self._current.request_id,
        )


def route_of(seq: Sequence, record: AnswerRecord) -> Route:
    """Return the route of an answer."""
    if seq.num_preemptions:
        return Route.PREEMPTED
    if seq.is_forked:
        return Route.FORKED
    if seq.num_cached:
        return Route.HIT
    if seq.num_chunks > 1:
        return Route.CHUNKED
    return Route.BATCHED if record.has_neighbours else Route.PLAIN


def first_difference(rows: list[ForcedRow], route: Route, *, most_apart: float = 0.0) -> Difference | None:
    """Return the first row whose token cannot have been chosen there, or had another log probability.

    `most_apart`: the share of the rows whose log probabilities are no difference yet, if they are no more than that.
    """
    is_tolerated = sum(not row.is_near for row in rows) <= most_apart * len(rows)
    for place, row in enumerate(rows):
        if not row.is_near:
            if is_tolerated:
                continue
            reads_others = route in (Route.HIT, Route.FORKED, Route.PREEMPTED)  # a preempted one may find its own pages
            return Difference(place, Cause.CACHE if reads_others else Cause.LOGITS, row)
        if not row.is_choosable or row.is_defined is False:
            return Difference(place, Cause.LOGITS if row.served is None else Cause.SAMPLING, row)
    return None


def _num_tokens(waiting: _Waiting) -> int:
    return len(waiting.answer.prompt_token_ids) + len(waiting.answer.token_ids)


def _result(steps: Iterator[_Compared | None]) -> Generator[None, None, _Compared]:
    """Yield None as often as `steps` does, and return what it yields at last."""
    found: _Compared | None = None
    for found in steps:
        if found is None:
            yield None
    assert found is not None
    return found
