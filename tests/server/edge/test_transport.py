"""The edge over real sockets: OpenAI's own client, slow and silent peers, and the end of the server."""

import gc
import json
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from starlette.types import Receive, Scope, Send

from server.edge.uvicorn_server import Server, uvicorn_config
from server.protocol.messages import FinishReason, TokenDelta
from support.api.edge_fakes import delta, impatient, playing, saying, served
from support.api.running_api import Running, wait_until

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@pytest.fixture
def running(folder: Path) -> Iterator[Running]:
    with Running(served(folder, saying("Hel", "lo ", "€"))) as it:
        yield it


def test_openais_client_completes_chats_streams_and_lists(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        completion = client.completions.create(model="tiny", prompt="abc", max_tokens=20)
        assert completion.choices[0].text == "Hello €"
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 10
        messages = [{"role": "user", "content": "Hi"}]
        chat = client.chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == "Hello €"
        with client.chat.completions.create(
            model="tiny",
            messages=messages,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello €"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 19 + 10
        with client.completions.create(model="tiny", prompt=[1, 2], stream=True) as pieces:
            assert "".join(piece.choices[0].text for piece in pieces) == "Hello €"
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("is_at_once", [True, False])
def test_each_sent_request_notices_a_client_that_leaves(folder: Path, is_at_once: bool) -> None:
    it = served(folder, saying("a"))
    it.engine.gate.clear()
    running, body = Running(it), b'{"prompt": "a"}'
    try:
        with running.connect() as client:
            client.sendall((HEAD % len(body) + body) * (2 if is_at_once else 1))
            wait_until(lambda: it.engine.submitted)
            if not is_at_once:
                client.sendall(HEAD % len(body) + body)
            wait_until(lambda: any(each.pipeline for each in running.server.server_state.connections))
        wait_until(lambda: it.engine.cancelled == [it.engine.submitted[0][0]])
    finally:
        running.stop()
    assert it.value("requests_total", route="/v1/completions", outcome="disconnected") == 1
    assert it.services.lifecycle.num_inflight == 0


def test_objects_of_the_servers_lifetime_are_not_collected(folder: Path) -> None:
    num_before = gc.get_freeze_count()
    with Running(served(folder)):
        wait_until(lambda: gc.get_freeze_count() > num_before + 1000)


def test_openais_client_understands_the_errors(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as too_long:
            client.completions.create(model="tiny", prompt="a" * 2000)
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as unsupported:
            client.completions.create(model="tiny", prompt="a", best_of=2)
        assert (unsupported.value.code, unsupported.value.param) == ("unsupported_field", "best_of")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")


def test_openais_client_sees_an_error_in_the_middle_of_a_stream(folder: Path) -> None:
    died = TokenDelta("", [], FinishReason.ERROR, error_code="engine_died", error_message="gone")
    with (
        Running(served(folder, playing(delta("a"), died))) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
        client.completions.create(model="tiny", prompt="a", stream=True) as stream,
        pytest.raises(openai.APIError, match="gone"),
    ):
        list(stream)


@pytest.fixture
def impatient_server(folder: Path) -> Iterator[Running]:
    """A server that waits 0.3 s for the rest of a request, in place of 10."""
    with Running(served(folder, saying("Hel", "lo ", "€")), header_timeout_s=0.3) as it:
        yield it


@pytest.mark.parametrize("sent", [b"", b"GET /livez HT", b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Slow: a"])
def test_a_connection_that_never_ends_its_headers_is_closed(impatient_server: Running, sent: bytes) -> None:
    began_at = time.monotonic()  # before the server may know of the connection, however late this thread goes on
    with impatient_server.connect() as connection:
        connection.sendall(sent)
        assert connection.recv(100) == b""
        assert time.monotonic() - began_at > 0.2


@pytest.mark.parametrize("num_first", [0, 40])
def test_the_header_timer_spares_a_connection_within_a_request(impatient_server: Running, num_first: int) -> None:
    """The headers come at once or in two parts, behind the first of which the timer runs again."""
    impatient_server.it.engine.gate.clear()
    body = b'{"prompt": "x"}'
    sent = HEAD % len(body) + body
    with impatient_server.connect() as connection:
        connection.sendall(sent[:num_first])
        time.sleep(0.05)
        connection.sendall(sent[num_first:])
        wait_until(lambda: impatient_server.it.engine.submitted)
        time.sleep(0.5)
        [protocol] = impatient_server.server.server_state.connections
        protocol.loop.call_soon_threadsafe(impatient_server.it.engine.gate.set)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def refused_by_its_headers(connection: socket.socket) -> None:
    """Send a request that is answered while 999 bytes of its body are still to come."""
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    answer = b""
    while not answer.endswith(b"}}"):
        answer += connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 415")


def test_a_refused_body_that_never_ends_is_closed(impatient_server: Running) -> None:
    with impatient_server.connect() as connection:
        refused_by_its_headers(connection)
        connection.sendall(b"x" * 100)  # ends uvicorn's own timer, which is for idle connections
        assert connection.recv(100) == b""


def test_a_refused_body_may_end_and_the_next_be_served(impatient_server: Running) -> None:
    with impatient_server.connect() as connection:
        refused_by_its_headers(connection)
        connection.sendall(b"x" * 999)
        time.sleep(0.5)
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_what_is_no_http_is_answered_in_the_envelope(running: Running) -> None:
    with running.connect() as connection:
        connection.sendall(b"\x16\x03\x01 not http\r\n\r\n")
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"code":"invalid_http"' in answer


@pytest.mark.parametrize(
    ("fields", "has_length"),
    [({"stream": True}, False), ({"stream": True, "stop": "~"}, False), ({"prompt_logprobs": 20}, False), ({}, True)],
    ids=["stream", "stream by the long way", "answer in pieces", "answer of known length"],
)
def test_a_client_of_http_1_0_gets_no_chunks(running: Running, fields: dict[str, object], has_length: bool) -> None:
    body = json.dumps({"prompt": "x" * 600, **fields}).encode()
    with running.connect() as connection:
        connection.sendall(HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") % len(body) + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert (b"content-length" in head) is has_length
    if "stream" not in fields:
        assert json.loads(content)["choices"][0]["text"] == "Hello €"
        return
    *chunks, done, nothing = content.split(b"\n\n")
    texts = [json.loads(chunk.removeprefix(b"data: "))["choices"][0]["text"] for chunk in chunks]
    assert ("".join(texts), done, nothing) == ("Hello €", b"data: [DONE]", b"")


def test_garbage_behind_a_request_does_not_get_into_its_stream(folder: Path) -> None:
    it = served(folder, saying("a", "b"))
    it.engine.gate.clear()
    it.engine.num_free = 1
    running = Running(it)
    body = b'{"prompt": "x", "stream": true}'
    with running.connect() as connection:
        connection.sendall(HEAD % len(body) + body)
        answer = b""
        while b"data: " not in answer:
            answer += connection.recv(4096)
        connection.sendall(b"\x00 not http\r\n\r\n")
        assert b"HTTP/1.1" not in answer.removeprefix(b"HTTP/1.1 200") + connection.recv(4096)
    running.stop()


def test_a_shutdown_finishes_streams_and_refuses_new_requests(folder: Path) -> None:
    it = served(folder, saying("a", "b"))
    it.engine.gate.clear()
    it.engine.num_free = 1
    with Running(it, grace_s=30) as running:
        with httpx2.stream("POST", f"{running.url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            lines = answer.iter_lines()
            assert '"text":"a"' in next(lines)
            for _ in range(2):  # as timeout(1) does: to the process, then to its group
                running.server.handle_exit(signal.SIGTERM, None)
            assert httpx2.get(f"{running.url}/readyz").status_code == 503
            assert httpx2.get(f"{running.url}/livez").status_code == 200
            refused = httpx2.post(f"{running.url}/v1/completions", json={"prompt": "y"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            [protocol, *_] = running.server.server_state.connections
            protocol.loop.call_soon_threadsafe(it.engine.gate.set)
            rest = "".join(lines)
        assert '"text":"b"' in rest
        assert rest.endswith("data: [DONE]")
        assert "error" not in rest
        running.thread.join(5)
        assert not running.thread.is_alive()


def test_an_arriving_request_does_not_hold_up_a_shutdown(folder: Path) -> None:
    with Running(served(folder), grace_s=30) as running:
        with running.connect() as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            )
            connection.sendall(b"Content-Length: 100\r\n\r\n{")
            wait_until(lambda: running.server.server_state.tasks)
            running.server.handle_exit(signal.SIGTERM, None)
            answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"code":"shutting_down"' in answer


def test_a_server_that_must_end_needs_no_signal_or_grace(folder: Path) -> None:
    must_end, it = threading.Event(), served(folder, saying("a"))
    it.engine.gate.clear()
    running = Running(it, grace_s=3600, must_end=must_end.is_set)
    answers: list[httpx2.Response] = []
    client = threading.Thread(
        target=lambda: answers.append(httpx2.post(f"{running.url}/v1/completions", json={"prompt": "a"}, timeout=30))
    )
    client.start()
    wait_until(lambda: it.engine.submitted)
    must_end.set()
    client.join(10)
    running.thread.join(10)
    assert not running.thread.is_alive()
    assert [answer.status_code for answer in answers] == [503]
    running.stop()


def test_a_lack_of_file_descriptors_is_logged_and_survived(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    was = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as early:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, was[1]))
        try:
            early.connect(("127.0.0.1", running.port))
            deadline = time.monotonic() + 10
            while "no file descriptor is left, the limit is 3" not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, was)
    assert httpx2.get(f"{running.url}/livez").status_code == 200


def test_only_a_third_order_to_end_cares_for_nothing(folder: Path) -> None:
    it = served(folder)
    server = Server(uvicorn_config(it.app), it.services.lifecycle, 30, one_order_s=0)
    for _ in range(2):
        server.handle_exit(signal.SIGINT, None)
        assert not server.should_exit
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit
    assert server.force_exit


@pytest.mark.parametrize(("grace_s", "num_orders"), [(0.2, 1), (30, 2)])
def test_a_stream_that_outlives_the_grace_ends_with_an_error(folder: Path, grace_s: float, num_orders: int) -> None:
    it = served(folder, saying("a", "b"))
    it.engine.gate.clear()
    it.engine.num_free = 1
    with Running(it, grace_s=grace_s, one_order_s=0) as running:
        with httpx2.stream("POST", f"{running.url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            for _ in range(num_orders):
                running.server.handle_exit(signal.SIGTERM, None)
            rest = "".join(lines)
        assert '"code":"shutting_down"' in rest
        assert rest.endswith("data: [DONE]")
        assert it.engine.cancelled == [it.engine.submitted[0][0]]
        running.thread.join(5)
        assert not running.thread.is_alive()


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for _ in range(2):
            await send({"type": f"{(await receive())['type']}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})


def test_a_stalled_readers_connection_is_dropped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    it = served(folder)
    running = Running(it, app=impatient(it, endless), send_buffer_bytes=4096)
    with caplog.at_level(logging.WARNING), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", running.port))
        client.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: it.value("requests_total", route="other", outcome="disconnected") == 1)
        wait_until(lambda: not running.server.server_state.connections)
    running.stop()
    assert it.services.lifecycle.num_inflight == 0
    assert caplog.messages == []
