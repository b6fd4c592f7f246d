"""Write the PrometheusRule of the observability overlay from deploy/prometheus/rules. Run it when a rule changes.

.venv/bin/python deploy/kubernetes/rules.py
"""

from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[1]
TARGET = DEPLOY / "kubernetes" / "overlays" / "observability" / "prometheus-rule.yaml"
HEAD = "# Written by deploy/kubernetes/rules.py from deploy/prometheus/rules; do not edit.\n"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, as people write them."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def manifest() -> str:
    files = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    rule: dict[str, Any] = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "hallmark"},
        "spec": {"groups": groups},
    }
    return HEAD + yaml.dump(rule, Dumper=_Dumper, sort_keys=False, width=120)


if __name__ == "__main__":
    TARGET.write_text(manifest())
