"""Latency of requests and their parts: histograms by the length of the prompt, with exemplars that lead to traces.

The edges are few, because every edge is a sample for each bucket of prompt lengths. Only the time to the first token
is read to a few percent, by the dashboard's quantiles and by an alert; the others show where time goes.
"""

from collections.abc import Iterable
from functools import cache, partial

from kernels.vocabulary.buckets import Bucket, bucket_of
from server.protocol.messages import RequestTimes
from server.telemetry.factory import Exemplar, MetricFactory, ladder
from server.telemetry.outcomes import Outcome

# Steps of x1.1 where the p99 of recorded first tokens lies: Prometheus interpolates inside a bucket, and reads a p99 up
# to 5% wrong from x1.1 and 10% from x1.3 (docs/decisions). Below are short prompts on a GPU, where x1.4 is what
# 1,000 samples allow; above are queues and long prompts.
FINE_TTFT_S = (0.03, 1.0)
TTFT_EDGES = (
    *ladder(0.004, FINE_TTFT_S[0], 1.4)[:-1],
    *ladder(*FINE_TTFT_S, 1.1)[:-1],
    *ladder(FINE_TTFT_S[1], 60, 2),
)
TPOT_EDGES = ladder(0.002, 0.2, 1.7)  # around the objectives of 50 and 100 ms
PREFILL_EDGES = ladder(0.01, 60, 10)  # whether it is the prefill or the queue that is slow
QUEUE_EDGES = PREFILL_EDGES  # to be compared with it
DURATION_EDGES = (1.0, 10.0, 60.0, 600.0)  # depends most on the length of the answer
# Of these the duration is measured; a refusal takes no time that anybody asks for.
TIMED_OUTCOMES = (Outcome.OK, Outcome.SERVER_ERROR, Outcome.DISCONNECTED)


class LatencyMetrics:
    def __init__(self, make: MetricFactory, model: str) -> None:
        """Create the histograms. Those of a prompt length are created by `create_buckets`."""
        by_bucket, by_outcome = ("model", "bucket"), ("model", "outcome")
        ttft = make.histogram(
            "time_to_first_token_seconds", "From arrival to the first token, by prompt length", TTFT_EDGES, *by_bucket
        )
        tpot = make.histogram(
            "time_per_output_token_seconds", "Mean time between a request's tokens", TPOT_EDGES, *by_bucket
        )
        prefill = make.histogram("prefill_seconds", "From first schedule to the first token", PREFILL_EDGES, *by_bucket)
        queue = make.histogram("queue_seconds", "From submission to first schedule", QUEUE_EDGES, "model")
        duration = make.histogram(
            "request_duration_seconds",
            "From arrival to the last byte, of requests that were not refused",
            DURATION_EDGES,
            *by_outcome,
        )
        self._ttft, self._tpot, self._prefill = (cache(partial(it.labels, model)) for it in (ttft, tpot, prefill))
        self._queue = queue.labels(model)
        self._duration = cache(partial(duration.labels, model))
        for outcome in TIMED_OUTCOMES:
            self._duration(outcome.value)

    def create_buckets(self, buckets: Iterable[Bucket]) -> None:
        """Create the series of these prompt lengths at 0."""
        for bucket in buckets:
            for metric in (self._ttft, self._tpot, self._prefill):
                metric(bucket.label)

    def first_token(self, num_prompt_tokens: int, ttft_s: float, times: RequestTimes | None, trace: Exemplar) -> None:
        bucket = bucket_of(num_prompt_tokens).label
        self._ttft(bucket).observe(ttft_s, trace)
        if times is not None:
            self._queue.observe(times.scheduled_at - times.submitted_at, trace)
            self._prefill(bucket).observe(times.first_token_at - times.scheduled_at, trace)

    def output_token(self, num_prompt_tokens: int, mean_gap_s: float, trace: Exemplar) -> None:
        self._tpot(bucket_of(num_prompt_tokens).label).observe(mean_gap_s, trace)

    def request(self, outcome: Outcome, elapsed_s: float, trace: Exemplar) -> None:
        if outcome in TIMED_OUTCOMES:
            self._duration(outcome.value).observe(elapsed_s, trace)
