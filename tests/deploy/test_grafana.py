"""The dashboard: the committed JSON is what the code builds, and Prometheus can parse every query of it."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "grafana"))  # before a package named build

from build import EVENTS, build, to_text
from charts import OPEN, ROWS

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


def test_a_query_with_a_typing_error_would_be_caught(promtool, tmp_path: Path) -> None:
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [{"record": "a:b", "expr": "sum by (x (y)"}]}]}))
    assert promtool("check", "rules", file).returncode != 0


def test_every_row_that_operators_look_for_is_there() -> None:
    rows = [panel["title"] for panel in committed()["panels"] if panel["type"] == "row"]
    assert rows == list(ROWS)
    for word in ("Objectives", "first token", "Attention", "Matrix", "Engine", "KV cache", "Rollout", "Telemetry"):
        assert any(word in row for row in rows), word


def test_the_headline_is_open_and_details_are_a_click_away() -> None:
    rows = [panel for panel in committed()["panels"] if panel["type"] == "row"]
    assert [row["title"] for row in rows if not row.get("collapsed")] == list(OPEN)
    assert {event["name"] for event in committed()["annotations"]["list"]} == {event[0] for event in EVENTS}


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


def test_latency_panels_show_exemplars() -> None:
    with_exemplars = {panel["title"] for panel in panels(committed()) if panel["targets"][0].get("exemplar")}
    assert with_exemplars == {"p99 now", "Prefill apart: p99", "Time per output token: p99"}


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
