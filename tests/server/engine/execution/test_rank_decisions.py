"""Rank 0's decisions as the other ranks get them: every shape keeps its place, also one that has lost its last path."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.collective.paths import COLLECTIVE_PATHS, CollectivePath
from kernels.collective.peers import AddNorm, Peers
from kernels.collective.shape import CollectiveShape, Follows
from kernels.system.device_lost import DeviceLost
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Decision, Pairs, Status, decisions_of
from server.engine.execution import followers
from server.engine.operators.collective import CollectiveTable
from server.engine.operators.decisions import NoPathError, decided
from server.engine.operators.dispatch import Dispatcher

BUCKETS = (TokenRows.LE_16, TokenRows.LE_128, TokenRows.LE_512)
SHAPES = [CollectiveShape(Dtype.FP32, 8, 2, Follows.NOTHING, rows) for rows in BUCKETS]


def path_for(shape: CollectiveShape, calls: list[str]) -> CollectivePath:
    def run(_: Peers, __: Tensor, ___: AddNorm | None, ____: Tensor) -> None:
        calls.append(shape.rows.label)

    return replace(COLLECTIVE_PATHS[-1], name=f"of.{shape.rows.label}", run=run)


def no_path(shape: CollectiveShape, _: Pairs, __: Pairs) -> Decision[CollectiveShape]:
    return Decision(shape, None, Status.QUARANTINED, "none", (), (), None)


def test_a_shape_without_a_path_moves_no_other_shape() -> None:
    calls: list[str] = []
    paths = [path_for(shape, calls) for shape in SHAPES]
    pairs = zip(SHAPES, paths, strict=True)
    first = {it: Decision(it, path.name, Status.PROVEN, path.name, (), (), None) for it, path in pairs}
    table = CollectiveTable({Follows.NOTHING: 1}, first, paths, redecide=no_path)
    table.decided.quarantine(SHAPES[0])
    sent = followers.decisions_of(Dispatcher({}, (), (), redecide=no_path, tables=(table,)))
    there = CollectiveTable({Follows.NOTHING: 1}, decisions_of(CollectiveShape, decided(sent)), paths)
    for ranks_table in (table, there):
        for num_rows in (17, 128, 129, 512):  # the edges of their buckets
            part = torch.zeros(num_rows, 8)
            ranks_table.run(Peers(1, 2), part, None, part)
        for num_rows in (1, 16):
            part = torch.zeros(num_rows, 8)
            with pytest.raises(NoPathError):
                ranks_table.run(Peers(1, 2), part, None, part)
    assert calls == ["le_128", "le_128", "le_512", "le_512"] * 2


def test_a_sum_that_cannot_be_launched_names_its_path() -> None:
    def run(_: Peers, __: Tensor, ___: AddNorm | None, ____: Tensor) -> None:
        raise RuntimeError("too many resources requested for launch")

    shape, path = SHAPES[0], replace(COLLECTIVE_PATHS[-1], name="of.le_16", run=run)
    decision = Decision(shape, path.name, Status.PROVEN, path.name, (), (), None)
    table = CollectiveTable({Follows.NOTHING: 1}, {shape: decision}, [path])
    with pytest.raises(DeviceLost, match=r"of\.le_16 failed to launch") as lost:
        table.run(Peers(1, 2), torch.zeros(1, 8), None, torch.zeros(1, 8))
    assert lost.value.suspects == [("of.le_16", str(shape))]
