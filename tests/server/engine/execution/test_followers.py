"""Rank 0 where another rank fails: it learns which, and ends; its folder is removed."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kernels.system.device_lost import DeviceLost
from qualification.decision.decision import Decision, Status
from server.engine.execution.commands import CompareMemory, OtherSideGone, RankFailed, frame_of, receive
from server.engine.execution.followers import EXIT_RANK_LOST, MEET_S, RankIdentity, meet_ranks, report_of
from server.engine.execution.worker import LaunchFailed
from server.engine.operators.table import OperatorChoice
from server.errors import ModelError
from server.protocol.liveness import START_KILLED_AFTER_S
from server.protocol.messages import PathUse

RUNNING = [("path.b", "of a step that is not done")]
# Rank 0 of two, which would wait for ever.
PROGRAM = f"""
import json, time
from server.engine.execution.followers import Followers, RankListener
def report(lost):
    print(json.dumps([str(lost), lost.suspects]))
    for _ in range(2):
        counts = followers.take_fallbacks()
        print(json.dumps({{reason.value: count for reason, count in counts.items()}}), flush=True)
listener = RankListener(
    on_progress=lambda rank, it: print(json.dumps([rank, it.stage, it.count]), flush=True),
    on_failure=report,
    on_refusal=lambda code, message: print(json.dumps([code, message]), flush=True),
)
followers = Followers(2, "support.ranks.failing_rank", listener)
followers.blamed = lambda: {RUNNING!r}
time.sleep(60)
"""


def heard(failed: RankFailed | None, folder: Path) -> list[Any]:
    """Return what rank 0 hears until it ends."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "FAILED": msgspec.json.encode(failed).decode(),
        "TMPDIR": str(folder),
    }
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == EXIT_RANK_LOST
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("suspects", "is_device_lost", "blamed"),
    [
        ([("path.a", "a shape")], False, [["path.a", "a shape"]]),
        ([], True, [list(pair) for pair in RUNNING]),  # found long behind the launch, by a rank that does not know
    ],
)
def test_rank_0_hears_whom_another_rank_blames(
    suspects: list[tuple[str, str]], is_device_lost: bool, blamed: list[list[str]], tmp_path: Path
) -> None:
    failed = RankFailed("what happened on rank 1 of 2", suspects, is_device_lost)
    assert heard(failed, tmp_path)[:2] == [[1, "loading", 3], ["what happened on rank 1 of 2", blamed]]
    assert list(tmp_path.iterdir()) == []


def test_rank_0_hears_that_no_start_can_succeed(tmp_path: Path) -> None:
    failed = RankFailed("rank 1 of 2 cannot serve: w.safetensors: cut", [], False, "a code")
    assert heard(failed, tmp_path) == [[1, "loading", 3], ["a code", failed.message]]


def test_rank_0_ends_with_a_rank_that_says_nothing(tmp_path: Path) -> None:
    assert heard(None, tmp_path) == [[1, "loading", 3]]
    assert list(tmp_path.iterdir()) == []


def test_rank_0_gives_what_others_leave_to_pytorch_once(tmp_path: Path) -> None:
    [_, _, *counts] = heard(RankFailed("the last report", [], False), tmp_path)
    assert counts == [{"library_refused": 2, "launch_failed": 2}, {}]


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
