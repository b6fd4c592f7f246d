"""A rank beside rank 0: `python -m server.engine.follower DESCRIPTOR`, started by server/engine/execution/followers.py.

It gets step buffers and sees no sequence: it launches what rank 0 launches, on its own part of the model.
"""

import logging
import os
import signal
import socket
import sys
import threading

import torch
import torch.distributed as dist

from kernels.operators import AnyShape
from kernels.triton_cache import use_own_cache
from qualification.decision.decision import Decision, Pairs, ShapeT, Status
from qualification.evidence.shape_text import parse_shape
from server.engine.attention.dispatch import Dispatcher
from server.engine.execution.commands import Allocate, Begin, ComputeLogits, CopyPages, Decide, Launch, receive
from server.engine.execution.followers import meet
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.step_buffer import StepBuffer, StepLayout
from server.engine.execution.worker import Worker
from server.engine.startup.subject import dispatcher_of, identity_of, join_weights, kv_cache_of, load_rank, read_subject
from server.log import configure_logging
from server.model.ranks import Ranks
from server.protocol.hang_up import leave_with

logger = logging.getLogger(__name__)


class Follower:
    """One rank's part of the model, and what it was told about it."""

    def __init__(self, begin: Begin) -> None:
        self._subject = read_subject(begin.settings, begin.rank)
        identity = identity_of(begin.settings, self._subject)
        self._ranks: Ranks = meet(begin.meeting, begin.rank, begin.settings.tensor_parallel_size, identity)
        self._decoder = load_rank(begin.settings, self._subject, self._ranks)
        self._dispatcher = self._dispatcher_of(begin.decisions)
        self._worker: Worker | None = None

    def obey(self, command: object) -> None:
        """Do what rank 0 does, too. Raises whatever keeps this rank from it."""
        if isinstance(command, Allocate):
            self._worker = None  # its cache goes first
            tokens = SampledTokens(command.num_rows, self._subject.device)
            kv = kv_cache_of(self._subject, command.num_pages)
            self._worker = Worker(self._decoder, kv, self._dispatcher, tokens, rank=self._ranks)
        elif isinstance(command, Decide):
            self._dispatcher = self._dispatcher_of(command.decisions)
            if self._worker is not None:
                self._worker.dispatcher = self._dispatcher
        elif isinstance(command, Launch) and self._worker is not None:
            data = torch.frombuffer(bytearray(command.data), dtype=torch.uint8)
            self._worker.launch(StepBuffer(None, StepLayout(command.parts, command.num_sampled), data, False))
            self._worker.drop_unread()
        elif isinstance(command, CopyPages) and self._worker is not None:
            self._worker.copy_pages(command.copies)
        elif isinstance(command, ComputeLogits) and self._worker is not None:
            rows = torch.empty(
                command.num_rows,
                self._subject.config.hidden_size,
                dtype=self._decoder.weights.embedding.dtype,
                device=self._subject.device,
            )
            dist.broadcast(rows, src=0)
            self._worker.logits(rows)
        else:
            raise ValueError(f"rank 0 sent {type(command).__name__}, which is not due now")

    def _dispatcher_of(self, decisions: list[tuple[str, str]]) -> Dispatcher:
        """Return what rank 0 decided: this rank decides nothing, and counts for nobody."""
        found: dict[AnyShape, Decision[AnyShape]] = {}
        for text, path in decisions:
            shape = parse_shape(text)
            found[shape] = Decision(shape, path, Status.PROVEN, path, (), (), None)
        dispatcher = dispatcher_of(self._subject, found, redecide=_decide_nothing, has_timer=False)
        join_weights(dispatcher, self._decoder)
        return dispatcher


def _decide_nothing(shape: ShapeT, _: Pairs, __: Pairs) -> Decision[ShapeT]:
    raise RuntimeError(f"only rank 0 decides what serves {shape}")


def main() -> None:
    configure_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 ends, and we with it
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=leave_with, args=(connection, os._exit), name="rank-0-watch", daemon=True).start()
    try:
        begin = receive(connection)
        if not isinstance(begin, Begin):
            raise ValueError(f"the first command must be Begin, got {type(begin).__name__}")
        configure_logging(begin.settings.log_format)
        use_own_cache()
        follower = Follower(begin)
        while True:
            follower.obey(receive(connection))
    except EOFError:
        os._exit(0)
    except Exception:  # the edge of the process: this is logged, and all ranks start again
        logger.exception("this rank cannot go on")
        os._exit(70)  # EX_SOFTWARE


if __name__ == "__main__":
    main()
