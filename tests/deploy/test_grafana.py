"""The dashboard: the committed JSON is what the code builds, and Prometheus can parse every query of it."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

GRAFANA = Path(__file__).resolve().parents[2] / "deploy" / "grafana"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_build", GRAFANA / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    rows = dashboard["panels"]
    return [panel for row in rows for panel in [row, *row.get("panels", [])] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def committed() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads((GRAFANA / "hallmark.json").read_text())
    return dashboard


def test_the_committed_dashboard_is_what_the_code_builds(build: ModuleType) -> None:
    assert (GRAFANA / "hallmark.json").read_text() == build.to_text(build.build())


def test_every_panel_has_a_title_a_description_and_a_query() -> None:
    shown = panels(committed())
    assert len(shown) == 10
    for panel in shown:
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]


def test_prometheus_parses_every_query(promtool, tmp_path: Path) -> None:
    asked = [expr.replace("$__rate_interval", "5m") for expr in queries(committed())]
    rules = [{"record": f"panel:query:{i}", "expr": expr} for i, expr in enumerate(asked)]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    result = promtool("check", "rules", file)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(asked)} rules found" in result.stdout


def test_a_query_with_a_typing_error_would_be_caught(promtool, tmp_path: Path) -> None:
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [{"record": "a:b", "expr": "sum by (x (y)"}]}]}))
    assert promtool("check", "rules", file).returncode != 0
