"""Spans, as a collector receives them."""

import time
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from prometheus_client import CollectorRegistry

from server.errors import SettingsError
from server.protocol.messages import (
    AttestationReport,
    AttestedBatch,
    ExplainedTime,
    FinishReason,
    LayersStatus,
    PathUse,
    ReplayReport,
    RequestTimes,
    SamplingParams,
    TokenDelta,
)
from server.telemetry import conventions
from server.telemetry.export import EXPORT_TIMEOUT_S, MAX_PENDING_SPANS, CountedExporter
from server.telemetry.metrics import Metrics
from server.telemetry.outcomes import Outcome
from server.telemetry.request import RequestRecord
from server.telemetry.tracing import RequestTrace, Tracing
from support.scraped import scraped_value
from support.telemetry.otlp_collectors import Collector, attributes, events, grpc_collector, http_collector

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
PROVEN = PathUse("prefill", "sdpa.cpu", "proven", [])
FALLBACK = PathUse("prefill", "sdpa.math", "proven", ["head_dim"])
DECODE = PathUse("decode", "triton.decode", "proven", [])


@pytest.fixture
def collector() -> Iterator[Collector]:
    with http_collector() as it:
        yield it


class Subject:
    """A server's tracing and metrics, and what its edge does for a request."""

    def __init__(self, endpoint: str | None, ratio: float = 1.0) -> None:
        self.metrics = Metrics("m", CollectorRegistry(), version="1.0")
        count = self.metrics.traffic.spans_dropped
        self.tracing = Tracing(endpoint, version="1.0", count_dropped=count, ratio=ratio)

    def begin(self, headers: dict[str, str] | None = None) -> RequestRecord:
        trace = self.tracing.begin(
            "POST", "/v1/completions", headers or {}, request_id="mine", arrived_at=time.monotonic()
        )
        return RequestRecord(self.metrics, trace, "id-1", operation="text_completion")

    def serve(self, headers: dict[str, str] | None = None, *uses: PathUse) -> RequestRecord:
        """One that is answered, with these decisions."""
        record = self.begin(headers)
        at = record.arrived_at
        record.tokenized(at)
        record.describe(SamplingParams(max_tokens=9), matrix_digest="abc", layers=LayersStatus.PROVEN, is_stream=True)
        sequence = record.sequence(130)
        times = RequestTimes(at + 0.001, at + 0.002, at + 0.004, 3, 16)
        sequence.delta(TokenDelta("id-1", [1], times=times, path_uses=list(uses or (PROVEN, DECODE))))
        sequence.tokens(1)
        sequence.delta(TokenDelta("id-1", [2], FinishReason.STOP))
        sequence.tokens(1)
        sequence.end("stop")
        record.end(Outcome.OK, status=200, error_code=None)
        return record

    def fail(self, headers: dict[str, str] | None = None) -> RequestRecord:
        record = self.begin(headers)
        record.sequence(130)
        record.end(Outcome.SERVER_ERROR, status=500, error_code="internal_error")
        return record

    @property
    def num_dropped(self) -> float | None:
        return scraped_value(self.metrics.registry, "hallmark_spans_dropped_total")


def test_a_tracestate_is_not_even_read(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    subject = Subject(collector.url)
    record = subject.serve({"traceparent": TRACEPARENT, "tracestate": "=" * 8000})
    subject.tracing.close()
    assert record.trace.trace_id == TRACE_ID
    assert caplog.records == []  # the library quotes what it cannot read


def test_the_operation_carries_the_decision_and_the_usage(collector: Collector) -> None:
    subject = Subject(collector.url)
    subject.serve(None, FALLBACK, DECODE)
    subject.tracing.close()
    found = attributes(collector.named("text_completion m"))
    assert found.pop("gen_ai.response.time_to_first_chunk") > 0  # type: ignore[operator]
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "hallmark",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "id-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 130,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "hallmark.cached_tokens": 16,
        "hallmark.bucket": "le_512",
        "hallmark.attention.path": ["sdpa.math", "triton.decode"],
        "hallmark.attention.status": ["proven", "proven"],
        "hallmark.attention.fallback": True,
        "hallmark.attention.reasons": ["head_dim"],
        "hallmark.attention.matrix_digest": "abc",
    }
    selected = {"phase": "prefill", "path": "sdpa.math", "status": "proven"}
    assert events(collector.named("text_completion m")) == [
        ("attention.selected", selected),
        ("attention.fallback", selected | {"reasons": "head_dim"}),
        ("attention.selected", {"phase": "decode", "path": "triton.decode", "status": "proven"}),
        ("first_token", {}),
    ]


