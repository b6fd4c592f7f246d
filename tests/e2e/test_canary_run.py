"""The canary against real servers of the demo model: itself, a slower one, and one whose window is off by one."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from running_server import DEMO, Server, StartServer

from support.e2e.canary import canary
from support.e2e.holding_proxy import holding

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a start on a busy machine takes minutes


@pytest.mark.timed
def test_the_demo_server_against_itself_passes(demo: Server, tmp_path: Path) -> None:
    """Numerics against the answers that ship; times against its own, with room for a machine that does other work."""
    trace = ("--lengths", "32", "160", "--samples", "8", "--utilization", "0.5", "--vocab-size", "4000")
    room = ("--max-slowdown", "3", "--noise-ms", "300")
    done = canary(demo.url, "--baseline", demo.url, *trace, *room, "--out-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads((tmp_path / "canary.json").read_text())["verdicts"]
    assert [(it["stage"], it["bucket"]) for it in verdicts if it["bucket"]] == [
        ("plan", "layers"),
        *(("numerics", bucket) for bucket in ("le_128", "le_512", "le_2k", "le_8k", "mix")),
        *(("performance", bucket) for bucket in ("le_128", "le_512")),
    ]


@pytest.mark.timed
def test_a_slower_prefill_fails_performance_in_its_bucket(demo: Server, tmp_path: Path) -> None:
    """Two seconds on top of a prefill that takes 0.05 to 0.5 s, so that a busy machine changes nothing."""
    trace = ("--lengths", "32", "160", "--samples", "8", "--looks", "1", "--utilization", "4", "--vocab-size", "4000")
    room = ("--max-slowdown", "2", "--noise-ms", "500")
    with ExitStack() as stack:
        baseline = stack.enter_context(holding(demo.url))
        candidate = stack.enter_context(holding(demo.url, hold_s=2.0, lengths=range(129, 513)))
        done = canary(candidate, "--baseline", baseline, *trace, *room, "--out-dir", str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    verdicts = json.loads((tmp_path / "canary.json").read_text())["verdicts"]
    failed = [(it["stage"], it["bucket"]) for it in verdicts if it["outcome"] == "fail"]
    assert failed == [("performance", "le_512")]
    assert any("TTFT is surely more than 2x" in reason for it in verdicts for reason in it["reasons"])


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
