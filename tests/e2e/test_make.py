"""The commands of the README, as a newcomer types them."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running_server import ROOT, StartServer, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a start on a busy machine takes minutes


def test_make_serve_listens_on_the_port_of_the_environment(start_server: StartServer) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    if not Path(ROOT, ".venv", ".installed").exists():
        pytest.skip("this checkout has no .venv, and making one is more than a test should do")
    port = free_port()
    with start_server(command=["make", "serve"], port=port) as server:
        server.wait_ready()
        server.wait_for(lambda: f"http://127.0.0.1:{port}/v1" in server.log, "the line to try", 60)
        assert "curl" in server.log
        assert "sdpa.cpu" in server.log or "triton." in server.log, "no plan table"
        models = server.get("/v1/models").json()
        assert [model["id"] for model in models["data"]] == ["demo"]


def test_make_refuses_a_venv_of_another_python(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copy(Path(ROOT, "Makefile"), tmp_path)
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    other = scripts / "python"  # answers both `--version` and the question for the minor version
    other.write_text("#!/bin/sh\necho 'Python 3.9.1'\n")
    other.chmod(0o755)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv" / ".installed").touch()  # nothing is to be installed
    command = ["make", f"PYTHON={shlex.quote(sys.executable)}", "serve"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert ".venv has Python 3.9.1" in done.stderr
    assert "make clean" in done.stderr