def test_the_operation_carries_the_digest_of_its_receipt(collector: Collector) -> None:
    subject = Subject(collector.url)
    record = subject.begin()
    record.receipted("0af1")
    record.end(Outcome.OK, status=200, error_code=None)
    subject.tracing.close()
    assert attributes(collector.named("text_completion m"))["hallmark.receipt.digest"] == "0af1"


def test_the_server_span_says_what_http_says(collector: Collector) -> None:
    subject = Subject(collector.url)
    subject.serve()
    subject.tracing.close()
    kinds = {span.name: span.kind for span in collector.spans}
    assert kinds.pop("POST /v1/completions") == Span.SPAN_KIND_SERVER
    assert set(kinds.values()) == {Span.SPAN_KIND_INTERNAL}
    assert attributes(collector.named("POST /v1/completions")) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "hallmark.request_id": "mine",
    }
    assert collector.resource == {"service.name": "hallmark", "service.version": "1.0"}
    assert collector.schemas == {conventions.SCHEMA_URL}


def test_stages_are_timed_and_follow_one_another(collector: Collector) -> None:
    subject = Subject(collector.url)
    subject.serve()
    subject.tracing.close()
    queue, prefill, decode = (collector.named(f"hallmark.{name}") for name in ("queue", "prefill", "decode"))
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == pytest.approx(1e6, abs=1e3)
    assert prefill.end_time_unix_nano - prefill.start_time_unix_nano == pytest.approx(2e6, abs=1e3)
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert attributes(prefill)["hallmark.attention.path"] == ["sdpa.cpu"]
    assert attributes(prefill)["hallmark.num_chunks"] == 3
    assert attributes(decode)["hallmark.attention.path"] == ["triton.decode"]
    assert abs(queue.start_time_unix_nano / 1e9 - time.time()) < 60


@pytest.mark.parametrize(("ratio", "headers"), [(0.0, {}), (1.0, UNSAMPLED)], ids=["ratio", "client"])
def test_what_is_not_sampled_is_no_span_and_no_exemplar(
    collector: Collector, ratio: float, headers: dict[str, str]
) -> None:
    subject = Subject(collector.url, ratio)
    record = subject.serve(headers)
    subject.tracing.close()
    assert collector.spans == []
    assert record.trace.exemplar is None
    assert record.trace.traceparent.endswith("-00")  # the trace goes on, unsampled


@pytest.mark.parametrize(("ratio", "headers"), [(0.0, {}), (1.0, UNSAMPLED)], ids=["ratio", "client"])
def test_errors_and_fallbacks_are_exported_unsampled_too(
    collector: Collector, ratio: float, headers: dict[str, str]
) -> None:
    subject = Subject(collector.url, ratio)
    failed = subject.fail(headers)
    fallen = subject.serve(headers, FALLBACK, DECODE)
    subject.tracing.close()
    kept = {span.trace_id.hex() for span in collector.spans}
    assert kept == {failed.trace.trace_id, fallen.trace.trace_id}
    assert fallen.trace.exemplar is not None


def test_a_ratio_keeps_about_its_share_of_the_traces(collector: Collector) -> None:
    subject = Subject(collector.url, 0.25)
    sampled = [subject.begin().trace.is_sampled for _ in range(400)]
    subject.tracing.close()
    assert 60 <= sum(sampled) <= 145  # 100 +- 5 standard deviations


def test_a_request_that_was_turned_away_is_no_failure_to_keep(collector: Collector) -> None:
    subject = Subject(collector.url, 0.0)
    subject.begin().end(Outcome.REJECTED, status=429, error_code="too_many_requests")
    subject.tracing.close()
    assert collector.spans == []


def test_without_an_endpoint_a_request_has_ids_only() -> None:
    subject = Subject(None)
    record = subject.serve({"traceparent": TRACEPARENT})
    assert record.trace.trace_id == TRACE_ID
    assert record.trace.exemplar is None
    other = subject.serve()
    assert len(other.trace.trace_id) == 32
    assert other.trace.trace_id != TRACE_ID
    subject.tracing.close()


def test_a_malformed_traceparent_begins_a_new_trace(collector: Collector) -> None:
    subject = Subject(collector.url)
    record = subject.serve({"traceparent": f"00-{TRACE_ID}-xyz-01"})
    subject.tracing.close()
    assert record.trace.trace_id != TRACE_ID
    assert len(collector.spans) == 6


