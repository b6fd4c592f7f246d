"""Hostile bodies at the limit of 8 MiB, while a probe asks whether the server is alive."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import running_api

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


@contextlib.contextmanager
def running() -> Iterator[tuple[int, int]]:
    """Process id and port of a server."""
    script = Path(running_api.__file__)
    folders = [script.parents[2], script.parents[1], script.parent, script.parent / "telemetry"]
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


def slowest_probe_s(port: int, has_ended: threading.Event) -> float:
    """The longest time that /livez took until the event."""
    probe, slowest = http.client.HTTPConnection("127.0.0.1", port, timeout=60), 0.0
    with contextlib.closing(probe):
        while not has_ended.is_set():
            began_at = time.perf_counter()
            probe.request("GET", "/livez")
            assert probe.getresponse().read()
            slowest = max(slowest, time.perf_counter() - began_at)
            time.sleep(0.002)
    return slowest


@pytest.mark.timed
def test_hostile_bodies_delay_no_probe() -> None:
    """Of each body, the better of two tries: another program may have the machine's cores for a moment."""
    delays = {}
    with running() as (_, port):
        for name, body in BODIES.items():
            tries = []
            for _ in range(2):
                has_ended, found = threading.Event(), list[float]()
                probing = threading.Thread(target=lambda: found.append(slowest_probe_s(port, has_ended)))  # noqa: B023
                probing.start()
                assert b"HTTP/1.1 400" in post(port, body), name
                has_ended.set()
                probing.join()
                tries += found
            delays[name] = min(tries)
    assert max(delays.values()) < LATE_S, delays


@pytest.mark.timed
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("name", ["ids", "padded ids", "texts", "fields"])
def test_a_body_of_many_values_takes_less_than_twice_its_size(name: str) -> None:
    """A server of its own for each: what an allocator has kept for later would hide the next."""
    with running() as (pid, port):
        assert b"HTTP/1.1 200" in post(port, b'{"prompt": "%b"}' % (b"a" * 1000))
        before_mib = memory_mib(pid, "VmRSS")
        assert b"HTTP/1.1 400" in post(port, BODIES[name])
        assert memory_mib(pid, "VmHWM") - before_mib < 2 * LIMIT / 2**20
