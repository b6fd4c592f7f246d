"""The dashboard of deploy/grafana held against the types of the Grafana that deploy/compose.yaml starts.

make test-deploy
"""

import copy
import json
from typing import Any

import yaml
from tools import HERE, ROOT, Tools

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "hallmark.json").read_text())


def test_the_dashboard_is_what_grafana_reads(tools: Tools) -> None:
    assert tools.problems_of_dashboard(DASHBOARD) == []


def test_a_dashboard_with_a_mistake_is_noticed(tools: Tools) -> None:
    misspelt, null, refresh = (copy.deepcopy(DASHBOARD) for _ in range(3))
    misspelt["panels"][1]["gridPosition"] = misspelt["panels"][1].pop("gridPos")
    null["panels"][1]["options"] = None
    refresh["templating"]["list"][1]["refresh"] = "sometimes"
    for dashboard, word in ((misspelt, "gridPosition"), (null, "null"), (refresh, "VariableRefresh")):
        [problem] = tools.problems_of_dashboard(dashboard)
        assert word in problem


def test_the_types_are_of_the_grafana_that_is_deployed() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    types = json.loads((HERE / "package.json").read_text())["dependencies"]["@grafana/schema"]
    assert compose["services"]["grafana"]["image"] == f"grafana/grafana:{types}"
