"""Builds of Hallmark, and servers and commands that are run from them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from alerts import free_port

ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Build:
    """A checkout or a copy of it, and the variables that its programs get besides ours."""

    root: Path = ROOT
    environ: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        ours = {name: text for name, text in os.environ.items() if not name.startswith("HALLMARK_")}
        return {**ours, "PYTHONPATH": str(self.root), **self.environ}


def hallmark(build: Build, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A command of the build, to its end; its output is kept."""
    command = [sys.executable, "-m", "server.cli", *arguments]
    return subprocess.run(command, cwd=build.root, env=build.environment(), capture_output=True, text=True, check=False)


@contextmanager
def serving(build: Build, log_file: Path, *flags: str, waits_for: str = "/readyz") -> Iterator[str]:
    """A started server's URL, once `waits_for` answers with 200.

    Raises RuntimeError for one that ends or takes too long.
    """
    port = free_port()
    command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), *flags]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=build.root, env=build.environment(), stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}{waits_for}", log_file)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait(process: "subprocess.Popen[bytes]", url: str, log_file: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{url} did not answer; the server's log is {log_file}")
        try:
            if httpx2.get(url, timeout=5).status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.2)
