"""Write deploy/grafana/hallmark.json, the dashboard as code. A test compares the file with what this builds.

.venv/bin/python deploy/grafana/build.py
"""

import json
from pathlib import Path
from typing import Any

from chart import WHERE, Chart, Kind
from charts import OPEN, ROWS
from grafana_foundation_sdk.builders import common, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
    TextBoxVariable,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

JSON_FILE = Path(__file__).parent / "hallmark.json"
PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")
QUARANTINED = f'hallmark_attention_fallback_total{{{WHERE}, reason="quarantined"}}'
# Events that explain a step in any chart: name, colour, query, text. A series that is new is an event too.
EVENTS = (
    (
        "Other version or stack",
        "blue",
        f"hallmark_build_info{{{WHERE}}} unless hallmark_build_info{{{WHERE}}} offset 2m",
        "{{instance}}: {{version}} on {{gpu}}, torch {{torch}}",
    ),
    (
        "Quarantine",
        "red",
        f"sum by (instance, phase, from, to) (increase({QUARANTINED}[2m])) > 0",
        "{{instance}}: {{phase}} on {{to}}, {{from}} is quarantined",
    ),
    (
        "Engine restart",
        "orange",
        f"sum by (instance, cause) (increase(hallmark_engine_restarts_total{{{WHERE}}}[2m])) > 0",
        "{{instance}}: {{cause}}",
    ),
)
# What one H200 was measured to reach: a bf16 matmul of 8192^3, and a device read.
PEAK_TFLOPS, PEAK_TBYTES = "790", "4.2"


def panel(chart: Chart) -> Any:
    """One panel's builder, with its queries."""
    if chart.kind is Kind.TABLE:
        hidden = {"excludeByName": {"Time": True, "__name__": True}}
        built = table.Panel().with_transformation(DataTransformerConfig(id_val="organize", options=hidden))
    elif chart.kind is Kind.NUMBER:
        built = stat.Panel()
    else:
        built = timeseries.Panel().min(0)
        if chart.kind is Kind.SHARES:
            built = built.fill_opacity(40).stacking(common.StackingConfig().mode(StackingMode.PERCENT))
    built = built.title(chart.title).description(chart.about).unit(chart.unit).datasource(PROMETHEUS)
    for ref_id, (expr, legend) in zip("ABCD", chart.queries, strict=False):
        query = Dataquery().expr(expr).legend_format(legend).ref_id(ref_id)
        if chart.kind is Kind.TABLE:
            query = query.instant().format(PromQueryFormat.TABLE)
        if chart.has_exemplars:
            query = query.exemplar(True)
        built = built.with_target(query)
    return built.span(chart.width).height(8)


def chosen(name: str, label: str, query: str) -> Any:
    """A variable that Prometheus fills; all of its values unless somebody chooses."""
    variable = QueryVariable(name).label(label).datasource(PROMETHEUS).multi(True).include_all(True)
    return variable.query(query).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def build() -> dict[str, Any]:
    """The dashboard as JSON data."""
    board = Dashboard("Hallmark").uid("hallmark").tags(["hallmark", "llm"]).refresh("30s").time("now-3h", "now")
    board = board.readonly().with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    board = board.with_variable(chosen("model", "Model", "label_values(hallmark_attention_dispatch_total, model)"))
    board = board.with_variable(chosen("instance", "Server", "label_values(hallmark_engine_up, instance)"))
    board = board.with_variable(TextBoxVariable("peak_tflops").label("Device TFLOP/s").default_value(PEAK_TFLOPS))
    board = board.with_variable(TextBoxVariable("peak_tbytes").label("Device TB/s").default_value(PEAK_TBYTES))
    board = board.link(DashboardLink("Alerts").type(DashboardLinkType.LINK).url("/alerting/list").keep_time(True))
    for title, charts in ROWS.items():
        if title in OPEN:
            board = board.with_row(Row(title))
            for chart in charts:
                board = board.with_panel(panel(chart))
        else:
            row = Row(title)
            for chart in charts:
                row = row.with_panel(panel(chart))
            board = board.with_row(row)
    dashboard: dict[str, Any] = _without_nulls(json.loads(JSONEncoder(sort_keys=True).encode(board.build())))
    dashboard.pop("style", None)  # Grafana has it no more
    for variable in dashboard["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min", "id"):  # the SDK's, of an interval and of none
            variable.pop(name, None)
    _number(dashboard)
    dashboard["annotations"] = {"list": [_annotation(*event) for event in EVENTS]}  # the SDK has no title for a series
    return dashboard


def _number(dashboard: dict[str, Any]) -> None:
    """Give every panel an id, and each headline a link to the chart behind it."""
    everything = [it for panel in dashboard["panels"] for it in (panel, *panel.get("panels", ()))]
    for number, it in enumerate(everything, start=1):
        it["id"] = number
    headline = everything[1 : 1 + len(ROWS[OPEN[0]])]
    charts = {it["title"]: it["id"] for it in everything[1 + len(headline) :] if it["type"] != "row"}
    for it, chart in zip(headline, ROWS[OPEN[0]], strict=True):
        link = DashboardLink(chart.detail).type(DashboardLinkType.LINK).keep_time(True).include_vars(True)
        url = f"/d/{dashboard['uid']}?viewPanel={charts[chart.detail]}"
        it["links"] = [json.loads(JSONEncoder(sort_keys=True).encode(link.url(url).build()))]


def _without_nulls(value: Any) -> Any:
    """JSON data without the keys that are null: Grafana's schema has them absent."""
    if isinstance(value, dict):
        return {name: _without_nulls(it) for name, it in value.items() if it is not None}
    return [_without_nulls(it) for it in value] if isinstance(value, list) else value


def _annotation(name: str, color: str, expr: str, text: str) -> dict[str, Any]:
    query = AnnotationQuery().name(name).datasource(PROMETHEUS).enable(True).icon_color(color).expr(expr)
    built: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(query.build()))
    return built | {"step": "60s", "titleFormat": name, "textFormat": text}


def to_text(dashboard: dict[str, Any]) -> str:
    return json.dumps(dashboard, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    JSON_FILE.write_text(to_text(build()))
