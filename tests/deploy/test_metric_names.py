"""Rules and panels ask only for metrics and labels that the server's registry really has."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from server.telemetry.metrics import Metrics

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SCRAPE_LABELS = {"instance", "job", "le", "rollouts_pod_template_hash"}  # the scrape's, and the histograms'
SUFFIXES = {"counter": ("",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}


def queries() -> list[str]:
    """Every PromQL expression of the rules, of the dashboard and of Kubernetes' analyses and autoscaler."""
    groups = [
        g
        for path in sorted((DEPLOY / "prometheus/rules").glob("*.yml"))
        for g in yaml.safe_load(path.read_text())["groups"]
    ]
    dashboard = json.loads((DEPLOY / "grafana/hallmark.json").read_text())
    panels = [panel for row in dashboard["panels"] for panel in [row, *row.get("panels", [])]]
    overlays = DEPLOY / "kubernetes" / "overlays"
    ratios = yaml.safe_load((overlays / "canary" / "analysis-ratios.yaml").read_text())["spec"]["metrics"]
    triggers = yaml.safe_load((overlays / "observability" / "scaled-object.yaml").read_text())["spec"]["triggers"]
    return [
        *(rule["expr"] for group in groups for rule in group["rules"]),
        *(target["expr"] for panel in panels for target in panel.get("targets", [])),
        *(metric["provider"]["prometheus"]["query"] for metric in ratios),
        *(trigger["metadata"]["query"] for trigger in triggers),
    ]


def metrics_in(query: str) -> set[str]:
    """Names of metrics; those of recorded series hold a colon on either side and are not metrics of the server."""
    return set(re.findall(r"(?<![\w:])hallmark_\w+(?![\w:])", query))


def labels_in(query: str) -> set[str]:
    listed = [name for names in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query) for name in names.split(",")]
    matched = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", query)
    return {name.strip() for name in [*listed, *matched]} - {""}  # on () names none


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Sample name -> labels, of everything that the server can expose."""
    declared = Metrics("demo", CollectorRegistry(), version="0").declarations
    return {it.name + suffix: set(it.labels) for it in declared for suffix in SUFFIXES[it.kind]}


def test_queries_name_only_metrics_and_labels_of_the_server(exposed: dict[str, set[str]]) -> None:
    known = {label for labels in exposed.values() for label in labels} | SCRAPE_LABELS
    found = {query: (metrics_in(query) - exposed.keys(), labels_in(query) - known) for query in queries()}
    assert len(found) > 80
    assert {query: unknown for query, unknown in found.items() if any(unknown)} == {}


def test_a_misspelt_metric_or_label_would_be_caught(exposed: dict[str, set[str]]) -> None:
    query = 'sum by (modle) (rate(hallmark_attention_fallbacks_total{phse="decode"}[5m]))'
    assert metrics_in(query) - exposed.keys() == {"hallmark_attention_fallbacks_total"}
    assert labels_in(query) == {"modle", "phse"}
