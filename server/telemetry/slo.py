"""Exact counts of good and bad events against the objectives: a quantile from a histogram is no base for an alert."""

from collections.abc import Iterable
from functools import cache, partial

from kernels.vocabulary.buckets import Bucket, bucket_of
from server.telemetry.factory import MetricFactory
from server.telemetry.objectives import Objectives
from server.telemetry.outcomes import Outcome, Sli

UNKNOWN_BUCKET = "unknown"  # the request ended before its prompt was counted
# The client's own doing says nothing of our availability.
_UNCOUNTED = frozenset({Outcome.CLIENT_ERROR, Outcome.DISCONNECTED})


class SloMetrics:
    def __init__(self, make: MetricFactory, model: str, objectives: Objectives) -> None:
        self._objectives = objectives
        events = make.counter(
            "slo_events_total",
            "Events by their objective: good or bad. A request that we end before its first token is a bad ttft",
            *("model", "bucket", "sli", "result"),
        )
        self._event = cache(partial(events.labels, model))
        self._limits = make.gauge("slo_objective_seconds", "Longest time of a good event", "bucket", "sli")
        targets = make.gauge("slo_target_ratio", "Share of events that must be good", "sli")
        targets.labels(Sli.TTFT.value).set(objectives.ttft.target)
        targets.labels(Sli.TPOT.value).set(objectives.tpot.target)
        targets.labels(Sli.AVAILABILITY.value).set(objectives.availability.target)
        self._create(UNKNOWN_BUCKET, Sli.AVAILABILITY)

    def create_buckets(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._create(bucket.label, *Sli)
            self._limits.labels(bucket.label, Sli.TTFT.value).set(self._objectives.ttft.seconds[bucket])
            self._limits.labels(bucket.label, Sli.TPOT.value).set(self._objectives.tpot.seconds[bucket])

    def first_token(self, num_prompt_tokens: int, ttft_s: float) -> None:
        bucket = bucket_of(num_prompt_tokens)
        self._count(bucket.label, Sli.TTFT, ttft_s <= self._objectives.ttft.seconds[bucket])

    def no_first_token(self, num_prompt_tokens: int, outcome: Outcome, waited_s: float) -> None:
        """A sequence ended without one. A client that left in time has seen nothing bad yet."""
        bucket = bucket_of(num_prompt_tokens)
        if outcome not in _UNCOUNTED or waited_s > self._objectives.ttft.seconds[bucket]:
            self._count(bucket.label, Sli.TTFT, is_good=False)

    def output_token(self, num_prompt_tokens: int, mean_gap_s: float) -> None:
        bucket = bucket_of(num_prompt_tokens)
        self._count(bucket.label, Sli.TPOT, mean_gap_s <= self._objectives.tpot.seconds[bucket])

    def request(self, num_prompt_tokens: int | None, outcome: Outcome) -> None:
        """`num_prompt_tokens` of its longest prompt; None when it ended before its prompts were counted."""
        if outcome not in _UNCOUNTED:
            bucket = UNKNOWN_BUCKET if num_prompt_tokens is None else bucket_of(num_prompt_tokens).label
            self._count(bucket, Sli.AVAILABILITY, outcome is Outcome.OK)

    def _count(self, bucket: str, sli: Sli, is_good: bool) -> None:
        self._event(bucket, sli.value, "good" if is_good else "bad").inc()

    def _create(self, bucket: str, *slis: Sli) -> None:
        for sli in slis:
            for result in ("good", "bad"):
                self._event(bucket, sli.value, result)
