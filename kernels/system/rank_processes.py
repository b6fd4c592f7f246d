"""Ranks 1 to N - 1 as rank 0 sees them: processes that it starts, that meet it, and without which it ends.

An engine and a qualification start theirs by it.
"""

import logging
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernels.system.hang_up import wait_for_hang_up
from kernels.system.locked_folder import LockedFolder

logger = logging.getLogger(__name__)

PREFIX = "hallmark-ranks-"  # of the folder in which they meet
_MEETING = "meeting"

Store = Any  # torch's FileStore, which has no types


def _listen_for_the_end(_: int, connection: socket.socket) -> None:
    wait_for_hang_up(connection)


class RankProcesses:
    """The other ranks, each with a socket pair. They end with this process, and it ends with any of them.

    meeting      a file that all ranks may write
    connections  this process's ends, in the order of the ranks
    """

    def __init__(
        self,
        world: int,
        command: Callable[[int, int, str], Sequence[str]],
        *,
        leave: Callable[[int], None],
        listen: Callable[[int, socket.socket], None] = _listen_for_the_end,
    ) -> None:
        """Start the processes. Where one cannot be started those before it are ended, and its error is raised.

        command  gives that of a rank, whose end of its socket pair has this descriptor, for the file where all meet
        leave    ends this process when the rank of this number is gone
        listen   returns when a rank, with this end of its socket pair, is gone; what it raises counts as that
        The last two are called on a thread of each rank.
        """
        self._leave, self._listen = leave, listen
        self._is_closed = False
        self._folder = LockedFolder(lambda: Path(tempfile.mkdtemp(prefix=PREFIX)), PREFIX, _MEETING)
        self.meeting = str(self._folder.path / _MEETING)
        self.connections: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watches: list[threading.Thread] = []
        try:
            for rank in range(1, world):
                self._start(rank, command)
        except BaseException:
            self.close()
            raise

    def expect_ends(self) -> None:
        """Take the end of a rank for no loss from now on."""
        self._is_closed = True

    def close(self, patience_s: float = 0.0) -> None:
        """End the ranks, of which each may end by itself for so long, and wait for them."""
        self.expect_ends()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience_s)
            process.kill()
            process.wait()
        for watch in self._watches:
            watch.join()
        for connection in self.connections:
            connection.close()
        self._folder.remove()

    def _start(self, rank: int, command: Callable[[int, int, str], Sequence[str]]) -> None:
        ours, theirs = socket.socketpair()
        self.connections.append(ours)
        with theirs:
            # With the environment of this process, which in an engine the supervisor has given it.
            arguments = command(rank, theirs.fileno(), self.meeting)
            self._processes.append(subprocess.Popen(arguments, pass_fds=(theirs.fileno(),)))
        watch = threading.Thread(target=self._watch, args=(rank, ours), name=f"rank-{rank}-watch", daemon=True)
        watch.start()
        self._watches.append(watch)

    def _watch(self, rank: int, connection: socket.socket) -> None:
        try:
            self._listen(rank, connection)
        except Exception:  # the edge of the thread: without its end this process would wait for the rank for ever
            logger.exception("what rank %d reported could not be handled", rank)
        if not self._is_closed:
            self._folder.remove()  # which an end without Python's own clean-up leaves behind
            self._leave(rank)


def meet(
    meeting: str,
    rank: int,
    world: int,
    backend: str,
    *,
    device: torch.device | None = None,
    before: Callable[[Store], None] = lambda _: None,
) -> None:
    """Wait until every rank of this host is here; they are torch.distributed's default group from then on.

    device  of NCCL, which then connects its GPUs at once
    before  gets what the ranks share until they are a group
    """
    store = dist.FileStore(meeting, world)  # type: ignore[attr-defined]
    before(store)
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, device_id=device)
