"""Ranks 1 to N - 1 of a qualification: processes that make every call of a collective which this one, rank 0, makes.

Rank 0 alone runs the checks and the clock. Before each call of its own it names path, shape and case to the others,
which make the same inputs from the same seed and call the same path. A rank that is lost would leave rank 0 waiting for
ever, so this process ends with it.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.collective.boxes import BoxPeers, make_boxes
from kernels.collective.library_path import gather_into
from kernels.collective.paths import EXCHANGE, CollectivePath
from kernels.collective.peers import AddNorm, Peers, RunCollective
from kernels.collective.shape import CollectiveShape
from kernels.system.child_process import python_command
from kernels.system.device_lost import loss_of
from kernels.system.rank_processes import RankProcesses, meet
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.path import AnyPath
from qualification.common.exit_code import ExitCode
from qualification.measure.inputs.collective_inputs import CollectiveCase

logger = logging.getLogger(__name__)

_END_S = 20.0  # until a rank that was asked to end is killed
WORKER = "qualification.measure.ranks.rank_worker"
Pair = tuple[AnyShape, AnyPath]


class RankCall(msgspec.Struct, frozen=True, tag=True):
    """Run a case of a shape by a path."""

    path: str
    shape: str
    case: str
    seed: int


class RankGather(msgspec.Struct, frozen=True, tag=True):
    """Give what the last call has filled to all."""


class RankEnd(msgspec.Struct, frozen=True, tag=True):
    """Leave the group and end."""


RankCommand = RankCall | RankGather | RankEnd


class RankPeers:
    """A rank's peers for each kind of row: inboxes are made where a path of a GPU first needs them, on all ranks."""

    def __init__(self, index: int, world: int, device: torch.device) -> None:
        self._index, self._world, self._device = index, world, device
        self._made: dict[int, Peers] = {}
        self._with_boxes: dict[int, BoxPeers] = {}

    def of(self, path: str, row_bytes: int) -> Peers:
        if path == EXCHANGE:
            return self._of_boxes(row_bytes)
        if not path.startswith("triton."):
            return Peers(self._index, self._world)
        if row_bytes not in self._made:
            from kernels.collective.inboxes import make_inboxes
            from kernels.collective.most_rows import most_rows

            inboxes = make_inboxes(self._index, self._world, most_rows(self._world), row_bytes, self._device)
            self._made[row_bytes] = Peers(self._index, self._world, inboxes)
        return self._made[row_bytes]

    def _of_boxes(self, row_bytes: int) -> BoxPeers:
        if row_bytes not in self._with_boxes:
            boxes = make_boxes(self._index, row_bytes, self._device)
            self._with_boxes[row_bytes] = BoxPeers(self._index, self._world, boxes=boxes)
        return self._with_boxes[row_bytes]

    def free(self) -> None:
        """Give the memory of the inboxes back, when the other ranks have ended."""
        for peers in self._made.values():
            if peers.inboxes is not None:
                peers.inboxes.memory.free()
        for peers in self._with_boxes.values():
            if peers.boxes is not None:
                peers.boxes.memory.free()
        self._made.clear()
        self._with_boxes.clear()


class RankGroup:
    """Rank 0's side of the others."""

    def __init__(self, world: int, device: torch.device) -> None:
        """Start the others, and meet them. `device`: rank 0's; those of the others have the numbers behind it."""

        def command(rank: int, descriptor: int, meeting: str) -> Sequence[str]:
            return python_command(WORKER, str(descriptor), meeting, str(rank), str(world), device.type)

        self._ranks = RankProcesses(world, command, leave=_leave)
        self._files: list[BinaryIO] = [it.makefile("wb") for it in self._ranks.connections]
        join(self._ranks.meeting, 0, world, device)
        self.world = world
        self.peers = RankPeers(0, world, device)
        self.is_idle = True  # false from a call's beginning on, until it has ended on this rank

    def send(self, command: RankCommand) -> None:
        """Have all others do this, after all earlier commands."""
        line = msgspec.json.encode(command) + b"\n"
        for file in self._files:
            file.write(line)
            file.flush()

    def close(self, *, is_idle: bool) -> None:
        """End the others. is_idle: no call was interrupted, so that all can leave the group, which NCCL waits for."""
        self._ranks.expect_ends()
        if is_idle:
            self.send(RankEnd())
            dist.destroy_process_group()
        self._ranks.close(_END_S if is_idle else 0.0)
        for file in self._files:
            file.close()
        self.peers.free()


def _leave(rank: int) -> None:
    logger.critical("rank %d of the qualification is gone, and it ends: it cannot go on without it", rank)
    os._exit(ExitCode.ENVIRONMENT)


class GroupRun:
    """A path that all ranks run, as `RunOnRanks`."""

    def __init__(self, path: str, run: RunCollective, group: RankGroup) -> None:
        self._path, self._run, self._group = path, run, group

    def __call__(self, case: CollectiveCase, part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
        self._group.is_idle = False
        self._group.send(RankCall(self._path, str(case.shape), case.name, case.seed))
        peers = self._group.peers.of(self._path, part.shape[1] * part.element_size())
        self._run(peers, part, follows, out)
        self._group.is_idle = True

    def everywhere(self, own: Tensor) -> Tensor:
        self._group.is_idle = False
        self._group.send(RankGather())
        found = gathered(own, self._group.world)
        self._group.is_idle = True
        return found


def gathered(own: Tensor, world: int) -> Tensor:
    """[world, *own's shape]."""
    found = own.new_empty(world * own.shape[0], *own.shape[1:])
    gather_into(found, own.contiguous())
    return found.view(world, *own.shape)


def join(meeting: str, rank: int, world: int, device: torch.device) -> None:
    """Meet the other ranks."""
    if device.type == "cuda":
        meet(meeting, rank, world, "nccl", device=device)
    else:
        meet(meeting, rank, world, "gloo")


@contextmanager
def on_ranks(pairs: Sequence[Pair], device: torch.device) -> Iterator[list[Pair]]:
    """The pairs, with those of collectives run on as many ranks as their shapes have, all of one number.

    Where an error ends it between two calls (the time is up), all ranks leave the group too: a rank 0 that had not left
    NCCL's had not exited 15 s after its verdict (two H200s, torch 2.11.0).
    """
    worlds = {shape.world for shape, _ in pairs if isinstance(shape, CollectiveShape)}
    if not worlds:
        yield list(pairs)
        return
    if len(worlds) > 1:
        raise ValueError(f"expected collectives of one number of ranks, found {sorted(worlds)}")
    at = torch.device("cuda", 0) if device.type == "cuda" else device
    group = RankGroup(worlds.pop(), at)
    try:
        yield [(shape, _on(path, group)) for shape, path in pairs]
    except BaseException:
        group.close(is_idle=group.is_idle and loss_of(at) is None)
        raise
    group.close(is_idle=True)


def _on(path: AnyPath, group: RankGroup) -> AnyPath:
    if not isinstance(path, CollectivePath) or path.run is None:
        return path
    return replace(path, run=GroupRun(path.name, path.run, group))  # type: ignore[arg-type]  # as its trial calls it
