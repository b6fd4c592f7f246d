"""One scrape: a registry as the text that Prometheus reads, written by prometheus_client in slices."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

TEXT = CONTENT_TYPE_PLAIN_0_0_4
OPENMETRICS = openmetrics.CONTENT_TYPE_LATEST  # has exemplars, too

_SLICE_SAMPLES = 50
_OPENMETRICS_END = b"# EOF\n"


@dataclass(frozen=True, slots=True)
class _One(Collector):
    """A single metric as a registry, which is what prometheus_client's writers take."""

    metric: Metric

    def collect(self) -> list[Metric]:
        return [self.metric]


def content_type_of(accept: str) -> str:
    """Return the format that answers an Accept header: OpenMetrics where it is asked for, else the text format."""
    return OPENMETRICS if "application/openmetrics-text" in accept else TEXT


def scrape(registry: CollectorRegistry, content_type: str) -> bytes:
    """Write every metric of the registry as TEXT or OPENMETRICS. Any thread may call this.

    The interpreter's lock is given up after each slice: the event loop's thread, which streams tokens, waits for one
    slice at most and not for the whole scrape.
    """
    is_openmetrics = content_type == OPENMETRICS
    parts: list[bytes] = []
    for metric in registry.collect():
        for number, part in enumerate(_slices(metric)):
            text = _write(part, is_openmetrics)
            parts.append(text if number == 0 else text.split(b"\n", 2)[2])  # the help and the type only once
            time.sleep(0)
    if is_openmetrics:
        parts.append(_OPENMETRICS_END)
    return b"".join(parts)


def _slices(metric: Metric) -> Iterator[Metric]:
    """Yield the metric in parts of a few samples, without the `_created` samples, which nothing reads."""
    samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    for start in range(0, max(1, len(samples)), _SLICE_SAMPLES):
        part = Metric(metric.name, metric.documentation, metric.type)
        part.samples = samples[start : start + _SLICE_SAMPLES]
        yield part


def _write(metric: Metric, is_openmetrics: bool) -> bytes:
    if not is_openmetrics:
        return generate_latest(_One(metric))
    # Names of ours need no escaping; by default each is checked character by character.
    text: bytes = openmetrics.generate_latest(_One(metric), escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return text.removesuffix(_OPENMETRICS_END)
