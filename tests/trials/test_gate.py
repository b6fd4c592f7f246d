"""The gate's parts on a clock of their own: what begins, what is ended, and what the last lines say."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from gate import END_S, MUST_END_S, PARTS, TWICE, Ended, Part, command_of, passed_again, run_parts, run_within

MUST = [part for part in PARTS if not part.is_optional]
OPTIONAL = [part for part in PARTS if part.is_optional]


class Machine:
    """Takes for each part a multiple of its usual time, and ends it where its time is up."""

    def __init__(self, pace: float, *, broken: str | None = None, has_index: bool = True) -> None:
        self.now_s, self.ran, self.said = 0.0, list[str](), list[str]()
        self._pace, self._broken, self._has_index = pace, broken, has_index

    def run(self, command: Sequence[str], limit_s: float) -> Ended:
        target = command[1]
        (part,) = (part for part in PARTS if part.target == target)
        self.ran.append(target)
        took_s = part.usual_s * self._pace
        self.now_s += min(took_s, limit_s)
        lines = ("FAILED tests/test_it.py::test_it - assert 1 == 2", "== 1 failed, 2 passed in 9.00s ==")
        if target == self._broken:
            return Ended(2, lines)
        return Ended(0 if took_s <= limit_s else None, ("== 3 passed in 9.00s ==",))

    def passes(self, parts: Sequence[Part] = PARTS) -> bool:
        return run_parts(parts, self.run, lambda: self.now_s, self.said.append, lambda: self._has_index)


def test_every_part_runs_where_there_is_time() -> None:
    machine = Machine(1.1)
    assert machine.passes()
    assert machine.ran == [part.target for part in PARTS]
    assert machine.said[-1].endswith("at 1.10 of the usual time")


@pytest.mark.parametrize("pace", [1.1, 1.5, 2.2])
def test_it_ends_in_time_and_names_what_did_not_begin(pace: float) -> None:
    machine = Machine(pace)
    assert machine.passes()
    assert machine.now_s < END_S
    assert machine.ran[: len(MUST)] == [part.target for part in MUST]
    left_out = [part.target for part in OPTIONAL if part.target not in machine.ran]
    assert machine.said[-1].partition("; not run: ")[2] == ", ".join(left_out)
    assert [f"make {target}: NOT RUN: out of time" in machine.said for target in left_out] == [True] * len(left_out)


def test_a_part_that_must_run_and_has_no_time_fails() -> None:
    machine = Machine(5.0)
    assert not machine.passes()
    assert machine.now_s == MUST_END_S
    assert machine.said[-1].startswith(
        "The gate ended with make test: FAILED: not done when the time was up, after 28.0 m"
    )


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.target)
def test_a_failure_in_any_part_fails_the_gate(part: Part) -> None:
    machine = Machine(0.6, broken=part.target)
    assert not machine.passes()
    assert machine.ran[-1] == part.target
    assert "FAILED tests/test_it.py::test_it - assert 1 == 2" in machine.said


def test_tests_that_passed_when_run_again_are_named(tmp_path: Path) -> None:
    """Read the lines of pytest itself: one passes when it is run again, one fails twice, one fails as it is set up."""
    (tmp_path / "test_it.py").write_text(
        "import pathlib, pytest\n"
        "seen = pathlib.Path(__file__).with_name('seen')\n"
        "def test_flaky(): assert seen.exists() or seen.touch()\n"
        "def test_broken(): assert False\n"
        "@pytest.fixture\n"
        "def late(): raise OSError('x - y')\n"
        "def test_set_up(late): pass\n"
        "def test_sound(): pass\n"
    )
    flags = [*TWICE.split(), "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "--rootdir", str(tmp_path)]
    ended = run_within([sys.executable, "-m", "pytest", *flags, str(tmp_path)], 120)
    assert passed_again(ended.lines) == ["test_it.py::test_flaky"]


def test_the_last_lines_count_what_passed_when_run_again() -> None:
    said = list[str]()
    lines = (
        "RERUN tests/test_a.py::test_a",
        "RERUN tests/test_b.py::test_b[1 - 2]",
        "== 3 passed, 2 rerun in 9.00s ==",
    )
    assert run_parts(MUST[:1], lambda *_: Ended(0, lines), lambda: 0.0, said.append, lambda: True)
    assert said[-2] == "2 tests passed only when run again: tests/test_a.py::test_a, tests/test_b.py::test_b[1 - 2]"


def test_a_part_that_is_ended_with_a_failed_test_fails() -> None:
    assert Ended(None, ("FAILED tests/test_it.py::test_it",)).has_failed
    assert not Ended(None, ("== 3 passed in 9.00s ==",)).has_failed


def test_without_an_index_what_needs_one_is_named() -> None:
    machine = Machine(0.6, has_index=False)
    assert machine.passes()
    assert machine.said[-1].endswith(
        "; not run: test-deploy, test-schemas-suite, test-tokenizers, test-templates, test-clients"
    )
    assert "make test-clients: NOT RUN: no package index can be reached" in machine.said


def test_a_command_says_how_many_seconds_its_part_has() -> None:
    part = Part("test-clients", 1, "CLIENTS=--time-limit {left_s} --known docs/clients.md")
    assert command_of(part, 90.7) == ["make", "test-clients", "CLIENTS=--time-limit 90 --known docs/clients.md"]
    assert command_of(Part("lint", 1), 90.7) == ["make", "lint"]


def test_a_command_and_its_children_are_interrupted() -> None:
    """Read what each says at its interrupt, as pytest lists the tests that failed so far."""
    code = (
        "import os, time\nchild = os.fork()\ntry:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('FAILED', 'child' if not child else os.wait() and 'parent')"
    )
    ended = run_within(["env", "--default-signal=INT", sys.executable, "-S", "-c", code], 1)
    assert ended.status is None
    assert sorted(ended.lines) == ["FAILED child", "FAILED parent"]
    assert ended.has_failed


def test_a_command_that_ignores_interrupts_is_killed() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready', flush=True); time.sleep(99)"
    )
    ended = run_within([sys.executable, "-S", "-c", code], 1, grace_s=0.2)
    assert ended == Ended(None, ("ready",))


def test_a_process_left_behind_holds_nothing_up() -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '50'], start_new_session=True); print('over')"
    begun = time.monotonic()
    assert run_within([sys.executable, "-c", code], 30, read_s=0.5) == Ended(0, ("over",))
    assert time.monotonic() - begun < 20


def test_a_gate_that_is_ended_ends_what_it_runs() -> None:
    code = "import gate; gate.end_on_sigterm(); gate.run_within(['sh', '-c', 'echo $$; sleep 50'], 60)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        group = int(program.stdout.readline())
        program.send_signal(signal.SIGTERM)
        assert program.wait(20) == 128 + signal.SIGTERM
    end = time.monotonic() + 20  # of the signal that was sent to all of it
    while left := [each for each in psutil.process_iter() if is_alive(each, group)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def is_alive(process: psutil.Process, group: int) -> bool:
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        return process.status() != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group
    return False
