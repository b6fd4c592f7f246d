"""The p99 that Prometheus reads from our buckets, beside the exact one of recorded times to the first token."""

import json
import math
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kernels.vocabulary.buckets import Bucket
from server.telemetry.factory import MetricFactory
from server.telemetry.latency import LatencyMetrics
from support.scraped import scraped

# Seconds by machine and bucket, at a client: open-loop loads whose lengths are log-uniform inside the bucket.
RECORDED: dict[str, dict[str, list[float]]] = json.loads((Path(__file__).parent / "recorded_ttfts.json").read_text())
SETS = [(machine, bucket) for machine, buckets in RECORDED.items() for bucket in buckets]
LIMIT = 0.05


def exact_quantile(samples: list[float], share: float) -> float:
    """The smallest sample that at least this share of all does not exceed."""
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def histogram_quantile(buckets: list[tuple[float, float]], share: float) -> float:
    """Compute as Prometheus does from (upper edge, cumulative count): linear inside the bucket that holds the rank."""
    rank = share * buckets[-1][1]
    below, low = 0.0, 0.0
    for edge, count in buckets:
        if count >= rank:
            return low if math.isinf(edge) else low + (edge - low) * (rank - below) / (count - below)
        below, low = count, edge
    raise AssertionError("the last bucket holds everything")


def buckets_of(registry: CollectorRegistry, name: str) -> list[tuple[float, float]]:
    samples = [s for metric in scraped(registry) for s in metric.samples if s.name == f"{name}_bucket"]
    return [(float(s.labels["le"]), s.value) for s in samples]


@pytest.mark.parametrize(("machine", "bucket"), SETS)
def test_our_histograms_p99_is_within_5_percent(machine: str, bucket: str) -> None:
    samples = RECORDED[machine][bucket]
    registry = CollectorRegistry()
    metrics = LatencyMetrics(MetricFactory(registry), "m")
    num_tokens = {member.label: member.hi or member.lo + 1 for member in Bucket}[bucket]
    for seconds in samples:
        metrics.first_token(num_tokens, seconds, None, None)
    read = histogram_quantile(buckets_of(registry, "hallmark_time_to_first_token_seconds"), 0.99)
    assert read == pytest.approx(exact_quantile(samples, 0.99), rel=LIMIT)


def test_the_quantile_is_prometheus_own() -> None:
    buckets = [(1.0, 0.0), (2.0, 90.0), (4.0, 100.0), (math.inf, 100.0)]
    assert histogram_quantile(buckets, 0.99) == pytest.approx(2.0 + 2.0 * 9 / 10)
    assert histogram_quantile([(1.0, 50.0), (math.inf, 100.0)], 0.99) == 1.0
