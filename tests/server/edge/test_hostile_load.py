"""Hostile bodies at the limit of 8 MiB, and endless bytes beside one, while a probe asks whether the server lives."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support.api import running_api

LIMIT = 8 * 2**20
LATE_S = 0.1


def filled(head: bytes, item: bytes, tail: bytes) -> bytes:
    """A body of just the limit or an item less."""
    return head + item * ((LIMIT - len(head) - len(tail)) // len(item)) + tail


BODIES = {
    "ids": filled(b'{"prompt": [', b"1,", b"1]}"),
    "padded ids": filled(b'{"prompt": [', b"123456" + b" " * 58 + b",", b"1]}"),
    "ids, then a text": filled(b'{"prompt": [', b"1,", b'"a"]}'),
    "texts": filled(b'{"prompt": [', b'"a",', b'"a"]}'),
    "lists": filled(b'{"prompt": [', b"[1],", b"[1]]}"),
    "lists of eight": filled(b'{"prompt": [', b"[1,1,1,1,1,1,1,1],", b"[1]]}"),
    "messages": filled(b'{"messages": [', b'{"role":"user"},', b'{"role":"user"}]}'),
    "fields": filled(b'{"prompt": "a"', b',"k":1', b"}"),
    "text": filled(b'{"prompt": "', b"abcdefg ", b'"}'),
    "text of marks": filled(b'{"prompt": "', b"{a: [1, 2]}, \\n", b'"}'),
    "quotes": filled(b'{"prompt": "', b'[\\"', b'"}'),
    "escapes": filled(b'{"prompt": "', b"\\u00e9", b'"}'),
    "brackets": filled(b'{"prompt": ', b"[", b"}"),
}


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f\r\n" + b'{"prompt": "a"}' + b"\r\n"
# What a request begins with, and what follows 64 MiB of it. None ends by itself.
FLOODS = {
    "a trailer": (CHUNKED + b"0\r\nx: ", b"a" * 2**20),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * (2**20 // 6)),
    "long trailers": (CHUNKED + b"0\r\n", (b"a: %b\r\n" % (b"b" * 4000)) * 250),
    "a chunk's extension": (CHUNKED + b"1;x=", b"a" * 2**20),
    "chunks of a byte": (CHUNKED, b"1\r\n \r\n" * (2**20 // 6)),
    "headers": (HEAD, b"a: b\r\n" * (2**20 // 6)),
}


@contextlib.contextmanager
def running() -> Iterator[tuple[int, int]]:
    """Process id and port of a server."""
    script = Path(running_api.__file__)
    folders = [script.parents[3], script.parents[2]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as program:
        assert program.stdout is not None
        yield program.pid, int(program.stdout.readline())


def memory_mib(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def post(port: int, body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def is_refused(port: int, begin: bytes, more: bytes) -> bool:
    """Send until the server closes the connection; False where it takes all 64 MiB."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            connection.sendall(begin)
            for _ in range(64):
                connection.sendall(more)
        except (BrokenPipeError, ConnectionResetError):
            return True
    return False


def slowest_probe_s(pid: int, port: int, has_ended: threading.Event) -> float:
    """The longest that the server kept /livez waiting until the event: in seconds of its own CPU time, which no other
    program on the machine adds to, where these are less."""
    probe, slowest, server = http.client.HTTPConnection("127.0.0.1", port, timeout=60), 0.0, psutil.Process(pid)
    with contextlib.closing(probe):
        is_last = False
        while not is_last:  # the last one begins when the event has come, and waits for what is left of an attack
            is_last = has_ended.is_set()
            began_at, had_s = time.perf_counter(), sum(server.cpu_times()[:2])
            probe.request("GET", "/livez")
            assert probe.getresponse().read()
            took_s = time.perf_counter() - began_at
            slowest = max(slowest, min(took_s, sum(server.cpu_times()[:2]) - had_s))
            time.sleep(0.002)
    return slowest


@pytest.fixture(scope="module")
def attacked() -> Iterator[tuple[int, int]]:
    with running() as it:
        yield it


def test_hostile_bodies_delay_no_probe(attacked: tuple[int, int]) -> None:
    pid, port = attacked
    delays = {
        name: delay_s(pid, port, lambda body=body: b"HTTP/1.1 400" in post(port, body))  # type: ignore[misc]
        for name, body in BODIES.items()
    }
    assert max(delays.values()) < LATE_S, delays


def test_floods_beside_a_body_are_refused_and_delay_no_probe(attacked: tuple[int, int]) -> None:
    """A client without a key, whose trailers were joined for ever, once made a probe wait 6 to 20 s."""
    pid, port = attacked
    delays = {
        name: delay_s(pid, port, lambda flood=flood: is_refused(port, *flood))  # type: ignore[misc]
        for name, flood in FLOODS.items()
    }
    assert max(delays.values()) < LATE_S, delays


def delay_s(pid: int, port: int, attack: Callable[[], bool]) -> float:
    """The longest that /livez waited during an attack, which must return True."""
    has_ended, found = threading.Event(), list[float]()
    probing = threading.Thread(target=lambda: found.append(slowest_probe_s(pid, port, has_ended)))
    probing.start()
    is_as_wanted = attack()
    has_ended.set()
    probing.join()
    assert is_as_wanted
    return found[0]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("name", ["ids", "texts", "fields"])
def test_a_body_of_many_values_takes_less_than_twice_its_size(name: str) -> None:
    """A server of its own for each: what an allocator has kept for later would hide the next."""
    with running() as (pid, port):
        assert b"HTTP/1.1 200" in post(port, b'{"prompt": "%b"}' % (b"a" * 1000))
        before_mib = memory_mib(pid, "VmRSS")
        assert b"HTTP/1.1 400" in post(port, BODIES[name])
        assert memory_mib(pid, "VmHWM") - before_mib < 2 * LIMIT / 2**20
