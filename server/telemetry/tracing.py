"""The spans of a request: one of the HTTP server, below it one of the model's operation, below that its stages.

Whether a trace is kept is decided at its end: errors and fallbacks always, the rest by a ratio of the trace ids, or as
the client has decided. Spans are made then, from what was observed, and only of what is kept. They are made as the
exporter takes them, not by a tracer: with one, six spans took 250 us of the event loop, and 90 us so (a busy core).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.protocol.messages import AttestationReport, ReplayReport
from server.telemetry import conventions as names
from server.telemetry.export import BoundedProcessor, CountedExporter, exporter_of
from server.telemetry.factory import Exemplar

Value = str | bool | int | float | list[str]
Attributes = dict[str, Value]

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_RATIO_BITS = TraceIdRatioBased.TRACE_ID_LIMIT
_RANDOM = Random()  # seeded by the system; asked for each id, that takes two calls of it a request


@dataclass(frozen=True, slots=True)
class _Span:
    """Content of a span without its place in the trace; times in nanoseconds of the wall clock."""

    name: str
    began_ns: int
    ended_ns: int
    attributes: Attributes
    events: tuple[Event, ...] = ()
    kind: SpanKind = SpanKind.INTERNAL
    status: Status = field(default_factory=Status)


class _Sender:
    """Hands spans to the exporter's queue."""

    def __init__(self, endpoint: str, version: str, count_dropped: Callable[[int], None]) -> None:
        self._resource = Resource({names.SERVICE_NAME: "hallmark", names.SERVICE_VERSION: version})
        self._scope = InstrumentationScope(names.SCOPE, version, names.SCHEMA_URL)
        self._processor = BoundedProcessor(CountedExporter(exporter_of(endpoint), count_dropped))

    def send(self, span: _Span, context: SpanContext, parent: SpanContext | None) -> None:
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context,
                parent,
                self._resource,
                attributes=span.attributes,
                events=span.events,
                kind=span.kind,
                status=span.status,
                start_time=span.began_ns,
                end_time=span.ended_ns,
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class RequestTrace:
    """Collected content of one request's spans, sent when it ends. `_sender` is None where nothing is exported."""

    name: str  # of the server's span
    context: SpanContext  # the server's span's
    is_sampled: bool  # by the client, or by the ratio
    arrived_at: float  # monotonic seconds, as all times here
    _sender: _Sender | None
    _parent: SpanContext | None  # the client's span
    is_kept: bool = False  # whatever the sampling says
    server_attributes: Attributes = field(default_factory=dict)
    attributes: Attributes = field(default_factory=dict)  # of the operation
    _offset_ns: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())
    _events: list[Event] = field(default_factory=list)
    _stages: list[_Span] = field(default_factory=list)
    trace_id: str = field(init=False)
    span_id: str = field(init=False)  # of the server's span
    traceparent: str = field(init=False)  # the W3C header that names it

    def __post_init__(self) -> None:
        self.trace_id, self.span_id = f"{self.context.trace_id:032x}", f"{self.context.span_id:016x}"
        self.traceparent = f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"

    @property
    def is_recording(self) -> bool:
        return self._sender is not None

    @property
    def exemplar(self) -> Exemplar:
        """Labels that link a measurement to its trace; None where that is not kept, for the link would be dead."""
        if self._sender is None or not (self.is_sampled or self.is_kept):
            return None
        return {"trace_id": self.trace_id, "span_id": self.span_id}

    def keep(self) -> None:
        """Export this trace whatever the sampling says."""
        self.is_kept = True

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        if self._sender is not None:
            self._events.append(Event(name, attributes or {}, self._ns(at)))

    def stage(self, name: str, began_at: float, ended_at: float, attributes: Attributes) -> None:
        if self._sender is not None:
            ended_ns = self._ns(max(began_at, ended_at))
            self._stages.append(_Span(name, self._ns(began_at), ended_ns, attributes))

    def end(self, operation: str, *, ended_at: float, is_error: bool) -> None:
        """Hand all spans to the exporter, if the trace is kept. `operation` names the span below the server's."""
        sender = self._sender
        if sender is None or not (self.is_sampled or self.is_kept):
            return
        times = (self._ns(self.arrived_at), self._ns(ended_at))
        status = Status(StatusCode.ERROR) if is_error else Status()
        inner = _child_of(self.context)
        for stage in self._stages:
            sender.send(stage, _child_of(inner), inner)
        middle = _Span(operation, *times, self.attributes, tuple(self._events), status=status)
        sender.send(middle, inner, self.context)
        server = _Span(self.name, *times, self.server_attributes, kind=SpanKind.SERVER, status=status)
        sender.send(server, self.context, self._parent)

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
        self._bound = TraceIdRatioBased(ratio).bound  # of the lower bits of the trace ids that are sampled
        self._sender = None if endpoint is None else _Sender(endpoint, version, count_dropped)

    def begin(
        self, method: str, route: str, headers: Mapping[str, str], *, request_id: str, arrived_at: float
    ) -> RequestTrace:
        """Continues the client's trace, if `headers` (lower case) carry one. `arrived_at`: monotonic seconds."""
        parent = self._parent(headers.get("traceparent"))
        if parent is not None:
            context, is_sampled = _child_of(parent), parent.trace_flags.sampled
        else:
            context = _root()
            is_sampled = context.trace_id & _RATIO_BITS < self._bound
        trace = RequestTrace(f"{method} {route}", context, is_sampled, arrived_at, self._sender, parent)
        if trace.is_recording:
            trace.server_attributes |= {
                names.HTTP_METHOD: method,
                names.HTTP_ROUTE: route,
                names.URL_PATH: route,
                names.REQUEST_ID: request_id,
            }
        return trace

    def _parent(self, traceparent: str | None) -> SpanContext | None:
        """The client's span; None where it names none, or none that is valid."""
        if traceparent is None:
            return None
        known = {"traceparent": traceparent}  # tracestate goes nowhere from here: it is not parsed
        parent = get_current_span(self._propagator.extract(known, Context())).get_span_context()
        return parent if parent.is_valid else None

    def attested(self, report: AttestationReport) -> None:
        """A span of its own, with an event for each profiled batch. Always kept: there are few."""
        if self._sender is None:
            return
        end_ns = round(report.at * 1e9)
        events = []
        for batch in report.batches:
            attributes: Attributes = {
                names.PHASE: batch.phase,
                names.PATH: batch.paths,
                names.RESULT: batch.result,
                names.IS_REPLAY: batch.is_replay,
                names.KERNELS: list(batch.kernels),
            }
            detail: Attributes = {} if batch.detail is None else {names.DETAIL: batch.detail}
            if batch.explained is not None:
                detail = {**detail, names.EXPLAINED: batch.explained.share}
            events.append(Event(names.ATTESTED, attributes | detail, end_ns))
        what: Attributes = {names.TRIGGER: report.trigger, names.RESULT: report.result}
        status = Status() if report.result == "match" else Status(StatusCode.ERROR, report.result)
        began_ns = end_ns - round(report.busy_s * 1e9)
        span = _Span(names.ATTESTATION, began_ns, end_ns, what, tuple(events), status=status)
        self._sender.send(span, _root(), None)

    def replayed(self, report: ReplayReport) -> None:
        """A span of the trace of the answer that was computed again. A difference is always kept.

        It says nothing of the answer but the place of the first token that differs.
        """
        parent = self._parent(report.traceparent)
        is_kept = report.cause is not None or (parent is not None and parent.trace_flags.sampled)
        if self._sender is None or not is_kept:
            return
        what: Attributes = {names.RESULT: report.result, names.ROUTE: report.route, names.TOKENS: report.num_tokens}
        if report.cause is not None and report.place is not None:
            what |= {names.CAUSE: report.cause, names.PLACE: report.place}
        end_ns = round(report.at * 1e9)
        status = Status() if report.cause is None else Status(StatusCode.ERROR, report.result)
        span = _Span(names.REPLAY, end_ns - round(report.spent_s * 1e9), end_ns, what, status=status)
        self._sender.send(span, _root() if parent is None else _child_of(parent), parent)

    def close(self) -> None:
        """Send what waits, for a few seconds at most. Blocks: call it off the event loop."""
        if self._sender is not None:
            self._sender.close()


def _root() -> SpanContext:
    """A new trace."""
    return SpanContext(
        _RANDOM.getrandbits(128) or 1, _RANDOM.getrandbits(64) or 1, is_remote=False, trace_flags=_SAMPLED
    )


def _child_of(parent: SpanContext) -> SpanContext:
    """A new span of the same trace. Exported spans say that they are sampled, whatever the header going out says."""
    return SpanContext(parent.trace_id, _RANDOM.getrandbits(64) or 1, is_remote=False, trace_flags=_SAMPLED)
