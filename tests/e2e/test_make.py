"""The two commands of the README, as a newcomer types them."""

import shutil
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
