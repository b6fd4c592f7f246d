"""Layers that keep a state in place of pages, served by the whole engine: as the plain loop over one sequence does."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
import torch

from server.engine.execution.forced_answers import ForcedAnswers, Precision
from server.engine.proof.replay import Replay
from server.engine.proof.shadow_check import ShadowBudget, ShadowCheck
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.sequence import Batch
from server.model.decoder import Decoder
from server.protocol.messages import Fork
from support.engine.graph_session import Session
from support.engine.random_traffic import ask_at_random
from support.engine.running_sum import PAGE_SIZE, Hybrid, reference_answer
from support.engine.serving_faults import BrokenRunner
from support.models.tiny_llama import NAN_TOKEN

NUM_TOKENS = 9
WORDS = random.Random(5).choices(range(NAN_TOKEN), k=60)
Answer = Callable[[list[int]], list[int]]


class Checked(Session):
    """A session that proves after each step that nothing is lost, and at its end that all has returned."""

    def __init__(self, subject: Hybrid) -> None:
        super().__init__(subject.engine)
        self.subject = subject

    def step(self) -> None:
        super().step()
        self.subject.scheduler.check_integrity()

    def drain(self) -> "Checked":
        super().drain()
        assert self.subject.pool.num_used == self.subject.scheduler.num_pages_used == 0
        zero = [tensor[self.subject.states.num_slots] for it in self.subject.states.layers for tensor in it.tensors]
        assert not any(it.any() for it in zero)
        return self

    def ask(self, name: str, prompt: list[int], num_forks: int = 0) -> None:
        self.submit(name, prompt, max_tokens=NUM_TOKENS, forks=[Fork(f"{name} {i}", None) for i in range(num_forks)])


@pytest.fixture(scope="module")
def answer(decoder: Decoder) -> Answer:
    found: dict[tuple[int, ...], list[int]] = {}

    def of_prompt(prompt: list[int]) -> list[int]:
        if tuple(prompt) not in found:
            found[tuple(prompt)] = reference_answer(decoder, prompt, NUM_TOKENS)
        return found[tuple(prompt)]

    return of_prompt


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_batched_answers_equal_the_plain_loop(
    decoder: Decoder, answer: Answer, runs_ahead: bool, has_graphs: bool
) -> None:
    subject = Hybrid(decoder, runs_ahead=runs_ahead, has_graphs=has_graphs)
    session = Checked(subject)
    prompts = [WORDS[start : start + size] for start, size in ((0, 1), (1, 7), (2, 8), (3, 9), (4, 40), (5, 17))]
    for index, prompt in enumerate(prompts):
        session.ask(str(index), prompt)
    session.drain()
    assert [session.tokens(str(index)) for index in range(len(prompts))] == [answer(prompt) for prompt in prompts]
    assert (subject.runner.worker.num_replays > 0) == has_graphs


@pytest.mark.parametrize("step_tokens", [1, 3, *range(PAGE_SIZE - 1, PAGE_SIZE + 2), 2 * PAGE_SIZE, 31])
def test_chunks_that_end_anywhere_change_no_token(decoder: Decoder, answer: Answer, step_tokens: int) -> None:
    session = Checked(Hybrid(decoder, step_tokens=step_tokens, max_num_seqs=1))
    for index, size in enumerate((33, 32, 31)):
        session.ask(str(index), WORDS[:size])
        session.drain()
        assert session.tokens(str(index)) == answer(WORDS[:size])


def test_hits_in_the_order_a_b_a_begin_with_the_state(decoder: Decoder, answer: Answer) -> None:
    session, shared = Checked(Hybrid(decoder, runs_ahead=True)), WORDS[:27]
    a, b, c = ([*shared, *WORDS[30 + 3 * index : 40 + 3 * index]] for index in range(3))
    found = []
    for index, prompt in enumerate((a, b, a, b, c, [*a, *answer(a), 5])):
        before = session.total("num_prefix_hit_tokens")
        session.ask(str(index), prompt)
        session.drain()
        assert session.tokens(str(index)) == answer(prompt)
        found.append(session.total("num_prefix_hit_tokens") - before)
    # The second prompt finds pages without a state; where it parts from the first, the fifth finds one.
    assert found == [0, 0, 32, 32, 24, 32]


def without_snapshots(batch: Batch, zero: int) -> Batch:
    """Begin from the slot that is zero wherever a sequence begins from a snapshot."""
    if batch.states is None:
        return batch
    pairs = zip(batch.states.sources, batch.states.targets, strict=True)
    sources = tuple(source if source == target else zero for source, target in pairs)
    return replace(batch, states=replace(batch.states, sources=sources))


@pytest.mark.parametrize("restores", [True, False])
def test_a_state_that_a_hit_does_not_restore_is_seen(decoder: Decoder, restores: bool) -> None:
    subject = Hybrid(decoder)
    zero, config = subject.pool.zero_slot, subject.runner.worker.decoder.config
    launching = BrokenRunner(subject.runner, batch=lambda batch: batch if restores else without_snapshots(batch, zero))
    forced = ForcedAnswers(subject.runner, subject.scheduler, Precision.of(config, torch.float32), most_tokens=32)
    seconds = count(step=1000)
    replay = Replay(forced, subject.scheduler, ShadowBudget(0.5, lambda: float(next(seconds))), rng=random.Random(3))
    engine = Engine(subject.scheduler, launching, EngineOptions(config.vocab_size, (), 0))
    engine.answers = replay
    session, reports = Session(engine), []
    for index in range(4):
        session.submit(str(index), [*WORDS[:27], *WORDS[30 + 3 * index : 40 + 3 * index]], max_tokens=NUM_TOKENS)
        session.drain()
        while replay.has_waiting:
            reports.append(replay.step())
    found = [(report.route, report.cause) for report in reports if report is not None]
    assert found[:2] == [("plain", None)] * 2
    assert found[2:] == [("hit", None if restores else "cache")] * 2


def test_a_shadow_check_names_the_layer_of_the_model(decoder: Decoder, answer: Answer) -> None:
    subject = Hybrid(decoder)
    check = ShadowCheck(subject.runner.dispatcher, budget=1e9, interval_s=0.0, is_quarantining=True)
    subject.runner.shadow = check
    session, layers = Checked(subject), set()
    session.ask("a", WORDS[:20])
    while session.engine.has_work:
        session.step()
        report = check.judge()
        if report is not None:
            assert report.result == "match"
            layers.add(report.layer)
    assert layers == {1, 3}
    assert session.tokens("a") == answer(WORDS[:20])


def test_random_traffic_with_few_slots_changes_no_token(decoder: Decoder, answer: Answer) -> None:
    rng = random.Random(3)
    prompts = [[*WORDS[:cut], *WORDS[45 : 45 + rest]] for cut, rest in ((11, 3), (24, 1), (24, 9), (40, 0), (33, 6))]
    num_found = num_preempted = num_evicted = 0
    for runs_ahead, num_slots, num_pages in ((False, 3, 30), (True, 5, 12), (True, 1, 20), (True, 20, 14)):
        subject = Hybrid(decoder, runs_ahead=runs_ahead, num_slots=num_slots, num_pages=num_pages, step_tokens=21)
        session = Checked(subject)
        asked = ask_at_random(session, rng, prompts, num_requests=16, most_steps=3, share_cancelled=0.3)
        session.drain()
        for name, prompt in asked.items():
            assert session.tokens(name) == answer(prompt)
        num_found += session.total("num_prefix_hit_tokens")
        num_preempted += session.total("num_preemptions")
        num_evicted += subject.pool.num_snapshots <= num_slots
    assert (num_found > 0, num_preempted > 0) == (True, True)
