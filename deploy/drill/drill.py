"""The drill: 10% of traffic moves to a model with an unsupported head dim; who notices? Needs no GPU.

.venv/bin/python deploy/drill/drill.py [--out drill] [--requests 1700]

Exit status 0 when it showed all that it is to show, 1 otherwise. The evidence of the stable server stays in OUT/cache.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from alerts import counted, firing, free_port, prometheus
from model import STABLE_HEAD_DIM, UPGRADED_HEAD_DIM, write_model
from plot import cdf_plot
from report import Findings, markdown
from traffic import HIT, compare, plan

UPGRADED_SHARE = 0.1
NUM_WARM = 40
_START_TIMEOUT_S = 300.0


@contextmanager
def server(model: Path, out: Path, *flags: str) -> Iterator[str]:
    """A started server's URL; ready servers only. Raises RuntimeError for one that ends or takes too long."""
    port = free_port()
    command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), "--model", str(model)]
    command += ["--served-model-name", "drill", "--load-format", "dummy", "--dtype", "fp32", "--device", "cpu"]
    command += ["--max-num-batched-tokens", "2048", "--no-prefix-caching", "--cache-dir", str(out / "cache"), *flags]
    environ = {name: text for name, text in os.environ.items() if not name.startswith("HALLMARK_")}
    with (out / f"{model.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ)
    try:
        wait_ready(process, f"http://127.0.0.1:{port}", out / f"{model.name}.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_ready(process: "subprocess.Popen[bytes]", url: str, log_file: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a server did not become ready; its log is {log_file}")
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def run(out: Path, num_requests: int) -> Findings:
    """Both servers, their monitor and the traffic."""
    with ExitStack() as stack:
        stable_model = write_model(out / "stable", STABLE_HEAD_DIM)
        upgraded_model = write_model(out / "upgraded", UPGRADED_HEAD_DIM)
        say("starting the stable server; its first start proves every shape ...")
        stable = stack.enter_context(server(stable_model, out))
        say("starting the upgraded one, with --on-unproven degrade ...")
        upgraded = stack.enter_context(server(upgraded_model, out, "--on-unproven", "degrade"))
        targets = [url.removeprefix("http://") for url in (stable, upgraded)]
        monitor = stack.enter_context(prometheus(out / f"prometheus-{time.time_ns()}", targets))
        compare(stable, upgraded, plan(NUM_WARM, 0.5, seed=2))
        say(f"{num_requests} requests as before and as after the upgrade, {UPGRADED_SHARE:.0%} of them moved ...")
        before, after = compare(stable, upgraded, plan(num_requests, UPGRADED_SHARE, seed=1))
        if monitor is not None:
            return Findings(before, after, firing(monitor, "KernelFallback"), "Prometheus, the shipped rules")
        alerts = counted(httpx.get(f"{upgraded}/metrics", timeout=10).text)
        return Findings(before, after, alerts, "no Prometheus here: read from /metrics")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("drill"))
    parser.add_argument("--requests", type=int, default=1700)
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    findings = run(out, options.requests)
    panels = [("All requests", None), (f"Prompts of bucket {HIT}", HIT)]
    curves = [(t, findings.seconds(findings.before, b), findings.seconds(findings.after, b)) for t, b in panels]
    (out / "ttft.svg").write_text(cdf_plot(curves))
    (out / "report.md").write_text(markdown(findings))
    for is_so, text in findings.verdicts():
        say(f"{'yes' if is_so else 'NO '}  {text}")
    say(f"The report is {out / 'report.md'}")
    return 0 if all(is_so for is_so, _ in findings.verdicts()) else 1


if __name__ == "__main__":
    sys.exit(main())
