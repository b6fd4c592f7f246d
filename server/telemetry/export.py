"""Spans on their way to a collector: a bounded queue, a short patience, and a count of what was lost."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from server.errors import SettingsError

logger = logging.getLogger(__name__)

MAX_PENDING_SPANS = 2048
EXPORT_TIMEOUT_S = 2.0  # a dead collector must not hold up the shutdown: with 5 s it took 8 s
FLUSH_INTERVAL_MS = 1000.0
_LOG_EVERY_S = 60.0


def exporter_of(endpoint: str) -> SpanExporter:
    """Return the exporter for the collector's address. Raises SettingsError for one that cannot be used."""
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("http", "https") and rest:
        url = endpoint if endpoint.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
        return OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S)
    if scheme in ("grpc", "grpcs") and rest:
        return _grpc_exporter(rest, is_insecure=scheme == "grpc")
    wanted = "http://, https://, grpc:// or grpcs://"
    raise SettingsError(f"--otlp-endpoint {endpoint!r}: the address must begin with {wanted}")


def _grpc_exporter(host: str, *, is_insecure: bool) -> SpanExporter:
    try:  # not at the top: it is an extra, and importing it takes 0.2 s that only its users should wait
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter
    except ImportError:
        raise SettingsError(
            "--otlp-endpoint: grpc needs the extra of that name: pip install 'hallmark-serve[grpc]'; "
            "or send to the collector's http port"
        ) from None
    return trace_exporter.OTLPSpanExporter(endpoint=host, insecure=is_insecure, timeout=EXPORT_TIMEOUT_S)


class CountedExporter(SpanExporter):
    """Passes batches on; counts the spans that still wait and those that were lost."""

    def __init__(self, inner: SpanExporter, count_dropped: Callable[[int], None]) -> None:
        self._inner = inner
        self._count_dropped = count_dropped
        self._lock = threading.Lock()
        self._num_pending = 0
        self._num_unlogged = 0
        self._logged_at = -_LOG_EVERY_S

    def admit(self) -> bool:
        """Return whether one more span may wait; counts it as waiting or as lost."""
        with self._lock:
            is_admitted = self._num_pending < MAX_PENDING_SPANS
            self._num_pending += is_admitted
        if not is_admitted:
            self._lose(1)
        return is_admitted

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:  # some exporters raise, and who calls this only logs it
            with self._lock:
                self._num_pending -= len(spans)
            if result is not SpanExportResult.SUCCESS:
                self._lose(len(spans))
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _lose(self, num_spans: int) -> None:
        """Counts every span, and says so once a minute: the exporter's own log says it for every batch."""
        self._count_dropped(num_spans)
        now = time.monotonic()
        with self._lock:
            self._num_unlogged += num_spans
            if now - self._logged_at < _LOG_EVERY_S:
                return
            num_lost, self._num_unlogged, self._logged_at = self._num_unlogged, 0, now
        logger.warning("%d spans did not reach the collector", num_lost)


class BoundedProcessor(BatchSpanProcessor):
    def __init__(self, exporter: CountedExporter) -> None:
        super().__init__(exporter, MAX_PENDING_SPANS, FLUSH_INTERVAL_MS)
        self._counted = exporter

    def on_end(self, span: ReadableSpan) -> None:
        if self._counted.admit():
            super().on_end(span)
