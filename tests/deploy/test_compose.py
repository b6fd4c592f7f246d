"""deploy/compose.yaml: what it mounts exists, its services find each other, and nothing is open to the world."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.settings import Settings, flag_of

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def server_flags() -> dict[str, str]:
    command, *flags = SERVICES["hallmark"]["command"]
    assert command == "serve"
    return dict(flag.split("=", 1) for flag in flags)


def mounts() -> list[tuple[str, str, str]]:
    """Service, source and target of each mount."""
    parts = [(name, *volume.split(":")[:2]) for name, it in SERVICES.items() for volume in it.get("volumes", [])]
    return [(name, source, target) for name, source, target in parts]


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_has_an_exact_version(name: str) -> None:
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])


def test_every_mounted_file_exists_and_every_volume_is_declared() -> None:
    assert len({name for name, _, _ in mounts()}) >= 4
    for name, source, _ in mounts():
        if source.startswith("."):
            assert (DEPLOY / source).exists(), f"{name} mounts {source}"
        else:
            assert source in COMPOSE["volumes"], f"{name} mounts {source}"


def test_configurations_on_command_lines_are_mounted_there() -> None:
    named = [
        (name, flag.partition("=")[2])
        for name, service in SERVICES.items()
        for flag in service.get("command", [])
        if flag.startswith(("--config.file=", "--config="))
    ]
    assert {name for name, _ in named} == {"prometheus", "alertmanager", "otel-collector"}
    assert {*named} <= {(name, target) for name, _, target in mounts()}


def test_ports_are_published_on_loopback_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_the_servers_flags_are_flags_of_the_server() -> None:
    known = {flag_of(name) for name in Settings.__struct_fields__}
    assert set(server_flags()) <= known


def test_prometheus_scrapes_the_admin_port_and_has_alertmanager() -> None:
    config = load("prometheus/compose.yml")
    [job] = config["scrape_configs"]
    assert job["job_name"] == "hallmark"  # as the rules name it
    assert job["static_configs"][0]["targets"] == [f"hallmark:{server_flags()['--admin-port']}"]
    assert config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] == ["alertmanager:9093"]
    alone = load("prometheus/prometheus.yml")
    assert config["rule_files"] == alone["rule_files"]
    assert alone["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] == ["127.0.0.1:9093"]


def test_the_server_sends_spans_where_the_collector_listens() -> None:
    receivers = load("otel/collector.yaml")["receivers"]["otlp"]["protocols"]
    port = receivers["http"]["endpoint"].rpartition(":")[2]
    assert server_flags()["--otlp-endpoint"] == f"http://otel-collector:{port}"


def test_every_part_of_the_collectors_pipelines_is_configured() -> None:
    config = load("otel/collector.yaml")
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(config[kind])
    assert set(config["service"]["extensions"]) <= set(config["extensions"])


def test_grafana_is_given_the_dashboard_and_its_data_source() -> None:
    [source] = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert source["jsonData"]["timeInterval"] == load("prometheus/compose.yml")["global"]["scrape_interval"]
    [provider] = load("grafana/provisioning/dashboards/hallmark.yaml")["providers"]
    targets = [target for name, _, target in mounts() if name == "grafana"]
    assert f"{provider['options']['path']}/hallmark.json" in targets
    assert "/etc/grafana/provisioning" in targets


def test_prometheus_accepts_its_configuration(promtool) -> None:
    result = promtool("check", "config", DEPLOY / "prometheus" / "compose.yml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_alertmanager_accepts_its_configuration() -> None:
    program = shutil.which("amtool")
    if program is None:
        pytest.skip("amtool is not installed (Debian package prometheus-alertmanager)")
    command = [program, "check-config", str(DEPLOY / "alertmanager" / "alertmanager.yml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_pages_and_tickets_go_to_different_receivers() -> None:
    config = load("alertmanager/alertmanager.yml")
    rules = [
        rule
        for file in (DEPLOY / "prometheus" / "rules").glob("*.yml")
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert {rule["labels"]["severity"] for rule in rules} == {"page", "ticket"}
    [pages] = config["route"]["routes"]
    assert pages["matchers"] == ['severity="page"']
    receivers = {receiver["name"] for receiver in config["receivers"]}
    assert {pages["receiver"], config["route"]["receiver"]} == receivers


def test_what_inhibits_is_an_alert_that_exists() -> None:
    names = " ".join(file.read_text() for file in (DEPLOY / "prometheus" / "rules").glob("*.yml"))
    rules = load("alertmanager/alertmanager.yml")["inhibit_rules"]
    assert rules
    for rule in rules:
        [source] = rule["source_matchers"]
        assert f"alert: {source.partition('=')[2].strip(chr(34))}\n" in names
