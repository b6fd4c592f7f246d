"""Whole engines that verify drafted tokens: answers, scores and ends are those of an engine that drafts none."""

import random

import pytest

from kernels.vocabulary.buckets import Bucket
from server.engine.execution.graph_keys import GraphSizes, row_sizes
from server.engine.scheduling.drafter import Drafter
from server.engine.scheduling.sequence import Sequence
from server.model.decoder import Decoder
from server.protocol.messages import FinishReason, Fork, Grammar, GrammarKind
from support.engine.ascii_grammars import EOS
from support.engine.closure_graphs import capture
from support.engine.graph_session import attention_counts
from support.engine.served_decoder import ServedDecoder
from support.models.tiny_llama import NAN_TOKEN, TinyLlama

MOST = 4  # drafted tokens of a sequence
SIZES = GraphSizes((Bucket.LE_512,), row_sizes(6), (16, 32), (4,), (16, 32), num_prompts=2, row_tokens=(2, 5))
JSON = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": [1, 23, "x"]}, "minItems": 1}')
WAYS: tuple[dict[str, object], ...] = (
    {},
    {"logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 7, "logprobs": 0},
    {"stop_token_ids": tuple(range(40)), "min_tokens": 9},
    {"stop_token_ids": tuple(range(6))},
    {"temperature": 1.0, "logit_bias": ((3, 2.0),), "bad_words": ((5, 6), (7,))},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"temperature": 0.9, "presence_penalty": 0.4, "logprobs": 1},
    {"prompt_logprobs": 2, "logprobs": 1},
    {"grammar": Grammar(GrammarKind.REGEX, "[a-f]{3,20}")},
    {"grammar": Grammar(GrammarKind.REGEX, "(ab|c)*"), "ignore_eos": True, "temperature": 1.0},
    {"grammar": JSON, "min_tokens": 7, "logprobs": 1},
)
UNTIL_A_STOP: tuple[dict[str, object], ...] = ({}, {"stop_token_ids": tuple(range(40)), "min_tokens": 9})
Request = tuple[list[int], dict[str, object]]


class Oracle:
    """Knows each request's answer, and lies in half of its drafts about one token."""

    def __init__(self, rng: random.Random, answers: dict[str, list[int]]) -> None:
        self.rng = rng
        self.answers = answers

    def __call__(self, seq: Sequence, most: int) -> list[int]:
        answer = self.answers[seq.request_id]
        assert seq.tokens[seq.num_prompt :] == answer[: seq.num_generated], "a wrong token was left in a sequence"
        drafted = answer[seq.num_generated :][: self.rng.randint(0, most)]
        drafted += [self.rng.randrange(EOS) for _ in range(self.rng.randint(0, most - len(drafted)))]  # behind its end
        if drafted and self.rng.random() < 0.5:
            drafted[self.rng.randrange(len(drafted))] = self.rng.randrange(EOS)
        return drafted


class Subject(ServedDecoder):
    """A session whose pages are counted after every step."""

    def __init__(
        self, decoder: Decoder, drafter: Drafter | None, *, num_pages: int = 64, has_graphs: bool = False
    ) -> None:
        super().__init__(
            decoder, drafter=drafter, most_drafted=MOST, capture=capture if has_graphs else None, sizes=SIZES,
            num_pages=num_pages, max_step=40, has_grammars=True,
        )  # fmt: skip

    def step(self) -> None:
        super().step()
        self.scheduler.check_integrity()

    def drain(self) -> "Subject":
        super().drain()
        assert self.pool.num_used == 0
        return self

    def ends(self) -> dict[str, FinishReason]:
        deltas = [delta for output in self.outputs for delta in output.deltas]
        return {delta.request_id: delta.finish_reason for delta in deltas if delta.finish_reason is not None}

    def scores(self, name: str) -> list[tuple[int, float]]:
        """Return position and log probability of each scored token."""
        deltas = [delta for output in self.outputs for delta in output.deltas if delta.request_id == name]
        parts = [part for delta in deltas for part in delta.scores]
        return [(part.position + i, row[0]) for part in parts for i, row in enumerate(part.rows())]


