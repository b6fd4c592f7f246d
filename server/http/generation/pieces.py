"""Pieces of text made of an engine's tokens: detokenizing, stop strings, exact counts."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from server.edge.direct_stream import DirectStream
from server.errors import error_of_code
from server.http.generation.prepared import Job
from server.protocol.messages import FinishReason, TokenDelta, TokenScores
from server.supervisor.choices import Choices
from server.supervisor.client import EngineClient
from server.telemetry.request import SequenceRecord
from server.text.answer.deltas import CallEnd, CallStart, ContentText, Delta
from server.text.stop import StopMatcher
from server.text.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one prompt's answer; empty while text is held back. Or, where it is parsed, new deltas."""

    index: int
    text: str
    finish_reason: str | None  # as OpenAI names it
    token_ids: Sequence[int] = ()  # new ones that are part of the answer, those whose text is held back included
    scores: Sequence[TokenScores] = ()  # where asked for, of these tokens at least
    deltas: Sequence[Delta] = ()
    stop: str | None = None  # the stop string that ended it
    pooled: bytes | None = None

    @property
    def all_deltas(self) -> Sequence[Delta]:
        """Deltas of the piece, of an answer that is parsed or is all content."""
        return [ContentText(self.text), *self.deltas] if self.text else self.deltas


