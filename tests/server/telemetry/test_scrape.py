"""A scrape: prometheus_client's own text, without what nothing reads, in slices and within its time."""

import random
import re
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from kernels.vocabulary.buckets import Bucket
from server.protocol.messages import RequestTimes
from server.telemetry.factory import MAX_SAMPLES
from server.telemetry.metrics import Metrics
from server.telemetry.outcomes import Outcome
from server.telemetry.scrape import OPENMETRICS, TEXT, content_type_of, scrape
from support.telemetry.engine_records import use_everything

TRACE = {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"}
MAX_SCRAPE_S = 0.05


class WithoutCreated(CollectorRegistry):
    def __init__(self, inner: CollectorRegistry) -> None:
        super().__init__()
        self._inner = inner

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def full() -> CollectorRegistry:
    """Every series there can be, with exemplars in most of the buckets."""
    metrics = Metrics('quo"ted \\ wörter', CollectorRegistry(), version="1.0")
    use_everything(metrics)
    draw = random.Random(0)
    for _ in range(3000):
        num_tokens = draw.choice([it.hi or it.lo + 1 for it in Bucket])
        seconds = 10 ** draw.uniform(-3.5, 2.2)
        metrics.first_token(num_tokens, seconds, RequestTimes(0.0, seconds / 3, seconds, 1, 0), TRACE)
        metrics.sequence_ended(num_tokens, 1, seconds / 50, TRACE)
        metrics.latency.request(draw.choice(list(Outcome)), seconds * 4, TRACE)
    return metrics.registry


def without_ages(text: bytes) -> bytes:
    """Drop the one gauge that changes between two scrapes."""
    return re.sub(rb"(?m)^hallmark_oldest_inflight_seconds .*$", b"", text)


def test_text_is_the_librarys_without_created_samples() -> None:
    registry = full()
    assert without_ages(scrape(registry, TEXT)) == without_ages(generate_latest(WithoutCreated(registry)))


def test_openmetrics_is_the_librarys_with_exemplars() -> None:
    registry = full()
    found = scrape(registry, OPENMETRICS)
    assert without_ages(found) == without_ages(generate_openmetrics(WithoutCreated(registry)))
    assert found.count(TRACE["trace_id"].encode()) > 400
    assert found.endswith(b"# EOF\n")


def test_openmetrics_is_sent_to_a_scraper_that_asks_for_it() -> None:
    assert content_type_of("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5") == OPENMETRICS
    assert content_type_of("text/plain; version=0.0.4") == content_type_of("") == TEXT


@pytest.mark.parametrize("content_type", [TEXT, OPENMETRICS])
def test_a_full_scrape_takes_at_most_50_ms_of_a_core(content_type: str) -> None:
    registry = full()
    took_s = []
    for _ in range(10):
        began_at = time.thread_time()
        text = scrape(registry, content_type)
        took_s.append(time.thread_time() - began_at)
    assert 800 < sum(not line.startswith(b"#") for line in text.splitlines()) <= MAX_SAMPLES
    assert min(took_s) < MAX_SCRAPE_S


def test_other_threads_run_during_a_scrape() -> None:
    """The event loop's thread, which streams tokens. The interpreter takes the lock from no thread here."""
    registry = full()
    turns, is_done = [0], False

    def turn() -> None:
        while not is_done:
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=turn)
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread.start()
        num_turns = 0
        for _ in range(10):
            before = turns[0]
            scrape(registry, TEXT)
            num_turns += turns[0] - before
        assert num_turns > 10
    finally:
        is_done = True
        sys.setswitchinterval(switch_interval_s)
        thread.join()
