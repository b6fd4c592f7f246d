"""Rows of the dashboard's charts, as data. build.py makes Grafana's JSON of it."""

from attention_charts import ATTENTION, EFFICIENCY, MATRIX
from chart import Chart
from headline_charts import HEADLINE
from latency_charts import FIRST_TOKENS, OBJECTIVES, ROLLOUT
from service_charts import ENGINE, MEMORY, TELEMETRY, TRANSPORT

OPEN = ("Now", "Objectives", "Time to first token, by prompt-length bucket")  # the others open by a click
ROWS: dict[str, tuple[Chart, ...]] = {
    "Now": HEADLINE,
    "Objectives": OBJECTIVES,
    "Time to first token, by prompt-length bucket": FIRST_TOKENS,
    "Attention: what ran": ATTENTION,
    "Matrix and plan": MATRIX,
    "Attention: how fast": EFFICIENCY,
    "Engine": ENGINE,
    "KV cache and memory": MEMORY,
    "Rollout: stable against canary": ROLLOUT,
    "Transport": TRANSPORT,
    "Telemetry": TELEMETRY,
}
