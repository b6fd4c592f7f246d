"""What a scraper reads: byte for byte what the client library would write of its own metrics, and at what cost."""

import math
import random
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator

import pytest
from engine_records import use_everything
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from scraped import scraped_value

from kernels.buckets import Bucket
from server.protocol.messages import RequestTimes
from server.telemetry.exposition import OPENMETRICS, TEXT, expose
from server.telemetry.metrics import Metrics
from server.telemetry.outcomes import Outcome
from server.telemetry.registry import Maker, Registry, ladder
from server.telemetry.series import number

TRACE = {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"}
NAMES = ("short", 'quo"ted', "back\\slash", "new\nline", "wörter", "")
HELP = 'Of "all"\nthings \\ people'
EDGES = ladder(60)


class WithoutCreated(CollectorRegistry):
    """The client library's, without the `_created` samples, which nobody reads."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def walk(seed: int) -> tuple[Registry, CollectorRegistry]:
    """The same random events, counted by our metrics and by the client library's."""
    ours, theirs = Registry(), WithoutCreated()
    make = Maker(ours)
    counter = make.counter("events_total", HELP, "reason", "kind", model="m")
    gauge = make.gauge("level", HELP, "place")
    plain = make.gauge("plain", "Without labels").of()
    histogram = make.histogram("latency_seconds", HELP, EDGES, "zone", "bucket", model="m")
    make.counter("unused_total", "Without series", "reason")
    their_counter = Counter("hallmark_events_total", HELP, ["model", "reason", "kind"], registry=theirs)
    their_gauge = Gauge("hallmark_level", HELP, ["place"], registry=theirs)
    their_plain = Gauge("hallmark_plain", "Without labels", registry=theirs)
    names = ["model", "zone", "bucket"]
    their_histogram = Histogram("hallmark_latency_seconds", HELP, names, registry=theirs, buckets=EDGES)
    Counter("hallmark_unused_total", "Without series", ["reason"], registry=theirs)
    draw = random.Random(seed)
    for _ in range(300):
        one, other = draw.choice(NAMES), draw.choice(NAMES)
        amount = draw.choice([0.0, 1.0, draw.random(), draw.uniform(0, 1000), *draw.sample(EDGES, 2)])
        trace = draw.choice([TRACE, None])
        counter.of(one, other).inc(amount)
        their_counter.labels("m", one, other).inc(amount)
        level = draw.choice([amount, -amount, math.nan, math.inf, -math.inf])
        gauge.of(one).set(level)
        their_gauge.labels(one).set(level)
        plain.set(level)
        their_plain.set(level)
        histogram.of(one, other).observe(amount, trace)
        their_histogram.labels("m", one, other).observe(amount, trace)
    return ours, theirs


def timeless(text: bytes) -> bytes:
    """Without the times of exemplars, the one thing that two observations of the same do not share."""
    return re.sub(rb"(?m)( # \{.*\} \S+) [0-9.]+$", rb"\1", text)


@pytest.mark.parametrize("seed", range(3))
def test_the_text_is_the_client_librarys_own(seed: int) -> None:
    ours, theirs = walk(seed)
    assert expose(ours, TEXT) == generate_latest(theirs)


@pytest.mark.parametrize("seed", range(3))
def test_openmetrics_is_the_client_librarys_own_exemplars_included(seed: int) -> None:
    ours, theirs = walk(seed)
    found = expose(ours, OPENMETRICS)
    assert timeless(found) == timeless(generate_openmetrics(theirs))
    assert timeless(found).count(TRACE["trace_id"].encode()) > 50
    assert expose(ours, OPENMETRICS) == found  # a second scrape shows the same exemplars


def test_an_exemplar_says_when_it_was_and_the_latest_of_a_bucket_stays() -> None:
    registry = Registry()
    seconds = Maker(registry).histogram("seconds", "Of requests", (1.0,)).of()
    for amount in (0.25, 0.5):
        seconds.observe(amount, TRACE)
        line = expose(registry, OPENMETRICS).decode().splitlines()[2]
        found = re.fullmatch(r'hallmark_seconds_bucket\{le="1.0"\} \S+ # \{(.*)\} (\S+) (\S+)', line)
        assert found is not None, line
        assert found[1] == ",".join(f'{name}="{value}"' for name, value in sorted(TRACE.items()))
        assert float(found[2]) == amount
        assert 0 <= time.time() - float(found[3]) < 60


@pytest.mark.parametrize("value", [1e6, 1763768397.1234567, 2.5e17, 1e-12, -1e9, 123456789.0, 2.0**53])
def test_a_large_number_has_other_digits_than_the_client_librarys_and_is_read_as_the_same(value: float) -> None:
    """It writes them as Go does, 1e+06; that is left out, for a reader sees no difference."""
    registry = Registry()
    Maker(registry).gauge("level", "A number").of().set(value)
    assert scraped_value(registry, "hallmark_level") == float(number(value)) == value
    assert f" {value!r}\n".encode() in expose(registry, TEXT)


def test_a_second_scrape_shows_what_has_changed_since_the_first() -> None:
    registry = Registry()
    counter = Maker(registry).counter("events_total", "Counted", "reason")
    counter.of("a").inc()
    first = expose(registry, TEXT)
    counter.of("a").inc()
    counter.of("b").inc()
    second = expose(registry, TEXT)
    assert b'hallmark_events_total{reason="a"} 1.0\n' in first
    assert b'hallmark_events_total{reason="a"} 2.0\nhallmark_events_total{reason="b"} 1.0\n' in second
    counter.clear()
    assert b"{" not in expose(registry, TEXT)


def test_what_would_break_the_text_is_refused() -> None:
    make = Maker(Registry())
    counter = make.counter("events_total", "Counted", "reason")
    with pytest.raises(ValueError, match="only grows"):
        counter.of("a").inc(-1)
    with pytest.raises(ValueError, match="zip"):
        counter.of("a", "b")
    with pytest.raises(ValueError, match="hallmark_events"):
        make.gauge("events_total", "A name that is taken")


def full() -> Metrics:
    """Every series there can be, and an exemplar in nearly every bucket."""
    metrics = Metrics("m", Registry(), version="1.0")
    use_everything(metrics)
    observe(metrics, range(3000))
    return metrics


def observe(metrics: Metrics, seeds: Iterable[int]) -> None:
    draw = random.Random(min(seeds))
    for _ in seeds:
        num_tokens = draw.choice([it.hi or it.lo + 1 for it in Bucket])
        seconds = 10 ** draw.uniform(-3.5, 2.2)
        metrics.first_token(num_tokens, seconds, RequestTimes(0.0, seconds / 3, seconds, 1, 0), TRACE)
        metrics.sequence_ended(num_tokens, 1, seconds / 50, TRACE)
        metrics.latency.request(draw.choice(list(Outcome)), seconds * 4, TRACE)


@pytest.mark.parametrize("content_type", [TEXT, OPENMETRICS])
def test_a_full_scrape_takes_less_of_a_core_than_the_client_librarys(content_type: str) -> None:
    metrics = full()
    theirs = CollectorRegistry()
    histogram = Histogram("h", HELP, ["name"], registry=theirs, buckets=EDGES)
    for number_of in range(30):
        histogram.labels(str(number_of)).observe(number_of)
    took_s, theirs_took_s = [], []
    for number_of in range(20):
        observe(metrics, range(20 * number_of, 20 * number_of + 20))  # whose exemplars are new to the scrape
        began_at = time.thread_time()
        text = expose(metrics.registry, content_type)
        took_s.append(time.thread_time() - began_at)
        began_at = time.thread_time()
        other = generate_latest(theirs)
        theirs_took_s.append(time.thread_time() - began_at)
    assert num_samples(text) > 1800
    assert num_samples(text) > 0.9 * num_samples(other)
    assert text.count(TRACE["trace_id"].encode()) > (1200 if content_type == OPENMETRICS else -1)
    assert min(took_s) < min(theirs_took_s)  # a quarter of it on two busy cores


def num_samples(text: bytes) -> int:
    return sum(not line.startswith(b"#") for line in text.splitlines())


def test_other_threads_run_while_a_scrape_is_written() -> None:
    """The event loop's, with tokens. Nobody else is given the interpreter here, but by who gives it up."""
    registry = full().registry
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
            expose(registry, TEXT)
            num_turns += turns[0] - before
        assert num_turns > 10
    finally:
        is_done = True
        sys.setswitchinterval(switch_interval_s)
        thread.join()
