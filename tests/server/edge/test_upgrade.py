"""Requests that offer another protocol: they are served by HTTP/1.1, body and all (RFC 9110, 7.8)."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.api.edge_fakes import saying, served
from support.api.running_api import Running

# As Java's java.net.http.HttpClient asks, unless it is told to stay with HTTP/1.1.
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAA\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\n" + H2C + b"Host: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "abc", "max_tokens": 20}).encode()
SIZED = b"Content-Length: %d\r\n\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"4\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:4], len(BODY) - 4, BODY[4:])
PLAIN = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with Running(served(folder, saying("Hel", "lo"))) as it:
        yield it


def answers(connection: socket.socket) -> bytes:
    """Until the server ends the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD + SIZED + BODY + PLAIN],
        [HEAD + SIZED, BODY, PLAIN],
        [HEAD[:50], HEAD[50:] + SIZED + BODY[:3], BODY[3:] + PLAIN],
        [HEAD + CHUNKED + CHUNKS + PLAIN],
        [HEAD + CHUNKED, CHUNKS[:7], CHUNKS[7:], PLAIN],
    ],
    ids=["at once", "in three", "torn", "chunked", "chunked and torn"],
)
def test_a_body_with_an_upgrade_and_the_next_request_are_read(running: Running, parts: list[bytes]) -> None:
    with running.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02)  # so that the server reads each by itself
        answer = answers(connection)
    first, second = answer.split(b"HTTP/1.1 200")[1:]
    assert b'"text":"Hello"' in first
    assert b'{"status":"ok"}' in second


@pytest.mark.parametrize("offer", [H2C, b"Connection: Upgrade\r\nUpgrade: websocket\r\n"])
def test_a_request_may_offer_an_upgrade_again_and_again(running: Running, offer: bytes) -> None:
    with running.connect() as connection:
        for _ in range(2):
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n")
        connection.sendall(PLAIN)
        assert answers(connection).count(b"HTTP/1.1 200") == 3


def test_a_thousand_offers_in_one_read_are_answered(running: Running) -> None:
    offer = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
    with running.connect() as connection:
        connection.sendall(1000 * offer + PLAIN)
        assert answers(connection).count(b"HTTP/1.1 200") == 1001


def test_a_body_after_an_offer_is_held_to_its_length(running: Running) -> None:
    with running.connect() as connection:
        connection.sendall(HEAD + CHUNKED + b"zz\r\n")
        assert b'"code":"invalid_http"' in answers(connection)
