"""The whole way of an alert: a real server under load, Prometheus with our rules, Alertmanager, somebody's pager."""

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import pytest
import yaml
from running_server import Server, StartServer, free_port

from support.e2e.monitoring import (
    DEPLOY,
    LINKS,
    RULES,
    Alert,
    Prometheus,
    Webhook,
    running_alertmanager,
    running_prometheus,
    running_webhook,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MIN_REQUESTS = 70  # so that a sampled step, one in 64 of each phase, was timed
P99 = "a p99 is of 300 requests at least"
PAST = "compares with half an hour ago"
# What rightly returns nothing in the first minute of a server where nothing is wrong, and why.
NOTHING = {
    "AttestationFailing": "failed attestations `unless` there are some that match, and there is one",
    "UnprovenShapesServing": "no shape of the plan has a status outside of proven and provisional",
    "TtftP99Doubled": PAST,
    "model_bucket:hallmark_time_to_first_token_seconds:p99_30m": P99,
    "model_bucket:hallmark_time_to_first_token_seconds:p99_1h": P99,
    "hallmark: p99 over 1 h": P99,
    "hallmark: Peak temporary memory": "measured on CUDA devices only",
}
FILLED = {"$__rate_interval": "1m", "$__range": "5m", "$peak_tflops": "790", "$peak_tbytes": "4.2"}
SHORT, LONG = "Once", "Once upon a time there was a little girl. " * 12


@dataclass(frozen=True, slots=True)
class Watched:
    server: Server
    admin: str
    prometheus: Prometheus
    webhook: Webhook

    def switch(self, method: str, path: str) -> None:
        httpx2.request(method, f"{self.admin}/attention/quarantine", json={"path": path}, timeout=60).raise_for_status()


def load(server: Server, stop: threading.Event) -> None:
    """One request after the other: short prompts, longer ones, and some that share their beginning."""
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        for number in range(100_000):
            if stop.is_set():
                return
            prompt = LONG * (number % 5) + SHORT
            body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": number % 2 == 0}
            client.post("/v1/completions", json=body)


@pytest.fixture(scope="module")
def watched(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("monitoring")
    admin_port = free_port()
    stop = threading.Event()
    with (
        running_webhook() as webhook,
        running_alertmanager(folder / "alertmanager", webhook.url) as alertmanager,
        start_server("--admin-port", str(admin_port)) as server,
    ):
        server.wait_ready()
        targets = [f"127.0.0.1:{admin_port}"]
        with running_prometheus(folder / "prometheus", targets=targets, alertmanager=alertmanager) as prometheus:
            client = threading.Thread(target=load, args=(server, stop))
            client.start()
            try:
                yield Watched(server, f"http://127.0.0.1:{admin_port}", prometheus, webhook)
            finally:
                stop.set()
                client.join(timeout=60)


def expressions() -> list[tuple[str, str]]:
    """Return the name and text of each expression; those of alerts without what they are compared with."""
    found = []
    for file in sorted(RULES.glob("*.yml")):
        rules = [rule for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]
        found += [(rule.get("alert") or rule["record"], compared(rule["expr"])) for rule in rules]
    for file in sorted((DEPLOY / "grafana").glob("*.json")):
        rows = json.loads(file.read_text())["panels"]
        for panel in [panel for row in rows for panel in [row, *row.get("panels", [])]]:
            for target in panel.get("targets", []):
                found.append((f"{file.stem}: {panel['title']}", filled(target["expr"])))
    return found


def compared(expr: str) -> str:
    """The left-hand side of every comparison with a number."""
    return re.sub(r"\s(?:>=|>|==)\s*[\d.]+(?!\s*\*)(?=\s|$|\))", " ", expr)


def filled(expr: str) -> str:
    """A panel's expression with its variables as Grafana would fill them."""
    for name, text in FILLED.items():
        expr = expr.replace(name, text)
    return re.sub(r"\$\{?\w+\}?", ".*", expr)


def num_requests(prometheus: Prometheus) -> float:
    found = prometheus.query("sum(hallmark_time_to_first_token_seconds_count)")
    return float(found[0]["value"][1]) if found else 0.0


def test_every_expression_of_rules_and_dashboards_returns_data(watched: Watched) -> None:
    wait_until(lambda: num_requests(watched.prometheus) >= MIN_REQUESTS, "the load", 120)
    empty = set(expressions())

    def is_all_there() -> bool:  # a rate needs two scrapes, a recorded series an evaluation
        for name, expr in list(empty):
            if name in NOTHING or watched.prometheus.query(expr):
                empty.discard((name, expr))
        return not empty

    deadline = time.monotonic() + 120
    while not is_all_there() and time.monotonic() < deadline:
        time.sleep(1)
    assert empty == set()


def test_an_expression_that_no_server_answers_would_be_found(watched: Watched) -> None:
    assert watched.prometheus.query("sum(rate(hallmark_attention_fallbacks_total[1m]))") == []


def test_a_server_in_order_raises_no_alert(watched: Watched) -> None:
    wait_until(lambda: num_requests(watched.prometheus) >= MIN_REQUESTS, "the load", 120)
    alerts = watched.prometheus.ask("alerts")["alerts"]
    assert [alert["labels"] for alert in alerts if alert["state"] == "firing"] == []
    assert [alert for alert in watched.webhook.alerts if alert["receiver"] == "pager"] == []


def test_a_fallback_reaches_the_pager_and_recovery_clears_it(watched: Watched) -> None:
    def told(status: str) -> list[Alert]:
        return watched.webhook.told("KernelFallback", status=status, phase="prefill")

    watched.switch("POST", "sdpa.cpu")
    wait_until(lambda: bool(told("firing")), "the page", 90)
    page = told("firing")[0]
    wanted = {"model": "demo", "phase": "prefill", "from": "sdpa.cpu", "to": "sdpa.math", "severity": "page"}
    assert page["receiver"] == "pager"
    assert page["labels"].items() >= {**wanted, "reason": "operator_override"}.items()
    assert page["annotations"]["runbook_url"] == f"{LINKS['runbooks']}/KernelFallback.md"
    assert page["annotations"]["dashboard_url"] == f"{LINKS['grafana']}/d/hallmark?var-model=demo"
    watched.switch("DELETE", "sdpa.cpu")
    wait_until(lambda: bool(told("resolved")), "the alert to be resolved", 90)

    def is_silent() -> bool:  # of the other phases too, each of which has its own time
        alerts = watched.prometheus.ask("alerts")["alerts"]
        return "KernelFallback" not in {alert["labels"]["alertname"] for alert in alerts}

    wait_until(is_silent, "the rules to be silent", 60)
