"""Sums over ranks as an operator: two processes of gloo prove the right path, and refuse a wrong one."""

import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.collective.library_path import run_library
from kernels.collective.paths import COLLECTIVE_PATHS
from kernels.collective.peers import AddNorm, Peers
from kernels.collective.shape import CollectiveShape, Follows
from kernels.system.child_process import python_command
from kernels.system.device import read_fingerprint
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.evidence.evidence import Evidence
from qualification.measure.campaign import OutOfTime
from qualification.measure.qualify import Bench, qualify
from qualification.measure.ranks.rank_group import WORKER

CPU = torch.device("cpu")
SHAPE = CollectiveShape(Dtype.BF16, 64, 2, Follows.ADD_NORM, TokenRows.LE_16)
[GLOO] = [path for path in COLLECTIVE_PATHS if path.name == "gloo.collective"]


def doubled_on_rank_0(peers: Peers, part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
    run_library(peers, part, follows, out)
    out *= 2


def test_sums_are_proven_by_all_ranks_and_a_wrong_one_refused() -> None:
    """All ranks leave together when the time is up, before a fourth."""
    found: list[Evidence] = []

    def add(evidence: Evidence) -> None:
        found.append(evidence)
        if len(found) == 3:
            raise OutOfTime

    wrong = replace(GLOO, run=doubled_on_rank_0)
    pairs = (SHAPE, GLOO), (replace(SHAPE, follows=Follows.NOTHING), GLOO), (SHAPE, wrong), (SHAPE, GLOO)
    bench = Bench(read_fingerprint(CPU), CPU, timing_budget_s=0.001)
    with pytest.raises(OutOfTime):
        qualify(pairs, bench, progress=lambda *_: None, on_evidence=add)
    assert [entry.failure for entry in found] == [None] * 3
    assert [entry.is_proven for entry in found] == [True, True, False]
    assert {check.name for check in found[2].checks if not check.is_passed} == {"every_row", "unequal_ranks"}
    assert {entry.tested_query_tokens for entry in found} == {16}
    assert not dist.is_initialized(), "an engine meets its own ranks behind this, and NCCL's group would keep a process"


def test_a_rank_that_waits_for_rank_0_ends_with_it(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    meeting = tmp_path / "meeting"
    with ours, theirs:
        command = python_command(WORKER, str(theirs.fileno()), str(meeting), "1", "2", "cpu")
        with subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as rank:
            theirs.close()
            ours.close()  # rank 0 never comes
            try:
                assert rank.wait(timeout=60) == 0  # it would wait for 300 s
            finally:
                rank.kill()
