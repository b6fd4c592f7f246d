"""The canary against real servers of the demo model: itself, a slower one, and one whose window is off by one."""

import json
import shutil
from pathlib import Path

import pytest
from running_server import DEMO, Server, StartServer

from support.e2e.canary import canary
from support.e2e.holding_proxy import holding

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a start on a busy machine takes minutes


def test_a_slower_prefill_fails_performance_in_its_bucket_alone(demo: Server, tmp_path: Path) -> None:
    """Two seconds on top of a prefill that takes 0.05 to 0.5 s, so that a busy machine changes nothing.

    Numerics are against the answers that ship, times against the same server's.
    """
    trace = ("--lengths", "32", "160", "--samples", "6", "--looks", "1", "--utilization", "4", "--vocab-size", "4000")
    room = ("--max-slowdown", "3", "--noise-ms", "500")
    with holding(demo.url, hold_s=2.0, lengths=range(129, 513)) as candidate:
        done = canary(candidate, "--baseline", demo.url, *trace, *room, "--out-dir", str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    verdicts = json.loads((tmp_path / "canary.json").read_text())["verdicts"]
    outcomes = {(it["stage"], it["bucket"]): it["outcome"] for it in verdicts if it["bucket"]}
    buckets = ("le_128", "le_512", "le_2k", "le_8k", "mix")
    right = [("plan", "layers"), *(("numerics", bucket) for bucket in buckets)]
    assert {stage: outcomes.pop(stage) for stage in right} == dict.fromkeys(right, "pass")
    assert outcomes.keys() == {("performance", "le_128"), ("performance", "le_512")}
    assert [stage for stage, outcome in outcomes.items() if outcome == "fail"] == [("performance", "le_512")]
    assert any("TTFT is surely more than 3x" in reason for it in verdicts for reason in it["reasons"])


def test_a_window_off_by_one_fails_numerics_in_its_bucket(start_server: StartServer, tmp_path: Path) -> None:
    """A window of 2048 in a model without: the last of 2049 tokens does not see the first. Nothing shorter notices."""
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    config = json.loads((folder / "config.json").read_text())
    windowed = config | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 2048}
    (folder / "config.json").write_text(json.dumps(windowed))
    with start_server("--model", str(folder), "--served-model-name", "demo", "--on-unproven", "degrade") as server:
        server.wait_ready()
        done = canary(server.url, "--no-performance")
    assert done.returncode == 1, done.stdout + done.stderr
    outcomes = dict(line.split(": ")[:2] for line in done.stdout.splitlines() if line.startswith("numerics"))
    assert outcomes == {
        "numerics le_128": "PASS",
        "numerics le_512": "PASS",
        "numerics le_2k": "PASS",
        "numerics le_8k": "FAIL",
        "numerics mix": "PASS",
    }
