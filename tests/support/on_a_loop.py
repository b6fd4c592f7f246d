"""Tests that are coroutines, each run on an event loop of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec

Arguments = ParamSpec("Arguments")
WITHIN_S = 60.0


def on_a_loop(test: Callable[Arguments, Awaitable[None]]) -> Callable[Arguments, None]:
    """Make a coroutine function a plain test. Raises TimeoutError after 60 s."""

    @wraps(test)
    def limited(*args: Arguments.args, **options: Arguments.kwargs) -> None:
        async def run() -> None:
            async with asyncio.timeout(WITHIN_S):
                await test(*args, **options)

        asyncio.run(run())

    return limited
