"""The upgrade drill: candidates beside a stable server, each with one thing changed, and the gate before each.

.venv/bin/python deploy/drill/upgrade.py [--out drill-upgrade] [--cases fingerprint slower wrong]

Needs no GPU. A candidate is this build on a changed machine, or a copy of it with one line of its source changed; the
stable server answers requests all the while. Other programs on the machine make times uncertain: before a gate that
compares times the drill waits two minutes at most until they take little, and repeats a gate that could not decide.

Exit status 0 when every gate said what it had to and the stable server lost nothing, 1 when not, 4 when a gate could
not decide three times.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import torch
from builds import SLOW_KERNEL, SLOWDOWN, SLOWED_BUCKET, WRONG_KERNEL, WRONG_WINDOW, write_build
from model import write_windowed_model
from other_load import used, wait_for_calm
from report import Judgement
from servers import Build, hallmark, serving
from steady_load import Steady, steady_load
from upgrade_report import Drilled, Expected, GateRun, as_json, as_markdown

from kernels.system.device import num_cores, read_fingerprint

NAME = "drill"
# It changes the fingerprint and nothing else: all instruction sets are what oneDNN uses without it.
CHANGED_MACHINE = {"ONEDNN_MAX_CPU_ISA": "ALL"}
# A length of the bucket that is slowed and one of a bucket that is not, so seldom that few requests meet. A kernel that
# is 1.3 times slower makes the first token of the long prompt 1.2 times as late: 1.1 lies between that and nothing.
TRACE = (
    *("--lengths", "384", "1536", "--samples", "50", "--looks", "2", "--utilization", "0.3"),
    *("--max-slowdown", "1.1", "--noise-ms", "1"),
)
ATTEMPTS = 3  # of a gate that compares times and cannot decide
CALM_CORES, CALM_LIMIT_S = 0.2, 120.0  # what others may take before such a gate, and how long it waits for that


@dataclass(slots=True)
class Drill:
    """The stable server, what was recorded of it, and what the gates have said so far."""

    out: Path
    model: Path
    stable: str = ""
    runs: list[GateRun] = field(default_factory=list)
    # Before a comparison of times; returns the cores that others take then.
    wait: Callable[[], float] = field(default=lambda: wait_for_calm(CALM_CORES, CALM_LIMIT_S))

    @property
    def matrices(self) -> Path:
        return self.out / "matrices"

    @property
    def golden(self) -> Path:
        return self.out / "golden.json"

    @contextmanager
    def server(self, name: str, build: Build, *flags: str, waits_for: str = "/readyz") -> Iterator[str]:
        """A server of the drill's model; its cache of evidence is its own."""
        common = ["--model", str(self.model), "--served-model-name", NAME, "--device", "cpu", "--dtype", "fp32"]
        common += ["--max-num-seqs", "8", "--kv-cache-tokens", "32768", "--cache-dir", str(self.out / f"cache-{name}")]
        with serving(build, self.out / f"{name}.log", *common, *flags, waits_for=waits_for) as url:
            yield url

    def run(self, case: str, what: str, build: Build, expected: Expected, *arguments: str) -> GateRun:
        """Run a command of the build, and keep what it said."""
        say(f"{case}: {what} ...")
        began = used()
        done = hallmark(build, *arguments)
        lines = [line.rstrip().replace(f"{self.out}/", "") for line in done.stdout.splitlines()]
        lines += [line.rstrip() for line in done.stderr.splitlines() if line.startswith("hallmark: ")]
        command = shlex.join(["hallmark", *arguments]).replace(f"{self.out}/", "")
        ended = used()
        took_s, others = round(ended.at - began.at, 1), round(ended.others_since(began), 2)
        found = GateRun(case, what, command, expected, done.returncode, lines, took_s, others)
        self.runs.append(found)
        say("\n".join(f"    {line}" for line in lines if ": " in line or "verdict" in line) + f"\n{found}")
        return found

    def qualify(self, case: str, what: str, build: Build, expected: Expected, folder: Path, *flags: str) -> GateRun:
        where = ["--model", str(self.model), "--out-dir", str(folder), "--dtype", "fp32"]
        return self.run(
            case, what, build, expected, "qualify", *where, "--quick", "--paths", "sdpa.cpu", "torch.linear", *flags
        )

    def canary(self, case: str, what: str, url: str, expected: Expected, *flags: str) -> GateRun:
        """Run the gate of this build, whatever the candidate's is."""
        against = ["--url", url, "--golden", str(self.golden), *flags]
        return self.run(
            case, what, Build(), expected, "canary", *against, "--out-dir", str(self.out / f"canary-{len(self.runs)}")
        )

    def timed_canary(self, case: str, what: str, url: str, expected: Expected, *flags: str) -> None:
        """Run the gate with times beside the stable server's; repeat it while it cannot decide."""
        for attempt in range(1, ATTEMPTS + 1):
            others = self.wait()
            if others > CALM_CORES:
                say(f"other programs take {others:.2f} of {num_cores()} cores, and have for {CALM_LIMIT_S:g} s")
            with steady_load(url):  # as the stable server has it, or that one would be slower by it
                found = self.canary(case, what, url, expected, *flags, "--baseline", self.stable, *TRACE)
            if found.judgement is not Judgement.CANNOT or attempt == ATTEMPTS:
                return
            self.runs[-1] = replace(found, is_repeated=True)


