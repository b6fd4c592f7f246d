"""The server's load under vLLM's names, beside our own, for routers and schedulers that read those.

Names, types, labels and bucket edges are those of vLLM 0.11, and so is what is counted: sequences and not requests,
each gap between two tokens and not their mean. Routers still read three names that vLLM has since dropped.
"""

from collections.abc import Callable

from server.protocol.messages import EngineReady, StepRecord
from server.telemetry.engine import EngineMetrics
from server.telemetry.factory import MetricFactory

PREFIX = "vllm:"
MAX_VLLM_SAMPLES = 100  # beside MAX_SAMPLES; 80 today, whatever is served
TTFT_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
DURATION_EDGES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LABELS = ("model_name", "engine")
_ENGINE = "0"  # vLLM counts the engines behind one API; here it is one


class VllmMetrics:
    def __init__(self, make: MetricFactory, model: str, engine: EngineMetrics) -> None:
        """`make` puts vLLM's prefix before each name; gauges read the state of `engine` at each scrape."""
        labels = (model, _ENGINE)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            make.gauge(name, text, *_LABELS).labels(*labels).set_function(value)

        gauge("num_requests_running", "Sequences that the engine computes", lambda: engine.num_running)
        gauge("num_requests_waiting", "Sequences that wait in the engine", lambda: engine.num_waiting)
        gauge("kv_cache_usage_perc", "Used share of the KV cache's pages, 0 to 1", lambda: engine.kv_usage)
        gauge("gpu_cache_usage_perc", "Earlier name of vllm:kv_cache_usage_perc", lambda: engine.kv_usage)
        queries, hits = "Prompt tokens looked up in the prefix cache", "Prompt tokens found in the prefix cache"
        self._queries, self._hits = (
            [make.counter(it, text, *_LABELS).labels(*labels) for it in (name, f"gpu_{name}")]
            for name, text in (("prefix_cache_queries_total", queries), ("prefix_cache_hits_total", hits))
        )
        ttft = make.histogram(
            "time_to_first_token_seconds", "From arrival to a sequence's first token", TTFT_EDGES, *_LABELS
        )
        gap = make.histogram(
            "inter_token_latency_seconds", "Between two outputs of a sequence, each", GAP_EDGES, *_LABELS
        )
        duration = make.histogram(
            "e2e_request_latency_seconds", "From arrival to a sequence's last token", DURATION_EDGES, *_LABELS
        )
        self.first_token, self.next_token, self.sequence_ended = (
            it.labels(*labels).observe for it in (ttft, gap, duration)
        )
        self._drafts, self._drafted, self._accepted = (
            make.counter(f"spec_decode_num_{name}_total", text, *_LABELS)
            for name, text in (
                ("drafts", "Drafts that were verified"),
                ("draft_tokens", "Tokens of these drafts"),
                ("accepted_tokens", "Those that were chosen as they were drafted"),
            )
        )
        self._accepted_at = make.counter(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Likewise, by place in the draft, from 0",
            *_LABELS,
            "position",
        )
        self._labels = labels
        self._cache_config = make.gauge(
            "cache_config_info",
            "Pages of the KV cache and tokens a page; always 1. Of vLLM's labels those that schedulers read",
            *("block_size", "num_gpu_blocks", "engine"),
        )

    def ready(self, ready: EngineReady) -> None:
        """A restarted engine may have found less memory."""
        self._cache_config.clear()
        self._cache_config.labels(str(ready.page_size), str(ready.num_pages), _ENGINE).set(1)

    def stepped(self, record: StepRecord) -> None:
        if record.drafts is not None:
            drafted, accepted = record.drafts.drafted, record.drafts.accepted
            for counter, amount in (
                (self._drafts, drafted[0]), (self._drafted, sum(drafted)), (self._accepted, sum(accepted)),
            ):  # fmt: skip
                counter.labels(*self._labels).inc(amount)
            for place, count in enumerate(accepted):
                self._accepted_at.labels(*self._labels, str(place)).inc(count)
        if not record.num_prefix_queried_tokens:
            return
        for counters, amount in (
            (self._queries, record.num_prefix_queried_tokens),
            (self._hits, record.num_prefix_hit_tokens),
        ):
            for counter in counters:
                counter.inc(amount)
