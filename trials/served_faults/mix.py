"""The canary's mix, asked of an engine without a server: answers alone and before, beside those of now."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import structs

from qualification.canary.golden import GoldenRequest, MixAnswer
from qualification.canary.mix import NUM_ROUNDS, MixReply, judge_mix, mix_requests
from qualification.canary.verdict import Outcome
from server.protocol.messages import Fork, Grammar, GrammarKind, SamplingParams, Submit
from support.engine.replayed import ReplayedEngine

_KNOWN = [(7 * place + place * place // 3) % 85 + 4 for place in range(40)]  # tokens of a text
_PREFIX, _TAIL = 64, 16  # of its prompts, which are longer than these engines serve


def golden_of(engine: ReplayedEngine) -> list[GoldenRequest]:
    """Return the requests of a mix with the answers to each alone; a chat, which needs a template, is left out."""
    wanted = [it for it in mix_requests(_KNOWN) if "prompt" in it.body]
    return [_Asked(it, place).answered(engine) for place, it in enumerate(wanted)]


def why_wrong(engine: ReplayedEngine, golden: Sequence[GoldenRequest]) -> str | None:
    """Ask all at once, as often as the canary does; return what it says of the answers, None where they pass."""
    replies = []
    for turn in range(NUM_ROUNDS):
        asked = [_Asked(it, 100 * turn + place) for place, it in enumerate(golden)]
        for it in asked:
            it.submit(engine)
        deltas = _deltas(engine)
        replies += [MixReply(it.request, it.found(deltas)) for it in asked]
    verdict = judge_mix(replies, dtype="fp32", is_exact=False)
    return None if verdict.outcome is Outcome.PASS else verdict.reasons[0]


@dataclass
class _Given:
    """Tokens and log probabilities of one answer."""

    tokens: list[int] = field(default_factory=list)
    logprobs: bytes = b""


@dataclass(frozen=True)
class _Asked:
    request: GoldenRequest
    place: int

    def answered(self, engine: ReplayedEngine) -> GoldenRequest:
        """Ask it alone."""
        self.submit(engine)
        return self.found(_deltas(engine))

    def submit(self, engine: ReplayedEngine) -> None:
        body = dict(self.request.body)
        prompt: list[int] = body.pop("prompt")
        num, grammar = body.pop("n", 1), body.pop("structured_outputs", None)
        if grammar is not None:
            body["grammar"] = Grammar(GrammarKind.REGEX, grammar["regex"])
        sampling = SamplingParams(logprobs=0, **body)
        short = prompt if len(prompt) <= _PREFIX + _TAIL else prompt[:_PREFIX] + prompt[-_TAIL:]
        seed = sampling.seed
        forks = [Fork(self._name(at), None if seed is None else seed + at) for at in range(1, num)]
        salt = self.request.salt.encode()
        engine.engine.submit(Submit(self._name(0), short, sampling, cache_salt=salt, forks=forks))

    def found(self, deltas: dict[str, _Given]) -> GoldenRequest:
        answers = []
        for at in range(self.request.body.get("n", 1)):
            given = deltas[self._name(at)]
            logprobs = [round(float(it), 5) for it in np.frombuffer(given.logprobs, "<f4")]
            answers.append(MixAnswer(str(given.tokens), given.tokens, logprobs))
        return structs.replace(self.request, answers=answers)

    def _name(self, answer: int) -> str:
        return f"mix {self.place}/{answer}"


def _deltas(engine: ReplayedEngine) -> dict[str, Any]:
    """Serve what is queued; return what came of each answer."""
    first = len(engine.outputs)
    engine.serve(0)
    found: dict[str, _Given] = defaultdict(_Given)
    for output in engine.outputs[first:]:
        for delta in output.deltas:
            given = found[delta.request_id]
            given.tokens += delta.token_ids
            given.logprobs += b"".join(it.logprobs for it in delta.scores)
    return found
