"""Run the parts of the gate within its 45 minutes, and say last what failed and what was not run.

What no change may break comes first: lint, types, `make test`, whole servers, manifests. Such a part that is not done
within thirty minutes has failed. The others begin only where the time that they usually take, at the pace at which
`make test` went on this machine today, fits into what is left of 45; one that takes longer is ended.
Neither is a failure: the last lines name it as NOT RUN. A test that fails is a failure in every part, and ends the
gate.

`.ci/run` runs it, with the interpreter of the machine.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
# When every part has been ended; two minutes more are for what starts the gate and for its end.
MUST_END_S, END_S = 28 * 60.0, 43 * 60.0  # of the parts that must run, and of all
SPARE_S = 60.0  # between the expected end of a part and the time that all have
GRACE_S = 20.0  # from SIGINT, at which pytest writes what has failed so far, to SIGKILL
READ_S = 5.0  # to read what a command has written, after its end
INDEX_S = 60.0  # for the package index to answer
OUT_OF_TIME = "NOT RUN: out of time"
NO_TIME = "FAILED: not done when the time was up"
NO_INDEX = "NOT RUN: no package index can be reached"
TWICE = "--reruns 1 -raR"  # a test that fails is run once more, since others may load this machine
_SAID_LAST = re.compile(
    r"=+ .* in [0-9.]+s|NOT RUN |NEW FAILURE |FAILED |ERROR |RERUN |[0-9]+ of [0-9]+ (clients work|changed configs)|"
    r"[0-9]+ tokenizers, "
)
_FAILED_TEST = re.compile(r"(FAILED|ERROR|NEW FAILURE) ")


@dataclass(frozen=True, slots=True)
class Part:
    """A target of make.

    usual_s      seconds that it takes on two cores, or that are the least worth beginning it
    argument     of make; {left_s} stands for the seconds it has, {first} for a number that is another one every day
    sets_pace    whether the seconds that it takes, over usual_s, are this machine's pace
    """

    target: str
    usual_s: float
    argument: str = ""
    is_optional: bool = False
    needs_index: bool = False
    sets_pace: bool = False


# Seconds of one whole run on two cores of an AMD EPYC with nothing beside it, on 2026-11-29 at c487aa2f. Machines with
# other work on their cores have taken 2.2 times as long.
PARTS = (
    Part(".venv/.installed", 60),
    Part("test", 375, f"PYTEST_FLAGS=--require-tools {TWICE}", sets_pace=True),  # a missing tool is a failure here
    Part("test-e2e", 230, f"PYTEST_FLAGS=--require-tools {TWICE}"),
    Part("test-deploy", 40, f"PYTEST_FLAGS={TWICE}", needs_index=True),  # skipped without node and npm
    Part("test-sm90", 260, f"PYTEST_FLAGS={TWICE}", is_optional=True),
    Part("test-portable", 80, f"PYTEST_FLAGS={TWICE}", is_optional=True),
    # The whole suite, and numbers that are others every day.
    Part(
        "test-schemas-suite",
        60,
        "SUITE_FLAGS=--numbers 100000 --seed {first} --out .cache/gate-schema-suite.json",
        is_optional=True,
        needs_index=True,
    ),
    # Which tokenizers, templates, configs, small models and clients have time changes with the day; clients take all
    # that is left.
    Part("test-tokenizers", 90, "TOKENIZER_FLAGS=--num 2 --first {first}", is_optional=True, needs_index=True),
    Part("test-templates", 60, "TEMPLATE_FLAGS=--sample 20 --first {first}", is_optional=True, needs_index=True),
    Part("test-configs", 60, "CONFIG_FLAGS=--first {first} --time-limit 60", is_optional=True),
    Part("test-starts", 90, f"PYTEST_FLAGS=--begin-within 60 --first {{first}} {TWICE}", is_optional=True),
    Part(
        "test-clients",
        120,
        "CLIENTS=--time-limit {left_s} --page .cache/gate-clients.md --known docs/clients.md",
        is_optional=True,
        needs_index=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. status: None where its time was up. lines: its output."""

    status: int | None
    lines: tuple[str, ...]

    @property
    def has_failed(self) -> bool:
        """Return whether it says that something failed, or ended so; no time left is no failure."""
        return bool(self.status) or (self.status is None and any(_FAILED_TEST.match(line) for line in self.lines))


Run = Callable[[Sequence[str], float], Ended]  # a command, and the seconds it has


