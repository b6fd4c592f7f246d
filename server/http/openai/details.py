"""Details of an answer that a request may ask for: log probabilities, token ids, its prompt."""

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from server.http.chat.requests import ChatRequest
from server.http.common.json_pieces import LazyList
from server.http.generation.pieces import Piece
from server.http.generation.prepared import Job
from server.http.generation.requests import GenerationRequest
from server.http.openai.requests import CompletionRequest
from server.protocol.messages import TokenScores
from server.text.tokenizer import Detokenizer, Tokenizer

Fields = dict[str, Any]
_LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON cannot hold; vLLM's choice


@dataclass(frozen=True, slots=True)
class _Score:
    """One token's log probability and rank, and the likeliest tokens at its place with theirs, the likeliest first."""

    logprob: float
    rank: int
    likeliest: list[tuple[int, float]]


_Scores = Callable[[], Iterator[_Score]]  # makes them anew: as Python's objects a long prompt's take a gigabyte


def details_of(fields: GenerationRequest, jobs: Sequence[Job], tokenizer: Tokenizer) -> "Details | None":
    """Return what makes the details of these answers; None where the request asks for none."""
    asked = (fields.num_likeliest, fields.prompt_logprobs)
    if isinstance(fields, CompletionRequest) and (fields.echo or fields.return_token_ids or asked != (None, None)):
        return CompletionDetails(fields, jobs, tokenizer)
    if isinstance(fields, ChatRequest) and (fields.return_token_ids or asked != (None, None)):
        return ChatDetails(fields, jobs, tokenizer)
    return None


class Details(abc.ABC):
    """Makes the fields of one request's chunks, or of its whole answer, from pieces in their order."""

    def __init__(self, fields: GenerationRequest, jobs: Sequence[Job], tokenizer: Tokenizer) -> None:
        self._fields = fields
        self._jobs = jobs
        self._tokenizer = tokenizer
        self._begun: set[int] = set()  # choices of which a piece was seen
        self._of_prompts: dict[int, Sequence[TokenScores]] = {}  # by the number of the prompt

    def of(self, piece: Piece) -> tuple[Piece, Fields, Fields]:
        """The piece as it is given out, the fields of its choice, and those beside the choices."""
        job = self._jobs[piece.index]
        is_first = piece.index not in self._begun
        self._begun.add(piece.index)
        num_prompt, prompt = len(job.prompt_token_ids), piece.index // self._fields.n
        if is_first and prompt not in self._of_prompts:
            self._of_prompts[prompt] = piece.scores
        scores = self._of_prompts.get(prompt, ())
        num_answer = len(piece.token_ids)
        return self._made(
            piece,
            is_first,
            lambda: _scores(scores, range(1, num_prompt)),
            lambda: islice(_scores(piece.scores, range(num_prompt, 2**63)), num_answer),
        )

    @abc.abstractmethod
    def _made(self, piece: Piece, is_first: bool, prompt: _Scores, answer: _Scores) -> tuple[Piece, Fields, Fields]:
        """`prompt`: scores of the prompt from its second token on; `answer`: those of the piece's tokens."""

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._fields.return_tokens_as_token_ids else self._text(token_id)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.names.text_of(token_id)

    def _prompt_logprobs(self, token_ids: Sequence[int], scores: _Scores) -> LazyList:
        """Write a prompt's log probabilities as vLLM does: token id to log probability, rank and text at each place."""
        num_top = self._fields.prompt_logprobs or 0

        def places() -> Iterator[dict[str, Fields] | None]:
            yield None
            for token_id, score in zip(token_ids[1:], scores(), strict=True):
                ranked = {
                    token: (value, rank) for rank, (token, value) in enumerate(score.likeliest[:num_top], start=1)
                }
                ranked.setdefault(token_id, (score.logprob, score.rank))
                yield {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": self._text(token)}
                    for token, (value, rank) in ranked.items()
                }

        return LazyList(places)


def prompt_texts(fields: CompletionRequest, jobs: Sequence[Job], tokenizer: Tokenizer) -> tuple[str | None, ...]:
    """The text of each prompt. What was sent as token ids, or was cut, has one where `echo` gives it out."""
    is_whole = fields.truncate_prompt_tokens is None
    texts = [it if isinstance(it, str) and is_whole else None for it in fields.prompts()]
    if fields.echo and None in texts:
        firsts = jobs[:: fields.n]
        texts = [_text_of(job, tokenizer) if it is None else it for job, it in zip(firsts, texts, strict=True)]
    return tuple(texts)


def _text_of(job: Job, tokenizer: Tokenizer, *, is_all: bool = False) -> str:
    """The text of a prompt's tokens, without a character that the answer finishes, unless `is_all`."""
    ids = job.prompt_token_ids
    num_whole = len(ids) if is_all else len(ids) - tokenizer.num_unfinished(ids)
    return tokenizer.decode(ids[:num_whole], skip_special_tokens=not job.has_special_tokens)