def fingerprint(drill: Drill) -> None:
    """Every proof of a changed machine is stale: it does not serve before it is qualified again, and then passes."""
    case, build = "changed machine", Build(environ=CHANGED_MACHINE)
    refusing = ("--on-unproven", "refuse", "--matrix")
    with drill.server("changed", build, *refusing, str(drill.matrices), waits_for="/attention") as url:
        drill.canary(case, "with the evidence of the machine before", url, Expected(3), "--no-performance")
        readyz = httpx2.get(f"{url}/readyz", timeout=10)
        reasons = [str(it) for it in readyz.json().get("reasons", ())][:1]
        asked = GateRun(
            case, "its readiness", "curl $CANDIDATE/readyz", Expected(503), readyz.status_code, reasons, 0.0
        )
        drill.runs.append(asked)
        say(f"    {reasons}\n{asked}")
    again = drill.out / "matrices-changed"
    drill.qualify(case, "qualified again", build, Expected(0), again)
    with drill.server("requalified", build, *refusing, str(again)) as url:
        drill.timed_canary(case, "with its own evidence", url, Expected(0, set()), "--matrix", str(again))


def slower(drill: Drill) -> None:
    """A kernel that is right and slower: only a comparison of times can see it."""
    case = f"kernel {SLOWDOWN}x slower"
    build = write_build(drill.out / "builds" / "slower", SLOW_KERNEL)
    with drill.server("slower", build) as url:
        wanted = Expected(2, {f"performance {SLOWED_BUCKET}"})
        drill.timed_canary(case, f"prompts of {SLOWED_BUCKET} alone", url, wanted)


def wrong(drill: Drill) -> None:
    """A window that is one key too short: in the kernel, and where no proof of a kernel can see it."""
    build = write_build(drill.out / "builds" / "wrong-kernel", WRONG_KERNEL)
    folder = drill.out / "matrices-wrong-kernel"
    drill.qualify("window off by one", "in the kernel", build, Expected(1), folder, "--phases", "prefill")
    build = write_build(drill.out / "builds" / "wrong-window", WRONG_WINDOW)
    with drill.server("wrong-window", build) as url:
        wanted = Expected(1, {f"numerics {SLOWED_BUCKET}"})
        drill.canary("window off by one", "in the reading of config.json", url, wanted, "--no-performance")


CASES: dict[str, Callable[[Drill], None]] = {"fingerprint": fingerprint, "slower": slower, "wrong": wrong}


def run(out: Path, cases: list[str]) -> Drilled:
    drill = Drill(out, write_windowed_model(out / "model"))
    say("qualifying the stable build on this machine ...")
    done = hallmark(
        Build(),
        *("qualify", "--model", str(drill.model), "--out-dir", str(drill.matrices), "--dtype", "fp32"),
        *("--quick", "--paths", "sdpa.cpu", "torch.linear"),
    )
    if done.returncode:
        raise RuntimeError(f"the stable build could not be qualified: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    with ExitStack() as stack:
        refusing = ("--on-unproven", "refuse", "--matrix", str(drill.matrices))
        drill.stable = stack.enter_context(drill.server("stable", Build(), *refusing))
        say(f"the stable server is ready at {drill.stable}; recording its answers ...")
        done = hallmark(
            Build(), *("canary", "record", "--url", drill.stable, "--out", str(drill.golden), "--no-performance")
        )
        if done.returncode:
            raise RuntimeError(f"the stable server's answers could not be recorded: {done.stdout}{done.stderr}")
        steady: Steady = stack.enter_context(steady_load(drill.stable))
        for name in cases:
            CASES[name](drill)
    return Drilled(drill.runs, steady)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("drill-upgrade"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    drilled = run(out, options.cases)
    machine = (
        f"{num_cores()} cores of {read_fingerprint(torch.device('cpu')).gpu}, load average {os.getloadavg()[2]:.1f}"
    )
    head = {"command": "make drill-upgrade", "at": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine}
    (out / "report.json").write_text(as_json(drilled, head))
    (out / "report.md").write_text(as_markdown(drilled))
    say("")
    for found in drilled.runs:
        say(str(found))
    say(drilled.stable_line())
    say(f"The report is {out / 'report.md'}; exit {drilled.exit_code}")
    return drilled.exit_code


if __name__ == "__main__":
    sys.exit(main())
