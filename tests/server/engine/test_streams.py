"""What a reader finds when he was away for some deltas."""

import asyncio

from server.engine.messages import AttentionUse, FinishReason, RequestTimes, TokenDelta, TokenScores
from server.engine.streams import OpenStream

TIMES = RequestTimes(1.0, 2.0, 3.0, 1, 0)
SCORES = (TokenScores(1, [-0.5], [[7]], [[-0.5]]),)
USE = [AttentionUse("decode", "sdpa.cpu", "proven", [])]


def test_unread_deltas_are_one_that_has_lost_nothing_of_them() -> None:
    stream = OpenStream("a")
    stream.push(TokenDelta("a", [1], times=TIMES, attention=USE, scores=SCORES))
    stream.push(TokenDelta("a", [2, 3]))
    stream.push(TokenDelta("a", [4], FinishReason.LENGTH))
    read = asyncio.run(stream.next())
    assert read == TokenDelta("a", [1, 2, 3, 4], FinishReason.LENGTH, times=TIMES, attention=USE, scores=SCORES)


def test_after_the_end_nothing_is_added() -> None:
    stream = OpenStream("a")
    stream.push(TokenDelta("a", [1], FinishReason.STOP))
    stream.push(TokenDelta("a", [2]))
    assert asyncio.run(stream.next()).token_ids == [1]
