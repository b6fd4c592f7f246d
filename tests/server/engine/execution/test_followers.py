"""Rank 0 where another rank fails: it learns which, and ends; its folder is removed."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kernels.system.device_lost import DeviceLost
from qualification.decision.decision import Decision, Status
from server.engine.execution.commands import CompareMemory, OtherSideGone, RankDecided, RankFailed, frame_of, receive
from server.engine.execution.followers import (
    EXIT_RANK_LOST,
    MEET_S,
    RankIdentity,
    meet_ranks,
    report_of,
    why_stale,
)
from server.engine.execution.worker import LaunchFailed
from server.engine.operators.table import OperatorChoice
from server.errors import ModelError
from server.protocol.liveness import START_KILLED_AFTER_S
from server.protocol.messages import PathUse
from support.ranks.forks import Forks

RUNNING = [("path.b", "of a step that is not done")]
REPORTS = {
    "blames a path": RankFailed("what happened on rank 1 of 2", [("path.a", "a shape")], False),
    # Found long behind the launch, by a rank that does not know.
    "lost its device": RankFailed("what happened on rank 1 of 2", [], True),
    "cannot serve": RankFailed("rank 1 of 2 cannot serve: w.safetensors: cut", [], False, "a code"),
    "serves otherwise": RankDecided({"a shape": "path.a", "another": None}),
    "says nothing": None,
}


@pytest.fixture(scope="module")
def heard(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return what rank 0 hears until it ends, by the report of the other rank; its folder is empty then."""
    folder, program = tmp_path_factory.mktemp("ranks"), "support.ranks.failing_rank"
    found = {}
    for name, report in REPORTS.items():
        own, out = folder / name, folder / f"{name}.out"
        own.mkdir()
        environment = {"TMPDIR": str(own), "FAILED": msgspec.json.encode(report).decode()}
        assert forks.run(program, str(out), json.dumps(RUNNING), follower=program, **environment) == EXIT_RANK_LOST
        assert list(own.iterdir()) == []
        found[name] = [json.loads(line) for line in out.read_text().splitlines()]
    return found


def test_rank_0_hears_whom_another_rank_blames(heard: dict[str, list[Any]]) -> None:
    assert heard["blames a path"][:2] == [[1, "loading", 3], ["what happened on rank 1 of 2", [["path.a", "a shape"]]]]
    running = [list(pair) for pair in RUNNING]
    assert heard["lost its device"][:2] == [[1, "loading", 3], ["what happened on rank 1 of 2", running]]


def test_rank_0_hears_that_no_start_can_succeed(heard: dict[str, list[Any]]) -> None:
    message = "rank 1 of 2 cannot serve: w.safetensors: cut"
    assert heard["cannot serve"] == [[1, "loading", 3], ["a code", message]]


def test_rank_0_hears_of_stale_decisions(heard: dict[str, list[Any]]) -> None:
    said, blamed = heard["serves otherwise"][1]
    assert said.startswith("stale decisions on rank 1 of 2: it serves 1 of 2 shapes otherwise than rank 0")
    assert said.endswith("the first a shape by path.a, rank 0 by path.b")
    assert blamed == []


@pytest.mark.parametrize(
    ("paths", "end"),
    [
        ({"a": "x", "b": None}, None),
        ({"a": "x", "b": "y"}, "the first b by y, rank 0 by no path"),
        ({"a": None, "b": None}, "the first a by no path, rank 0 by x"),
        ({"b": None}, "the first a by nothing that it was sent, rank 0 by x"),
        ({"a": "x", "b": None, "c": "y"}, "the first c by y, rank 0 by nothing that it was sent"),
    ],
)
def test_a_rank_serves_each_shape_as_rank_0_does(paths: dict[str, str | None], end: str | None) -> None:
    found = why_stale(1, 2, paths, [("a", "x"), ("b", None)])
    assert found is None if end is None else found is not None and found.endswith(end)


def test_rank_0_ends_with_a_rank_that_says_nothing(heard: dict[str, list[Any]]) -> None:
    assert heard["says nothing"] == [[1, "loading", 3]]


def test_rank_0_gives_what_others_leave_to_pytorch_once(heard: dict[str, list[Any]]) -> None:
    assert heard["blames a path"][2:] == [{"library_refused": 2, "launch_failed": 2}, {}]


def launch_failed() -> LaunchFailed:
    decision: Decision[Any] = Decision("a shape", "path.a", Status.PROVEN, "path.a", (), (), None)  # type: ignore[arg-type]
    choice = OperatorChoice(decision, lambda *_: None, PathUse("decode", "path.a", "proven", []), False)
    return LaunchFailed(choice, RuntimeError("Triton Error [CUDA]: out of memory"))


@pytest.mark.parametrize(
    ("error", "report"),
    [
        (
            launch_failed(),
            RankFailed(
                "path.a could not be launched on rank 1 of 2: Triton Error [CUDA]: out of memory",
                [("path.a", "a shape")],
                False,
            ),
        ),
        (torch.OutOfMemoryError("2 GiB"), RankFailed("out of memory on rank 1 of 2: 2 GiB", [], False)),
        (
            DeviceLost("path.c failed to launch", [("path.c", "a product")]),
            RankFailed("on rank 1 of 2: path.c failed to launch", [("path.c", "a product")], False),
        ),
        (
            RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered\nmore"),
            RankFailed(
                "the device is lost on rank 1 of 2: Triton Error [CUDA]: an illegal memory access was encountered",
                [],
                True,
            ),
        ),
        (
            ModelError("w.safetensors: cut"),
            RankFailed("rank 1 of 2 cannot serve: w.safetensors: cut", [], False, "invalid_model"),
        ),
        (
            ValueError("no such page"),
            RankFailed("rank 1 of 2 left a step that the others compute: no such page", [], False),
        ),
    ],
)
def test_a_rank_reports_why_it_ends(error: Exception, report: RankFailed) -> None:
    assert report_of(error, 1, 2) == report


def test_a_command_that_breaks_off_says_that_rank_0_is_gone() -> None:
    """Not by EOFError: of a file that a rank reads, that would end it without a report."""
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(frame_of(CompareMemory())[:-1])
        with pytest.raises(OtherSideGone):
            receive(theirs)


def test_the_supervisor_gives_a_rank_up_before_rank_0_does(tmp_path: Path) -> None:
    assert MEET_S > START_KILLED_AFTER_S
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="identity 1"):
        meet_ranks(str(tmp_path / "meeting"), 0, 2, RankIdentity({}, None), patience_s=0.5)
    assert time.monotonic() - began < 60, "torch's own limit is 300 s"
