"""The parts of the upgrade drill; `make drill-upgrade` is the whole."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from qualification.common.exit_code import ExitCode
from server.model.load.load import load_config

sys.path.append(str(Path(__file__).resolve().parents[2] / "deploy" / "drill"))

from builds import SLOW_KERNEL, WRONG_KERNEL, WRONG_WINDOW, Patch, patched
from model import WINDOW, write_windowed_model
from other_load import Used, used, wait_for_calm
from report import Judgement
from steady_load import Steady, streamed
from upgrade import ATTEMPTS, Drill
from upgrade_report import INCONCLUSIVE, Drilled, Expected, GateRun

LINES = (
    "numerics le_512: PASS: 2 prompts",
    "numerics le_2k: FAIL: 2 prompts, 512 places",
    "    le_2k-600: differs from character 96 of 161 on",
    "verdict: NUMERICS (exit 1)",
)
RUN = GateRun("window off by one", "in a test", "hallmark canary", Expected(1, {"numerics le_2k"}), 1, LINES, 2.0)
WHOLE = Steady(num_sent=2, seconds=[0.1, 0.2], answers={"the same"})


@pytest.mark.parametrize("patch", [SLOW_KERNEL, WRONG_KERNEL, WRONG_WINDOW], ids=lambda it: it.file)
def test_each_patch_fits_this_source_and_is_python(patch: Patch) -> None:
    compile(patched(patch), patch.file, "exec")


def test_a_patch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="0 times, not once"):
        patched(replace(SLOW_KERNEL, old="no such text"))


def test_the_models_window_is_reached_by_golden_prompts(tmp_path: Path) -> None:
    config = load_config(write_windowed_model(tmp_path))
    assert {layer.attention.window for layer in config.layers} == {WINDOW}
    assert 400 < WINDOW < 1900  # prompts that the canary records on either side


def test_codes_are_those_of_the_gate() -> None:
    assert INCONCLUSIVE == ExitCode.INCONCLUSIVE


@pytest.mark.parametrize(
    ("changes", "judgement"),
    [
        ({}, Judgement.YES),
        ({"code": 0}, Judgement.NO),
        ({"code": 4}, Judgement.CANNOT),
        ({"lines": LINES[:1]}, Judgement.NO),  # failed, and in no bucket
        ({"lines": (*LINES, "numerics le_128: FAIL: 2 prompts")}, Judgement.NO),
        ({"expected": Expected(1)}, Judgement.YES),
    ],
)
def test_a_gate_must_fail_with_its_code_and_in_its_bucket_only(
    changes: dict[str, object], judgement: Judgement
) -> None:
    assert replace(RUN, **changes).judgement is judgement


@pytest.mark.parametrize(
    ("codes", "stable", "code"),
    [
        ([1], WHOLE, 0),
        ([1, 4], WHOLE, 4),
        ([0, 4], WHOLE, 1),
        ([1], replace(WHOLE, lost=["streamed: ReadTimeout"]), 1),
        ([1], replace(WHOLE, answers={"the same", "another"}), 1),
        ([1], Steady(), 1),
    ],
)
def test_wrong_verdicts_and_lost_requests_fail_the_drill(codes: list[int], stable: Steady, code: int) -> None:
    assert Drilled([replace(RUN, code=it) for it in codes], stable).exit_code == code


def test_a_gate_that_was_repeated_does_not_decide_the_drill() -> None:
    undecided = replace(RUN, code=INCONCLUSIVE, is_repeated=True, others_cores=1.5)
    assert Drilled([undecided, RUN], WHOLE).exit_code == 0
    assert str(undecided).endswith("while other programs took 1.50 cores, repeated")


@pytest.mark.parametrize(
    ("codes", "judgements"),
    [
        ([1], [Judgement.YES]),
        ([4, 1], [Judgement.CANNOT, Judgement.YES]),
        ([4, 0], [Judgement.CANNOT, Judgement.NO]),
        ([4] * ATTEMPTS, [Judgement.CANNOT] * ATTEMPTS),
    ],
)
def test_a_gate_is_repeated_only_while_it_cannot_decide(
    codes: list[int], judgements: list[Judgement], tmp_path: Path
) -> None:
    answers = iter(codes)

    class Played(Drill):
        def canary(self, *_: object) -> GateRun:
            self.runs.append(replace(RUN, code=next(answers)))
            return self.runs[-1]

    drill = Played(tmp_path, tmp_path, wait=lambda: 0.0)
    drill.timed_canary("a case", "a gate", "http://127.0.0.1:1", Expected(1))
    assert [run.judgement for run in drill.runs] == judgements
    assert [run.is_repeated for run in drill.runs] == [True] * (len(codes) - 1) + [False]
    assert not list(answers)


def test_the_own_programs_are_not_others() -> None:
    before = used()
    busy = "import time\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert used().own_s - before.own_s > 0.3
    assert Used(10.0, 18.0, 5.0).others_since(Used(0.0, 0.0, 0.0)) == 1.3


@pytest.mark.parametrize(("others", "num_looks"), [([0.1], 1), ([1.5, 0.1], 2), ([1.5] * 9, 4)])
def test_a_gate_waits_for_calm_but_not_for_ever(others: list[float], num_looks: int) -> None:
    def moments() -> Iterator[Used]:
        at = everyone_s = 0.0
        yield Used(at, everyone_s, 0.0)
        for cores in others:
            at, everyone_s = at + 5.0, everyone_s + 5.0 * cores
            yield Used(at, everyone_s, 0.0)

    seen, slept = moments(), []
    found = wait_for_calm(0.2, 20.0, window_s=5.0, read=lambda: next(seen), sleep=slept.append)
    assert found == pytest.approx(others[num_looks - 1])
    assert len(slept) == num_looks


def stream_of(*lines: str) -> str:
    text = "".join(f"{line}\n\n" for line in lines)
    with httpx2.Client(transport=httpx2.MockTransport(lambda _: httpx2.Response(200, text=text))) as client:
        return streamed(client, "http://stable")


CHUNK = 'data: {"choices":[{"text":"a"}]}'


def test_a_stream_is_lost_that_ends_early_or_with_an_error() -> None:
    assert stream_of(CHUNK, CHUNK, "data: [DONE]") == "aa"
    with pytest.raises(ValueError, match="without"):
        stream_of(CHUNK)
    with pytest.raises(ValueError, match="engine died"):
        stream_of(CHUNK, 'data: {"error":{"message":"engine died"}}', "data: [DONE]")
