"""The spans of a request: one of the HTTP server, below it one of the model's operation, below that its stages.

Whether a trace is kept is decided at its end: errors and fallbacks always, the rest by a ratio of the trace ids, or as
the client has decided. What is not kept is never ended, hence never exported.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.engine.messages import AttestationReport
from server.telemetry import conventions as names
from server.telemetry.export import BoundedProcessor, CountedExporter, exporter_of
from server.telemetry.registry import Exemplar

Value = str | bool | int | float | list[str]
Attributes = dict[str, Value]


@dataclass(frozen=True, slots=True)
class _Stage:
    """A span below the operation's; times in monotonic seconds."""

    name: str
    began_at: float
    ended_at: float
    attributes: Attributes


@dataclass(slots=True)
class RequestTrace:
    """What becomes the spans of one request, when it ends. `tracer` is None where nothing is exported."""

    tracer: Tracer | None
    server: Span
    is_sampled: bool  # by the client, or by the ratio
    arrived_at: float  # monotonic seconds, as all times here
    is_kept: bool = False  # whatever the sampling says
    server_attributes: Attributes = field(default_factory=dict)
    attributes: Attributes = field(default_factory=dict)  # of the operation
    _offset_ns: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())
    _events: list[tuple[str, Attributes, float]] = field(default_factory=list)
    _stages: list[_Stage] = field(default_factory=list)

    @property
    def is_recording(self) -> bool:
        return self.tracer is not None

    @property
    def trace_id(self) -> str:
        return f"{self.server.get_span_context().trace_id:032x}"

    @property
    def span_id(self) -> str:
        return f"{self.server.get_span_context().span_id:016x}"

    @property
    def traceparent(self) -> str:
        """The W3C header that names the server's span."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"

    @property
    def exemplar(self) -> Exemplar:
        """Labels that link a measurement to its trace; None where that is not kept, for the link would be dead."""
        if self.tracer is None or not (self.is_sampled or self.is_kept):
            return None
        return {"trace_id": self.trace_id, "span_id": self.span_id}

    def keep(self) -> None:
        """Export this trace whatever the sampling says."""
        self.is_kept = True

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        if self.tracer is not None:
            self._events.append((name, attributes or {}, at))

    def stage(self, name: str, began_at: float, ended_at: float, attributes: Attributes) -> None:
        if self.tracer is not None:
            self._stages.append(_Stage(name, began_at, max(began_at, ended_at), attributes))

    def end(self, operation: str, *, ended_at: float, is_error: bool) -> None:
        """Hand all spans to the exporter, if the trace is kept. `operation` names the span below the server's."""
        if self.tracer is None or not (self.is_sampled or self.is_kept):
            return
        inner = self._start(operation, self.server, self.arrived_at, self.attributes)
        for name, attributes, at in self._events:
            inner.add_event(name, attributes, self._ns(at))
        for stage in self._stages:
            self._start(stage.name, inner, stage.began_at, stage.attributes).end(self._ns(stage.ended_at))
        self.server.set_attributes(self.server_attributes)
        for span in (inner, self.server):
            if is_error:
                span.set_status(StatusCode.ERROR)
            span.end(self._ns(ended_at))

    def _start(self, name: str, parent: Span, began_at: float, attributes: Attributes) -> Span:
        assert self.tracer is not None
        context = set_span_in_context(parent, Context())
        return self.tracer.start_span(name, context, attributes=attributes, start_time=self._ns(began_at))

    def _ns(self, monotonic_s: float) -> int:
        """One offset a request: a step of the wall clock must not tear its spans apart."""
        return round(monotonic_s * 1e9) + self._offset_ns


class Tracing:
    """Begins traces. `endpoint` is the collector's address; with None traces have ids and are exported nowhere."""

    def __init__(
        self, endpoint: str | None, *, version: str, count_dropped: Callable[[int], None], ratio: float = 1.0
    ) -> None:
        """Raises SettingsError for an endpoint that cannot be used."""
        self._propagator = TraceContextTextMapPropagator()
        self._ratio = TraceIdRatioBased(ratio)
        self._provider: TracerProvider | None = None
        self._tracer: Tracer | None = None
        if endpoint is None:
            return
        resource = Resource({names.SERVICE_NAME: "hallmark", names.SERVICE_VERSION: version})
        exporter = CountedExporter(exporter_of(endpoint), count_dropped)
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BoundedProcessor(exporter))
        self._tracer = self._provider.get_tracer(names.SCOPE, version, schema_url=names.SCHEMA_URL)

    def begin(
        self, method: str, route: str, headers: Mapping[str, str], *, request_id: str, arrived_at: float
    ) -> RequestTrace:
        """Continues the client's trace, if `headers` (lower case) carry one. `arrived_at`: monotonic seconds."""
        context = self._propagator.extract(headers, Context())
        parent = get_current_span(context).get_span_context()
        if self._tracer is None:
            trace_id = parent.trace_id if parent.is_valid else secrets.randbits(128) or 1
            own = SpanContext(trace_id, secrets.randbits(64) or 1, is_remote=False, trace_flags=TraceFlags(0))
            is_sampled = parent.is_valid and parent.trace_flags.sampled
            return RequestTrace(None, NonRecordingSpan(own), is_sampled, arrived_at)
        offset_ns = time.time_ns() - time.monotonic_ns()
        start_ns = round(arrived_at * 1e9) + offset_ns
        server = self._tracer.start_span(f"{method} {route}", context, SpanKind.SERVER, start_time=start_ns)
        trace = RequestTrace(self._tracer, server, self._samples(parent, server), arrived_at, _offset_ns=offset_ns)
        trace.server_attributes |= {
            names.HTTP_METHOD: method,
            names.HTTP_ROUTE: route,
            names.URL_PATH: route,
            names.REQUEST_ID: request_id,
        }
        return trace

    def attested(self, report: AttestationReport) -> None:
        """A span of its own, with an event for each profiled batch. Always kept: there are few."""
        if self._tracer is None:
            return
        end_ns = round(report.at * 1e9)
        span = self._tracer.start_span(
            names.ATTESTATION,
            Context(),
            SpanKind.INTERNAL,
            {names.TRIGGER: report.trigger, names.RESULT: report.result},
            start_time=end_ns - round(report.busy_s * 1e9),
        )
        for batch in report.batches:
            attributes: Attributes = {
                names.PHASE: batch.phase,
                names.PATH: batch.paths,
                names.RESULT: batch.result,
                names.IS_REPLAY: batch.is_replay,
                names.KERNELS: list(batch.kernels),
            }
            detail: Attributes = {} if batch.detail is None else {names.DETAIL: batch.detail}
            span.add_event(names.ATTESTED, attributes | detail, end_ns)
        if report.result != "match":
            span.set_status(StatusCode.ERROR, report.result)
        span.end(end_ns)

    def close(self) -> None:
        """Send what waits, for a few seconds at most. Blocks: call it off the event loop."""
        if self._provider is not None:
            self._provider.shutdown()

    def _samples(self, parent: SpanContext, span: Span) -> bool:
        if parent.is_valid:
            return parent.trace_flags.sampled
        trace_id = span.get_span_context().trace_id
        return self._ratio.should_sample(None, trace_id, "").decision is Decision.RECORD_AND_SAMPLE
