"""deploy/kubernetes without Kustomize: settings, queries, scripts. `make test-deploy` checks the rendered manifests."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from qualification.evidence.gpu_folder import gpu_folder
from qualification.evidence.matrix import MATRICES
from server.cli.main import build_parser
from server.cli.parser import parsed
from server.settings import PREFIX, read_settings
from server.telemetry.metrics import Metrics

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
CANARY = KUBERNETES / "overlays" / "canary"
SCRIPTS = KUBERNETES / "qualification" / "base" / "scripts"
GPU_LABEL = "nvidia.com/gpu.product"
FILES = sorted(KUBERNETES.rglob("*.yaml"))


def documents(path: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def containers(node: Any) -> Iterator[dict[str, Any]]:
    """Give every container of a manifest or a patch, wherever its pod template is."""
    if isinstance(node, list):
        for item in node:
            yield from containers(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in {"containers", "initContainers"}:
                yield from value
            else:
                yield from containers(value)


@cache  # not when tests are collected: parsing takes a second of every worker
def all_containers() -> list[dict[str, Any]]:
    return [each for path in FILES for document in documents(path) for each in containers(document)]


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Return the server's variables of a container."""
    return {it["name"]: it["value"] for it in container.get("env", []) if it["name"].startswith(PREFIX)}


def test_the_servers_variables_are_settings() -> None:
    found = [read_settings({}, each) for container in all_containers() if (each := variables(container))]
    assert {settings.tensor_parallel_size for settings in found} == {1, 2}
    assert {settings.admin_port for settings in found} >= {9000}


def test_the_programs_commands_and_flags_are_its_own() -> None:
    lines = [each["args"] for each in all_containers() if each.get("image") == "hallmark-serve" and "args" in each]
    commands = [parsed(build_parser(), line).command for line in lines]
    assert sorted(commands) == ["canary", "serve"]


def gpus_of(node: Any) -> list[str]:
    """Return the folders of matrices of the GPUs that node affinities below this node name."""
    if isinstance(node, list):
        return [gpu for item in node for gpu in gpus_of(item)]
    if not isinstance(node, dict):
        return []
    if node.get("key") == GPU_LABEL:  # feature discovery puts a dash for each space of the GPU's name
        return [gpu_folder(value) for value in node["values"]]
    return [gpu for item in node.values() for gpu in gpus_of(item)]


def test_servers_may_run_on_every_gpu_with_committed_evidence() -> None:
    allowed = gpus_of(documents(KUBERNETES / "overlays" / "single-gpu" / "gpu.yaml"))
    committed = {path.name for path in MATRICES.iterdir() if path.is_dir()}
    assert committed <= set(allowed)


def test_the_proof_by_night_reads_the_file_of_its_gpu() -> None:
    nights = sorted(KUBERNETES.glob("qualification/h*/kustomization.yaml"))
    found = {}
    for path in nights:
        [document] = documents(path)
        patches = [yaml.safe_load(patch["patch"]) for patch in document["patches"]]
        [qualify] = containers(patches)
        [reviewed] = [it["value"] for it in qualify["env"] if it["name"] == "REVIEWED"]
        found[Path(reviewed).parent.name] = gpus_of(patches)
    assert found == {gpu: [gpu] for gpu in gpus_of(documents(KUBERNETES / "overlays" / "single-gpu" / "gpu.yaml"))}


def test_the_rule_resource_is_made_of_the_rule_files() -> None:
    spec = importlib.util.spec_from_file_location("kubernetes_rules", KUBERNETES / "rules.py")
    assert spec is not None
    assert spec.loader is not None
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    assert rules.TARGET.read_text() == rules.manifest(), "run .venv/bin/python deploy/kubernetes/rules.py"


def test_the_picker_reads_gauges_that_are_single_numbers() -> None:
    [config] = documents(KUBERNETES / "overlays" / "inference-pool" / "config.yaml")
    plugins = {it.get("name", it["type"]): it.get("parameters", {}) for it in config["plugins"]}
    [engine] = plugins["core-metrics-extractor"]["engineConfigs"]
    [custom] = engine.pop("customMetrics")
    engine.pop("name")
    declared = {it.name: it for it in Metrics("demo", CollectorRegistry(), version="0").declarations}
    for name in (*engine.values(), custom["metricSpec"]):
        assert (declared[name].kind, declared[name].labels) == ("gauge", ())
    assert plugins["without-fallbacks"]["attribute"] == custom["attributeKey"]
    referred = {it["pluginRef"] for profile in config["schedulingProfiles"] for it in profile["plugins"]}
    assert referred <= set(plugins)


# Share of what fell back or came late: the candidate's, the stable side's. Then the verdict of the analysis.
SIDES = [
    pytest.param((0, 100), (0, 100), "pass", id="neither falls back"),
    pytest.param((5, 100), (0, 100), "fail", id="the candidate does"),
    pytest.param((5, 100), (5, 100), "pass", id="both do"),
    pytest.param((0, 0), (0, 100), "inconclusive", id="the candidate served nothing"),
    pytest.param((0, 100), None, "inconclusive", id="no stable side"),
]


