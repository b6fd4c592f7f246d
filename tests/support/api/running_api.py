"""An API on a free port: in a thread, or as a program of its own (its port is the line that it prints)."""

import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from starlette.types import ASGIApp

from server.edge.connection import LimitedProtocol
from server.edge.keys import NO_KEYS, Keys
from server.edge.tls import Tls
from server.edge.uvicorn_server import Server, uvicorn_config
from server.http.app import create_app
from support.api.edge_fakes import Served, served, write_tokenizer


class Running:
    """A server in a thread, on a free port.

    What lives when one starts stays frozen: to collect the garbage of all test modules takes 0.3 s at each start.
    """

    def __init__(
        self,
        it: Served,
        *,
        grace_s: float = 5.0,
        one_order_s: float = 0.5,
        keys: Keys = NO_KEYS,
        app: ASGIApp | None = None,
        must_end: Callable[[], bool] = lambda: False,
        send_buffer_bytes: int | None = None,
        header_timeout_s: float | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`app`: in place of the whole API. `send_buffer_bytes`: of each connection, in the kernel."""
        self.it = it
        self._socket = socket.socket()
        if send_buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        config = uvicorn_config(app or create_app(replace(it.services), keys), tls)
        if header_timeout_s is not None:
            config.http = type("Impatient", (LimitedProtocol,), {"header_timeout_s": header_timeout_s})
        self.server = Server(config, it.services.lifecycle, grace_s, one_order_s=one_order_s, must_end=must_end)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]})
        self.thread.start()
        deadline = time.monotonic() + 30
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        it = Running(served(Path(folder)))
        print(it.port, flush=True)
        sys.stdin.read()
        it.stop()
