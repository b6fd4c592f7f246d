"""The memory that bodies of requests take together."""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server.edge.body_memory import Bodies, Body, in_thread
from server.errors import TooManyRequests
from support.api.edge_fakes import served
from support.on_a_loop import on_a_loop

COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}


def test_bodies_are_counted_together_and_forgotten_once() -> None:
    bodies = Bodies(10)
    first, second = Body(bodies), Body(bodies)
    first.grow(6)
    second.grow(4)
    with pytest.raises(TooManyRequests, match="11 bytes of requests would wait to be parsed, the limit is 10"):
        second.grow(1)
    first.drop()
    first.drop()
    second.grow(6)
    assert bodies.num_bytes == 10


def test_a_body_that_is_alone_may_be_of_any_size() -> None:
    bodies = Bodies(10)
    body = Body(bodies)
    body.grow(8)
    body.grow(8)
    body.drop()
    assert bodies.num_bytes == 0


@on_a_loop
async def test_a_body_without_room_is_a_429_until_others_have_gone(folder: Path) -> None:
    it = served(folder, max_queued_bytes=1000)
    end = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"prompt": "a"' + b" " * 900
        await end.wait()
        yield b"}"

    large = json.dumps({"prompt": "b" * 200}).encode()
    async with it.client() as client:
        first = asyncio.create_task(client.post(COMPLETIONS, content=slowly(), headers=JSON))
        while (second := await client.post(COMPLETIONS, content=large, headers=JSON)).status_code == 200:
            await asyncio.sleep(0)  # the first has not come this far
        assert (second.status_code, second.json()["error"]["code"]) == (429, "too_many_requests")
        assert second.headers["retry-after"] == "1"
        assert (await client.post("/tokenize", content=large, headers=JSON)).status_code == 429
        assert (await client.post(COMPLETIONS, json={"prompt": "c"})).status_code == 200
        end.set()
        assert (await first).status_code == 200
        assert (await client.post(COMPLETIONS, content=large, headers=JSON)).status_code == 200
    assert it.value("rejected_total", reason="queue_bytes") == 2


@on_a_loop
async def test_a_request_that_runs_holds_no_body_any_more(folder: Path) -> None:
    it = served(folder, max_queued_bytes=300)
    it.engine.gate.clear()
    large = {"prompt": "b" * 250}
    async with it.client() as client:
        running = []
        for num_running in range(1, 4):
            running.append(asyncio.create_task(client.post(COMPLETIONS, json=large)))
            while len(it.engine.submitted) < num_running:
                await asyncio.sleep(0)
        it.engine.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3


@on_a_loop
async def test_a_waiting_body_whose_client_has_gone_is_not_held() -> None:
    """The body's bytes are not counted any more: a flood of clients that go would take any memory."""

    is_free = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        busy = asyncio.create_task(in_thread(b"", lambda _: is_free.wait(5)))
        body = b"{" * 8192
        num_before = sys.getrefcount(body)
        waiting = asyncio.create_task(in_thread(body, len))
        await asyncio.sleep(0)
        num_waiting = sys.getrefcount(body)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        del waiting
        num_cancelled = sys.getrefcount(body)
        is_free.set()
        assert await busy
        assert await in_thread(body, len) == 8192
        assert num_cancelled == num_before < num_waiting
