"""Good and bad events, and the file of objectives."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kernels.vocabulary.buckets import Bucket
from server.errors import SettingsError
from server.telemetry.factory import MetricFactory
from server.telemetry.objectives import DEFAULT_OBJECTIVES, load_objectives
from server.telemetry.outcomes import Outcome
from server.telemetry.slo import SloMetrics
from support.scraped import scraped_value

LIMIT_S = DEFAULT_OBJECTIVES.ttft.seconds[Bucket.LE_128]


class Slo:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = SloMetrics(MetricFactory(self.registry), "m", DEFAULT_OBJECTIVES)
        self.metrics.create_buckets([Bucket.LE_128])

    def counts(self, sli: str, bucket: str = "le_128") -> tuple[float | None, float | None]:
        """Good and bad events."""
        labels = {"model": "m", "bucket": bucket, "sli": sli}
        good, bad = (
            scraped_value(self.registry, "hallmark_slo_events_total", labels | {"result": result})
            for result in ("good", "bad")
        )
        return good, bad


@pytest.fixture
def slo() -> Slo:
    return Slo()


@pytest.mark.parametrize(
    ("events", "sli", "counts"),
    [
        ([("first_token", 128, LIMIT_S), ("first_token", 128, LIMIT_S * 1.001)], "ttft", (1, 1)),
        ([("output_token", 10, 0.05), ("output_token", 10, 0.051), ("output_token", 10, 0.2)], "tpot", (1, 2)),
        ([("no_first_token", 10, Outcome.SERVER_ERROR, 0.0)], "ttft", (0, 1)),
        # A client that leaves counts only after it has waited too long.
        ([("no_first_token", 10, Outcome.DISCONNECTED, LIMIT_S / 2)], "ttft", (0, 0)),
        ([("no_first_token", 10, Outcome.DISCONNECTED, LIMIT_S * 2)], "ttft", (0, 1)),
    ],
)
def test_a_token_is_good_until_its_objective(
    slo: Slo, events: list[tuple[Any, ...]], sli: str, counts: tuple[int, int]
) -> None:
    for name, num_tokens, value, *waited in events:
        getattr(slo.metrics, name)(num_tokens, value, **({"waited_s": waited[0]} if waited else {}))
    assert slo.counts(sli) == counts


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome.OK, (1, 0)),
        (Outcome.SERVER_ERROR, (0, 1)),
        (Outcome.REJECTED, (0, 1)),
        (Outcome.CLIENT_ERROR, (0, 0)),
        (Outcome.DISCONNECTED, (0, 0)),
    ],
)
def test_availability_counts_what_is_ours(slo: Slo, outcome: Outcome, expected: tuple[int, int]) -> None:
    slo.metrics.request(10, outcome)
    assert slo.counts("availability") == expected


def test_a_request_without_a_counted_prompt_still_counts(slo: Slo) -> None:
    slo.metrics.request(None, Outcome.REJECTED)
    assert slo.counts("availability", "unknown") == (0, 1)


def test_the_objectives_are_metrics(slo: Slo) -> None:
    get = partial(scraped_value, slo.registry)
    assert get("hallmark_slo_objective_seconds", {"bucket": "le_128", "sli": "ttft"}) == LIMIT_S
    assert get("hallmark_slo_target_ratio", {"sli": "availability"}) == 0.999


def test_a_file_changes_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "slo.toml"
    file.write_text("[ttft]\ntarget = 0.95\n[ttft.seconds]\nle_2k = 0.7\n")
    found = load_objectives(file)
    assert found.ttft.target == 0.95
    assert found.ttft.seconds == DEFAULT_OBJECTIVES.ttft.seconds | {Bucket.LE_2K: 0.7}
    assert found.tpot == DEFAULT_OBJECTIVES.tpot
    as_json = tmp_path / "slo.json"
    as_json.write_text('{"availability": {"target": 0.99}}')
    assert load_objectives(as_json).availability.target == 0.99


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("slo.toml", "[ttfb]\ntarget = 0.9\n", "ttfb"),
        ("slo.toml", "[ttft.seconds]\nle_1k = 1\n", "le_1k"),
        ("slo.toml", "[ttft]\ntarget = 99\n", "target"),
        ("slo.toml", "[ttft.seconds]\nle_128 = -1\n", "> 0"),
        ("slo.toml", "ttft = \n", "--slo-file"),
        ("slo.json", "[]", "object"),
        ("slo.yaml", "", ".toml or .json"),
        ("none.toml", None, "No such file"),
    ],
)
def test_a_file_that_says_nothing_sensible_stops_the_start(
    tmp_path: Path, name: str, text: str | None, complaint: str
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError, match=complaint) as refusal:
        load_objectives(file)
    assert "--slo-file" in str(refusal.value)
