"""Streams of a reader who was away for some deltas."""

import asyncio

from server.protocol.messages import FinishReason, PathUse, RequestTimes, TokenDelta, TokenScores
from server.supervisor.streams import OpenStream, Streams

TIMES = RequestTimes(1.0, 2.0, 3.0, 1, 0)
SCORES = (TokenScores.of(1, 1, [[-0.5, 1, 7, -0.5]]),)
USE = [PathUse("decode", "sdpa.cpu", "proven", [])]


def test_unread_deltas_are_one_that_has_lost_nothing_of_them() -> None:
    stream = OpenStream("a")
    stream.push(TokenDelta("a", [1], times=TIMES, path_uses=USE, scores=SCORES))
    stream.push(TokenDelta("a", [2, 3]))
    stream.push(TokenDelta("a", [4], FinishReason.LENGTH))
    read = asyncio.run(stream.next())
    assert read == TokenDelta("a", [1, 2, 3, 4], FinishReason.LENGTH, times=TIMES, path_uses=USE, scores=SCORES)


def test_after_the_end_nothing_is_added() -> None:
    stream = OpenStream("a")
    stream.push(TokenDelta("a", [1], FinishReason.STOP))
    stream.push(TokenDelta("a", [2]))
    assert asyncio.run(stream.next()).token_ids == [1]


def reading(stream: OpenStream, *deltas: TokenDelta) -> TokenDelta | Exception:
    """Return what a reader gets who waits while these are pushed."""

    async def test() -> TokenDelta | Exception:
        reader = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        for delta in deltas:
            stream.push(delta)
        try:
            return await reader
        except LookupError as error:
            return error

    return asyncio.run(test())


def test_a_waiting_reader_gets_the_last_message() -> None:
    taken: list[TokenDelta] = []
    stream = OpenStream("a", lambda delta: not taken.append(delta))
    last = TokenDelta("a", [3], FinishReason.STOP)
    assert reading(stream, TokenDelta("a", [1]), TokenDelta("a", [2]), last) == last
    assert [delta.token_ids for delta in taken] == [[1], [2]]


def test_behind_something_unread_nothing_is_taken() -> None:
    offered: list[TokenDelta] = []

    def take(delta: TokenDelta) -> bool:
        offered.append(delta)
        return False

    stream = OpenStream("a", take)
    assert reading(stream, TokenDelta("a", [1]), TokenDelta("a", [2])) == TokenDelta("a", [1, 2])
    stream.push(TokenDelta("a", [3]))  # nobody waits
    assert len(offered) == 1


def test_who_is_behind_takes_nothing_and_merges() -> None:
    streams = Streams(10)
    offered: list[TokenDelta] = []
    stream = streams.open("a", lambda delta: not offered.append(delta))

    async def test() -> TokenDelta:
        reader = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        assert streams.push(TokenDelta("a", [1]), is_behind=True)
        assert streams.push(TokenDelta("a", [2]))  # behind something unread
        return await reader

    assert asyncio.run(test()).token_ids == [1, 2]
    assert offered == []


def test_what_goes_wrong_in_taking_is_the_readers() -> None:
    def take(_: TokenDelta) -> bool:
        raise LookupError("no room after all")

    assert isinstance(reading(OpenStream("a", take), TokenDelta("a", [1]), TokenDelta("a", [2])), LookupError)
