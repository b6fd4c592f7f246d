"""The program serves a model by its hub id, and heeds the variables of the hub's client."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running_server import DEMO, StartServer, free_port

from support.hub_server import HubServer, serving_hub

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a start on a busy machine takes minutes
NAME = "org/demo"
FILES = {file.name: file.read_bytes() for file in DEMO.iterdir() if file.suffix in (".json", ".safetensors", ".jinja")}


def ended(*words: str, **variables: str) -> tuple[int, str]:
    """Exit code and standard error of a command of the program."""
    command = [sys.executable, "-m", "server.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=os.environ | variables)
    return done.returncode, done.stderr


def test_a_hub_id_is_fetched_served_and_kept(start_server: StartServer, tmp_path: Path) -> None:
    port = free_port()
    with serving_hub(HubServer(NAME, FILES)) as hub:
        here = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_mine"}
        words = [f"{name}={value}" for name, value in here.items()]
        program = ["env", *words, sys.executable, "-m", "server.cli", "serve", NAME, "--port", str(port)]
        with start_server(command=program, port=port) as server:
            server.wait_ready()
            assert [model["id"] for model in server.get("/v1/models").json()["data"]] == [NAME]
            answer = server.post("/v1/completions", {"model": NAME, "prompt": "Once", "max_tokens": 4}).json()
            assert answer["usage"]["completion_tokens"] == 4
            assert f"fetching: {NAME} at " in server.log
        assert hub.tokens == {"Bearer hf_mine"}
        num_asked = len(hub.asked)
        file = tmp_path / "evidence.json"
        offline = here | {"HF_HUB_OFFLINE": "1"}
        quick = ("--quick", "--max-model-len", "64", "--phases", "decode", "--out", str(file))
        assert ended("qualify", "--model", NAME, *quick, **offline) == (0, "")
        assert file.is_file()
        code, error = ended("serve", "org/other", **offline)
        assert (code, error.count("\n")) == (2, 1)
        assert error.startswith("hallmark: model org/other: HF_HUB_OFFLINE is set, and ")
        assert len(hub.asked) == num_asked
