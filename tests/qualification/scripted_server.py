"""An OpenAI-compatible server that does what a test says, over real HTTP: its times and its faults are planted here."""

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def no_delay(_: int) -> float:
    return 0.0


@dataclass
class Script:
    """What the server does; a test changes a field."""

    model: str = "demo"
    max_model_len: int | None = 4096
    first_token_s: Callable[[int], float] = no_delay  # of the number of prompt tokens
    token_s: float = 0.0
    tokens_per_event: int = 1
    has_usage: bool = True
    is_spaced: bool = False  # JSON with spaces, and lines that end in \r\n
    status: int = 200
    error_event: bool = False
    is_cut: bool = False  # the connection ends in the middle
    drops_idle: bool = False  # the connection ends after each answer, unsaid
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)  # Authorization headers
    num_connections: int = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every small write waits 40 ms for the client's delayed ACK
    script: Script

    def setup(self) -> None:
        super().setup()
        self.script.num_connections += 1

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.script.keys.add(self.headers["authorization"])
        entry = {"id": self.script.model, "max_model_len": self.script.max_model_len}
        self.send_json({"data": [entry]}, 200 if self.path == "/v1/models" else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.script.bodies.append(body)
        if self.script.status == 200:
            self.stream(body)
        else:
            self.send_json({"error": {"message": "go away"}}, self.script.status)

    def stream(self, body: dict[str, Any]) -> None:
        script, num_tokens = self.script, body["max_tokens"]
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        time.sleep(script.first_token_s(len(body["prompt"])))
        for first in range(0, num_tokens, script.tokens_per_event):
            if first:
                time.sleep(script.token_s)
            if first and script.is_cut:
                self.close_connection = True
                return
            self.event({"choices": [{"index": 0, "text": 'a "choices":[] b', "finish_reason": None}], "usage": None})
        if script.error_event:
            self.event({"error": {"message": "the engine\ndied"}})
        elif script.has_usage:
            self.event({"choices": [], "usage": {"completion_tokens": num_tokens}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")
        self.close_connection = script.drops_idle

    def event(self, body: dict[str, Any]) -> None:
        separators = (", ", ": ") if self.script.is_spaced else (",", ":")
        end = b"\r\n\r\n" if self.script.is_spaced else b"\n\n"
        self.chunk(b": still there" + end + b"data: " + json.dumps(body, separators=separators).encode() + end)

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def send_json(self, body: object, status: int = 200) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving(script: Script) -> Generator[str, None, None]:
    """The URL of a server that follows the script."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Scripted", (Handler,), {"script": script}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
