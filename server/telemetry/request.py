"""Observations of one generation request, for the metrics and for its trace alike."""

import time
from collections.abc import Callable, Iterable

from kernels.vocabulary.buckets import bucket_of
from kernels.vocabulary.shape import Phase
from qualification.decision.decision import Status
from server.protocol.messages import LayersStatus, PathUse, RequestTimes, SamplingParams, TokenDelta
from server.protocol.plan_rows import TOWER
from server.telemetry import conventions as names
from server.telemetry.metrics import Metrics
from server.telemetry.outcomes import DisconnectStage, Outcome
from server.telemetry.tracing import Attributes, RequestTrace

# Phases of PathUse that only a prompt's own computation is, and only decoding; other operators are part of both.
_PROMPT, _DECODE = (TOWER, Phase.PREFILL.value, Phase.EXTEND.value), (Phase.DECODE.value, Phase.VERIFY.value)
_FROM_BEST_TO_WORST = [status.value for status in Status]
_FAILED = Status.FAILED.value


class RequestRecord:
    """One HTTP request that generates. `end` is called exactly once."""

    def __init__(
        self,
        metrics: Metrics,
        trace: RequestTrace,
        unique_id: str,
        *,
        operation: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`operation` in the terms of the GenAI conventions."""
        self.metrics = metrics
        self.trace = trace
        self.now = now
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_reasoning_tokens = 0
        self.matrix_digest: str | None = None  # of the plan that serves it
        self.receipt_digest: str | None = None  # once it has a receipt
        self.layers: LayersStatus | None = None  # of the engine that serves it
        self.first_token_at: float | None = None
        self._unique_id = unique_id
        self._operation = operation
        self._sequences: list[SequenceRecord] = []
        self.kernel_status: str | None = None  # the worst of the decisions that have served it so far
        self._uses: dict[tuple[str, str, str], PathUse] = {}
        self._latest_uses: list[PathUse] | None = None
        self._finish_reasons: list[str] = []
        metrics.traffic.began(unique_id, trace.arrived_at)

    @property
    def arrived_at(self) -> float:
        return self.trace.arrived_at

    @property
    def uses(self) -> list[PathUse]:
        """The distinct decisions that have served it so far."""
        return list(self._uses.values())

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of its longest prompt; None before they are counted."""
        return max((it.num_prompt_tokens for it in self._sequences), default=None)

    def tokenized(self, began_at: float) -> None:
        """The body is parsed and its prompts are token ids, just now."""
        self.trace.stage(names.TOKENIZE, began_at, self.now(), {})

    def describe(
        self, sampling: SamplingParams, *, matrix_digest: str | None, layers: LayersStatus, is_stream: bool
    ) -> None:
        self.matrix_digest, self.layers = matrix_digest, layers
        if not self.trace.is_recording:
            return
        self.trace.attributes |= {
            names.GEN_AI_MAX_TOKENS: sampling.max_tokens,
            names.GEN_AI_TEMPERATURE: sampling.temperature,
            names.GEN_AI_TOP_P: sampling.top_p,
            names.GEN_AI_STREAM: is_stream,
            names.MATRIX_DIGEST: matrix_digest or "none",
        }

    def sequence(self, num_prompt_tokens: int, *, is_first: bool = True) -> "SequenceRecord":
        """One more answer; `is_first`: of its prompt, which is computed once and counts once."""
        self.num_prompt_tokens += num_prompt_tokens if is_first else 0
        found = SequenceRecord(self, len(self._sequences), num_prompt_tokens, is_first=is_first)
        self._sequences.append(found)
        return found

    def first_token(self, at: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = at
            self.trace.event(names.FIRST_TOKEN, at)

    def served_by(self, uses: list[PathUse]) -> None:
        """Record the decisions that served it; those that are recorded already change nothing."""
        if uses is self._latest_uses:
            return
        self._latest_uses = uses
        if self.layers is LayersStatus.FAILED:
            self.kernel_status = max(self.kernel_status or _FAILED, _FAILED, key=_FROM_BEST_TO_WORST.index)
        for use in uses:
            if (use.phase, use.path, use.status) in self._uses:
                continue
            if self.kernel_status != use.status:
                known = [use.status] if self.kernel_status is None else [use.status, self.kernel_status]
                self.kernel_status = max(known, key=_FROM_BEST_TO_WORST.index)
            self._uses[use.phase, use.path, use.status] = use
            if use.fallback_reasons:
                self.trace.keep()
            if not self.trace.is_recording:
                continue
            what: Attributes = {names.PHASE: use.phase, names.PATH: use.path, names.STATUS: use.status}
            self.trace.event(names.ATTENTION_SELECTED, self.now(), what)
            if use.fallback_reasons:
                reasons = ",".join(use.fallback_reasons)
                self.trace.event(names.ATTENTION_FELL_BACK, self.now(), what | {names.REASONS: reasons})

    def receipted(self, digest: str) -> None:
        """The answer has a receipt whose content has this digest."""
        self.receipt_digest = digest
        self.metrics.traffic.receipted()
        if self.trace.is_recording:
            self.trace.attributes[names.RECEIPT_DIGEST] = digest

    def finished(self, reason: str) -> None:
        self._finish_reasons.append(reason)

    def disconnected(self, *, is_slow: bool) -> None:
        if is_slow:
            stage = DisconnectStage.SLOW_READER
        else:
            stage = DisconnectStage.QUEUED if self.first_token_at is None else DisconnectStage.STREAMING
        self.metrics.traffic.disconnected(stage)
        self.trace.event(names.CLIENT_DISCONNECT, self.now(), {names.STAGE: stage.value})

    def end(self, outcome: Outcome, *, status: int | None, error_code: str | None) -> None:
        now = self.now()
        has_failed = outcome is Outcome.SERVER_ERROR or (outcome is Outcome.REJECTED and bool(self._sequences))
        if has_failed:  # it was admitted, and we did not serve it
            self.trace.keep()
        longest = self.longest_prompt
        self.metrics.generation_ended(self._unique_id, outcome, longest, self.trace.exemplar)
        for it in self._sequences:
            if it.first_token_at is None:
                self.metrics.slo.no_first_token(it.num_prompt_tokens, outcome, now - self.arrived_at)
        if self.trace.is_recording:
            self._finish_trace(now, longest, status, error_code)
            self.trace.end(f"{self._operation} {self.metrics.model}", ended_at=now, is_error=has_failed)

    def _finish_trace(self, now: float, longest: int | None, status: int | None, error_code: str | None) -> None:
        for it in self._sequences:
            it.add_stages(now, self.uses)
        trace = self.trace
        trace.attributes |= {
            names.GEN_AI_OPERATION: self._operation,
            names.GEN_AI_PROVIDER: "hallmark",
            names.GEN_AI_REQUEST_MODEL: self.metrics.model,
            names.GEN_AI_RESPONSE_MODEL: self.metrics.model,
            names.GEN_AI_RESPONSE_ID: self._unique_id,
            names.GEN_AI_INPUT_TOKENS: self.num_prompt_tokens,
            names.GEN_AI_OUTPUT_TOKENS: self.num_tokens,
            names.GEN_AI_CACHED_TOKENS: self.num_cached_tokens,
            names.CACHED_TOKENS: self.num_cached_tokens,
            names.GEN_AI_FINISH_REASONS: self._finish_reasons,
            **path_attributes(self._uses.values()),
        }
        if longest is not None:
            trace.attributes[names.BUCKET] = bucket_of(longest).label
        if self.first_token_at is not None:
            trace.attributes[names.GEN_AI_TIME_TO_FIRST_CHUNK] = self.first_token_at - self.arrived_at
        if status is not None:
            trace.server_attributes[names.HTTP_STATUS] = status
        if error_code is not None:
            trace.server_attributes[names.ERROR_TYPE] = trace.attributes[names.ERROR_TYPE] = error_code


class SequenceRecord:
    """One prompt of a request: it is measured under its own prompt's bucket."""

    def __init__(self, request: RequestRecord, index: int, num_prompt_tokens: int, *, is_first: bool) -> None:
        self._is_first = is_first
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.first_token_at: float | None = None
        self._request = request
        self._index = index
        self._began_at = request.now()
        self.now = request.now
        self._last_at = 0.0
        self._times: RequestTimes | None = None
        self._is_ended = False

    @property
    def traceparent(self) -> str:
        """Return the request's trace parent for the engine's process."""
        return self._request.trace.traceparent

    def served_by(self, uses: list[PathUse]) -> None:
        """Record the decisions of a delta before it is written: the head of the answer names them."""
        self._request.served_by(uses)

    def delta(self, delta: TokenDelta, at: float | None = None) -> None:
        """Count a piece that came `at` (monotonic seconds), or just now."""
        request, before = self._request, self._last_at
        self._last_at = request.now() if at is None else at
        if delta.path_uses is not None:  # first, for a fallback makes the trace one that exemplars may lead to
            request.served_by(delta.path_uses)
        if self.first_token_at is not None:
            if request.metrics.vllm is not None and delta.token_ids:
                request.metrics.vllm.next_token(self._last_at - before)
        elif delta.token_ids or delta.pooled is not None:
            self.first_token_at = self._last_at
            self._times = delta.times
            if self._is_first:
                request.num_cached_tokens += 0 if delta.times is None else delta.times.num_cached_tokens
            request.first_token(self._last_at)
            ttft_s = self._last_at - request.arrived_at
            request.metrics.first_token(
                self.num_prompt_tokens, ttft_s, delta.times, request.trace.exemplar, is_first=self._is_first
            )

    def tokens(self, num_tokens: int) -> None:
        """Tokens that are part of the answer: those behind a stop string are not."""
        self.num_tokens += num_tokens
        self._request.num_tokens += num_tokens
        self._request.metrics.traffic.generated(num_tokens)

    def reasoning_tokens(self, num_tokens: int) -> None:
        """Count tokens of the answer that are reasoning."""
        self._request.num_reasoning_tokens += num_tokens

    def end(self, finish_reason: str) -> None:
        request, vllm = self._request, self._request.metrics.vllm
        self._is_ended = True
        request.finished(finish_reason)
        request.metrics.traffic.add_generated()
        if vllm is not None:
            vllm.sequence_ended(self._last_at - request.arrived_at)
        if self.first_token_at is not None and self.num_tokens > 1:
            decode_s = self._last_at - self.first_token_at
            request.metrics.sequence_ended(
                self.num_prompt_tokens, self.num_tokens - 1, decode_s, request.trace.exemplar
            )

    def add_stages(self, now: float, uses: list[PathUse]) -> None:
        """Add the spans, as the engine timed them. The engine says nothing of what ended before its first token."""
        add, times = self._request.trace.stage, self._times
        which: Attributes = {names.SEQUENCE: self._index, names.BUCKET: bucket_of(self.num_prompt_tokens).label}
        if times is None:
            add(names.QUEUE, self._began_at, now, which | {names.IS_COMPLETE: False})
            return
        add(names.QUEUE, times.submitted_at, times.scheduled_at, which | {names.IS_COMPLETE: True})
        prefill = which | {names.NUM_CHUNKS: times.num_chunks, names.CACHED_TOKENS: times.num_cached_tokens}
        prefill |= path_attributes(use for use in uses if use.phase not in _DECODE)
        if any(use.phase == TOWER for use in uses):
            prefill[names.COMPUTED_IMAGES] = times.num_computed_images
            prefill[names.TOWER_PATH] = [use.path for use in uses if use.phase == TOWER]
            if times.tower_s is not None:
                prefill[names.TOWER_SECONDS] = times.tower_s
        add(names.PREFILL, times.scheduled_at, times.first_token_at, prefill | {names.IS_COMPLETE: True})
        decode = which | {names.GEN_AI_OUTPUT_TOKENS: self.num_tokens, names.IS_COMPLETE: self._is_ended}
        decode |= path_attributes(use for use in uses if use.phase not in _PROMPT)
        add(names.DECODE, times.first_token_at, self._last_at if self._is_ended else now, decode)


def path_attributes(uses: Iterable[PathUse]) -> Attributes:
    """Return the decisions that served: the same position of each list is the same decision."""
    uses = list(uses)
    reasons = sorted({reason for use in uses for reason in use.fallback_reasons})
    return {
        names.ATTENTION_PATH: [use.path for use in uses],
        names.ATTENTION_STATUS: [use.status for use in uses],
        names.ATTENTION_FALLBACK: bool(reasons),
        names.ATTENTION_REASONS: reasons,
    }
