"""Tokens that are written by the way, without waking the stream's task, among those that are not."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from server.protocol.images import PromptImages
from server.protocol.messages import FinishReason, SamplingParams, TokenDelta
from server.supervisor.choices import Choices
from server.supervisor.streams import Streams, Take
from support.api.edge_fakes import ScriptedEngine, Served, delta, served
from support.api.running_api import Running, wait_until


class PushingEngine(ScriptedEngine):
    """Pushes the script's deltas whether or not they are read, as an engine process does."""

    def __init__(self, deltas: list[TokenDelta]) -> None:
        super().__init__(lambda _: deltas)
        self.streams = Streams(10**6)
        self.num_pushed = 0
        self.num_taken = 0
        self.num_yielded = 0

    async def stream(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,  # noqa: ARG002 -- the engine's signature
        *,
        cache_salt: bytes = b"",  # noqa: ARG002
        traceparent: str | None = None,  # noqa: ARG002
        priority: int = 0,  # noqa: ARG002
        choices: Choices | None = None,  # noqa: ARG002
        take: Take | None = None,
        images: PromptImages | None = None,  # noqa: ARG002
    ) -> AsyncGenerator[TokenDelta]:
        def counting(it: TokenDelta) -> bool:
            is_taken = take is not None and take(it)
            self.num_taken += is_taken
            return is_taken

        async def push() -> None:
            for it in self.script(prompt_token_ids):
                await asyncio.sleep(0)
                self.streams.push(replace_id(it, request_id))
                self.num_pushed += 1

        stream = self.streams.open(request_id, None if take is None else counting)
        pushing = asyncio.create_task(push())
        try:
            while True:
                it = await stream.next()
                self.num_yielded += 1
                yield it
                if it.finish_reason is not None:
                    break
        finally:
            pushing.cancel()
            self.streams.close(stream)


def replace_id(it: TokenDelta, request_id: str) -> TokenDelta:
    return TokenDelta(request_id, it.token_ids, it.finish_reason, times=it.times, path_uses=it.path_uses)


def running(folder: Path, engine: ScriptedEngine, **options: int) -> Running:
    it = served(folder)
    return Running(Served(replace(it.services, engine=engine), engine), **options)


def texts_of(stream: bytes) -> list[str]:
    """Return the texts of a chunked response's events."""
    body = b""
    rest = stream.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    events = [line[len("data: ") :] for line in body.decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events]


def ask(connection: socket.socket, **fields: object) -> None:
    body = json.dumps({"prompt": [1, 2], "max_tokens": 100, "stream": True, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def answer(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def script(num_deltas: int) -> list[TokenDelta]:
    last = delta("", FinishReason.LENGTH)
    return [delta("0 ", is_first=True), *(delta(f"{i} €") for i in range(1, num_deltas)), last]


def expected(num_deltas: int) -> str:
    return "0 " + "".join(f"{i} €" for i in range(1, num_deltas))


def test_what_can_be_written_at_once_wakes_no_task(folder: Path) -> None:
    engine = PushingEngine(script(50))
    it = running(folder, engine)
    with it.connect() as connection:
        ask(connection)
        assert "".join(texts_of(answer(connection))) == expected(50)
    it.stop()
    assert (engine.num_taken, engine.num_yielded) == (50, 1)  # the first one too: its task sees but the last
    assert it.it.value("generation_tokens_total") == len(expected(50).encode())


def test_behind_a_slow_reader_tokens_are_merged_in_order(folder: Path) -> None:
    engine = PushingEngine(script(4000))
    it = running(folder, engine, send_buffer_bytes=4096)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", it.port))
        ask(connection)
        wait_until(lambda: engine.num_pushed == 4001)
        texts = texts_of(answer(connection))
    it.stop()
    assert "".join(texts) == expected(4000)
    assert len(texts) < 3900
    assert engine.num_taken > 0
    assert engine.num_yielded > 1


def test_a_failure_behind_an_unread_first_token_is_an_event(folder: Path) -> None:
    failed = TokenDelta("", [], FinishReason.ERROR)
    engine = PushingEngine([delta("0 ", is_first=True), delta("1 "), failed])
    it = running(folder, engine)
    with it.connect() as connection:
        ask(connection)
        stream = answer(connection)
    it.stop()
    assert stream.startswith(b"HTTP/1.1 200")
    assert stream.count(b"HTTP/1.1") == 1
    assert engine.num_taken == 2
    assert stream.index(b'"text":"1 "') < stream.index(b'"code":"internal_error"') < stream.index(b"data: [DONE]")


def test_a_first_token_without_text_begins_the_stream(folder: Path) -> None:
    engine = PushingEngine([delta("€")])
    engine.script = lambda _: [
        TokenDelta("", list("€".encode()[:1])),
        TokenDelta("", list("€".encode()[1:])),
        delta("", FinishReason.LENGTH),
    ]
    it = running(folder, engine)
    with it.connect() as connection:
        ask(connection)
        assert texts_of(answer(connection))[:2] == ["", "€"]
    it.stop()


@pytest.mark.parametrize("fields", [{"stop": ["~~"]}, {"n": 2}])
def test_stop_strings_and_several_choices_take_the_long_way(folder: Path, fields: dict[str, object]) -> None:
    engine = PushingEngine(script(20))
    it = running(folder, engine)
    with it.connect() as connection:
        ask(connection, **fields)
        answer(connection)
    it.stop()
    assert engine.num_taken == 0
