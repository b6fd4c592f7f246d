"""A proxy before a server that holds back the first token of some prompts: a slower prefill, planted from outside."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from support.local_http import listening


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    upstream: str
    slowdown: float  # of the time to the first token
    hold_s: float  # beside it
    lengths: range  # prompt tokens that are slowed down

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._forward(None)

    def do_POST(self) -> None:
        self._forward(self.rfile.read(int(self.headers["content-length"])))

    def _forward(self, body: bytes | None) -> None:
        target = urlsplit(self.upstream)
        connection = http.client.HTTPConnection(target.hostname or "", target.port or 80, timeout=300)
        headers = {"content-type": "application/json", "accept": self.headers.get("accept", "*/*")}
        began = time.monotonic()
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        self.send_response(answer.status)
        self.send_header("content-type", answer.headers.get("content-type", ""))
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        is_first = True
        while data := answer.read1(65536):
            if is_first and self._is_held(body):
                time.sleep((self.slowdown - 1) * (time.monotonic() - began) + self.hold_s)
            is_first = False
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        connection.close()

    def _is_held(self, body: bytes | None) -> bool:
        if body is None or not self.path.endswith("/completions"):
            return False
        return len(json.loads(body).get("prompt", "")) in self.lengths  # a chat has none


@contextmanager
def holding(upstream: str, *, slowdown: float = 1.0, hold_s: float = 0.0, lengths: range = range(0)) -> Iterator[str]:
    """The URL of a proxy before `upstream`; prompts of these lengths take `slowdown` times and `hold_s` more to the
    first token."""
    members = {"upstream": upstream, "slowdown": slowdown, "hold_s": hold_s, "lengths": lengths}
    with listening(type("Holding", (_Handler,), members)) as url:
        yield url
