"""A server in a folder, an environment and a user's hands that the authors' machines do not have."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ready import wait_ready
from running_server import ROOT, Server, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a start on a busy machine takes minutes
NOBODY = 65534
CHECKOUT = "a folder with blanks, an ü and 'quotes'/" + "/".join(["long" * 10] * 4)  # some 200 characters
ENVIRONMENT = {
    "TZ": "Asia/Kathmandu",  # +05:45
    "LC_ALL": "C",
    "HOME": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent/cache",  # no cache can be written
    "COLUMNS": "20", "PATH": "/usr/bin:/bin",
}  # fmt: skip


@pytest.fixture
def checkout() -> Iterator[Path]:
    """A copy that every user may read; pytest's own folders are of one user."""
    with tempfile.TemporaryDirectory(prefix="odd-hallmark-") as folder:
        Path(folder).chmod(0o755)
        place = Path(folder, CHECKOUT)
        for package in ("kernels", "qualification", "server"):
            shutil.copytree(ROOT / package, place / package, ignore=shutil.ignore_patterns("__pycache__"))
        yield place


def user_for_the_server() -> int | None:
    """Another user than root where root runs the tests; None for the same one, or where nobody may run our Python."""
    if os.geteuid() != 0:
        return None
    try:
        subprocess.run([sys.executable, "-c", "import torch"], user=NOBODY, capture_output=True, check=True, cwd="/")
    except (PermissionError, subprocess.CalledProcessError):
        return None
    return NOBODY


def test_a_server_starts_and_ends_in_an_odd_place(checkout: Path, tmp_path: Path) -> None:
    port, log_file = free_port(), tmp_path / "log"
    environment = ENVIRONMENT | {"PYTHONPATH": str(checkout)}
    few = ["--max-model-len", "128"]  # shapes to prove: no cache is found
    program = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), *few]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            program, cwd=checkout, env=environment, umask=0o077, user=user_for_the_server(), stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        server = Server(process, port, log_file)
        wait_ready(process, server.url, log_file)
        assert Path(psutil.Process(server.engine_pid()).cwd()) == checkout
        answer = server.post("/v1/completions", {"model": "demo", "prompt": "Grüße, the", "max_tokens": 4})
        assert answer.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, server.log
        assert "Traceback" not in server.log
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
