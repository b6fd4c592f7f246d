"""A real Prometheus and a real Alertmanager beside a server, and a webhook that remembers what it is told."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from running_server import ROOT, free_port

from support.local_http import listening

DEPLOY = ROOT / "deploy"
LINKS = {"runbooks": "https://wiki.example.com/runbooks", "grafana": "https://grafana.example.com"}
RULES = DEPLOY / "prometheus" / "rules"
PACKAGES = {"prometheus": "prometheus", "prometheus-alertmanager": "prometheus-alertmanager"}  # of Debian
Alert = dict[str, Any]  # as Alertmanager's webhook describes it


def program(name: str) -> str:
    """Return the program's path; skip the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian package {PACKAGES[name]})")
    return found


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Seconds that it took. Fails after `timeout_s`."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < timeout_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.2)
    return time.monotonic() - began


@contextmanager
def running(command: list[str], log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log_file.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=20)


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def ask(self, path: str, **params: str) -> Any:
        answer = httpx2.get(f"{self.url}/api/v1/{path}", params=params, timeout=30).json()
        assert answer["status"] == "success", f"{params}: {answer}"
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query. Fails where Prometheus does not parse it."""
        data = self.ask("query", query=expr)
        return list(data["result"]) if data["resultType"] == "vector" else [data]

    def is_ready(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/-/ready", timeout=5).status_code == 200
        except httpx2.TransportError:
            return False


@contextmanager
def running_prometheus(folder: Path, *, targets: list[str], alertmanager: str) -> Iterator[Prometheus]:
    """Scrapes every second by the shipped configuration, with the shortened rules."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s", "external_labels": LINKS}
    folder.mkdir()
    config["rule_files"] = [f"{shortened_rules(folder / 'rules')}/*.yml"]
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    port = free_port()
    flags = [f"--config.file={file}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    command = [program("prometheus"), *flags, "--enable-feature=exemplar-storage", "--log.level=warn"]
    with running(command, folder / "log"):
        found = Prometheus(f"http://127.0.0.1:{port}")
        wait_until(found.is_ready, "Prometheus", 30)
        yield found


@contextmanager
def running_alertmanager(folder: Path, webhook: str) -> Iterator[str]:
    """The shipped routes with our webhook's address; each alert is told within seconds. Yields host:port."""
    config = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yml").read_text())
    for receiver in config["receivers"]:
        receiver["webhook_configs"][0]["url"] = f"{webhook}/{receiver['name']}"
    for route in (config["route"], *config["route"]["routes"]):
        route["group_wait"] = route["group_interval"] = "1s"
    folder.mkdir()
    file = folder / "alertmanager.yml"
    file.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={file}", f"--storage.path={folder}/data", f"--web.listen-address={address}"]
    with running([program("prometheus-alertmanager"), *flags, "--cluster.listen-address="], folder / "log"):
        wait_until(lambda: answers(f"http://{address}/-/ready"), "Alertmanager", 30)
        yield address


def answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


@dataclass(slots=True)
class Webhook:
    """Alerts in the order in which they were told, each with the receiver that was chosen for it."""

    url: str = ""
    alerts: list[Alert] = field(default_factory=list)

    def told(self, name: str, *, status: str, **labels: str) -> list[Alert]:
        return [
            alert
            for alert in list(self.alerts)
            if alert["status"] == status and {"alertname": name, **labels}.items() <= alert["labels"].items()
        ]


@contextmanager
def running_webhook() -> Iterator[Webhook]:
    hook = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            hook.alerts += [alert | {"receiver": body["receiver"]} for alert in body["alerts"]]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with listening(Handler) as hook.url:
        yield hook


def shortened_rules(folder: Path) -> Path:
    """The rules, alerts on kernels with windows of six seconds for five minutes and a second of firing on."""
    shutil.copytree(RULES, folder)
    file = folder / "alerts.yml"
    text = file.read_text().replace("[5m]", "[6s]").replace("offset 5m", "offset 6s")
    file.write_text(re.sub(r"keep_firing_for: \w+", "keep_firing_for: 1s", text))
    return folder
