"""One connection over real sockets: bytes that are not body, trailers, pipelines and clients that close their side."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.edge.connection import BODY_BYTES_PER_EXTRA, MAX_WAITING, PART_BYTES
from server.edge.headers import MAX_HEADER_BYTES, MAX_HEADERS
from server.edge.keys import ApiKeys, Keys
from support.api.edge_fakes import saying, served
from support.api.running_api import Running, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "abc", "max_tokens": 20}'
SIZED = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)


@pytest.fixture
def running(folder: Path) -> Iterator[Running]:
    with Running(served(folder, saying("Hel", "lo"))) as it:
        yield it


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def over_the_limit(begin: bytes, repeated: bytes) -> bytes:
    """`begin` and as many `repeated` that the bytes beside the body, of which all are, are one too many."""
    limit = MAX_HEADER_BYTES + len(BODY) // BODY_BYTES_PER_EXTRA + len(BODY)
    num_more = limit + 1 - len(begin)
    return begin + (repeated * (num_more // len(repeated) + 1))[:num_more]


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        (CHUNKED + CHUNK + b"0\r\nx: ", b"a"),
        (CHUNKED + CHUNK + b"0\r\n", b"a: %b\r\n" % (b"b" * 400)),
        (CHUNKED + CHUNK + b"1;name=", b"a"),
        (HEAD + b"x: ", b"a" * len(BODY)),
    ],
    ids=["one long trailer", "many trailers", "a chunk extension", "a header"],
)
def test_too_many_bytes_beside_the_body_are_a_431(running: Running, begin: bytes, repeated: bytes) -> None:
    with running.connect() as connection:
        connection.sendall(over_the_limit(begin, repeated))
        answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 431")
    assert b'"code":"headers_too_large"' in answer
    assert str(MAX_HEADER_BYTES).encode() in answer


@pytest.mark.parametrize("begin", [HEAD, CHUNKED + CHUNK + b"0\r\n"], ids=["headers", "trailers"])
def test_many_small_headers_or_trailers_are_a_431(running: Running, begin: bytes) -> None:
    with running.connect() as connection:
        connection.sendall(
            begin + b"a: b\r\n" * (MAX_HEADERS + 1) + b"c"
        )  # the last one's value ends where a name begins
        answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 431")
    assert b" in %d fields" % MAX_HEADERS in answer


def test_chunks_of_a_byte_are_a_431_before_they_cost_much(running: Running) -> None:
    with running.connect() as connection:
        connection.sendall(CHUNKED + b"1\r\n \r\n" * (MAX_HEADER_BYTES // 5 + 200))
        assert answer_of(connection).startswith(b"HTTP/1.1 431")


def test_a_large_body_in_small_chunks_is_served(running: Running) -> None:
    body = b" " * 1_000_000 + BODY
    parts = [body[start : start + 100] for start in range(0, len(body), 100)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    with running.connect() as connection:
        connection.sendall(CHUNKED + chunks + b"0\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_the_request_before_does_not_count_against_the_next(running: Running) -> None:
    begin, end = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nx: ", b"\r\n\r\n"
    largest = begin + b"a" * (MAX_HEADER_BYTES - len(begin) - len(end)) + end
    num_before = (PART_BYTES - 1) // len(SIZED)  # as many as may share a part with it
    with running.connect() as connection:
        connection.sendall(SIZED * num_before + largest[:-1])
        answer = connection.recv(1)
        connection.sendall(largest[-1:])
        assert (answer + answer_of(connection)).count(b"HTTP/1.1 200") == num_before + 1


def test_a_refused_request_gets_no_second_answer(folder: Path) -> None:
    with Running(served(folder), keys=Keys(ApiKeys(["right"]))) as running:
        with running.connect() as connection:
            connection.sendall(CHUNKED + CHUNK)
            answer = connection.recv(65536)
            connection.sendall(b"0\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"c")
            answer += answer_of(connection)
        assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 401") == 1


def test_trailers_are_no_headers(folder: Path) -> None:
    trailers = b"0\r\nAuthorization: Bearer right\r\nHost: other\r\nX-Request-Id: forged\r\n\r\n"
    key = b"Authorization: Bearer right\r\n"
    with Running(served(folder, saying("Hello")), keys=Keys(ApiKeys(["right"]))) as running:
        for head, status in ((CHUNKED, b"401"), (CHUNKED.replace(b"Host", key + b"Host"), b"200")):
            with running.connect() as connection:
                connection.sendall(head + CHUNK + trailers)
                answer = connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 " + status)
                assert b"forged" not in answer


def test_of_many_requests_in_one_read_few_wait_in_memory(folder: Path) -> None:
    it = served(folder, saying("Hello"))
    it.engine.gate.clear()
    running, num_requests = Running(it), 1000
    try:
        with running.connect() as connection:
            connection.sendall(SIZED * num_requests)
            wait_until(lambda: it.engine.submitted)
            [protocol] = running.server.server_state.connections
            assert 0 < len(protocol.pipeline) <= MAX_WAITING + PART_BYTES // len(SIZED) + 1
            protocol.loop.call_soon_threadsafe(it.engine.gate.set)
            answer = b""
            while answer.count(b"HTTP/1.1 200") < num_requests:
                part = connection.recv(1 << 20)
                assert part
                answer += part
        assert len(it.engine.submitted) == num_requests
    finally:
        running.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_client_that_half_closes_is_answered(folder: Path, stream: bool, is_begun: bool) -> None:
    it = served(folder, saying("Hel", "lo"))
    it.engine.gate.clear()
    it.engine.num_free = int(is_begun)
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    with Running(it) as running:
        with running.connect() as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: it.engine.submitted)
            [protocol] = running.server.server_state.connections
            connection.shutdown(socket.SHUT_WR)
            protocol.loop.call_soon_threadsafe(protocol.loop.call_later, 0.4, it.engine.gate.set)  # it is looked after
            answer = answer_of(connection)
        assert b"HTTP/1.1 200" in answer
        assert answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert answer.rstrip().endswith(b"0" if stream else b"}")
        assert it.engine.cancelled == []
        assert it.value("requests_total", route="/v1/completions", outcome="ok") == 1


def test_all_requests_before_a_half_close_are_answered(running: Running) -> None:
    num_requests = 3 * MAX_WAITING + PART_BYTES // len(SIZED)
    with running.connect() as connection:
        connection.sendall(SIZED * num_requests)
        connection.shutdown(socket.SHUT_WR)
        assert answer_of(connection).count(b"HTTP/1.1 200") == num_requests


def test_a_half_close_within_a_request_is_a_disconnect(running: Running) -> None:
    with running.connect() as connection:
        connection.sendall(SIZED[:-1])
        wait_until(lambda: running.server.server_state.tasks)
        connection.shutdown(socket.SHUT_WR)
        assert answer_of(connection) == b""
    wait_until(lambda: running.it.value("requests_total", route="/v1/completions", outcome="disconnected") == 1)
