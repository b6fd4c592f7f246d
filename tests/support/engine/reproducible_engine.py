"""Engines on a CPU whose answers must not depend on the batch, and requests of every kind to ask them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qualification.evidence.evidence import Evidence, Invariance
from qualification.measure.qualify import Bench, Pair
from server.engine.scheduling.engine import Engine
from server.engine.startup.builder import BuiltEngine
from server.protocol.messages import Fork, SamplingParams, Submit
from server.settings import DeviceChoice, Settings
from support.engine.built_engine import built_engine
from support.qualification_fakes import evidence

NUM_TOKENS = 8


def trust(pairs: Sequence[Pair], bench: Bench, *, on_evidence: Callable[[Evidence], None], **_: object) -> None:
    """Believe all that paths claim: what is served is the subject here, and not how paths are proven."""
    for shape, path in pairs:
        seen = None if path.order is None else Invariance(path.order, 1, 0, (("rows", "0"),))
        on_evidence(replace(evidence(shape, path), fingerprint=bench.fingerprint, invariance=seen))


def build(folder: Path, cache: Path, **changes: object) -> BuiltEngine:
    given = {
        "max_model_len": 200,
        "kv_cache_tokens": 2048,
        "max_num_seqs": 10,
        "page_size": 8,
        "reproducible": True,
        "attestation_interval_s": 0.0,
    }
    settings = Settings(model=str(folder), device=DeviceChoice.CPU, cache_dir=str(cache), **{**given, **changes})  # type: ignore[arg-type]
    return built_engine(settings, trust)


@dataclass(frozen=True, slots=True)
class Request:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1

    def submit(self, engine: Engine, name: str) -> None:
        """Queue it: choice i has the i-th seed after the first one's."""
        seed = self.sampling.seed
        forks = [Fork(f"{name}/{i}", None if seed is None else seed + i) for i in range(1, self.num_choices)]
        engine.submit(Submit(f"{name}/0", [*self.prompt], self.sampling, forks=forks))


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens, and the bytes of their log probabilities and of the likeliest tokens beside them."""

    tokens: tuple[int, ...]
    scores: bytes


Answers = dict[str, Answer]


def requests(vocab_size: int, lengths: Sequence[int], seed: int = 5) -> list[Request]:
    """Greedy and drawn ones, with every limit and penalty, one of three choices; prompts begin alike, but for two."""
    draw = random.Random(seed)
    common = [draw.randrange(3, vocab_size) for _ in range(max(lengths))]
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.8, "seed": 11},
        {"temperature": 1.1, "top_k": 20, "min_p": 0.02, "seed": 12, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"temperature": 1.0, "seed": 13, "logit_bias": ((5, 2.0),), "bad_words": ((7,),)},
    ]
    found = []
    for index, length in enumerate(lengths):
        own = length if index % 4 == 3 else min(3, length)
        prompt = (*common[: length - own], *(draw.randrange(3, vocab_size) for _ in range(own)))
        kind = kinds[index % len(kinds)]
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=index % 3, **kind)  # type: ignore[arg-type]
        found.append(Request(prompt, sampling, 3 if index % 5 == 1 else 1))
    return found


def answers(engine: Engine, asked: Sequence[Request], *, at_once: int, seed: int = 0) -> Answers:
    """Ask in an order drawn by `seed`, with up to `at_once` requests under way and some steps between two of them."""
    draw = random.Random(seed)
    order = [*range(len(asked))]
    draw.shuffle(order)
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[bytes]] = {}
    left: dict[int, int] = {}  # answers under way of each request
    while order or engine.has_work:
        while order and len(left) < at_once and (at_once == 1 or not left or draw.random() < 0.6):
            index = order.pop()
            left[index] = asked[index].num_choices
            asked[index].submit(engine, str(index))
        output = engine.step()
        for delta in () if output is None else output.deltas:
            assert delta.error_code is None, delta.error_message
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            scores.setdefault(delta.request_id, []).extend(it.packed for it in delta.scores)
            if delta.finish_reason is not None:
                index = int(delta.request_id.split("/")[0])
                left[index] -= 1
                if not left[index]:
                    del left[index]
    return {name: Answer(tuple(tokens[name]), b"".join(scores[name])) for name in sorted(tokens)}


def different(alone: Answers, found: Answers) -> list[str]:
    """Return the names of the answers with other tokens or other bits of log probabilities."""
    assert alone.keys() == found.keys()
    return [name for name, answer in alone.items() if answer != found[name]]
