"""Metrics of the edge: requests that came in, how they left, and the state of the edge itself."""

import itertools
import time
from collections.abc import Callable, Iterable
from functools import cache

from server.telemetry.factory import MetricFactory
from server.telemetry.outcomes import DisconnectStage, Outcome, RejectedFor

MAX_KEYS = 20  # names of API keys with a label of their own
OTHER = "other"


class TrafficMetrics:
    def __init__(self, make: MetricFactory, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._inflight: dict[str, float] = {}  # request id -> arrival; the oldest first
        self.loop_seen_at = now()  # when the event loop last turned
        self._prompt_tokens = make.counter("prompt_tokens_total", "Prompt tokens of requests that got a first token")
        self._generation_tokens = make.counter("generation_tokens_total", "Tokens generated")
        self._num_generated = 0  # tokens that the counter does not have yet
        self._request = cache(make.counter("requests_total", "HTTP requests answered", "route", "outcome").labels)
        self._key_requests = make.counter("key_requests_total", "Requests answered by API key", "key")
        self._key_tokens = make.counter("key_tokens_total", "Tokens of prompts and answers by API key", "key")
        self._keys: dict[str, str] = {}  # the label of each name
        self._rejected = make.counter("rejected_total", "Requests turned away before the engine saw them", "reason")
        self._disconnects = make.counter(
            "client_disconnects_total", "Clients that left before their answer ended", "stage"
        )
        oldest = make.gauge("oldest_inflight_seconds", "Age of the oldest request without an end; 0 if none")
        oldest.set_function(self._oldest_inflight)
        self._loop_lag = make.gauge("event_loop_lag_seconds", "Longest delay of the event loop in the last 5 seconds")
        self._receipts = make.counter("receipts_total", "Signed receipts given out with answers")
        self._spans_dropped = make.counter("spans_dropped_total", "Spans that did not reach the collector")
        for reason in RejectedFor:
            self._rejected.labels(reason.value)
        for stage in DisconnectStage:
            self._disconnects.labels(stage.value)

    def create_routes(self, routes: Iterable[str]) -> None:
        for route, outcome in itertools.product(routes, Outcome):
            self._request(route, outcome.value)

    def create_keys(self, names: Iterable[str]) -> None:
        """Give each name a label of its own, while there are any left."""
        for name in names:
            if name not in self._keys:
                label = self._keys[name] = name if len(set(self._keys.values()) - {OTHER}) < MAX_KEYS else OTHER
                self._key_requests.labels(label)
                self._key_tokens.labels(label)

    def used(self, key: str, num_tokens: int) -> None:
        """Count an answered request of a key's name, and its tokens."""
        label = self._keys.get(key, OTHER)
        self._key_requests.labels(label).inc()
        self._key_tokens.labels(label).inc(num_tokens)

    def answered(self, route: str, outcome: Outcome) -> None:
        self._request(route, outcome.value).inc()

    def rejected(self, reason: RejectedFor) -> None:
        self._rejected.labels(reason.value).inc()

    def disconnected(self, stage: DisconnectStage) -> None:
        self._disconnects.labels(stage.value).inc()

    def began(self, unique_id: str, arrived_at: float) -> None:
        self._inflight[unique_id] = arrived_at

    def ended(self, unique_id: str) -> float:
        """Seconds since its arrival."""
        return self._now() - self._inflight.pop(unique_id)

    def prompt_computed(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def generated(self, num_tokens: int) -> None:
        """Count tokens, at the next `add_generated`: an addition for each token, and 1.5 us of the counter a step."""
        self._num_generated += num_tokens

    def add_generated(self) -> None:
        """Add the tokens since the last call to the counter: after each step, and when an answer or a request ends."""
        if self._num_generated:
            self._generation_tokens.inc(self._num_generated)
            self._num_generated = 0

    @property
    def num_inflight(self) -> int:
        """Requests that generate and have not ended."""
        return len(self._inflight)

    def loop_turned(self, lag_s: float) -> None:
        self.loop_seen_at = self._now()
        self._loop_lag.set(lag_s)

    def receipted(self) -> None:
        self._receipts.inc()

    def spans_dropped(self, num_spans: int) -> None:
        self._spans_dropped.inc(num_spans)

    def _oldest_inflight(self) -> float:
        oldest = next(iter(self._inflight.copy().values()), None)  # a copy: the scrape is another thread's
        return 0.0 if oldest is None else max(0.0, self._now() - oldest)
