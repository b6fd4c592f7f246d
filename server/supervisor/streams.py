"""The open requests of the API process: each delta to its reader, and never more unread than one may hold."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from server.protocol.messages import FinishReason, TokenDelta

Take = Callable[[TokenDelta], bool]  # whether it was taken


class OpenStream:
    """Deltas of one request on their way to one reader. Unread ones are merged, so its memory is bounded by tokens."""

    def __init__(self, request_id: str, take: Take | None = None, prompt: Sequence[int] = ()) -> None:
        """`take` may take a delta at once, where its reader waits for one and it is not the last."""
        self.request_id = request_id
        self.prompt = prompt
        self.is_begun = False  # a delta has come
        self.is_ended = False
        self._take = take
        self._error: Exception | None = None  # of `take`
        self._unread: TokenDelta | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the reader, while there is nothing to read

    @property
    def num_unread_tokens(self) -> int:
        return 0 if self._unread is None else len(self._unread.token_ids)

    def push(self, delta: TokenDelta, *, may_take: bool = True) -> bool:
        """Add a delta; what comes after the one with a finish_reason is dropped. Returns whether it was taken."""
        if self.is_ended:
            return False
        self.is_begun = True
        waiter, is_last = self._waiter, delta.finish_reason is not None
        if may_take and self._take is not None and waiter is not None and not waiter.done() and not is_last:
            try:
                if self._take(delta):
                    return True
            except Exception as error:  # an error of this stream's reader alone
                self._error = error
                waiter.set_result(None)
                return True
        self._unread = delta if self._unread is None else merge(self._unread, delta)
        self.is_ended = delta.finish_reason is not None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return False

    async def next(self) -> TokenDelta:
        """Everything unread as one delta; waits for the first. Raises what taking one raised."""
        while self._unread is None and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        delta, self._unread = self._unread, None
        assert delta is not None
        return delta


class Streams:
    """All open streams by request id."""

    def __init__(self, max_unread_tokens: int) -> None:
        self._max_unread_tokens = max_unread_tokens
        self._open: dict[str, OpenStream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: str, take: Take | None = None, prompt: Sequence[int] = ()) -> OpenStream:
        """Raises ValueError for an id that is open already."""
        if request_id in self._open:
            raise ValueError(f"request {request_id} is open already")
        stream = self._open[request_id] = OpenStream(request_id, take, prompt)
        return stream

    def prompts(self) -> list[Sequence[int]]:
        """Return the prompts of the open streams that nothing has come for; of all where each has begun."""
        unanswered = [stream.prompt for stream in self._open.values() if not stream.is_begun]
        return unanswered or [stream.prompt for stream in self._open.values()]

    def close(self, stream: OpenStream) -> None:
        """Forget the stream; its later deltas are dropped."""
        if self._open.get(stream.request_id) is stream:
            del self._open[stream.request_id]

    def push(self, delta: TokenDelta, *, is_behind: bool = False) -> bool:
        """Give a delta to its reader. False when that reader is too slow: its stream has ended, cancel its request.

        `is_behind`: more are there already, perhaps of the same stream, so that it pays to merge them.
        """
        stream = self._open.get(delta.request_id)
        if stream is None:
            return True
        if (
            stream.push(delta, may_take=not is_behind)
            or stream.is_ended
            or stream.num_unread_tokens <= self._max_unread_tokens
        ):
            return True
        message = f"{stream.num_unread_tokens} tokens wait to be read, the limit is {self._max_unread_tokens}"
        stream.push(error_delta(stream.request_id, "slow_client", message))
        return False

    def end_all(self, code: str, message: str) -> None:
        """End every stream with an error."""
        for stream in self._open.values():
            stream.push(error_delta(stream.request_id, code, message))
        self._open.clear()


def error_delta(request_id: str, code: str, message: str) -> TokenDelta:
    return TokenDelta(request_id, [], FinishReason.ERROR, error_code=code, error_message=message)


def merge(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """Two deltas of one request, the second the later one, as one."""
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        times=first.times or second.times,
        path_uses=second.path_uses or first.path_uses,
        scores=first.scores + second.scores,
    )
