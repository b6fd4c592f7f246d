"""`echo` and `logprobs` of /v1/completions: the prompt given back with the log probability of each of its tokens.

In the shape of OpenAI's legacy API, as harnesses and the canary ask for it: `echo`, `logprobs` and `max_tokens` 0 or 1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import msgspec

from server.errors import InvalidValue
from server.http.openai.completion import Job, Piece
from server.http.openai.requests import CompletionRequest
from server.protocol.messages import TokenScores
from server.text.tokenizer import Tokenizer

MAX_SCORED_TOKENS = 1  # that may be generated beside log probabilities


def checked_echo(fields: CompletionRequest, default_tokens: int) -> CompletionRequest:
    """The fields as the engine can serve them: a whole answer of at least one token. Raises InvalidValue.

    Where `max_tokens` is 0 a token is generated all the same and not given out.
    """
    num_tokens = default_tokens if fields.max_tokens is None else fields.max_tokens
    if fields.echo and fields.stream:
        raise InvalidValue("echo is not implemented for streams.", param="echo")
    if num_tokens == 0 and not fields.echo:
        raise InvalidValue("max_tokens must be at least 1 without echo, got 0.", param="max_tokens")
    if fields.logprobs is not None and not fields.echo:
        raise InvalidValue("logprobs needs echo: log probabilities are of the prompt.", param="logprobs")
    if fields.logprobs is not None and num_tokens > MAX_SCORED_TOKENS:
        message = f"logprobs needs max_tokens of at most {MAX_SCORED_TOKENS}, got {num_tokens}."
        raise InvalidValue(message, param="max_tokens")
    return fields if num_tokens else fields.model_copy(update={"max_tokens": 1})


def scored(jobs: Iterable[Job], num_likeliest: int | None) -> list[Job]:
    """The jobs, asking for log probabilities where they are wanted."""
    return [replace(job, sampling=msgspec.structs.replace(job.sampling, scored=num_likeliest)) for job in jobs]


class Echo:
    """Makes the choices of an answer that begins with its prompt."""

    def __init__(self, fields: CompletionRequest, jobs: Sequence[Job], tokenizer: Tokenizer, *, is_empty: bool) -> None:
        """`is_empty`: the client asked for 0 tokens."""
        self.is_empty = is_empty
        self._fields = fields
        self._jobs = jobs
        self._tokenizer = tokenizer

    def choices(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        by_job: dict[int, list[Piece]] = {job.index: [] for job in self._jobs}
        for piece in pieces:
            by_job[piece.index].append(piece)
        return [self._choice(job, by_job[job.index]) for job in self._jobs]

    def _choice(self, job: Job, pieces: list[Piece]) -> dict[str, Any]:
        text = self._tokenizer.decode(job.prompt_token_ids)
        generated = [token_id for piece in pieces for token_id in piece.token_ids]
        if self.is_empty:
            generated = []
        else:
            text += "".join(piece.text for piece in pieces)
        logprobs = None
        if self._fields.logprobs is not None:
            scores = [score for piece in pieces for score in piece.scores]
            logprobs = self._logprobs([*job.prompt_token_ids, *generated], scores)
        return {
            "index": job.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": pieces[-1].finish_reason,
        }

    def _logprobs(self, token_ids: list[int], scores: list[TokenScores]) -> dict[str, Any]:
        """OpenAI's legacy object. Nothing precedes the first token, so it has no probability."""
        names = [self._name(token_id) for token_id in token_ids]
        logprobs = [value for part in scores for value in part.logprobs]
        likeliest = [
            {self._name(token_id): value for token_id, value in zip(ids, values, strict=True)}
            for part in scores
            for ids, values in zip(part.top_ids, part.top_logprobs, strict=True)
        ]
        later = range(len(token_ids) - 1)
        return {
            "tokens": names,
            "token_logprobs": [None, *logprobs[: len(later)]],
            "top_logprobs": [None, *(likeliest[i] | {names[i + 1]: logprobs[i]} for i in later)],
            "text_offset": [0, *accumulate(map(len, names[:-1]))],
        }

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._fields.return_tokens_as_token_ids else self._tokenizer.decode([token_id])
