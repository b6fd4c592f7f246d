"""One SERVER span a request, sent to an OTLP/HTTP collector; without an endpoint nothing is made and nothing costs."""

import threading
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

MAX_PENDING_SPANS = 2048
EXPORT_TIMEOUT_S = 2.0  # a dead collector must not hold up the shutdown: with 5 s it took 8 s
FLUSH_INTERVAL_MS = 1000.0


class _CountedExporter(SpanExporter):
    """Passes batches on; counts the spans that still wait and those that were lost."""

    def __init__(self, inner: SpanExporter, count_dropped: Callable[[int], None]) -> None:
        self._inner = inner
        self._count_dropped = count_dropped
        self._lock = threading.Lock()
        self._num_pending = 0

    def admit(self) -> bool:
        """Whether one more span may wait; counts it as waiting or as lost."""
        with self._lock:
            is_admitted = self._num_pending < MAX_PENDING_SPANS
            self._num_pending += is_admitted
        if not is_admitted:
            self._count_dropped(1)
        return is_admitted

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        with self._lock:
            self._num_pending -= len(spans)
        if result is not SpanExportResult.SUCCESS:
            self._count_dropped(len(spans))
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class _BoundedProcessor(BatchSpanProcessor):
    def __init__(self, exporter: _CountedExporter) -> None:
        super().__init__(exporter, MAX_PENDING_SPANS, FLUSH_INTERVAL_MS)
        self._counted = exporter

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled and self._counted.admit():
            super().on_end(span)


class Tracing:
    """Starts spans. `endpoint` is the collector's base URL; None makes every span a free no-op."""

    def __init__(self, endpoint: str | None, *, version: str, count_dropped: Callable[[int], None]) -> None:
        self._propagator = TraceContextTextMapPropagator()
        self._provider: TracerProvider | None = None
        if endpoint is None:
            return
        url = endpoint if endpoint.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
        resource = Resource({"service.name": "hallmark", "service.version": version})
        self._provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(_BoundedProcessor(_CountedExporter(exporter, count_dropped)))

    def start(self, name: str, headers: Mapping[str, str]) -> Span:
        """A SERVER span that continues the client's trace, if `headers` (lower case) carry one."""
        if self._provider is None:
            return INVALID_SPAN
        parent = self._propagator.extract(headers)
        return self._provider.get_tracer("hallmark").start_span(name, parent, SpanKind.SERVER)

    def close(self) -> None:
        """Send what waits, for a few seconds at most. Blocks: call it off the event loop."""
        if self._provider is not None:
            self._provider.shutdown()


def exemplar_of(span: Span) -> dict[str, str] | None:
    """Labels that link a measurement to its trace; None where the trace is not sampled, for the link would be dead."""
    context = span.get_span_context()
    if not context.trace_flags.sampled:
        return None
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def traceparent_of(span: Span) -> str | None:
    """The W3C header that names this span; None for a no-op span."""
    context = span.get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
