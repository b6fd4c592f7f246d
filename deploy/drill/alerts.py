"""Alerts that fire, by a real Prometheus with the shipped rules, or read from the metrics where there is none."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

RULES = Path(__file__).resolve().parents[1] / "prometheus" / "rules"
LABELS = ("model", "phase", "from", "to", "reason")


_reserved: list[socket.socket] = []  # until this process ends


def free_port() -> int:
    """A port that no other program is given while we run, and that a server may still listen on.

    A socket of ours stays bound to it; with SO_REUSEADDR on both, which servers set, another may listen on it (Linux).
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    _reserved.append(sock)
    port: int = sock.getsockname()[1]
    return port


@contextmanager
def prometheus(folder: Path, targets: Sequence[str]) -> Iterator[str | None]:
    """Scrapes the targets every second under the shipped rules. Yields its URL; None where it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        yield None
        return
    config = {  # JSON is YAML
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [f"{RULES}/*.yml"],
        "scrape_configs": [{"job_name": "hallmark", "static_configs": [{"targets": list(targets)}]}],
    }
    folder.mkdir(parents=True)
    (folder / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address={address}", "--log.level=error"]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


def firing(url: str, name: str, timeout_s: float = 30.0) -> list[dict[str, str]]:
    """The labels of each firing instance of an alert; waits until there is one. Empty when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        alerts = httpx2.get(f"{url}/api/v1/alerts", timeout=10).json()["data"]["alerts"]
        found = [a["labels"] for a in alerts if a["labels"]["alertname"] == name and a["state"] == "firing"]
        if found:
            return found
        time.sleep(0.5)
    return []


def counted(metrics: str) -> list[dict[str, str]]:
    """The labels of each fallback that a server's /metrics counts: what the alert would fire on."""
    families = text_string_to_metric_families(metrics)
    samples = [sample for family in families for sample in family.samples]
    return [
        {label: sample.labels[label] for label in LABELS}
        for sample in samples
        if sample.name == "hallmark_attention_fallback_total" and sample.value > 0
    ]