class CompletionDetails(Details):
    def __init__(self, fields: CompletionRequest, jobs: Sequence[Job], tokenizer: Tokenizer) -> None:
        super().__init__(fields, jobs, tokenizer)
        self._has_echo = fields.echo
        self._num_likeliest = fields.logprobs
        self._is_empty = fields.max_tokens == 0  # a token is generated all the same, and not given out
        self._sent = fields.prompts() if fields.echo else []
        self._add_special_tokens = fields.add_special_tokens
        self._is_cut = fields.truncate_prompt_tokens is not None
        self._places: dict[int, _Places] = {}  # of each choice that has begun, where log probabilities are asked for

    def _made(self, piece: Piece, is_first: bool, prompt: _Scores, answer: _Scores) -> tuple[Piece, Fields, Fields]:
        prompt_ids = self._jobs[piece.index].prompt_token_ids
        if self._is_empty:
            piece = replace(piece, text="", token_ids=())
        found: Fields = {}
        ids = list(piece.token_ids)
        has_echo = self._has_echo and is_first
        if has_echo:
            piece = replace(piece, text=self._echo(piece.index) + piece.text)
        if self._num_likeliest is not None:
            offsets = self._begin_places(piece.index) if is_first else []
            offsets += map(self._places[piece.index].push, ids)

            def named() -> Iterator[tuple[int, _Score | None]]:
                if has_echo:
                    yield prompt_ids[0], None
                    yield from zip(prompt_ids[1:], prompt(), strict=False)
                yield from zip(ids, answer(), strict=False)

            found["logprobs"] = self._logprobs(named, self._num_likeliest, offsets)
        if self._fields.return_token_ids:
            found |= {"token_ids": ids} | ({"prompt_token_ids": prompt_ids} if is_first else {})
        if self._fields.prompt_logprobs is not None:
            found["prompt_logprobs"] = self._prompt_logprobs(prompt_ids, prompt)
        return piece, found, {}

    def _sent_text(self, index: int) -> str | None:
        """The prompt's text as it was sent; None where token ids were, or the text was cut."""
        sent = self._sent[index // self._fields.n]
        return sent if isinstance(sent, str) and not self._is_cut else None

    def _echo(self, index: int) -> str:
        """The prompt's text, to which the answer's is added."""
        sent, job = self._sent_text(index), self._jobs[index]
        if sent is not None:
            return sent
        return _text_of(job, self._tokenizer, is_all=self._is_empty)

    def _begin_places(self, index: int) -> list[int]:
        """Begin to read a choice's text. Return where each token of its prompt begins, if that is echoed."""
        job = self._jobs[index]
        ids = job.prompt_token_ids
        visible = self._tokenizer.added_ids if job.has_special_tokens else ()
        sent = self._sent_text(index) if self._has_echo else None
        if self._has_echo and sent is None:
            self._places[index] = _Places(Detokenizer(self._tokenizer, visible))
            return [*map(self._places[index].push, ids)]
        detokenizer = Detokenizer(self._tokenizer, visible, prompt=ids)
        self._places[index] = _Places(detokenizer, 0 if sent is None else len(sent))
        return [] if sent is None else self._tokenizer.starts(sent, add_special_tokens=self._add_special_tokens)

    def _logprobs(
        self, tokens: Callable[[], Iterator[tuple[int, _Score | None]]], num_likeliest: int, offsets: list[int]
    ) -> Fields:
        """OpenAI's legacy object. Nothing precedes a prompt's first token, so it has no probability."""

        def likeliest() -> Iterator[Fields | None]:
            for token_id, score in tokens():
                top = [] if score is None else score.likeliest[:num_likeliest]
                named = {self._name(token): value for token, value in top}
                yield None if score is None else named | {self._name(token_id): score.logprob}

        return {
            "tokens": LazyList(lambda: (self._name(token_id) for token_id, _ in tokens())),
            "token_logprobs": LazyList(lambda: (None if score is None else score.logprob for _, score in tokens())),
            "top_logprobs": LazyList(likeliest),
            "text_offset": offsets,
        }


class _Places:
    """Places in a text at which tokens begin. Those of one character are all at its beginning."""

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._end = start

    def push(self, token_id: int) -> int:
        """Return where the token begins in the text."""
        start = self._end
        self._end += len(self._detokenizer.push(token_id))
        return start


class ChatDetails(Details):
    def _made(self, piece: Piece, is_first: bool, prompt: _Scores, answer: _Scores) -> tuple[Piece, Fields, Fields]:
        fields, prompt_ids = self._fields, self._jobs[piece.index].prompt_token_ids
        found: Fields = {}
        beside: Fields = {}
        num_likeliest = fields.num_likeliest
        if num_likeliest is not None:

            def content() -> Iterator[Fields]:
                for token_id, score in zip(piece.token_ids, answer(), strict=False):
                    yield self._entry(token_id, score, num_likeliest)

            found["logprobs"] = {"content": LazyList(content), "refusal": None}
        if fields.return_token_ids:
            found["token_ids"] = list(piece.token_ids)
        if is_first and len(self._begun) == 1:  # a chat has one prompt, whatever its choices
            beside |= {"prompt_token_ids": prompt_ids} if fields.return_token_ids else {}
            if fields.prompt_logprobs is not None:
                beside["prompt_logprobs"] = self._prompt_logprobs(prompt_ids, prompt)
        return piece, found, beside

    def _entry(self, token_id: int, score: _Score, num_likeliest: int) -> Fields:
        top = [self._named(token, value) for token, value in score.likeliest[:num_likeliest]]
        return self._named(token_id, score.logprob) | {"top_logprobs": top}

    def _named(self, token_id: int, logprob: float) -> Fields:
        return {"token": self._name(token_id), "logprob": logprob, "bytes": self._tokenizer.names.bytes_of(token_id)}


def _scores(parts: Iterable[TokenScores], places: range) -> Iterator[_Score]:
    """The scores of the tokens at `places` of a sequence."""
    for part in parts:
        for place, (logprob, rank, ids, values) in enumerate(part.rows(), start=part.position):
            if place in places:
                yield _Score(_finite(logprob), rank, [*zip(ids, map(_finite, values), strict=True)])


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
