"""Write deploy/grafana/hallmark.json, the dashboard as code. A test compares the file with what this builds.

.venv/bin/python deploy/grafana/build.py
"""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

JSON_FILE = Path(__file__).parent / "hallmark.json"
PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")
TTFT = "hallmark_time_to_first_token_seconds"
MODEL = 'model=~"$model"'
DISPATCHES = f"rate(hallmark_attention_dispatch_total{{{MODEL}}}[$__rate_interval])"
FALLBACKS = f"rate(hallmark_attention_fallback_total{{{MODEL}}}[$__rate_interval])"


class Kind(Enum):
    LINES = "lines"
    SHARES = "shares"  # stacked to 100%
    NUMBER = "number"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    about: str
    unit: str  # of Grafana's unit ids
    queries: tuple[tuple[str, str], ...]  # PromQL and legend
    kind: Kind = Kind.LINES
    width: int = 12  # of 24


ROWS: dict[str, tuple[Chart, ...]] = {
    "Attention: what ran": (
        Chart(
            "Path share",
            "Every dispatch by the kernel path that served it.",
            "percentunit",
            (
                (
                    f"sum by (phase, path) ({DISPATCHES})",
                    "{{phase}} {{path}}",
                ),
            ),
            Kind.SHARES,
        ),
        Chart(
            "Fallbacks by reason",
            "Dispatches on another path than the wanted one, a second. Anything above 0 pages.",
            "ops",
            (
                (
                    f"sum by (phase, from, to, reason) ({FALLBACKS})",
                    "{{phase}}: {{from}} to {{to}}, {{reason}}",
                ),
            ),
        ),
        Chart(
            "Dispatches by status of their evidence",
            "proven: by the reviewed matrix. provisional: by this machine at start-up. The others page.",
            "percentunit",
            (
                (
                    f"sum by (status) ({DISPATCHES})",
                    "{{status}}",
                ),
            ),
            Kind.SHARES,
        ),
        Chart(
            "Shapes of the plan by status",
            "How many attention shapes each server's plan holds.",
            "none",
            (("sum by (instance, status) (hallmark_qualification_shapes)", ""),),
            Kind.TABLE,
        ),
    ),
    "Time to first token, by prompt-length bucket": (
        Chart(
            "p99 over 1 h",
            "Absent below 300 requests an hour: a p99 of fewer is noise.",
            "s",
            ((f"model_bucket:{TTFT}:p99_1h{{{MODEL}}}", "{{model}} {{bucket}}"),),
            width=8,
        ),
        Chart(
            "p50 over 5 min",
            "Absent below 20 requests in 5 minutes.",
            "s",
            ((f"model_bucket:{TTFT}:p50_5m{{{MODEL}}}", "{{model}} {{bucket}}"),),
            width=8,
        ),
        Chart(
            "Requests in the hour",
            "The sample count behind the p99.",
            "none",
            ((f"model_bucket:{TTFT}_count:increase1h{{{MODEL}}}", "{{model}} {{bucket}}"),),
            width=8,
        ),
    ),
    "Engine": (
        Chart("Engines up", "1 when ready.", "none", (("hallmark_engine_up", "{{instance}}"),), Kind.NUMBER, width=4),
        Chart(
            "Requests",
            "Running and waiting.",
            "none",
            (
                ("sum by (instance) (hallmark_requests_running)", "{{instance}} running"),
                ("sum by (instance) (hallmark_requests_waiting)", "{{instance}} waiting"),
            ),
            width=10,
        ),
        Chart(
            "KV cache in use",
            "Share of the pages. Near 1, sequences are preempted and computed again.",
            "percentunit",
            (("hallmark_kv_cache_usage_ratio", "{{instance}}"),),
            width=10,
        ),
    ),
}


def panel(chart: Chart) -> Any:
    """One panel's builder, with its queries."""
    if chart.kind is Kind.TABLE:
        built = table.Panel()
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
        built = built.with_target(query)
    return built.span(chart.width).height(8)


def build() -> dict[str, Any]:
    """The dashboard as JSON data."""
    models = QueryVariable("model").label("Model").datasource(PROMETHEUS).multi(True).include_all(True)
    models = models.query("label_values(hallmark_attention_dispatch_total, model)")
    board = Dashboard("Hallmark").uid("hallmark").tags(["hallmark", "llm"]).refresh("30s").time("now-3h", "now")
    board = board.readonly().with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    board = board.with_variable(models.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    for title, charts in ROWS.items():
        board = board.with_row(Row(title))
        for chart in charts:
            board = board.with_panel(panel(chart))
    dashboard: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(board.build()))
    return dashboard


def to_text(dashboard: dict[str, Any]) -> str:
    return json.dumps(dashboard, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    JSON_FILE.write_text(to_text(build()))
