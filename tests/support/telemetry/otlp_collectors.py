"""Collectors that a test can look into: OTLP over HTTP and over gRPC, each on a free port."""

import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.local_http import listening


class Collector:
    """Collector of what has been received."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.raw = b""
        self.resource: dict[str, object] = {}
        self.schemas: set[str] = set()

    def take(self, request: ExportTraceServiceRequest) -> None:
        self.raw += request.SerializeToString()
        for resource in request.resource_spans:
            self.resource |= attributes(resource.resource)
            for scope in resource.scope_spans:
                self.schemas.add(scope.schema_url)
                self.spans.extend(scope.spans)

    def named(self, name: str) -> Span:
        """The only span of that name."""
        [found] = [span for span in self.spans if span.name == name]
        return found

    def tree(self) -> dict[str, list[str]]:
        """Names of the children of each span, by start; spans without a parent here are under ''."""
        by_id = {span.span_id: span for span in self.spans}
        found: dict[str, list[str]] = {}
        for span in sorted(self.spans, key=lambda span: span.start_time_unix_nano):
            parent = by_id.get(span.parent_span_id)
            found.setdefault(parent.name if parent else "", []).append(span.name)
        return found


@contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with listening(Handler) as collector.url:
        yield collector


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:  # noqa: ARG002
            collector.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    collector.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def attributes(holder: object) -> dict[str, object]:
    return {item.key: _plain(item.value) for item in holder.attributes}  # type: ignore[attr-defined]


def events(span: Span) -> list[tuple[str, dict[str, object]]]:
    return [(event.name, attributes(event)) for event in span.events]


def _plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)
