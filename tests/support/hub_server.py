"""A model hub on loopback: the routes that its client asks for one repository, and what can go wrong with them."""

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

from support.local_http import listening

COMMIT = "c0ffee" + "0" * 34
_BRANCHES = ("main", "v2")


@dataclass(slots=True)
class HubServer:
    """A hub with one repository; tests change what it does.

    refused    status of every file, as for those that its makers let in; None: everyone may read them
    is_down    whether it answers nothing but 503
    breaks     file -> bytes after which the connection of its next download breaks, once
    resets     whether it breaks by a reset, of which the client does not go on by itself
    stalls     whether the last byte of weights is never sent
    asked      method, path and Range of each request
    tokens     bearer tokens that came
    ended      set when the hub ends
    """

    name: str
    files: Mapping[str, bytes]
    url: str = ""
    refused: HTTPStatus | None = None
    is_down: bool = False
    breaks: dict[str, int] = field(default_factory=dict)
    resets: bool = False
    stalls: bool = False
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)

    def downloads(self) -> list[tuple[str, str | None]]:
        """File and Range of each download that was begun."""
        return [(path.partition(f"{COMMIT}/")[2], wanted) for method, path, wanted in self.asked if method == "GET"
                and "/resolve/" in path]  # fmt: skip


@contextmanager
def serving_hub(hub: HubServer) -> Iterator[HubServer]:
    """The hub, with the URL it listens on."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            hub.asked.append((self.command, self.path, self.headers["Range"]))
            hub.tokens |= {self.headers["Authorization"]} - {None}
            path = self.path.partition("?")[0]
            if hub.is_down:
                self._send(HTTPStatus.SERVICE_UNAVAILABLE)
            elif path.startswith(f"/api/models/{hub.name}"):
                self._answer_api(path.removeprefix(f"/api/models/{hub.name}").strip("/").split("/"))
            elif path.startswith(f"/{hub.name}/resolve/"):
                revision, _, file = path.removeprefix(f"/{hub.name}/resolve/").partition("/")
                self._answer_file(revision, file)
            else:
                self._send(HTTPStatus.NOT_FOUND, {"X-Error-Code": "RepoNotFound"})

        def _answer_api(self, words: list[str]) -> None:
            kind, revision = (words[0], words[1]) if len(words) == 2 else ("revision", "main")
            if revision not in (*_BRANCHES, COMMIT):
                self._send(HTTPStatus.NOT_FOUND, {"X-Error-Code": "RevisionNotFound"})
                return
            if kind == "tree":
                found: object = [
                    {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                    for name, data in hub.files.items()
                ]
            else:
                siblings = [{"rfilename": name, "size": len(data)} for name, data in hub.files.items()]
                found = {"id": hub.name, "sha": COMMIT, "siblings": siblings}
            self._send(HTTPStatus.OK, {"Content-Type": "application/json"}, json.dumps(found).encode())

        def _answer_file(self, revision: str, file: str) -> None:
            if hub.refused is not None:
                self._send(hub.refused, {"X-Error-Code": "GatedRepo"})
                return
            assert revision == COMMIT, "the client pins what it fetches"
            data = hub.files[file]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(data)}"', "Accept-Ranges": "bytes"}
            wanted, status = self.headers["Range"], HTTPStatus.OK
            if wanted is not None:
                begin = int(wanted.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
                data, status = data[begin:], HTTPStatus.PARTIAL_CONTENT
            self._send(status, headers, data, breaks_at=hub.breaks.pop(file, None) if self.command == "GET" else None)

        def _send(
            self,
            status: HTTPStatus,
            headers: Mapping[str, str] | None = None,
            data: bytes = b"",
            breaks_at: int | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.stalls and data and "/resolve/" in self.path and self.path.endswith(".safetensors"):
                self.wfile.write(data[:-1])
                hub.ended.wait()
                return
            self.wfile.write(data[:breaks_at])
            if breaks_at is not None:
                self.close_connection = True
                if hub.resets:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()

    with listening(Handler) as url:
        hub.url = url
        try:
            yield hub
        finally:
            hub.ended.set()


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
