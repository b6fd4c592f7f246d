"""A rank beside rank 0 of `ranks_engine.py`, whose graphs are closures: `ranks_follower.py DESCRIPTOR`."""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat

import torch

from kernels.system.hang_up import leave_with
from kernels.vocabulary.shape import AttentionShape
from qualification.evidence.shape_text import parse_shape
from server.engine.execution.capture import Capture, Replayable
from server.engine.execution.commands import Begin, Reports, receive
from server.engine.execution.followers import meet_ranks
from server.engine.follower import Follower
from server.engine.operators.dispatch import Dispatcher
from server.engine.startup.subject import Subject, identity_of, kv_cache_of, load_weights, read_subject
from server.model.decoder import Decoder
from server.model.layers import Weights
from support.engine.closure_graphs import Replay, capture, decide
from support.ranks.ranks_engine import ATTENTION, dispatcher_of


def decided(subject: Subject, decisions: list[tuple[str, str | None]]) -> Dispatcher:
    found = {}
    for text, path in decisions:
        shape = parse_shape(text)
        assert isinstance(shape, AttentionShape)
        assert path is not None
        found[shape] = decide(shape, path)
    return dispatcher_of(subject, found)


def captures(rank: int) -> Iterator[Capture]:
    """Give what captures graphs, then what captures the steps that are to be timed: in the first two rank 1 fails."""
    yield capture
    yield refuse if rank == 1 else Replay
    yield ATTENTION.lack_memory if rank == 1 else Replay
    yield Replay  # rank 0 fails
    yield from repeat(capture)


def refuse(_: Callable[[], None]) -> Replayable:
    raise RuntimeError("operation not permitted when stream is capturing")


def main(changed: Callable[[Weights], Weights] = lambda it: it) -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=leave_with, args=(connection, os._exit), daemon=True).start()
    begin, _ = receive(connection)
    assert isinstance(begin, Begin)
    subject = read_subject(begin.settings, begin.rank)
    torch.set_num_threads(1)
    ranks = meet_ranks(
        begin.meeting, begin.rank, begin.settings.tensor_parallel_size, identity_of(begin.settings, subject)
    )
    follower = Follower(
        Decoder(subject.config, changed(load_weights(begin.settings, subject)), ranks),
        subject.device,
        dispatcher=decided(subject, begin.decisions),
        kv_of=partial(kv_cache_of, subject),
        new_capture=partial(next, captures(begin.rank)),
        send=Reports(connection).send,
    )
    while True:
        command, _ = receive(connection, follower.inputs.take)
        follower.obey(command)


if __name__ == "__main__":
    main()
