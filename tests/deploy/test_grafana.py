"""The dashboard: the committed JSON is what the code builds, and Prometheus can parse every query of it."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "grafana"))  # before a package named build

from build import build, to_text
from charts import ROWS

GRAFANA = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
FILLED = {"$__rate_interval": "5m", "$__range": "1h", "$peak_tflops": "790", "$peak_tbytes": "4.2"}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    rows = dashboard["panels"]
    return [panel for row in rows for panel in [row, *row.get("panels", [])] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[str]:
    events = [event["expr"] for event in dashboard["annotations"]["list"]]
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]] + events


def filled(expr: str) -> str:
    """An expression with its variables as Grafana would fill them."""
    for name, text in FILLED.items():
        expr = expr.replace(name, text)
    return expr


def committed() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads((GRAFANA / "hallmark.json").read_text())
    return dashboard


def test_the_committed_dashboard_is_what_the_code_builds() -> None:
    assert (GRAFANA / "hallmark.json").read_text() == to_text(build())


def test_every_panel_has_a_title_a_description_and_a_query() -> None:
    shown = panels(committed())
    assert len(shown) == sum(len(charts) for charts in ROWS.values())
    for panel in shown:
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]


def test_prometheus_parses_every_query(promtool, tmp_path: Path) -> None:
    asked = [filled(expr) for expr in queries(committed())]
    rules = [{"record": f"panel:query:{i}", "expr": expr} for i, expr in enumerate(asked)]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    result = promtool("check", "rules", file)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(asked)} rules found" in result.stdout


def test_each_headline_number_leads_to_the_chart_behind_it() -> None:
    shown = panels(committed())
    ids = [panel["id"] for panel in shown]
    assert len(set(ids)) == len(ids)
    headlines = len(ROWS["Now"])
    for panel in shown[:headlines]:
        [link] = panel["links"]
        [chart] = [it for it in shown[headlines:] if link["url"] == f"/d/hallmark?viewPanel={it['id']}"]
        assert chart["title"] == link["title"]
        assert link["keepTime"]
        assert link["includeVars"]


def test_alerts_link_to_this_dashboard_and_fill_its_variables() -> None:
    dashboard = committed()
    variables = {item["name"] for item in dashboard["templating"]["list"]}
    links = [
        rule["annotations"]["dashboard_url"].removeprefix("{{ $externalLabels.grafana }}")
        for file in (GRAFANA.parent / "prometheus" / "rules").glob("*.yml")
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert links
    for link in links:
        path, _, query = link.partition("?")
        assert path == f"/d/{dashboard['uid']}"
        assert {name.removeprefix("var-").partition("=")[0] for name in query.split("&") if name} <= variables