def answers_of(decoder: Decoder, requests: dict[str, Request]) -> Subject:
    subject = Subject(decoder, None)
    for name, (prompt, sampling) in requests.items():
        subject.submit(name, prompt, **sampling)
    return subject.drain()


def requests_of(rng: random.Random, num_requests: int, ways: tuple[dict[str, object], ...]) -> dict[str, Request]:
    def one() -> Request:
        prompt = [1, 2, 3, 4] * rng.choice([0, 0, 3, 6])
        prompt += [rng.randrange(NAN_TOKEN) for _ in range(rng.choice([1, 3, 9, 20, 50]))]
        return prompt, {**rng.choice(ways), "max_tokens": rng.choice([1, 2, 12, 40]), "seed": rng.randrange(99)}

    return {f"r{index}": one() for index in range(num_requests)}


@pytest.mark.parametrize(("seed", "has_graphs", "ways"), [(0, False, WAYS), (1, True, WAYS), (3, True, UNTIL_A_STOP)])
def test_answers_are_those_without_drafts(
    decoder: Decoder, seed: int, has_graphs: bool, ways: tuple[dict[str, object], ...]
) -> None:
    rng = random.Random(seed)
    requests = requests_of(rng, 26, ways)
    for name in [*requests][::4]:  # other answers to its prompt
        prompt, sampling = requests[name]
        requests |= {f"{name}-{i}": (prompt, {**sampling, "seed": 1 + i}) for i in range(2)}
    plain = answers_of(decoder, requests)
    oracle = Oracle(rng, {name: plain.tokens(name) for name in requests})
    subject = Subject(decoder, oracle, num_pages=rng.choice([22, 28, 64]), has_graphs=has_graphs)
    cancelled = set(rng.sample([*requests], 4))
    due = [name for name in requests if "-" not in name]
    while due or subject.engine.has_work:
        if due and subject.engine.num_waiting < 2 and rng.random() < 0.4:
            name = due.pop()
            prompt, sampling = requests[name]
            forks = [Fork(it, 1 + i) for i in range(2) if (it := f"{name}-{i}") in requests]
            subject.submit(name, prompt, forks=forks, **sampling)
        if rng.random() < 0.05:
            subject.engine.cancel(rng.choice([*cancelled]))
        if subject.engine.has_work:
            subject.step()
    subject.drain()
    for name in requests:
        reason, found, wanted = subject.ends()[name], subject.tokens(name), plain.tokens(name)
        if reason is FinishReason.CANCELLED and name in cancelled:
            assert found == wanted[: len(found)]
            continue
        assert (found, reason) == (wanted, plain.ends()[name])
        scores, due_scores = subject.scores(name), plain.scores(name)
        assert [position for position, _ in scores] == [position for position, _ in due_scores]
        assert [value for _, value in scores] == pytest.approx([value for _, value in due_scores], abs=1e-4)
    counts = attention_counts(*subject.outputs)
    assert sum(it.num_tokens for it in counts if it.phase == "verify") > 100
    assert max(len(delta.token_ids) for output in subject.outputs for delta in output.deltas) == 1 + MOST
    assert subject.graphs is None or subject.graphs.num_replays > 20


@pytest.mark.parametrize("spoilt_by", [None, 1, NAN_TOKEN])
def test_an_answer_of_any_length_has_its_tokens(decoder: Decoder, tiny_llama: TinyLlama, spoilt_by: int | None) -> None:
    """All drafts are right, wrong, or spoil their row's numbers: the answer may end before, at and behind any."""
    prompt, answer = tiny_llama.prompts[2], tiny_llama.greedy[2]
    drafted = answer if spoilt_by is None else [spoilt_by] * len(answer)
    subject = Subject(decoder, lambda seq, most: drafted[seq.num_generated :][:most])
    for num_tokens in range(1, 16):
        subject.submit(f"r{num_tokens}", prompt, max_tokens=num_tokens)
        subject.drain()
        assert subject.tokens(f"r{num_tokens}") == answer[:num_tokens]
    assert set(subject.ends().values()) == {FinishReason.LENGTH}
