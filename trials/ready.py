"""Waiting for a server that was started here."""

import subprocess
import time
from pathlib import Path

import httpx2


def wait_ready(process: "subprocess.Popen[bytes]", url: str, log_file: Path, timeout_s: float = 300.0) -> None:
    """Raises RuntimeError with the end of its log, when it ends or is not ready in time.

    Some 20 s on an idle machine: the first start qualifies every shape, the next ones find its evidence.
    """
    deadline = time.monotonic() + timeout_s
    while status_of(f"{url}/readyz") != 200:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{end_of(log_file)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server is not ready after {timeout_s:g} s:\n{end_of(log_file)}")
        time.sleep(0.2)


def status_of(url: str) -> int | None:
    """Return the status; None while no server answers."""
    try:
        return httpx2.get(url, timeout=10).status_code
    except httpx2.TransportError:
        return None


def end_of(log_file: Path) -> str:
    return log_file.read_text(errors="replace")[-4000:]
