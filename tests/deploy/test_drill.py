"""The parts of the drill; `make drill` is the whole."""

import random
import re
import sys
from pathlib import Path

import pytest

from kernels.vocabulary.buckets import bucket_of
from server.model.load.load import load_config

sys.path.append(str(Path(__file__).resolve().parents[2] / "deploy" / "drill"))

from alerts import counted
from model import UPGRADED_HEAD_DIM, write_model
from report import Findings, Judgement, markdown
from traffic import HIT, SAMPLES, Timed, Times, plan, quantile

ALERT = {"model": "drill", "phase": "prefill", "from": "sdpa.cpu", "to": "sdpa.math", "reason": "head_dim"}


def phase(*long_ms: float, short_ms: float = 10.0) -> list[Timed]:
    """One short and one middling request of 10 ms for each long one."""
    return [Timed(name, short_ms / 1000) for _ in long_ms for name in ("le_128", "le_512")] + [
        Timed(HIT, ms / 1000) for ms in long_ms
    ]


def test_the_upgraded_models_head_dim_is_read_as_320(tmp_path: Path) -> None:
    assert load_config(write_model(tmp_path / "m", UPGRADED_HEAD_DIM)).layers[0].attention.head_dim == 320


def test_a_seed_gives_the_same_traffic_and_moves_a_tenth() -> None:
    first, second = plan(SAMPLES, 0.1, seed=1), plan(SAMPLES, 0.1, seed=1)
    assert first == second
    for bucket in ("le_128", "le_512", HIT):
        sides = [request.is_moved for request in first if request.bucket == bucket]
        assert sum(sides) / len(sides) == pytest.approx(0.1, abs=0.01)


def test_every_prompt_lies_in_its_bucket() -> None:
    assert all(bucket_of(len(request.token_ids)).label == request.bucket for request in plan(SAMPLES, 0.1, seed=3))


def test_the_table_and_the_verdict_tell_the_same_average() -> None:
    rng = random.Random(2)
    bound = {"le_128": 10.0, "le_512": 30.0, HIT: 400.0}
    rounds = [
        [
            Timed(name, rng.uniform(0.9, 1.1) * ms * slower / 1000)
            for name, ms in bound.items()
            for _ in range(SAMPLES[name])
        ]
        for slower in (1.0, 1.0, 1.2)
    ]
    findings = Findings(Times(*rounds), [ALERT], "Prometheus")
    [cells] = [line.split(" | ") for line in markdown(findings).splitlines() if line.startswith("| all ")]
    mean_before, mean_after, p50_before, p50_after, p99_before, p99_after = (float(it.strip(" |")) for it in cells[2:])
    assert mean_after / mean_before - 1 == pytest.approx(findings.average_moved, abs=0.005)
    assert findings.average_moved == pytest.approx(0.2, abs=0.02)
    assert p50_after / p50_before == pytest.approx(1.2, abs=0.05)  # the baseline has twice as many requests
    assert p99_after / p99_before == pytest.approx(1.2, abs=0.05)


def test_a_quantile_is_a_measured_value() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50.0, 99.0, 100.0)
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


STILL = [20.0] * 120
SLOWER = [20.0] * 108 + [60.0] * 12  # a tenth went to the math path


def judged(before: list[Timed], again: list[Timed], after: list[Timed]) -> list[Judgement]:
    return [judgement for judgement, _ in Findings(Times(before, again, after), [ALERT], "Prometheus").verdicts()]


def test_the_report_says_yes_where_only_the_p99_shows_it() -> None:
    findings = Findings(Times(phase(*STILL), phase(*STILL), phase(*SLOWER)), [ALERT], "Prometheus")
    assert [judgement for judgement, _ in findings.verdicts()] == [Judgement.YES] * 3
    text = markdown(findings)
    assert re.search(r"\b3\.0 times .* 2\b.* 120 requests", text)
    assert "model=drill, phase=prefill, from=sdpa.cpu, to=sdpa.math, reason=head_dim" in text


def test_the_report_says_no_where_nothing_was_shown() -> None:
    same = phase(*STILL)
    findings = Findings(Times(same, same, same), [], "Prometheus")
    assert [judgement for judgement, _ in findings.verdicts()] == [Judgement.YES, Judgement.NO, Judgement.NO]
    assert markdown(findings).count("**NO**") == 2


def test_a_busy_machine_cannot_be_judged_by_its_average() -> None:
    noisy = phase(*STILL, short_ms=12.0)
    assert judged(phase(*STILL), noisy, phase(*SLOWER)) == [Judgement.CANNOT, Judgement.YES, Judgement.YES]


def test_a_p99_that_noise_alone_could_double_shows_nothing() -> None:
    noisy = phase(*STILL[:-2], 70.0, 70.0)
    assert judged(phase(*STILL), noisy, phase(*SLOWER))[1] is Judgement.CANNOT


def test_without_prometheus_fallbacks_are_read_from_metrics() -> None:
    labels = ",".join(f'{name}="{text}"' for name, text in ALERT.items())
    name = "hallmark_attention_fallback_total"
    other = labels.replace("head_dim", "unproven")
    text = f"# TYPE {name} counter\n{name}{{{labels}}} 3\n{name}{{{other}}} 0\n"
    assert counted(text) == [ALERT]
