"""Engines with graphs that run ahead, on a late device: whatever happens, tokens are those of a plain engine."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from server.engine.startup.warmup import synthetic_batch
from server.model.decoder import Decoder
from server.protocol.messages import EmbeddedSpan, FinishReason, Fork, Grammar, GrammarKind
from support.engine.embedded_prompts import with_spans
from support.engine.graph_session import Session
from support.engine.late_device import LateDevice, LateTokens
from support.engine.late_dispatch import (
    GRAPHED,
    PAGE_SIZE,
    SIZES,
)
from support.engine.served_decoder import ServedDecoder
from support.models.tiny_llama import NAN_TOKEN, TinyLlama

Ways = tuple[dict[str, object], ...]
GREEDY: Ways = ({}, {})
WAYS: Ways = (
    *GREEDY,
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 7},
    {"stop_token_ids": tuple(range(40)), "min_tokens": 9},
    {"stop_token_ids": tuple(range(6))},
    {"logprobs": 2},
    {"temperature": 1.0, "logprobs": 0, "logit_bias": ((3, 2.0),), "bad_words": ((5,),)},
)
# No step runs ahead of those with penalties, and one with scores of a prompt is read at once.
SLOW_WAYS: Ways = (
    *WAYS,
    {"repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 0.4},
    {"prompt_logprobs": 2, "logprobs": 1},
    {"temperature": 0.9, "bad_words": ((5, 6), (7,)), "allowed_token_ids": tuple(range(5, 30))},
)
WHOLE = (FinishReason.STOP, FinishReason.COMPLETE, FinishReason.LENGTH)
JSON = Grammar(
    GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": [1, 23, "x"]}, "minItems": 1, "maxItems": 9}'
)
BOUND_WAYS: Ways = (
    *WAYS,
    {"grammar": Grammar(GrammarKind.REGEX, "[a-f]{3,20}")},
    {"grammar": Grammar(GrammarKind.REGEX, "(ab|c)*"), "ignore_eos": True, "temperature": 1.0},
    {"grammar": JSON, "temperature": 1.0, "top_p": 0.9},
    {"grammar": JSON, "min_tokens": 7, "logprobs": 1},
)


def plain_session(decoder: Decoder) -> Session:
    """An engine that neither replays nor runs ahead."""
    return ServedDecoder(decoder, runs_ahead=False, has_grammars=True)


@dataclass(frozen=True)
class Replay:
    work: Callable[[], None]
    tokens: LateTokens

    def replay(self) -> None:
        self.tokens.replay(self.work)


class Walk:
    """Random requests, and whatever else may come between two steps."""

    def __init__(
        self, decoder: Decoder, device: LateDevice, rng: random.Random, ways: Ways, *, num_embeddings: int = 0
    ) -> None:
        """`num_embeddings`: of tokens that are submitted as embeddings, as far as those fit."""
        self.rng = rng
        self.ways = ways
        self._decoder = decoder
        self._num_embeddings = num_embeddings
        self.asked: dict[str, tuple[list[int], dict[str, object]]] = {}  # prompt and sampling of each request
        self.tokens = LateTokens(SIZES.max_sampled, device)
        self.session = ServedDecoder(
            decoder, capture=lambda work: Replay(work, self.tokens), tokens=self.tokens,
            num_pages=rng.choice([24, 30, 64]), num_embeddings=num_embeddings, has_grammars=True,
        )  # fmt: skip
        self.dispatcher, self.graphs, self.runner = self.session.dispatcher, self.session.graphs, self.session.runner
        lengths = ((1, 34), (17, 17), (5, 40), (1, 2))
        self._probes = [synthetic_batch([pair], PAGE_SIZE, page=self.runner.num_pages) for pair in lengths]

    def step(self) -> None:
        rng, engine = self.rng, self.session.engine
        for _ in range(rng.choice([*[0] * 10, 1, 1, 4]) if engine.num_waiting < 2 else 0):
            self._submit()
        if rng.random() < 0.06 and self.asked:
            engine.cancel(rng.choice(list(self.asked)[-6:]))
        if rng.random() < 0.15:
            self._override()
        self.tokens.is_failing |= rng.random() < 0.01
        may_run_ahead = rng.random() < 0.9
        output = engine.step(may_run_ahead=may_run_ahead)
        if output is not None:
            self.session.outputs.append(output)
        if not may_run_ahead and rng.random() < 0.5:
            self._attest()

    def _submit(self) -> None:
        rng = self.rng
        prompt = [1, 2, 3, 4] * rng.choice([0, 0, 3, 6])
        prompt += [rng.randrange(NAN_TOKEN) for _ in range(rng.choice([1, 3, 9, 20, 50]))]
        sampling = {**rng.choice(self.ways), "max_tokens": rng.choice([1, 2, 12, 40])}
        choices = {f"r{len(self.asked) + i}": rng.randrange(99) for i in range(rng.choice([1, 1, 1, 2, 3]))}
        self.asked |= {name: (prompt, {**sampling, "seed": seed}) for name, seed in choices.items()}
        (name, seed), *others = choices.items()
        prompt, embedded = self._embedded(prompt)
        forks = [Fork(*it) for it in others]
        self.session.submit(name, prompt, forks=forks, embedded=embedded, **{**sampling, "seed": seed})

    def _embedded(self, prompt: list[int]) -> tuple[list[int], list[EmbeddedSpan]]:
        """Replace up to two random parts of a prompt by their embeddings."""
        num_spans = self.rng.choice([0, 1, 2]) if self._num_embeddings and len(prompt) > 3 else 0
        ends = sorted(self.rng.sample(range(len(prompt) + 1), 2 * num_spans))
        places = list(zip(ends[::2], ends[1::2], strict=True))
        return with_spans(self._decoder, prompt, *places)

    def _override(self) -> None:
        """Let no graph rest from now on, or those of some shapes, or all."""
        names = [(GRAPHED.name, str(shape)) for shape in self.dispatcher.decisions]
        pairs = frozenset(self.rng.sample(names, self.rng.choice([0, 0, 0, 0, 0, 0, 2, len(names)])))
        assert self.dispatcher.override(pairs) == []

    def _attest(self) -> None:
        """Run a batch of nobody's, as an attestation does when the step before is read."""
        with self.dispatcher.watched(lambda _: nullcontext()):
            self.runner.launch(self.rng.choice(self._probes)).result()


