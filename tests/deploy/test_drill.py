"""The parts of the drill; `make drill` is the whole."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kernels.buckets import bucket_of
from server.model.load.load import load_config

sys.path.append(str(Path(__file__).resolve().parents[2] / "deploy" / "drill"))

from alerts import counted
from model import UPGRADED_HEAD_DIM, write_model
from plot import cdf_plot
from report import Findings, markdown
from traffic import HIT, Timed, plan, quantile

ALERT = {"model": "drill", "phase": "prefill", "from": "sdpa.cpu", "to": "sdpa.math", "reason": "head_dim"}


def phase(*long_ms: float) -> list[Timed]:
    """Nine short requests of 10 ms for each long one."""
    short = [Timed("le_128", 0.010)] * 5 + [Timed("le_512", 0.010)] * 4
    return [it for ms in long_ms for it in (*short, Timed(HIT, ms / 1000))]


def test_the_upgraded_model_has_heads_that_the_server_reads_as_320(tmp_path: Path) -> None:
    assert load_config(write_model(tmp_path / "m", UPGRADED_HEAD_DIM)).layers[0].attention.head_dim == 320


def test_traffic_is_the_same_for_a_seed_and_a_tenth_of_each_bucket_moves() -> None:
    first, second = plan(1000, 0.1, seed=1), plan(1000, 0.1, seed=1)
    assert first == second
    for bucket in ("le_128", "le_512", HIT):
        sides = [request.is_moved for request in first if request.bucket == bucket]
        assert sum(sides) / len(sides) == pytest.approx(0.1, abs=0.01)


def test_every_prompt_lies_in_the_bucket_that_it_is_counted_under() -> None:
    assert all(bucket_of(len(request.token_ids)).label == request.bucket for request in plan(400, 0.1, seed=3))


def test_a_quantile_is_a_measured_value() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50.0, 99.0, 100.0)
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_the_report_says_yes_where_the_average_hides_what_the_p99_shows() -> None:
    findings = Findings(phase(*[20.0] * 20), phase(*[20.0] * 18, 60.0, 60.0), [ALERT], "Prometheus")
    assert [is_so for is_so, _ in findings.verdicts()] == [True, True, True]
    text = markdown(findings)
    assert "3.0 times" in text
    assert "model=drill, phase=prefill, from=sdpa.cpu, to=sdpa.math, reason=head_dim" in text


def test_the_report_says_no_where_nothing_was_shown() -> None:
    same = phase(*[20.0] * 20)
    findings = Findings(same, same, [], "Prometheus")
    assert [is_so for is_so, _ in findings.verdicts()] == [True, False, False]
    assert markdown(findings).count("**NO**") == 2


def test_the_plot_is_xml_with_a_line_for_each_distribution() -> None:
    plot = ET.fromstring(cdf_plot([("All & sundry", [0.01, 0.02], [0.01, 0.5]), ("One", [0.1], [0.3])]))
    assert len(plot.findall(".//{http://www.w3.org/2000/svg}polyline")) == 4


def test_without_prometheus_the_fallbacks_are_read_from_the_metrics() -> None:
    labels = ",".join(f'{name}="{text}"' for name, text in ALERT.items())
    name = "hallmark_attention_fallback_total"
    other = labels.replace("head_dim", "unproven")
    text = f"# TYPE {name} counter\n{name}{{{labels}}} 3\n{name}{{{other}}} 0\n"
    assert counted(text) == [ALERT]