class Gathered:
    """All pieces of one answer."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._texts: list[str] = []
        self._finish_reason: str | None = None
        self._token_ids: list[int] = []
        self._scores: list[TokenScores] = []
        self._deltas: list[Delta] = []
        self._stop: str | None = None

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self._finish_reason = piece.finish_reason
        self._token_ids += piece.token_ids
        self._scores += piece.scores
        self._deltas += piece.deltas
        self._stop = piece.stop

    @property
    def piece(self) -> Piece:
        """All pieces as one."""
        text = "".join(self._texts)
        return Piece(self._index, text, self._finish_reason, self._token_ids, self._scores, self._deltas, self._stop)


async def pieces(
    job: Job,
    engine: EngineClient,
    tokenizer: Tokenizer,
    record: SequenceRecord,
    *,
    cache_salt: bytes,
    choices: Choices | None = None,
    began: Callable[[], None] = lambda: None,
    direct: DirectStream | None = None,
    gathered: Gathered | None = None,
) -> AsyncGenerator[Piece]:
    """Pieces of one answer; the last has a finish_reason. Raises what ends it early. Closing it cancels the engine.

    `choices`: the answers to the same prompt, where there are others. `began` is called before the first piece. While
    this is waited for, text goes to the `direct` stream where that has room, and not here: no task is woken for a token
    that can be written at once.
    `gathered` gets every piece before it is yielded, and what goes to the direct stream.
    """
    reading = _Reading(job, tokenizer, record, began, direct, gathered)
    what = (job.engine_id, job.prompt_token_ids, job.sampling)
    take = reading.take if reading.may_take else None
    stream = engine.stream(
        *what,
        cache_salt=cache_salt,
        traceparent=record.traceparent,
        priority=job.priority,
        choices=choices,
        take=take,
        images=job.images,
    )
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            came_at = record.now()
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                record.delta(delta, came_at)
                raise error_of_code(delta.error_code, delta.error_message)
            reading.begin()
            num_before = record.num_tokens
            if delta.path_uses is not None:
                record.served_by(delta.path_uses)
            text, is_stopped = reading.absorb(delta)
            token_ids = delta.token_ids[: record.num_tokens - num_before]
            if delta.finish_reason is None and not is_stopped:
                piece = Piece(job.index, text, None, token_ids, delta.scores, reading.take_deltas())
                if gathered is not None:
                    gathered.add(piece)
                try:
                    yield piece
                finally:  # measured when it is written: a first token's histograms would delay it by 20 us
                    record.delta(delta, came_at)
                continue
            record.delta(delta, came_at)
            reason = "length" if delta.finish_reason is FinishReason.LENGTH and not is_stopped else "stop"
            record.end(reason)
            found = reading.take_deltas()
            if reading.has_calls and reason == "stop" and not (is_stopped and reading.is_in_call):
                reason = "tool_calls"
            piece = Piece(job.index, text, reason, token_ids, delta.scores, found, reading.stop, delta.pooled)
            if gathered is not None:
                gathered.add(piece)
            yield piece
            return


class _Reading:
    """One answer as it is read: the text of its tokens so far, and whether it has begun."""

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        record: SequenceRecord,
        began: Callable[[], None],
        direct: DirectStream | None,
        gathered: Gathered | None,
    ) -> None:
        self._gathered = gathered
        self._index = job.index
        self._parser = job.parser
        self._deltas: list[Delta] = []
        self.has_calls = False
        self.is_in_call = False  # the last one has no end
        marks = tuple(job.parser.marks) if job.parser is not None else ()
        visible = tuple(tokenizer.added_ids) if job.has_special_tokens else marks
        # Special tokens that have a text for the stop strings alone: one that is a stop string ends the answer.
        hidden = {*job.stops}.difference(visible) & tokenizer.added_ids.keys()
        self._stop_tokens = {
            token_id: stop for stop in hidden if (token_id := tokenizer.added_ids[stop]) in tokenizer.special_ids
        }
        self._detokenizer = Detokenizer(
            tokenizer,
            (*visible, *self._stop_tokens.values()),
            prompt=job.prompt_token_ids if job.continues else (),
        )
        self._matcher = StopMatcher(job.stops, is_included=job.includes_stop)
        self._includes_stop = job.includes_stop
        self._min_tokens = job.sampling.min_tokens
        self._record = record
        self._began = began
        self._has_begun = False
        self._direct = direct

    @property
    def may_take(self) -> bool:
        """Return whether text may go to the direct stream: with stop strings, what has come may still be taken back."""
        return self._direct is not None and not self._matcher.has_stops and self._parser is None

    @property
    def stop(self) -> str | None:
        """The stop string that has ended it, if one has."""
        return self._matcher.matched

    def begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._began()

    def take(self, delta: TokenDelta) -> bool:
        """Write the text of `delta` to the direct stream and return True, if there is room."""
        direct, record = self._direct, self._record
        if direct is None or not direct.has_room():
            return False
        came_at = record.now()
        if delta.path_uses is not None:
            record.served_by(delta.path_uses)
        token_ids = delta.token_ids
        push = self._detokenizer.push
        text = push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))  # one in most deltas
        direct.put(text)
        if self._gathered is not None:
            self._gathered.add(Piece(self._index, text, None, token_ids))
        if not self._has_begun:
            self.begin()
        record.delta(delta, came_at)
        record.tokens(len(token_ids))
        return True

    def absorb(self, delta: TokenDelta) -> tuple[str, bool]:
        """Text to emit for `delta`, and whether a stop string ended it. Tokens behind a stop string do not count."""
        parser = self._parser
        if parser is None:
            if delta.finish_reason is None and not self._matcher.has_stops:
                self._record.tokens(len(delta.token_ids))
                return "".join(map(self._detokenizer.push, delta.token_ids)), False
            return self._absorb(delta, str)

        def parse(text: str) -> str:
            was_reasoning = parser.is_reasoning
            self._deltas += parser.feed(text)
            self._record.reasoning_tokens(was_reasoning and parser.is_reasoning)
            return ""

        text, is_stopped = self._absorb(delta, parse)
        if delta.finish_reason is not None or is_stopped:
            self._deltas += parser.finish()
        return text, is_stopped

    def take_deltas(self) -> Sequence[Delta]:
        """The deltas of the parsed answer that were not taken yet."""
        if not self._deltas:
            return ()
        found, self._deltas = self._deltas, []
        for it in found:
            if isinstance(it, CallStart):
                self.has_calls = self.is_in_call = True
            elif isinstance(it, CallEnd):
                self.is_in_call = False
        return found

    def _absorb(self, delta: TokenDelta, parsed: Callable[[str], str]) -> tuple[str, bool]:
        """Do `absorb`, with each token's text passed through `parsed`."""
        matcher, record, push = self._matcher, self._record, self._detokenizer.push
        if delta.finish_reason is None and not matcher.has_stops:
            record.tokens(len(delta.token_ids))
            return "".join([parsed(push(token_id)) for token_id in delta.token_ids]), False
        num_before = record.num_tokens
        # The last token ended the answer and has no text, unless asked for.
        is_stop_token = delta.finish_reason is FinishReason.STOP and not self._includes_stop
        num_text_tokens = len(delta.token_ids) - is_stop_token
        emitted = []
        for num_read, token_id in enumerate(delta.token_ids[:num_text_tokens], start=1):
            text = push(token_id)
            if num_before + num_read > self._min_tokens:
                text = matcher.push(text)
            else:
                text = text.removesuffix(self._stop_tokens.get(token_id, ""))
            emitted.append(parsed(text))
            if matcher.matched is not None:
                record.tokens(num_read)
                return "".join(emitted), True
        record.tokens(len(delta.token_ids))
        if delta.finish_reason is None:
            return "".join(emitted), False
        rest = matcher.push(self._detokenizer.finish())
        if matcher.matched is None:
            rest += matcher.finish()
        if rest and self._parser is not None:  # of tokens that are counted already
            self._deltas += self._parser.feed(rest)
        elif rest:
            emitted.append(rest)
        return "".join(emitted), matcher.matched is not None


async def merged(streams: list[AsyncGenerator[Piece]]) -> AsyncGenerator[Piece]:
    """Pieces of all streams as they come. The first error ends all.

    No more pieces wait here than there are streams: what a slow client does not read stays with the engine's client,
    which merges it, and has a limit.
    """
    queue: asyncio.Queue[Piece | asyncio.Task[None]] = asyncio.Queue()
    room = asyncio.Semaphore(len(streams))
    tasks = [asyncio.create_task(_pump(stream, queue, room)) for stream in streams]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Piece):
                room.release()
                yield item
            else:
                item.result()  # raises what ended the stream early
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    stream: AsyncGenerator[Piece], queue: "asyncio.Queue[Piece | asyncio.Task[None]]", room: asyncio.Semaphore
) -> None:
    async with aclosing(stream):
        async for piece in stream:
            await room.acquire()
            queue.put_nowait(piece)
