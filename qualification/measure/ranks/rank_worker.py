"""A rank of a qualification beside rank 0.

`python -m qualification.measure.ranks.rank_worker FD MEETING RANK WORLD DEVICE`

Started by qualification/measure/ranks/rank_group.py.
"""

import logging
import os
import signal
import socket
import sys
import threading

import msgspec
import torch
import torch.distributed as dist

from kernels.catalog import any_path_named
from kernels.collective.shape import parse_collective_shape
from kernels.system.device_lost import loss_of
from kernels.system.hang_up import leave_with
from kernels.system.triton_cache import use_own_cache
from qualification.measure.checks.collective_checks import copied
from qualification.measure.inputs.collective_inputs import CollectiveCase
from qualification.measure.orders.collective_order import any_case
from qualification.measure.ranks.rank_group import RankCall, RankCommand, RankEnd, RankPeers, gathered, join
from qualification.measure.trials.failures import KERNEL_ERRORS

logger = logging.getLogger(__name__)
_COMMANDS: "msgspec.json.Decoder[RankCommand]" = msgspec.json.Decoder(RankCommand)


class RankWorker:
    """One rank's state of the last case."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self._rank, self._world, self._device = rank, world, device
        self._peers = RankPeers(rank, world, device)
        self._case: tuple[tuple[str, str, int], CollectiveCase] | None = None
        self._out = torch.empty(0, device=device)

    def obey(self, command: RankCommand) -> None:
        if not isinstance(command, RankCall):
            gathered(self._out, self._world)
            return
        case = self._case_of(command.shape, command.case, command.seed)
        part, follows = case.parts[self._rank].clone(), copied(case.follows)
        self._out = torch.full_like(part, torch.nan)
        run = any_path_named(command.path).run
        assert run is not None
        try:
            peers = self._peers.of(command.path, part.shape[1] * part.element_size())
            run(peers, part, follows, self._out)
        except KERNEL_ERRORS as error:  # of rank 0's call too, which is evidence of it
            if loss_of(self._device) is not None:
                raise
            logger.warning("%s cannot serve %s on rank %d: %s", command.path, command.shape, self._rank, error)

    def _case_of(self, shape: str, name: str, seed: int) -> CollectiveCase:
        """Return the case's inputs. The last case is cached: a timed one is called often."""
        key = shape, name, seed
        if self._case is None or self._case[0] != key:
            self._case = None  # its memory goes first
            self._case = key, any_case(parse_collective_shape(shape), name, self._device, seed=seed)
        return self._case[1]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 ends, and we with it
    connection, meeting, rank, world = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], *map(int, sys.argv[3:5])
    # Rank 0 may end while this one waits for it to meet, or in a call.
    threading.Thread(target=leave_with, args=(connection, os._exit), name="rank-0-watch", daemon=True).start()
    device = torch.device("cuda", rank) if sys.argv[5] == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    use_own_cache()
    join(meeting, rank, world, device)
    worker = RankWorker(rank, world, device)
    with connection.makefile("rb") as lines:
        for line in lines:
            command = _COMMANDS.decode(line)
            if isinstance(command, RankEnd):
                dist.destroy_process_group()
                break
            worker.obey(command)
    os._exit(0)  # rank 0 is gone, or needs this one no more


if __name__ == "__main__":
    main()