def run_parts(
    parts: Sequence[Part],
    run: Run,
    passed_s: Callable[[], float],
    say: Callable[[str], None],
    has_index: Callable[[], bool],
) -> bool:
    """Run the parts and return whether none has failed. passed_s: seconds of the gate's time that have passed."""
    pace, summary, failed, not_run = 1.0, [], None, []
    for part in parts:
        end_s = END_S if part.is_optional else MUST_END_S
        left_s, needed_s = end_s - passed_s(), part.usual_s * pace
        if part.needs_index and not has_index():
            outcome = NO_INDEX
        elif left_s <= (needed_s + SPARE_S if part.is_optional else 0):
            outcome = OUT_OF_TIME if part.is_optional else NO_TIME
        else:
            begun_s = passed_s()
            ended = run(command_of(part, left_s - SPARE_S), left_s)
            took_s = passed_s() - begun_s
            if part.sets_pace:
                pace = took_s / part.usual_s
            summary += [line for line in ended.lines if _SAID_LAST.match(line)]
            if ended.status == 0:
                outcome = f"passed in {took_s:.0f} s"
            elif ended.has_failed:
                outcome = f"FAILED with status {ended.status} after {took_s:.0f} s"
            else:
                outcome = OUT_OF_TIME if part.is_optional else NO_TIME
        summary.append(f"make {part.target}: {outcome}")
        if outcome in (OUT_OF_TIME, NO_INDEX):
            not_run.append(part.target)
        if outcome.startswith("FAILED"):
            failed = f"{part.target}: {outcome}"
            break
    again = passed_again(summary)
    if again:
        summary.append(f"{len(again)} tests passed only when run again: {', '.join(again)}")
    for line in ("", *summary):
        say(line)
    left_out = f"; not run: {', '.join(not_run)}" if not_run else ""
    verdict = "passed" if failed is None else f"ended with make {failed},"
    say(f"The gate {verdict} after {passed_s() / 60:.1f} minutes, at {pace:.2f} of the usual time{left_out}")
    return failed is None


def passed_again(lines: Sequence[str]) -> list[str]:
    """Return the tests that failed and passed when they were run once more, by pytest's lines of them."""
    named = [(kind, rest) for kind, _, rest in (line.partition(" ") for line in lines)]
    failed = [rest for kind, rest in named if kind in ("FAILED", "ERROR")]  # the test, and often " - " and its error
    again = dict.fromkeys(test for kind, test in named if kind == "RERUN")
    return [test for test in again if not any(it == test or it.startswith(f"{test} - ") for it in failed)]


def command_of(part: Part, left_s: float) -> list[str]:
    """Return the command of a part that has so many seconds."""
    argument = part.argument.format(left_s=max(1, int(left_s)), first=int(time.time()) // 86_400 * 11)
    return ["make", part.target, *([argument] if argument else [])]


def run_within(command: Sequence[str], limit_s: float, grace_s: float = GRACE_S, read_s: float = READ_S) -> Ended:
    """Run a command in the checkout and repeat its output; end it and its children where it takes longer.

    A process that it leaves behind with its output open holds nothing up.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    said = bytearray()
    reader = threading.Thread(target=_repeat, args=(process, said), daemon=True)
    try:
        reader.start()
        status: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader.join(read_s)
    return Ended(status, tuple(bytes(said).decode(errors="replace").splitlines()))


def _repeat(process: subprocess.Popen[bytes], said: bytearray) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        while read := os.read(output.fileno(), 65_536):
            said.extend(read)
            os.write(sys.stdout.fileno(), read)


def index_answers() -> bool:
    """Return whether pip can reach a package index."""
    command = [".venv/bin/python", "-m", "pip", "index", "versions", "openai"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=INDEX_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def end_on_sigterm() -> None:
    """Leave by an exception at SIGTERM and at SIGINT, so that what is running is ended on the way out."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    # A shell's background jobs ignore SIGINT, and so would the commands, which are to write what has failed.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--passed-s", type=float, default=0.0, metavar="S", help="seconds that preparing has taken")
    begun = time.monotonic() - parser.parse_args().passed_s
    end_on_sigterm()
    (ROOT / ".cache").mkdir(exist_ok=True)
    is_sound = run_parts(
        PARTS,
        run_within,
        passed_s=lambda: time.monotonic() - begun,
        say=lambda line: print(line, flush=True),
        has_index=index_answers,
    )
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
