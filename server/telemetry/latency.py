"""How long what took: histograms by the length of the prompt, with exemplars that lead to traces."""

from collections.abc import Iterable

from kernels.buckets import Bucket, bucket_of
from server.protocol.messages import RequestTimes
from server.telemetry.outcomes import Outcome
from server.telemetry.registry import Maker, ladder
from server.telemetry.series import Exemplar

FINE_TTFT_S = (0.004, 4.0)  # from the fastest first token of a small model on an H200 to what nobody waits for


class LatencyMetrics:
    def __init__(self, make: Maker, model: str) -> None:
        self._ttft = make.histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token, by prompt length",
            ladder(60, FINE_TTFT_S),
            "bucket",
            model=model,
        )
        self._tpot = make.histogram(
            "time_per_output_token_seconds", "Mean time between a request's tokens", ladder(1), "bucket", model=model
        )
        self._prefill = make.histogram(
            "prefill_seconds", "From first schedule to the first token", ladder(60), "bucket", model=model
        )
        self._queue = make.histogram("queue_seconds", "From submission to first schedule", ladder(60), model=model).of()
        self._duration = make.histogram(
            "request_duration_seconds", "From arrival to the last byte", ladder(600), "outcome", model=model
        )
        for outcome in Outcome:
            self._duration.of(outcome.value)

    def create_buckets(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            for metric in (self._ttft, self._tpot, self._prefill):
                metric.of(bucket.label)

    def first_token(self, num_prompt_tokens: int, ttft_s: float, times: RequestTimes | None, trace: Exemplar) -> None:
        bucket = bucket_of(num_prompt_tokens).label
        self._ttft.of(bucket).observe(ttft_s, trace)
        if times is not None:
            self._queue.observe(times.scheduled_at - times.submitted_at, trace)
            self._prefill.of(bucket).observe(times.first_token_at - times.scheduled_at, trace)

    def output_token(self, num_prompt_tokens: int, mean_gap_s: float, trace: Exemplar) -> None:
        self._tpot.of(bucket_of(num_prompt_tokens).label).observe(mean_gap_s, trace)

    def request(self, outcome: Outcome, elapsed_s: float, trace: Exemplar) -> None:
        self._duration.of(outcome.value).observe(elapsed_s, trace)
