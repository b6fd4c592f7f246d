"""The drill: 10% of traffic moves to a model with an unsupported head dim; who notices? Needs no GPU.

.venv/bin/python deploy/drill/drill.py [--out drill] [--rounds 3]

Exit status 0 when it showed all that it is to show, 1 when it did not, 4 when this machine is too busy to judge it:
every request is sent as before the upgrade twice, and that difference is the noise. The evidence of the stable server
stays in OUT/cache.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
from alerts import counted, firing, prometheus
from model import STABLE_HEAD_DIM, UPGRADED_HEAD_DIM, write_model
from plot import cdf_plot
from report import Findings, Judgement, markdown
from servers import Build, serving
from traffic import HIT, SAMPLES, Times, compare, plan

UPGRADED_SHARE = 0.1
WARM = {"le_128": 12, "le_512": 8, HIT: 8}


@contextmanager
def server(model: Path, out: Path, *flags: str) -> Iterator[str]:
    """A started server's URL; ready servers only. Raises RuntimeError for one that ends or takes too long."""
    common = ["--model", str(model), "--served-model-name", "drill", "--load-format", "dummy", "--dtype", "fp32"]
    common += ["--device", "cpu", "--max-num-batched-tokens", "2048", "--no-prefix-caching"]
    with serving(Build(), out / f"{model.name}.log", *common, "--cache-dir", str(out / "cache"), *flags) as url:
        yield url


def run(out: Path, num_rounds: int) -> Findings:
    """Start both servers and their monitor, send the traffic, and return what was found."""
    with ExitStack() as stack:
        stable_model = write_model(out / "stable", STABLE_HEAD_DIM)
        upgraded_model = write_model(out / "upgraded", UPGRADED_HEAD_DIM)
        say("starting the stable server; its first start proves every shape ...")
        stable = stack.enter_context(server(stable_model, out))
        say("starting the upgraded one, with --on-unproven degrade ...")
        upgraded = stack.enter_context(server(upgraded_model, out, "--on-unproven", "degrade"))
        targets = [url.removeprefix("http://") for url in (stable, upgraded)]
        monitor = stack.enter_context(prometheus(out / f"prometheus-{time.time_ns()}", targets))
        compare(stable, upgraded, plan(WARM, 0.5, seed=0), Times())
        times = Times()
        alerts: list[dict[str, str]] = []
        source = "no Prometheus here: read from /metrics" if monitor is None else "Prometheus, the shipped rules"
        for number in range(1, num_rounds + 1):
            num = sum(SAMPLES.values())
            say(f"round {number}: {num} requests, as before twice and as after with {UPGRADED_SHARE:.0%} moved ...")
            compare(stable, upgraded, plan(SAMPLES, UPGRADED_SHARE, seed=number), times)
            if monitor is not None:
                alerts = alerts or firing(monitor, "KernelFallback")
            else:
                alerts = counted(httpx2.get(f"{upgraded}/metrics", timeout=10).text)
            findings = Findings(times, alerts, source)
            if all(judgement is not Judgement.CANNOT for judgement, _ in findings.verdicts()):
                break
        return findings


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("drill"))
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 10), help="at most, while it is too noisy")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    findings = run(out, options.rounds)
    panels = [("All requests", None), (f"Prompts of bucket {HIT}", HIT)]
    curves = [
        (t, findings.seconds(findings.times.before, b), findings.seconds(findings.times.after, b)) for t, b in panels
    ]
    (out / "ttft.svg").write_text(cdf_plot(curves))
    (out / "report.md").write_text(markdown(findings))
    verdicts = findings.verdicts()
    for judgement, text in verdicts:
        say(f"{judgement.value}: {text}")
    say(f"The report is {out / 'report.md'}")
    judgements = {judgement for judgement, _ in verdicts}
    return 1 if Judgement.NO in judgements else 4 if Judgement.CANNOT in judgements else 0


if __name__ == "__main__":
    sys.exit(main())
