"""What one generation request adds to the metrics and to its span, from the same observations."""

import time
from collections.abc import Callable, Iterable

from opentelemetry.trace import Span, StatusCode

from kernels.buckets import bucket_of
from server.engine.messages import AttentionUse, RequestTimes, SamplingParams, TokenDelta
from server.telemetry.metrics import Metrics
from server.telemetry.outcomes import DisconnectStage, Outcome
from server.telemetry.tracing import exemplar_of


class RequestRecord:
    """One HTTP request that generates. `end` is called exactly once."""

    def __init__(
        self,
        metrics: Metrics,
        span: Span,
        unique_id: str,
        *,
        request_id: str,
        arrived_at: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.span = span
        self.exemplar = exemplar_of(span)
        self.arrived_at = arrived_at
        self.now = now
        self.has_first_token = False
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self._longest_prompt: int | None = None
        self._unique_id = unique_id
        self._uses: dict[tuple[str, str], AttentionUse] = {}
        self._finish_reasons: list[str] = []
        metrics.traffic.began(unique_id, arrived_at)
        span.set_attribute("hallmark.request_id", request_id)

    def describe(self, operation: str, sampling: SamplingParams, *, matrix_digest: str | None, is_stream: bool) -> None:
        """Name the request's attributes, in the terms of the GenAI conventions where they have one."""
        span = self.span
        if not span.is_recording():
            return
        span.set_attribute("gen_ai.operation.name", operation)
        span.set_attribute("gen_ai.provider.name", "hallmark")
        span.set_attribute("gen_ai.request.model", self.metrics.model)
        span.set_attribute("gen_ai.request.max_tokens", sampling.max_tokens)
        span.set_attribute("gen_ai.request.temperature", sampling.temperature)
        span.set_attribute("gen_ai.request.top_p", sampling.top_p)
        span.set_attribute("gen_ai.request.stream", is_stream)
        span.set_attribute("hallmark.attention.matrix_digest", matrix_digest or "none")

    def sequence(self, num_prompt_tokens: int) -> "SequenceRecord":
        self.num_prompt_tokens += num_prompt_tokens
        self._longest_prompt = max(num_prompt_tokens, self._longest_prompt or 0)
        self.span.set_attribute("hallmark.bucket", bucket_of(num_prompt_tokens).label)
        return SequenceRecord(self, num_prompt_tokens)

    def first_token(self, times: RequestTimes | None) -> None:
        if not self.has_first_token:
            self.span.add_event("first_token")
        self.has_first_token = True
        if times is not None:
            self.span.set_attribute("hallmark.num_chunks", times.num_chunks)
            self.span.set_attribute("hallmark.cached_tokens", times.num_cached_tokens)

    def attention(self, uses: Iterable[AttentionUse]) -> None:
        for use in uses:
            if (use.phase, use.path) in self._uses:
                continue
            self._uses[use.phase, use.path] = use
            what = {"phase": use.phase, "path": use.path, "status": use.status}
            self.span.add_event("attention.selected", what)
            if use.fallback_reasons:
                self.span.add_event("attention.fallback", what | {"reasons": ",".join(use.fallback_reasons)})

    def finished(self, reason: str) -> None:
        self._finish_reasons.append(reason)

    def disconnected(self, *, is_slow: bool) -> None:
        if is_slow:
            stage = DisconnectStage.SLOW_READER
        else:
            stage = DisconnectStage.STREAMING if self.has_first_token else DisconnectStage.QUEUED
        self.metrics.traffic.disconnected(stage)
        self.span.add_event("client.disconnect", {"stage": stage.value})

    def end(self, outcome: Outcome, *, status: int | None, error_code: str | None) -> None:
        self.metrics.generation_ended(self._unique_id, outcome, self._longest_prompt, self.exemplar)
        span = self.span
        if span.is_recording():
            span.set_attribute("gen_ai.usage.input_tokens", self.num_prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", self.num_tokens)
            span.set_attribute("gen_ai.response.finish_reasons", self._finish_reasons)
            self._set_attention()
            if status is not None:
                span.set_attribute("http.response.status_code", status)
            if error_code is not None:
                span.set_attribute("error.type", error_code)
            if outcome is Outcome.SERVER_ERROR:
                span.set_status(StatusCode.ERROR)
        span.end()

    def _set_attention(self) -> None:
        uses = self._uses.values()
        reasons = sorted({reason for use in uses for reason in use.fallback_reasons})
        self.span.set_attribute("hallmark.attention.path", [use.path for use in uses])
        self.span.set_attribute("hallmark.attention.status", [use.status for use in uses])
        self.span.set_attribute("hallmark.attention.fallback", bool(reasons))
        self.span.set_attribute("hallmark.attention.reasons", reasons)


class SequenceRecord:
    """One prompt of a request: it is measured under its own prompt's bucket."""

    def __init__(self, request: RequestRecord, num_prompt_tokens: int) -> None:
        self._request = request
        self._num_prompt_tokens = num_prompt_tokens
        self._first_at: float | None = None
        self._last_at = 0.0
        self.num_tokens = 0

    def delta(self, delta: TokenDelta) -> None:
        request = self._request
        self._last_at = request.now()
        if delta.token_ids and self._first_at is None:
            self._first_at = self._last_at
            request.first_token(delta.times)
            ttft_s = self._last_at - request.arrived_at
            request.metrics.first_token(self._num_prompt_tokens, ttft_s, delta.times, request.exemplar)
        if delta.attention is not None:
            request.attention(delta.attention)

    def tokens(self, num_tokens: int) -> None:
        """Tokens that are part of the answer: those behind a stop string are not."""
        self.num_tokens += num_tokens
        self._request.num_tokens += num_tokens
        self._request.metrics.traffic.generated(num_tokens)

    def end(self, finish_reason: str) -> None:
        request = self._request
        request.finished(finish_reason)
        if self._first_at is not None and self.num_tokens > 1:
            decode_s = self._last_at - self._first_at
            request.metrics.sequence_ended(self._num_prompt_tokens, self.num_tokens - 1, decode_s, request.exemplar)
