"""The alert rules: valid, unit-tested both ways, with runbooks, and about metrics that the server really has."""

import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.vocabulary.path import Reject

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULE_FILES = sorted((PROMETHEUS / "rules").glob("*.yml"))
RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
RUNBOOKS = ROOT / "deploy" / "runbooks"


def rules(kind: str) -> list[dict[str, Any]]:
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


ALERTS = rules("alert")


def test_prometheus_accepts_the_configuration_and_its_rules(promtool) -> None:
    result = promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("rules found") == len(RULE_FILES)


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_the_rules_pass_their_unit_tests(path: Path, promtool) -> None:
    result = promtool("test", "rules", path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_tested_firing_and_silent() -> None:
    tests = [test for path in RULE_TESTS for test in yaml.safe_load(path.read_text())["tests"]]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    found = {(case["alertname"], bool(case["exp_alerts"])) for case in cases}
    assert found == {(alert["alert"], fires) for alert in ALERTS for fires in (True, False)}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_how_much_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"page", "ticket"}
    assert alert["annotations"]["summary"]
    assert "$value" in alert["annotations"]["value"]
    assert alert["annotations"]["dashboard_url"].startswith("{{ $externalLabels.grafana }}/d/hallmark")
    assert alert["annotations"]["runbook_url"].endswith(f"/{alert['alert']}.md")


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    names = {path.stem for path in RUNBOOKS.glob("*.md")}
    assert names == {alert["alert"] for alert in ALERTS}
    for name in names:
        assert (RUNBOOKS / f"{name}.md").read_text().startswith(f"# {name}\n")


@pytest.mark.parametrize(("name", "reasons"), [("KernelFallback", Reject), ("MatmulFallback", MatmulFallback)])
def test_the_reasons_of_a_fallbacks_runbook_are_all_there_are(name: str, reasons: type[Enum]) -> None:
    table = (RUNBOOKS / f"{name}.md").read_text().split("| reason |")[1].split("\n\n")[0]
    told = {found for row in table.splitlines()[2:] for found in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert told == {reason.value for reason in reasons}
