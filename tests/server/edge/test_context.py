"""Logs, spans and metrics of a request."""

import asyncio

import pytest

from server.edge.body_memory import Bodies, Body
from server.edge.context import RequestContext


def test_the_last_is_cleaned_up_first_even_after_a_failure() -> None:
    seen: list[str] = []

    async def first() -> None:
        seen.append("first")

    async def failing() -> None:
        seen.append("failing")
        raise LookupError

    async def test() -> None:
        task = asyncio.current_task()
        assert task is not None
        context = RequestContext("a", 0.0, task, "b", Body(Bodies(1)))
        for each in (first, failing):
            context.exits.push_async_callback(each)
        with pytest.raises(LookupError):
            await context.aclose()
        await context.aclose()  # nothing is left

    asyncio.run(test())
    assert seen == ["failing", "first"]
