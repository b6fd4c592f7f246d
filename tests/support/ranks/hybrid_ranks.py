"""A hybrid of running sums and the demo model's layers on several ranks of a CPU.

`hybrid_ranks WORLD OUT`, a fork, serves prompts that share their beginnings, by graphs and running ahead, and writes
the answers beside those of a plain loop; `hybrid_ranks DESCRIPTOR` is a rank beside it.
"""

import json
import os
import random
import socket
import sys
import threading
from pathlib import Path

import torch

from kernels.system.hang_up import leave_with
from kernels.vocabulary.shape import AttentionShape
from qualification.evidence.shape_text import parse_shape
from server.engine.execution.commands import Begin, receive
from server.engine.execution.followers import Followers, LedRanks, meet_ranks
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.worker import Worker
from server.engine.follower import Follower
from server.engine.operators.dispatch import Dispatcher
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.states import StatePool
from server.engine.startup.subject import Subject, identity_of, kv_cache_of, load_weights, read_subject
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.layer_state import StateCache
from server.model.ranks import ALONE, Ranks
from server.protocol.messages import Fork
from server.settings import DeviceChoice, Settings
from support.engine.closure_graphs import capture, decide
from support.engine.graph_session import Session
from support.engine.running_sum import (
    MAX_LEN,
    MAX_SEQS,
    PAGE_SIZE,
    SIZES,
    dispatcher_of,
    engine_of,
    hybrid_config,
    hybrid_decoder,
    poisoned,
    reference_answer,
)
from support.ranks.forks import STUB

NUM_PAGES, NUM_SLOTS, NUM_TOKENS = 40, 5, 6


def settings_of(world: int) -> Settings:
    return Settings(
        device=DeviceChoice.CPU,
        tensor_parallel_size=world,
        max_model_len=MAX_LEN,
        page_size=PAGE_SIZE,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=64,
    )


def lead(world: int, out: Path) -> None:
    """Answer as rank 0 of `world`, and as the plain loop does."""
    settings = settings_of(world)
    alone = settings_of(1)
    plain_subject, subject = read_subject(alone), read_subject(settings)
    torch.set_num_threads(1)
    tokens, kv = SampledTokens(SIZES.max_sampled, subject.device), kv_cache_of(subject, NUM_PAGES)
    dispatcher = dispatcher_of(hybrid_config(subject.config, 0, world), None)
    vocab_size = subject.config.vocab_size
    words = random.Random(1).choices(range(vocab_size), k=60)
    prompts = [words[:30], [*words[:20], *words[40:48]], words[:30], [*words[:20], *words[50:53]], words[30:35]]
    plain = _plain_decoder(alone, plain_subject)
    found: dict[str, object] = {"plain loop": [reference_answer(plain, prompt, NUM_TOKENS) for prompt in prompts]}
    followers = Followers(world, STUB)
    ranks = followers.begin(settings, dispatcher, identity_of(settings, subject))
    decoder = hybrid_decoder(_plain_decoder(settings, subject, ranks))
    others = LedRanks(decoder.ranks, dispatcher, followers.send)
    worker = Worker(decoder, kv, dispatcher, tokens, rank=decoder.ranks, others=others, states=_states(subject))
    pool = PagePool(NUM_PAGES, PAGE_SIZE, StatePool(NUM_SLOTS))
    _, engine, _ = engine_of(worker, pool, MAX_SEQS, 21, runs_ahead=True, has_graphs=True)
    session = Session(engine)
    for index, prompt in enumerate(prompts):
        session.submit(f"{index}", prompt, max_tokens=NUM_TOKENS)
        session.drain()
    for index, prompt in enumerate(prompts):
        session.submit(f"batched {index}", prompt, max_tokens=NUM_TOKENS, forks=[Fork(f"fork {index}", None)])
    session.drain()
    names = [f"{kind}{index}" for kind in ("", "batched ", "fork ") for index in range(len(prompts))]
    found |= {"answers": {name: session.tokens(name) for name in names}, "replays": worker.num_replays}
    found["hits"] = session.total("num_prefix_hit_tokens")
    out.write_text(json.dumps(found))
    followers.close()


def _plain_decoder(settings: Settings, subject: Subject, ranks: Ranks = ALONE) -> Decoder:
    return Decoder(subject.config, load_weights(settings, subject), ranks)


def _states(subject: Subject) -> StateCache:
    config = hybrid_config(subject.config, 0, subject.shard.world)
    states = StateCache.allocate(config, NUM_SLOTS, torch.float32, subject.device)
    assert states is not None
    return poisoned(states)


def follow(descriptor: int) -> None:
    """Obey rank 0."""
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=leave_with, args=(connection, os._exit), daemon=True).start()
    begin, _ = receive(connection)
    assert isinstance(begin, Begin)
    settings = begin.settings
    subject = read_subject(settings, begin.rank)
    torch.set_num_threads(1)
    ranks = meet_ranks(begin.meeting, begin.rank, settings.tensor_parallel_size, identity_of(settings, subject))

    def dispatcher() -> Dispatcher:
        found = {}
        for text, path in begin.decisions:
            shape = parse_shape(text)
            assert isinstance(shape, AttentionShape)
            assert path is not None
            found[shape] = decide(shape, path)
        return dispatcher_of(hybrid_config(subject.config, begin.rank, ranks.world), found)

    def pages(num_pages: int) -> KVCache:
        return kv_cache_of(subject, num_pages)

    decoder = hybrid_decoder(_plain_decoder(settings, subject, ranks))
    follower = Follower(decoder, subject.device, dispatcher=dispatcher(), kv_of=pages, new_capture=lambda: capture)
    while True:
        command, _ = receive(connection, follower.inputs.take)
        follower.obey(command)


def main() -> None:
    if len(sys.argv) == 3:
        lead(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        follow(int(sys.argv[1]))
