"""Faults of recurrent states in a running engine: an answer that is computed again alone, from nothing, shows them."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
import torch

from kernels.vocabulary.shape import Phase
from server.engine.execution.forced_answers import ForcedAnswers, Precision
from server.engine.proof.replay import Replay
from server.engine.proof.shadow_check import ShadowBudget
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.sequence import Batch
from server.engine.scheduling.states import BatchStates
from server.model.decoder import Decoder
from support.engine.graph_session import Session
from support.engine.hybrid_engine import Hybrid
from support.engine.serving_faults import BrokenRunner
from support.models.tiny_families import RECURRENT, load, save_reference

WORDS = random.Random(5).choices(range(97), k=200)
MOST_ANSWERS = 10
Fault = Callable[[Batch, BatchStates], BatchStates]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.set_num_threads(1)  # for tensors this small threads wait for each other
    folder = tmp_path_factory.mktemp("model")
    no_ends = {"bos_token_id": None, "eos_token_id": None}
    save_reference(folder, "qwen3_5_text", {**RECURRENT, "num_hidden_layers": 2, **no_ends})
    return load(folder)


def none(_: Batch, states: BatchStates) -> BatchStates:
    return states


def stale_snapshots(_: Batch, states: BatchStates) -> BatchStates:
    """Leave a snapshot's slot as it was before."""
    return replace(states, writes=())


def swapped_slots(batch: Batch, states: BatchStates) -> BatchStates:
    """Have decoding rows read each other's states."""
    decoding = batch.rows_of(Phase.DECODE)
    sources = [*states.sources[: decoding.start], *reversed(states.sources[decoding.start :])]
    return replace(states, sources=tuple(sources))


def slots_written_by_others(batch: Batch, states: BatchStates) -> BatchStates:
    decoding = batch.rows_of(Phase.DECODE)
    targets = [*states.targets[: decoding.start], *reversed(states.targets[decoding.start :])]
    return replace(states, targets=tuple(targets))


def states_kept_at_hits(_: Batch, states: BatchStates) -> BatchStates:
    """Begin from what the sequence's own slot holds, where a snapshot was to be read."""
    return replace(states, sources=states.targets)


FAULTS: dict[str, Fault] = {
    "none": none,
    "stale_snapshots": stale_snapshots,
    "swapped_slots": swapped_slots,
    "slots_written_by_others": slots_written_by_others,
    "states_kept_at_hits": states_kept_at_hits,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_state_is_seen_within_ten_answers(model: Decoder, name: str) -> None:
    subject = Hybrid(model)
    for layer in subject.states.layers:
        for tensor in layer.tensors:
            tensor.zero_()  # what was never written is no NaN, which would end the answer

    def broken(batch: Batch) -> Batch:
        return batch if batch.states is None else replace(batch, states=FAULTS[name](batch, batch.states))

    config = model.config
    forced = ForcedAnswers(subject.runner, subject.scheduler, Precision.of(config, torch.float32), most_tokens=64)
    seconds = count(step=1000)
    replay = Replay(forced, subject.scheduler, ShadowBudget(0.5, lambda: float(next(seconds))), rng=random.Random(3))
    runner = BrokenRunner(subject.runner, batch=broken)
    engine = Engine(subject.scheduler, runner, EngineOptions(config.vocab_size, (), 0))
    engine.answers = replay
    session, causes = Session(engine), []
    for index in range(MOST_ANSWERS // 2):
        for half in range(2):
            own = WORDS[100 + 6 * index + 3 * half :][:9]
            session.submit(f"{index} {half}", [*WORDS[40 * half : 40 * half + 35], *own], max_tokens=8)
        session.drain()
        while replay.has_waiting:
            report = replay.step()
            causes += [] if report is None else [report.cause]
        if name != "none" and any(causes):
            return
    assert len(causes) >= MOST_ANSWERS // 2
    assert (name, set(causes)) == ("none", {None})
