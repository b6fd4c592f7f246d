"""A client that stops reading its stream, over a real socket."""

import logging
import socket
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from support.api.edge_fakes import impatient, served
from support.api.running_api import Running, wait_until


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
    assert caplog.messages == []
