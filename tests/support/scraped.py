"""Scrapes of a registry, read by the client library."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from server.telemetry.scrape import TEXT, scrape


def scraped(registry: CollectorRegistry) -> list[Metric]:
    return list(text_string_to_metric_families(scrape(registry, TEXT).decode()))


def scraped_value(registry: CollectorRegistry, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """Return the value of the sample with exactly these labels; None where there is none."""
    for family in scraped(registry):
        for sample in family.samples:
            if sample.name == name and sample.labels == dict(labels or {}):
                return sample.value
    return None
