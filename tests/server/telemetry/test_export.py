"""Spans of an exporter that fails, hangs or refuses."""

from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from server.telemetry.export import MAX_PENDING_SPANS, CountedExporter


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
