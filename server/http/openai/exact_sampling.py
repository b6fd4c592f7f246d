"""Sampling parameters that a request gives as a receipt holds them."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from server.errors import InvalidValue
from server.http.common.inputs import checked_ids
from server.http.generation.prepared import Job
from server.http.openai.requests import ExactGrammar, ExactSampling
from server.protocol.messages import Grammar, GrammarKind

_PARAM = "exact_sampling"


def exactly(asked: ExactSampling, jobs: Sequence[Job], vocab_size: int) -> list[Job]:
    """The jobs with these words and this grammar. Raises InvalidValue, also where something else binds the answer."""
    words = tuple(tuple(checked_ids(word, vocab_size, f"{_PARAM}.bad_words")) for word in asked.bad_words)
    grammar = None if asked.grammar is None else _grammar(asked.grammar, vocab_size)
    return [_exactly(job, words, grammar) for job in jobs]


def _exactly(job: Job, words: tuple[tuple[int, ...], ...], grammar: Grammar | None) -> Job:
    sampling = job.sampling
    if grammar is not None and sampling.grammar is not None:
        message = f"{sampling.grammar.param} and {grammar.param} both say what the answer must match; send one."
        raise InvalidValue(message, param=grammar.param)
    changed = msgspec.structs.replace(
        sampling, bad_words=words or sampling.bad_words, grammar=grammar or sampling.grammar
    )
    return replace(job, sampling=changed)


def _grammar(asked: ExactGrammar, vocab_size: int) -> Grammar:
    param = f"{_PARAM}.grammar"
    before = None
    if asked.before is not None:
        before = Grammar(GrammarKind.LARK, asked.before.text, param, _marks(asked.before.tokens, vocab_size))
    return Grammar(GrammarKind(asked.kind), asked.text, param, _marks(asked.tokens, vocab_size), before)


def _marks(tokens: list[int], vocab_size: int) -> tuple[int, ...]:
    return tuple(checked_ids(tokens, vocab_size, f"{_PARAM}.grammar") if tokens else ())