@pytest.mark.parametrize(("candidate", "stable", "verdict"), SIDES)
@pytest.mark.parametrize("name", ["fallback-ratio", "bad-ttft-ratio"])
def test_the_analysis_compares_both_sides(
    name: str, candidate: tuple[int, int], stable: tuple[int, int] | None, verdict: str, promtool, tmp_path: Path
) -> None:
    """Compute the query by promtool, from samples a minute apart, and judge it by the template's conditions."""
    [template] = documents(CANARY / "analysis-ratios.yaml")
    [metric] = [it for it in template["spec"]["metrics"] if it["name"] == name]
    query = (
        metric["provider"]["prometheus"]["query"].replace("{{args.candidate}}", "new").replace("{{args.stable}}", "old")
    )
    assert "{{" not in query
    limit = float(re.fullmatch(r"len\(result\) > 0 && result\[0\] <= ([\d.]+)", metric["successCondition"])[1])
    assert metric["failureCondition"] == f"len(result) > 0 && result[0] > {limit:g}"
    series = []
    for side, counts in (("new", candidate), ("old", stable)):
        if counts is None:
            continue
        label = f'rollouts_pod_template_hash="{side}"'
        bad, every = counts
        series += [
            {"series": f"hallmark_attention_fallback_total{{{label}}}", "values": f"0+{bad}x20"},
            {"series": f"hallmark_attention_dispatch_total{{{label}}}", "values": f"0+{every}x20"},
            {"series": f'hallmark_slo_events_total{{sli="ttft",result="bad",{label}}}', "values": f"0+{bad}x20"},
            {
                "series": f'hallmark_slo_events_total{{sli="ttft",result="good",{label}}}',
                "values": f"0+{every - bad}x20",
            },
        ]
    difference = None if stable is None or not candidate[1] else candidate[0] / candidate[1] - stable[0] / stable[1]
    expected = [] if difference is None else [{"labels": "{}", "value": round(difference, 3)}]
    checks = {"expr": f"round({query}, 0.001)", "eval_time": "15m", "exp_samples": expected}
    file = tmp_path / "test.yml"
    file.write_text(
        yaml.safe_dump({"tests": [{"input_series": series, "interval": "1m", "promql_expr_test": [checks]}]})
    )
    result = promtool("test", "rules", file)
    assert result.returncode == 0, result.stdout + result.stderr
    said = "inconclusive" if difference is None else "pass" if difference <= limit else "fail"
    assert said == verdict


def run(script: str, *arguments: str, environ: dict[str, str]) -> str:
    """Return the output of one of the qualification's scripts, which must succeed."""
    command = ["sh", str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def matrices(tmp_path: Path) -> Path:
    """Make a repository of reviewed matrices, as its server has it."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path / "first")]
    file = tmp_path / "first" / "matrices" / "gpu" / "demo.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"driver": "580"}\n')
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "matrices: the first"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    subprocess.run(["git", "clone", "--quiet", "--bare", str(tmp_path / "first"), str(tmp_path / "server")], check=True)
    return tmp_path / "server"


def night(repository: Path, work: Path, driver: str) -> str:
    """Run the CronJob's containers in turn on a machine with that driver; return the last one's output."""
    shutil.rmtree(work, ignore_errors=True)
    (work / "bin").mkdir(parents=True)
    fake = work / "bin" / "hallmark"
    evidence = json.dumps({"driver": driver})
    fake.write_text(
        f"""#!/bin/sh
case "$1 $2" in
  "matrix verify") grep -q '"driver": "{driver}"' "$3" || exit 3 ;;
  "qualify --preset") mkdir -p "$5/gpu" && echo '{evidence}' >"$5/gpu/$3.json" ;;
  "matrix diff") echo "driver changed"; exit 3 ;;
  *) exit 2 ;;
esac
"""
    )
    fake.chmod(0o755)
    environ = {
        "PATH": f"{fake.parent}:{os.environ['PATH']}",
        "HOME": str(work),
        "WORK": str(work),
        "REPOSITORY": str(repository),
        "MATRICES": "matrices",
        "MODEL": "demo",
        "REVIEWED": str(work / "repository" / "matrices" / "gpu" / "demo.json"),
        "OUT": str(work / "out"),
    }
    run("open_diff.sh", "clone", environ=environ)
    run("qualify.sh", environ=environ)
    return run("open_diff.sh", "push", environ=environ)


def branches(repository: Path) -> list[str]:
    command = ["git", "-C", str(repository), "branch", "--list", "qualification/*", "--format=%(refname:short)"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_a_machine_that_has_not_changed_opens_nothing(matrices: Path, tmp_path: Path) -> None:
    assert "no new evidence" in night(matrices, tmp_path / "work", driver="580")
    assert branches(matrices) == []


def test_a_changed_driver_opens_one_branch_with_its_evidence(matrices: Path, tmp_path: Path) -> None:
    assert "opened" in night(matrices, tmp_path / "work", driver="590")
    assert "is open already" in night(matrices, tmp_path / "work", driver="590"), "the night after, or another node"
    [branch] = branches(matrices)
    command = ["git", "-C", str(matrices), "show", "--format=%B", branch]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert '+{"driver": "590"}' in shown
    assert "driver changed" in shown, "the difference is what the reviewer reads first"
