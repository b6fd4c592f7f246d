"""Good and bad events, and the file of objectives."""

from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from scraped import scraped_value

from kernels.buckets import Bucket
from server.errors import SettingsError
from server.telemetry.factory import MetricFactory
from server.telemetry.objectives import DEFAULT_OBJECTIVES, load_objectives
from server.telemetry.outcomes import Outcome
from server.telemetry.slo import SloMetrics

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


def test_a_first_token_at_the_objective_is_good_and_after_it_bad(slo: Slo) -> None:
    slo.metrics.first_token(128, LIMIT_S)
    slo.metrics.first_token(128, LIMIT_S * 1.001)
    assert slo.counts("ttft") == (1, 1)


def test_time_per_token_is_counted_against_its_own_objective(slo: Slo) -> None:
    slo.metrics.output_token(10, 0.05)
    slo.metrics.output_token(10, 0.051)
    slo.metrics.output_token(10, 0.2)
    assert slo.counts("tpot") == (1, 2)


def test_a_request_that_we_end_before_its_first_token_is_a_bad_one(slo: Slo) -> None:
    slo.metrics.no_first_token(10, Outcome.SERVER_ERROR, waited_s=0.0)
    assert slo.counts("ttft") == (0, 1)


def test_a_client_that_leaves_is_bad_only_after_it_has_waited_too_long(slo: Slo) -> None:
    slo.metrics.no_first_token(10, Outcome.DISCONNECTED, waited_s=LIMIT_S / 2)
    assert slo.counts("ttft") == (0, 0)
    slo.metrics.no_first_token(10, Outcome.DISCONNECTED, waited_s=LIMIT_S * 2)
    assert slo.counts("ttft") == (0, 1)


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


def test_a_request_whose_prompt_was_not_counted_yet_still_counts(slo: Slo) -> None:
    slo.metrics.request(None, Outcome.REJECTED)
    assert slo.counts("availability", "unknown") == (0, 1)


def test_the_objectives_are_metrics_so_that_a_rule_need_not_repeat_them(slo: Slo) -> None:
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


def test_json_says_the_same_as_toml(tmp_path: Path) -> None:
    file = tmp_path / "slo.json"
    file.write_text('{"availability": {"target": 0.99}}')
    assert load_objectives(file).availability.target == 0.99


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
    ],
)
def test_a_file_that_says_nothing_sensible_stops_the_start(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(SettingsError, match=complaint) as refusal:
        load_objectives(file)
    assert "--slo-file" in str(refusal.value)


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        load_objectives(tmp_path / "none.toml")