def end_of(trace: RequestTrace) -> None:
    trace.end("x", ended_at=time.monotonic(), is_error=False)


def test_a_dead_collectors_losses_are_counted_and_not_felt(refused_url: str, caplog: pytest.LogCaptureFixture) -> None:
    subject = Subject(refused_url)  # an export fails and is retried: one a trace would take longer than a test may
    for trace in [subject.begin().trace for _ in range(1024 + 50)]:
        end_of(trace)
    assert subject.num_dropped is not None
    assert subject.num_dropped >= 100
    began_at = time.monotonic()
    subject.tracing.close()
    assert time.monotonic() - began_at < 5 * EXPORT_TIMEOUT_S
    assert subject.num_dropped == 2 * 1074
    ours = [record for record in caplog.records if record.name == "server.telemetry.export"]
    assert len(ours) == 1  # not one a batch


def test_a_collector_that_speaks_grpc_gets_the_same_tree() -> None:
    with grpc_collector() as collector:
        subject = Subject(collector.url)
        subject.serve({"traceparent": TRACEPARENT})
        subject.tracing.close()
        assert collector.tree()["text_completion m"] == [
            *("hallmark.tokenize", "hallmark.queue", "hallmark.prefill", "hallmark.decode")
        ]
        assert collector.named("POST /v1/completions").parent_span_id.hex() == PARENT_ID


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "udp://127.0.0.1:4318", "http://", "grpc://"])
def test_an_address_of_no_known_kind_stops_the_start(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="--otlp-endpoint"):
        Subject(endpoint)


def test_the_genai_names_are_those_of_the_conventions() -> None:
    known = {text for name, text in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    ours = {text for name, text in vars(conventions).items() if name.startswith("GEN_AI_")}
    assert len(ours) >= 14
    assert ours <= known


def test_an_attestation_is_a_trace_with_an_event_a_batch(collector: Collector) -> None:
    subject = Subject(collector.url, ratio=0.0)
    explained = ExplainedTime(0.25, {"evidence": 1.0, "unproven": 3.0}, {"gemm": 3.0}, {})
    wrong = "did not launch hallmark_decode"
    batch = AttestedBatch("decode", ["triton.decode"], True, {"other": 4}, "mismatch", wrong, explained)
    subject.tracing.attested(AttestationReport("timer", "mismatch", 1000.5, 0.5, [batch], []))
    subject.tracing.close()
    (span,) = collector.spans
    assert (span.name, attributes(span)["trigger"]) == (conventions.ATTESTATION, "timer")
    assert span.end_time_unix_nano - span.start_time_unix_nano == 500_000_000
    (event,) = span.events
    assert event.name == conventions.ATTESTED
    assert {it.key: it.value.string_value for it in event.attributes}["detail"] == wrong
    assert {it.key: it.value.double_value for it in event.attributes}["explained_ratio"] == 0.25


def test_a_differing_replay_is_a_span_of_its_requests_trace(collector: Collector) -> None:
    subject = Subject(collector.url, ratio=0.0)
    parent = f"00-{5:032x}-{7:016x}-00"
    differs = ReplayReport("mismatch", 1000.5, "hit", "cache", 3, 9, None, "token 3", 0.5, parent, "r")
    subject.tracing.replayed(differs)
    subject.tracing.replayed(msgspec.structs.replace(differs, result="match", cause=None, place=None))
    subject.tracing.close()
    (span,) = collector.spans  # of an answer that matches only where its trace is sampled
    assert (span.name, int.from_bytes(span.trace_id), int.from_bytes(span.parent_span_id)) == ("hallmark.replay", 5, 7)
    assert {name: attributes(span)[name] for name in ("route", "cause")} == {"route": "hit", "cause": "cache"}


class BrokenExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise OSError(f"{len(spans)} spans cannot be sent")


def test_spans_that_raise_are_counted_and_make_room() -> None:
    dropped: list[int] = []
    exporter = CountedExporter(BrokenExporter(), dropped.append)
    for _ in range(2):
        spans = [ReadableSpan("a")] * MAX_PENDING_SPANS
        assert all(exporter.admit() for _ in spans)
        with pytest.raises(OSError, match="2048 spans"):
            exporter.export(spans)
    assert dropped == [MAX_PENDING_SPANS] * 2
