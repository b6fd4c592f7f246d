"""An engine of several ranks on a CPU that works as one on GPUs does: by graphs, here closures, and running ahead.

`ranks_engine WORLD OUT`, a fork, drives the demo model through what an engine serves, checks its layers on several
ranks, and writes what came out of it; `ranks_engine WORLD OUT FOLDER` answers by the hybrid model there, whose prompts
share their beginnings. `python -m support.ranks.ranks_engine 2 OUT MODULE` checks the layers alone, beside a rank that
runs MODULE.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.calls.batch import AttentionFlags
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from qualification.decision.decision import Decision
from qualification.decision.model_shapes import ServingLimits, shapes_needed, signature_of
from qualification.model.forward.model import ForwardReference
from server.engine.execution.followers import Followers, LedRanks
from server.engine.execution.grammars import Grammars
from server.engine.execution.graph_keys import GraphSizes
from server.engine.execution.graphs import StepGraphs
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.worker import Worker
from server.engine.operators.dispatch import Dispatcher
from server.engine.proof.layer_check import LayerCheck
from server.engine.proof.layer_steps import LayerSteps
from server.engine.proof.shadow_check import ShadowCheck
from server.engine.scheduling.embeddings import EmbeddingFormat
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.states import StatePool
from server.engine.startup.subject import Subject, identity_of, kv_cache_of, load_weights, read_subject
from server.engine.startup.warmup import synthetic_batch
from server.model.decoder import Decoder
from server.model.layer_state import StateCache
from server.protocol.messages import Fork, Grammar, GrammarKind, Pooling, SamplingParams, ShadowReport
from server.settings import DEMO_MODEL, DeviceChoice, Settings
from server.text.tokenizer import Tokenizer
from support.engine.closure_graphs import EAGER, PATH, Replay, capture, decide, redecide
from support.engine.embedded_prompts import with_spans
from support.engine.graph_session import Session
from support.engine.hybrid_engine import poisoned
from support.ranks.forks import STUB

PAGE_SIZE, NUM_PAGES, MAX_LEN = 16, 128, 160
NUM_EMBEDDINGS = 40  # at a time
NUM_SLOTS = 5  # of states, of a hybrid
SIZES = GraphSizes((Bucket.LE_512,), (2, 8), (64,), (8,), (64,), num_prompts=3, row_tokens=(4,))
TEXTS = (
    "Once upon a time",
    "The king",
    "It was a dark and stormy night, and the rain fell in torrents. " * 2 + "Then",
    "The sea",
    "A",
)


class Attention:
    """The first path, whose temporary memory may no longer fit."""

    def __init__(self) -> None:
        self._fits = True

    def __call__(self, *given: Any) -> None:
        if not self._fits:
            raise torch.OutOfMemoryError("no memory for a private pool")
        assert PATH.run is not None
        PATH.run(*given)

    def lack_memory(self, work: Callable[[], None]) -> Replay:
        """Capture a step without memory for its attention."""
        self._fits = False
        try:
            work()
        finally:
            self._fits = True
        return Replay(work)


ATTENTION = Attention()


def settings_of(world: int, model: str = str(DEMO_MODEL)) -> Settings:
    return Settings(
        model=model,
        device=DeviceChoice.CPU,
        tensor_parallel_size=world,
        max_model_len=MAX_LEN,
        page_size=PAGE_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )


def dispatcher_of(subject: Subject, decisions: dict[AttentionShape, Decision[AttentionShape]] | None) -> Dispatcher:
    if decisions is None:
        limits = ServingLimits(MAX_LEN, 64, PAGE_SIZE, Dtype.FP32, Dtype.FP32, max_drafted_tokens=3)
        decisions = {shape: decide(shape, PATH.name) for shape in shapes_needed(signature_of(subject.config), limits)}
    flags = tuple(AttentionFlags(it.scale, window=it.window) for it in subject.config.attentions)
    layers = subject.config.attention_layers
    return Dispatcher(decisions, (replace(PATH, run=ATTENTION), EAGER), flags, redecide=redecide, layers=layers)


class Ranks:
    """Rank 0 of an engine, and what a test asks of it."""

    def __init__(self, world: int, follower: str = STUB, model: str = str(DEMO_MODEL)) -> None:
        settings = settings_of(world, model)
        subject = read_subject(settings)
        config = subject.config
        torch.set_num_threads(1)  # that had chosen all
        self.dispatcher = dispatcher_of(subject, None)
        tokens = SampledTokens(SIZES.max_sampled, subject.device)
        kv = kv_cache_of(subject, NUM_PAGES)
        self.followers: Followers | None = None
        states = StateCache.allocate(config, NUM_SLOTS, torch.float32, subject.device)
        given: dict[str, Any] = {"num_embeddings": NUM_EMBEDDINGS, "states": states and poisoned(states)}
        if world == 1:
            decoder = Decoder(config, load_weights(settings, subject))
        else:
            self.followers = Followers(world, follower)
            ranks = self.followers.begin(settings, self.dispatcher, identity_of(settings, subject))
            decoder = Decoder(config, load_weights(settings, subject), ranks)
            others = LedRanks(decoder.ranks, self.dispatcher, self.followers.send)
            given |= {"rank": decoder.ranks, "others": others}
        self.worker = Worker(decoder, kv, self.dispatcher, tokens, **given)
        assert self.worker.others.least(7) == 7
        graphs = StepGraphs(self.worker, SIZES, max_context=MAX_LEN)
        graphs.capture(capture, lambda _: None)
        grammars = Grammars.load(subject.folder, config.vocab_size, config.eos_token_ids) if states is None else None
        self.runner = ModelRunner(self.worker, graphs, grammars=grammars)
        drafts = 3 if states is None else 0
        limits = SchedulerLimits(MAX_LEN, 8, 64, max_drafted_tokens=drafts, max_embedded_tokens=NUM_EMBEDDINGS)
        pool = PagePool(NUM_PAGES, PAGE_SIZE, None if states is None else StatePool(NUM_SLOTS))
        scheduler = Scheduler(limits, pool, shares_pages=True)
        embeddings = EmbeddingFormat(config.hidden_size)
        options = EngineOptions(config.vocab_size, config.eos_token_ids, 0, runs_ahead=True, embeddings=embeddings)
        compiles = None if grammars is None else grammars.compile
        self.engine_of = partial(Engine, scheduler, self.runner, options, compile_grammar=compiles)
        self.engine = self.engine_of()
        words = random.Random(1).choices(range(config.vocab_size), k=60)
        self.prompts = [
            words[:40],
            [*words[:36], *words[40:48]],
            words[:40],
            [*words[:36], *words[50:53]],
            words[30:35],
        ]
        if states is None:
            encode = Tokenizer.load(subject.folder).encode
            self.prompts = [encode(text) for text in TEXTS]

    def answers(
        self, submit: Callable[[Session], object], drafts: dict[str, list[int]] | None = None
    ) -> dict[str, list[int]]:
        """Return the tokens of what `submit` asks for, by name. `drafts`: the answers that are drafted, half wrong."""
        rng = random.Random(0)

        def draft(seq: Sequence, most: int) -> list[int]:
            found = (drafts or {})[seq.request_id][seq.num_generated :][:most]
            return [it if rng.random() < 0.8 else 1 for it in found]

        session = Session(self.engine if drafts is None else self.engine_of(drafter=draft))
        submit(session)
        session.drain()
        names = {delta.request_id: None for output in session.outputs for delta in output.deltas}
        return {name: session.tokens(name) for name in names}


def mixed(session: Session, prompts: list[list[int]]) -> None:
    """All ways to choose tokens beside each other: prompts arrive among decode rows."""
    session.submit("greedy", prompts[0], max_tokens=14)
    session.submit(
        "drawn", prompts[1], max_tokens=12, temperature=0.9, seed=7, forks=[Fork("second", 8), Fork("third", 9)]
    )
    for _ in range(4):
        session.step()
    session.submit("digits", prompts[3], grammar=Grammar(GrammarKind.REGEX, "[0-9]{8}"), temperature=1.0, seed=1)
    session.submit("penalty", prompts[4], max_tokens=3, repetition_penalty=1.3)
    session.submit("scored", prompts[2], max_tokens=6, logprobs=2)


def embedded(session: Session, decoder: Decoder, prompts: list[list[int]]) -> None:
    """Submit the first half of each prompt as embeddings, which are those of its tokens."""
    for index, prompt in enumerate(prompts):
        token_ids, spans = with_spans(decoder, prompt, (0, -(-len(prompt) // 2)))
        session.submit(f"r{index}", token_ids, embedded=spans, max_tokens=5)


def checked(ranks: Ranks) -> tuple[dict[str, list[int]], list[str], list[int]]:
    """Return answers while steps are checked until each rank has computed a call again, the results, and the ranks."""
    others = None if ranks.followers is None else ranks.followers.checked
    check = ranks.runner.shadow = ShadowCheck(
        ranks.dispatcher, budget=1e9, interval_s=0.0, is_quarantining=True, others=others
    )
    reports: list[ShadowReport] = []
    while {it.rank for it in reports} != set(range(ranks.worker.rank.world)):
        answers = ranks.answers(lambda it: it.submit_all(ranks.prompts[:2], max_tokens=3))
        while check.has_sample:
            report = check.judge()
            reports += [] if report is None else [report]
            time.sleep(0.001)
    ranks.runner.shadow = None
    return answers, sorted({it.result for it in reports}), sorted({it.rank for it in reports})


def check_layers(ranks: Ranks, world: int) -> dict[str, object]:
    """Return the first layer that is wrong, and the largest difference as a part of its limit."""
    subject = read_subject(settings_of(world))
    torch.set_num_threads(1)
    reference = ForwardReference(
        subject.folder, subject.model, torch.float32, subject.device, context=MAX_LEN, ranks=world
    )
    steps = LayerSteps(
        vocab_size=subject.model.vocab_size, page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_len=MAX_LEN, max_tokens=64,
        max_rows=8,
    ).all()  # fmt: skip
    found = LayerCheck(ranks.runner, reference, ranks.worker.logits, kv_dtype=torch.float32).run(steps)
    return {"first": found.first and str(found.first), "largest": found.largest.factor}


def drive(world: int) -> dict[str, object]:
    """Return the answers of all kinds of requests, and what else was asked of the ranks."""
    ranks = Ranks(world)
    prompts, found = ranks.prompts, dict[str, object]()
    found["alone"] = ranks.answers(lambda it: it.submit("r2", prompts[2], max_tokens=5))
    found["batched"] = ranks.answers(lambda it: it.submit_all(prompts, max_tokens=5))
    found["replays"] = ranks.worker.num_replays
    found["embedded"] = ranks.answers(lambda it: embedded(it, ranks.worker.decoder, prompts))
    found["drawn"] = ranks.answers(lambda it: it.submit_all(prompts, max_tokens=5, temperature=0.9, seed=3))
    found["mixed"] = answers = ranks.answers(lambda it: mixed(it, prompts))
    replays = ranks.worker.num_replays
    found["drafted"] = ranks.answers(lambda it: mixed(it, prompts), drafts=answers)
    found["drafted replays"] = ranks.worker.num_replays - replays
    found["pages found"] = ranks.answers(
        lambda it: it.submit("again", prompts[2], max_tokens=5, temperature=0.8, seed=5)
    )

    session = Session(ranks.engine)
    session.submit("scores", prompts[0], prompt_logprobs=1, max_tokens=4)
    session.submit("label", prompts[1], SamplingParams(max_tokens=1, temperature=0.0, pooling=Pooling((3, 5))))
    session.drain()
    deltas = [delta for output in session.outputs for delta in output.deltas]
    found["numbers"] = [
        *[value for it in deltas for scores in it.scores for value, *_ in scores.rows()],
        *[float(value) for it in deltas if it.pooled is not None for value in np.frombuffer(it.pooled, "<f4")],
    ]

    batch = synthetic_batch([(20, 20)], PAGE_SIZE, page=NUM_PAGES)  # recorded, and timed on all ranks
    ranks.runner.run(batch)
    if world > 1:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="another rank could not record the step"):
                ranks.worker.record(ranks.runner.writer.write(batch, {}), Replay)
        with pytest.raises(RuntimeError, match="no memory for a private pool"):  # and no fault of the engine
            ranks.worker.record(ranks.runner.writer.write(batch, {}), ATTENTION.lack_memory)
    record = ranks.worker.record(ranks.runner.writer.write(batch, {}), capture)
    assert record is not None
    for _ in range(3):
        with ranks.worker.others.repeating():
            record.replay()

    found["checked"], found["check"], found["checked ranks"] = checked(ranks)

    decode = [it for it in ranks.dispatcher.choices if it.decision.shape.phase is Phase.DECODE]
    short = min(decode, key=lambda it: it.decision.shape.context_bucket.lo)
    ranks.dispatcher.replace(short, torch.OutOfMemoryError("no memory"))
    found["quarantined"] = ranks.answers(lambda it: it.submit_all(prompts, max_tokens=4, temperature=0.9, seed=4))
    if ranks.followers is not None:
        found["layers"] = check_layers(ranks, world)  # last: it writes into all pages
        ranks.followers.close()
    return found


def drive_hybrid(world: int, model: str) -> dict[str, object]:
    """Return answers alone, beside each other and of forks, behind pages and states that were found."""
    ranks = Ranks(world, model=model)
    session = Session(ranks.engine)
    for index, prompt in enumerate(ranks.prompts):
        session.submit(f"alone {index}", prompt, max_tokens=6)
        session.drain()
    for index, prompt in enumerate(ranks.prompts):
        session.submit(f"beside {index}", prompt, max_tokens=6, forks=[Fork(f"fork {index}", None)])
    session.drain()
    names = [f"{kind} {index}" for kind in ("alone", "beside", "fork") for index in range(len(ranks.prompts))]
    if ranks.followers is not None:
        ranks.followers.close()
    return {
        "answers": {name: session.tokens(name) for name in names},
        "hits": session.total("num_prefix_hit_tokens"),
        "replays": ranks.worker.num_replays,
    }


def main() -> None:
    world, out, *named = sys.argv[1:]
    if named and Path(named[0]).is_dir():
        found = drive_hybrid(int(world), named[0])
    elif named:
        ranks = Ranks(int(world), *named)
        found = check_layers(ranks, int(world))
        assert ranks.followers is not None
        ranks.followers.close()
    else:
        found = drive(int(world))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
