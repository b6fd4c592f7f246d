"""`--metrics-compat vllm`: vLLM's names, types, labels and bucket edges, and what is counted under them."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from server.protocol.messages import FinishReason, Heartbeat, TokenDelta
from server.telemetry.factory import MAX_SAMPLES
from server.telemetry.metrics import Metrics
from server.telemetry.request import RequestRecord, SequenceRecord
from server.telemetry.tracing import Tracing
from server.telemetry.vllm_names import MAX_VLLM_SAMPLES
from support.scraped import scraped, scraped_value
from support.telemetry.engine_records import READY, RECORD, use_everything

LABELS = {"model_name": "m", "engine": "0"}
NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "gpu_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "gpu_prefix_cache_queries": "counter",
    "gpu_prefix_cache_hits": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m", CollectorRegistry(), version="1", has_vllm_names=True)


def value(metrics: Metrics, name: str) -> float | None:
    return scraped_value(metrics.registry, f"vllm:{name}", LABELS)


def sequence(metrics: Metrics, arrived_at: float) -> SequenceRecord:
    tracing = Tracing(None, version="1", count_dropped=metrics.traffic.spans_dropped)
    trace = tracing.begin("POST", "/v1/completions", {}, request_id="mine", arrived_at=arrived_at)
    return RequestRecord(metrics, trace, "id-1", operation="text_completion", now=lambda: 0.0).sequence(100)


def test_types_and_labels_of_every_name_are_vllms(metrics: Metrics) -> None:
    found = {it.name.removeprefix("vllm:"): it for it in scraped(metrics.registry) if it.name.startswith("vllm:")}
    info = found.pop("cache_config_info")
    assert (info.type, info.samples) == ("gauge", [])  # before the engine is ready
    drafts = [found.pop(name) for name in sorted(found) if name.startswith("spec_decode_num_")]
    assert [(it.type, it.samples) for it in drafts] == [("counter", [])] * 4  # before a draft is verified
    assert {name: it.type for name, it in found.items()} == NAMES
    for name, it in found.items():
        assert all(sample.labels.keys() - {"le"} == LABELS.keys() for sample in it.samples), name


@pytest.mark.parametrize(
    ("name", "num_edges", "edges"),
    [
        ("time_to_first_token_seconds", 22, {0.001, 0.005, 0.02, 0.25, 7.5, 640.0, 2560.0}),
        ("inter_token_latency_seconds", 19, {0.01, 0.025, 0.075, 0.4, 7.5, 80.0}),
        ("e2e_request_latency_seconds", 21, {0.3, 0.8, 15.0, 50.0, 1920.0, 7680.0}),
    ],
)
def test_bucket_edges_are_vllms(metrics: Metrics, name: str, num_edges: int, edges: set[float]) -> None:
    family = next(it for it in scraped(metrics.registry) if it.name == f"vllm:{name}")
    found = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
    assert found[-1] == float("inf")
    assert len(found) == num_edges + 1
    assert edges <= set(found)


def test_load_is_that_of_the_last_step_or_heartbeat(metrics: Metrics) -> None:
    metrics.on_step(RECORD)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc")
    assert [value(metrics, name) for name in names] == [3, 2, 0.25, 0.25]
    metrics.on_heartbeat(Heartbeat(8, 1.0, 0, 0))
    assert [value(metrics, name) for name in names[:2]] == [0, 0]


def test_prefix_cache_is_counted_in_tokens(metrics: Metrics) -> None:
    for prefix in ("", "gpu_"):
        assert value(metrics, f"{prefix}prefix_cache_queries_total") == 0
    metrics.on_step(RECORD)
    metrics.on_step(RECORD)
    for prefix in ("", "gpu_"):
        assert value(metrics, f"{prefix}prefix_cache_queries_total") == 80
        assert value(metrics, f"{prefix}prefix_cache_hits_total") == 64


def test_cache_of_a_restarted_engine_replaces_the_one_before(metrics: Metrics) -> None:
    metrics.on_ready(READY)
    metrics.on_ready(msgspec.structs.replace(READY, num_pages=90))
    info = next(it for it in scraped(metrics.registry) if it.name == "vllm:cache_config_info")
    labels = [(sample.labels, sample.value) for sample in info.samples]
    assert labels == [({"block_size": "16", "num_gpu_blocks": "90", "engine": "0"}, 1)]


def test_each_gap_and_the_whole_sequence_are_measured(metrics: Metrics) -> None:
    answer = sequence(metrics, arrived_at=10.0)
    for at, finish_reason in ((12.0, None), (12.5, None), (14.0, FinishReason.STOP)):
        answer.delta(TokenDelta("a", [1], finish_reason), at)
        answer.tokens(1)
    answer.end("stop")
    found = {
        name: (value(metrics, f"{name}_count"), value(metrics, f"{name}_sum"))
        for name, kind in NAMES.items()
        if kind == "histogram"
    }
    assert found == {
        "time_to_first_token_seconds": (1, 2.0),
        "inter_token_latency_seconds": (2, 2.0),
        "e2e_request_latency_seconds": (1, 4.0),
    }


def test_samples_are_bounded(metrics: Metrics) -> None:
    use_everything(metrics)
    samples = [sample.name for family in scraped(metrics.registry) for sample in family.samples]
    num_vllm = sum(name.startswith("vllm:") for name in samples)
    assert 50 < num_vllm <= MAX_VLLM_SAMPLES
    assert len(samples) - num_vllm <= MAX_SAMPLES


def test_without_the_setting_no_name_is_vllms() -> None:
    metrics = Metrics("m", CollectorRegistry(), version="1")
    metrics.on_ready(READY)
    sequence(metrics, 0.0).delta(TokenDelta("a", [1]), 1.0)
    assert not [it.name for it in scraped(metrics.registry) if it.name.startswith("vllm:")]
