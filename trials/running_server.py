"""A running server, and what the tests ask of it."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families
from ready import status_of, wait_ready

if TYPE_CHECKING:
    from openai import OpenAI

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "server" / "model" / "demo"


_reserved: list[socket.socket] = []  # until this process ends


def free_port() -> int:
    """A port that no other program is given, and that a server may still listen on.

    A socket of ours stays bound to it: the kernel then neither gives it to who asks for any port nor makes it the end
    of a connection, and with SO_REUSEADDR on both, which servers set, another process may listen on it (Linux).
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    _reserved.append(sock)
    port: int = sock.getsockname()[1]
    return port


class Server:
    """A running server and what can be asked of it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log_file = log_file

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=10)

    def post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=60)

    def plan(self) -> list[dict[str, Any]]:
        """The rows of GET /attention."""
        rows: list[dict[str, Any]] = self.get("/attention").json()["shapes"]
        return rows

    def value(self, sample: str, **labels: str) -> float:
        """Sum of the samples of that name whose labels include `labels`."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [item for family in families for item in family.samples if item.name == sample]
        return sum(item.value for item in samples if labels.items() <= item.labels.items())

    def openai(self) -> "OpenAI":
        from openai import OpenAI  # machines with GPUs, where some trials run, lack it

        return OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=120)

    def status_of(self, path: str) -> int | None:
        """Return the status; None while no server answers."""
        return status_of(self.url + path)

    def wait_ready(self, timeout_s: float = 300) -> None:
        wait_ready(self.process, self.url, self._log_file, timeout_s)

    def wait_for(self, is_so: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}:\n{self.log}"
            time.sleep(0.1)

    def engine_pid(self) -> int:
        """The process below the server that runs server.engine.process."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        (engine,) = [each for each in family if "server.engine.process" in each.cmdline()]
        return int(engine.pid)


StartServer = Callable[..., AbstractContextManager[Server]]


@contextmanager
def running(program: list[str], port: int, log_file: Path, environ: Mapping[str, str]) -> Iterator[Server]:
    """A program that serves on `port`, started in this checkout; it and its children are ended afterwards."""
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            program, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Server(process, port, log_file)
    finally:
        with suppress(ProcessLookupError):  # it has ended already
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
