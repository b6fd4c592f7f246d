"""A limit on what mostly need not be waited for: a timer is started only where there is something to wait for."""

import asyncio
from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


async def within(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises TimeoutError when it has to wait, and that takes longer than `limit_s`."""
    try:
        waits_for = work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    async with asyncio.timeout(limit_s):
        return await _Rest(work, waits_for)


class _Rest(Generic[T]):
    """What is left of a coroutine that has begun."""

    def __init__(self, work: Coroutine[Any, Any, T], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        """As `yield from`, for what it yielded first is known already."""
        work, waits_for = self._work, self._waits_for
        while True:
            try:
                sent = yield waits_for
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:  # the task is cancelled
                step = partial(work.throw, error)
            else:
                step = partial(work.send, sent)
            try:
                waits_for = step()
            except StopIteration as end:
                return cast(T, end.value)