def scores_of(session: Session, name: str) -> list[float]:
    """The log probabilities that came with a request's tokens."""
    deltas = [delta for output in session.outputs for delta in output.deltas if delta.request_id == name]
    return [value for delta in deltas for part in delta.scores for value, *_ in part.rows()]


def num_prompt_scores(walk: Walk, name: str) -> int:
    prompt, sampling = walk.asked[name]
    return len(prompt) - 1 if "prompt_logprobs" in sampling and walk.session.tokens(name) else 0


# With 64 embeddings at a time the prompts' tokens are submitted as embeddings, which the plain engine gets as tokens.
@pytest.mark.parametrize(
    ("seed", "ways", "num_embeddings"),
    [(0, GREEDY, 0), (1, WAYS, 0), (3, SLOW_WAYS, 0), (4, BOUND_WAYS, 0), (6, WAYS, 64)],
)
def test_tokens_are_those_of_a_plain_engine(decoder: Decoder, seed: int, ways: Ways, num_embeddings: int) -> None:
    rng = random.Random(seed)
    with LateDevice(random.Random(seed)) as device:  # its own: what runs before changes how many operations there are
        walk = Walk(decoder, device, rng, ways, num_embeddings=num_embeddings)
        for _ in range(80):
            walk.step()
        walk.tokens.is_failing = False
        walk.session.drain()
    plain = plain_session(decoder)
    for name, (prompt, sampling) in walk.asked.items():
        plain.submit(name, prompt, **sampling)
    plain.drain()
    ends = {
        delta.request_id: delta.finish_reason
        for output in walk.session.outputs
        for delta in output.deltas
        if delta.finish_reason is not None
    }
    assert ends.keys() == walk.asked.keys()
    for name, reason in ends.items():
        found, due = walk.session.tokens(name), plain.tokens(name)
        assert found == due if reason in WHOLE else found == due[: len(found)]
        for mine, its in zip(scores_of(walk.session, name), scores_of(plain, name), strict=False):
            assert mine == pytest.approx(its, abs=1e-4)
        num_scores = len(scores_of(walk.session, name))
        assert num_scores == (len(found) if "logprobs" in walk.asked[name][1] else 0) + num_prompt_scores(walk, name)
    assert {FinishReason.CANCELLED, FinishReason.ERROR} & set(ends.values())
    assert walk.graphs is not None
    assert walk.graphs.num_replays > 20
    assert ways is not GREEDY or device.most_due >= 5  # two replays, with what they read and the first one's tokens


def test_a_step_that_fails_late_costs_the_others_no_token(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    """The step's graph has written over the others' tokens on the device; the host knows them by then."""
    with LateDevice(random.Random(0)) as device:
        walk = Walk(decoder, device, random.Random(0), GREEDY)
        session = walk.session.submit_all(tiny_llama.prompts[:2])
        for _ in range(7):  # until both of the host's buffers were filled with tokens that only the device knows
            session.step()
        session.submit("doomed", [5, 6, 7], temperature=1.0)
        walk.tokens.is_failing = True
        session.drain()
    assert session.tokens("doomed") == []
    assert [output.record.oom_stage for output in session.outputs].count("prefill") == 1
    assert session.all_tokens(2) == tiny_llama.greedy[:2]


def test_lack_of_memory_for_a_bound_choice_ends_its_step_alone(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    """A prompt that the step computed a part of goes on, and so does what comes then."""
    long = [(3 * index) % NAN_TOKEN for index in range(70)]
    with LateDevice(random.Random(0)) as device:
        session = (walk := Walk(decoder, device, random.Random(0), BOUND_WAYS)).session
        session.submit("bound", tiny_llama.prompts[0], grammar=JSON, max_tokens=40)
        session.submit("free", tiny_llama.prompts[1], max_tokens=40)
        while not session.tokens("bound"):
            session.step()
        session.submit("long", long, max_tokens=5)  # more than a step takes
        session.step()
        walk.tokens.is_failing = True
        while walk.tokens.is_failing:
            session.step()
        session.submit("later", tiny_llama.prompts[1], grammar=JSON, max_tokens=5)
        session.drain()
    errors = {delta.request_id: delta.error_code for output in session.outputs for delta in output.deltas}
    assert errors == {"bound": "internal_error", "free": "internal_error", "long": None, "later": None}
    assert [output.record.oom_stage for output in session.outputs if output.record.oom_stage] == ["prefill"]
    plain = plain_session(decoder)
    plain.submit("long", long, max_tokens=5)
    plain.submit("later", tiny_llama.prompts[1], grammar=JSON, max_tokens=5)
    plain.drain()
    assert [session.tokens(name) for name in ("long", "later")] == [plain.tokens(name) for name in ("long", "later")]
