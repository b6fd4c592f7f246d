"""Spans, as a collector receives them."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from server.engine.messages import AttentionUse, FinishReason, RequestTimes, SamplingParams, TokenDelta
from server.telemetry.metrics import Metrics
from server.telemetry.outcomes import Outcome
from server.telemetry.registry import Registry
from server.telemetry.request import RequestRecord
from server.telemetry.tracing import Tracing, exemplar_of, traceparent_of

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
TIMES = RequestTimes(1.0, 1.25, 1.75, 3, 16)
USES = [AttentionUse("prefill", "sdpa.math", "proven", ["head_dim"]), AttentionUse("decode", "sdpa.cpu", "proven", [])]


class Collector:
    """An OTLP/HTTP collector on a free port."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    it = Collector()
    yield it
    it.close()


def plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    return [plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def attributes(holder: object) -> dict[str, object]:
    return {item.key: plain(item.value) for item in holder.attributes}  # type: ignore[attr-defined]


def make(endpoint: str | None) -> tuple[Tracing, Metrics]:
    metrics = Metrics("m", Registry(), version="1.0")
    return Tracing(endpoint, version="1.0", count_dropped=metrics.traffic.spans_dropped), metrics


def serve_one(tracing: Tracing, metrics: Metrics, headers: dict[str, str]) -> RequestRecord:
    """What the edge does for a request that is answered."""
    span = tracing.start("POST /v1/completions", headers)
    record = RequestRecord(metrics, span, "id-1", request_id="mine", arrived_at=0.0, now=lambda: 2.0)
    record.describe("text_completion", SamplingParams(max_tokens=9), matrix_digest="abc", is_stream=True)
    sequence = record.sequence(130)
    sequence.delta(TokenDelta("id-1", [1], times=TIMES))
    sequence.tokens(1)
    sequence.delta(TokenDelta("id-1", [2], FinishReason.STOP, attention=USES))
    sequence.tokens(1)
    sequence.end("stop")
    record.end(Outcome.OK, status=200, error_code=None)
    return record


def test_a_span_continues_the_clients_trace_and_carries_the_decision(collector: Collector) -> None:
    tracing, metrics = make(collector.url)
    serve_one(tracing, metrics, {"traceparent": TRACEPARENT})
    tracing.close()
    [span] = collector.spans
    assert span.name == "POST /v1/completions"
    assert span.kind == Span.SPAN_KIND_SERVER
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    found = attributes(span)
    assert found["hallmark.attention.path"] == ["sdpa.math", "sdpa.cpu"]
    assert found["hallmark.attention.status"] == ["proven", "proven"]
    assert found["hallmark.attention.fallback"] is True
    assert found["hallmark.attention.reasons"] == ["head_dim"]
    assert found["hallmark.attention.matrix_digest"] == "abc"
    assert found["hallmark.request_id"] == "mine"
    assert found["hallmark.bucket"] == "le_512"
    assert found["hallmark.cached_tokens"] == 16
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.usage.input_tokens"] == 130
    assert found["gen_ai.usage.output_tokens"] == 2
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert found["http.response.status_code"] == 200
    events = [(event.name, attributes(event)) for event in span.events]
    assert events == [
        ("first_token", {}),
        ("attention.selected", {"phase": "prefill", "path": "sdpa.math", "status": "proven"}),
        (
            "attention.fallback",
            {"phase": "prefill", "path": "sdpa.math", "status": "proven", "reasons": "head_dim"},
        ),
        ("attention.selected", {"phase": "decode", "path": "sdpa.cpu", "status": "proven"}),
    ]


def test_a_leaving_client_and_a_failure_are_on_the_span(collector: Collector) -> None:
    tracing, metrics = make(collector.url)
    record = RequestRecord(metrics, tracing.start("POST /x", {}), "id-1", request_id="mine", arrived_at=0.0)
    record.disconnected(is_slow=False)
    record.end(Outcome.SERVER_ERROR, status=503, error_code="engine_died")
    tracing.close()
    [span] = collector.spans
    assert attributes(span)["error.type"] == "engine_died"
    assert span.status.code == 2
    assert [(event.name, attributes(event)) for event in span.events] == [("client.disconnect", {"stage": "queued"})]


def test_a_client_that_does_not_sample_gets_no_span_and_no_exemplar(collector: Collector) -> None:
    tracing, metrics = make(collector.url)
    record = serve_one(tracing, metrics, {"traceparent": TRACEPARENT[:-2] + "00"})
    tracing.close()
    assert collector.spans == []
    assert exemplar_of(record.span) is None
    assert traceparent_of(record.span) is not None  # the trace goes on, unsampled


def test_the_first_token_of_a_sampled_request_is_an_exemplar_in_openmetrics_only(collector: Collector) -> None:
    tracing, metrics = make(collector.url)
    serve_one(tracing, metrics, {"traceparent": TRACEPARENT})
    tracing.close()
    lines = generate_openmetrics(metrics.registry).decode().splitlines()
    ttft = [line for line in lines if line.startswith("hallmark_time_to_first_token_seconds_bucket") and "#" in line]
    assert len(ttft) == 1
    assert TRACE_ID in ttft[0]
    assert TRACE_ID.encode() not in generate_latest(metrics.registry)


def test_without_an_endpoint_nothing_is_recorded() -> None:
    tracing, metrics = make(None)
    record = serve_one(tracing, metrics, {"traceparent": TRACEPARENT})
    assert not record.span.is_recording()
    assert traceparent_of(record.span) is None
    tracing.close()


def test_spans_that_the_collector_does_not_take_are_counted(collector: Collector) -> None:
    collector.status = 400
    tracing, metrics = make(collector.url)
    for _ in range(3):
        tracing.start("x", {}).end()
    tracing.close()
    assert metrics.registry.get_sample_value("hallmark_spans_dropped_total") == 3


def test_spans_beyond_the_queue_are_dropped_and_counted() -> None:
    tracing, metrics = make("http://127.0.0.1:9")  # nothing listens: an export fails and is retried
    for _ in range(2048 + 100):
        tracing.start("x", {}).end()
    dropped = metrics.registry.get_sample_value("hallmark_spans_dropped_total")
    assert dropped is not None
    assert dropped >= 100
    tracing.close()
    assert metrics.registry.get_sample_value("hallmark_spans_dropped_total") == 2148
