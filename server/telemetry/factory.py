"""Makes the server's metrics: prometheus_client's, under one prefix, in one registry, with a list for the docs."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "hallmark_"
# Of one server with every label set in use but the names of API keys, which add up to 42: Prometheus keeps each of them
# for weeks.
MAX_SAMPLES = 1000

Exemplar = dict[str, str] | None  # trace_id and span_id of a trace that is exported


@dataclass(frozen=True, slots=True)
class Declaration:
    """A metric as it is scraped; `kind` is counter, gauge or histogram."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]


class MetricFactory:
    """Makes metrics and registers them. Raises ValueError for a name that the registry has already."""

    def __init__(self, registry: CollectorRegistry, prefix: str = PREFIX) -> None:
        self.declarations: list[Declaration] = []  # in the order of their making
        self._registry = registry
        self._prefix = prefix

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._declare(name, "counter", text, labels), text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(self._declare(name, "gauge", text, labels), text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, edges: tuple[float, ...], *labels: str) -> Histogram:
        """A histogram with these bucket edges, ascending; prometheus_client adds the last bucket, above all of them."""
        full_name = self._declare(name, "histogram", text, labels)
        return Histogram(full_name, text, labels, buckets=edges, registry=self._registry)

    def _declare(self, name: str, kind: str, text: str, labels: tuple[str, ...]) -> str:
        self.declarations.append(Declaration(self._prefix + name, kind, text, labels))
        return self._prefix + name


def ladder(first: float, last: float, factor: float) -> tuple[float, ...]:
    """Bucket edges from `first` on, each `factor` times the one before, up to the first at or above `last`."""
    edges = [first]
    while edges[-1] < last:
        edges.append(float(f"{edges[-1] * factor:.3g}"))
    return tuple(edges)
