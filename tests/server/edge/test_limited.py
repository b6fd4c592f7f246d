"""A limit whose timer is only started where something is waited for."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from server.edge.timeouts import within


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the timers that are started."""

    num_timers = 0

    def call_at(self, *args: Any, **options: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self.num_timers += 1
        return super().call_at(*args, **options)


def run(work: Coroutine[Any, Any, object]) -> tuple[object, int]:
    """What it returns, and the number of timers it needed."""
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        return runner.run(work), loop.num_timers


async def at_once(value: object) -> object:
    return value


async def in_turns(num_turns: int) -> int:
    for _ in range(num_turns):
        await asyncio.sleep(0)
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, None)
        await future
    return num_turns


async def failing(num_turns: int) -> None:
    await in_turns(num_turns)
    raise LookupError("as it should")


def test_what_need_not_wait_needs_no_timer() -> None:
    assert run(within(5, at_once("done"))) == ("done", 0)


def test_what_waits_goes_on_where_it_was() -> None:
    assert run(within(5, in_turns(3))) == (3, 1)


@pytest.mark.parametrize("num_turns", [0, 2])
def test_its_errors_are_the_callers(num_turns: int) -> None:
    with pytest.raises(LookupError, match="as it should"):
        run(within(5, failing(num_turns)))


def test_what_takes_too_long_is_cancelled_where_it_waits() -> None:
    seen: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            seen.append("cleaned up")

    with pytest.raises(TimeoutError):
        run(within(0.02, slow()))
    assert seen == ["cleaned up"]


def test_who_is_cancelled_from_outside_is_no_timeout() -> None:
    async def test() -> str:
        task = asyncio.create_task(within(20, in_turns(10**9)))
        await asyncio.sleep(0.01)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled"
        return "not cancelled"

    assert run(test())[0] == "cancelled"


def test_a_cancellation_that_the_work_survives_leaves_its_result() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "survived"

    async def test() -> str:
        task = asyncio.create_task(within(20, stubborn()))
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert run(test())[0] == "survived"
