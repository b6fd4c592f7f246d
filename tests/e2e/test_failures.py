"""Failures: an engine that is killed, and a model that no first-tier kernel path takes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import torch
from running_server import DEMO, ROOT, Server, StartServer, free_port, running
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a start on a busy machine takes minutes
LONG = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 3000, "stream": True, "ignore_eos": True}


def events_of_a_long_stream(server: Server, began: threading.Barrier, events: list[str]) -> None:
    """Reads one stream to its end; meets the others at `began` after the first event."""
    with httpx2.stream("POST", server.url + "/v1/completions", json=LONG, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        events.append(next(lines))
        began.wait(timeout=60)
        events.extend(lines)


def test_a_killed_engine_ends_streams_and_the_server_recovers(
    start_server: StartServer,
) -> None:
    with start_server() as server:
        server.wait_ready()
        began = threading.Barrier(5)
        streams: list[list[str]] = [[] for _ in range(4)]
        clients = [threading.Thread(target=events_of_a_long_stream, args=(server, began, events)) for events in streams]
        for client in clients:
            client.start()
        began.wait(timeout=60)
        first = server.engine_pid()
        os.kill(first, signal.SIGKILL)
        for client in clients:
            client.join(timeout=30)
        for events in streams:
            errors = [json.loads(line.removeprefix("data: ")) for line in events if '"error"' in line]
            assert [error["error"]["code"] for error in errors] == ["engine_died"]
        server.wait_for(lambda: server.status_of("/readyz") == 503, "the server to notice", 60)
        server.wait_ready()
        assert server.engine_pid() != first
        answer = server.post("/v1/completions", {"model": "demo", "prompt": "Once", "max_tokens": 4, "temperature": 0})
        assert answer.status_code == 200, answer.text
        assert server.value("hallmark_engine_restarts_total", cause="killed") == 1
        assert server.value("hallmark_attention_fallback_total") == 0


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads have 320 dimensions: more than any first-tier path takes."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    demo = json.loads((DEMO / "config.json").read_text())
    config = LlamaConfig(
        vocab_size=demo["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=320,
        max_position_embeddings=512,
        bos_token_id=demo["bos_token_id"],
        eos_token_id=demo["eos_token_id"],
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def missing_shard(tmp_path: Path) -> list[str]:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model", copy_function=shutil.copyfile))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "part-1.safetensors"}}')
    return ["--model", str(folder)]


IMPOSSIBLE: list[tuple[Callable[[Path], list[str]], str]] = [
    (missing_shard, "part-1.safetensors does not exist, "),
    (lambda _: ["--max-model-len", "99999999"], "max_model_len is 99999999, the model's positions end at "),
    (lambda _: ["--device", "cuda"], "torch sees no CUDA device here: give this process a GPU, or serve with "),
]


@pytest.mark.parametrize(("broken", "message"), IMPOSSIBLE, ids=["shard", "length", "no CUDA"])
def test_a_start_that_cannot_succeed_is_one_line_and_exit_2(
    broken: Callable[[Path], list[str]], message: str, tmp_path: Path
) -> None:
    flags = broken(tmp_path)
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    program = [sys.executable, "-m", "server.cli", "serve", "--port", str(free_port()), *flags]
    environ = {**os.environ, "HALLMARK_CACHE_DIR": str(tmp_path / "cache")}
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environ, check=False)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("hallmark: ")
    assert message in line


def test_the_engine_starts_below_a_long_temporary_folder(tmp_path: Path) -> None:
    long = tmp_path / ("t" * 120)
    long.mkdir()
    port = free_port()
    program = [sys.executable, "-m", "server.cli", "serve", "--port", str(port)]
    environ = {**os.environ, "HALLMARK_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(long)}
    with running(program, port, tmp_path / "log", environ) as server:
        server.wait_ready()
        assert "the limit is 103; the socket is in /tmp/" in server.log


def test_under_degrade_a_large_head_dim_serves_by_fallbacks(wide_model: Path, start_server: StartServer) -> None:
    with start_server("--model", str(wide_model), "--on-unproven", "degrade") as server:
        server.wait_ready()
        plan = [row for row in server.plan() if row["head_dim"] is not None]
        assert {row["path"] for row in plan} == {"sdpa.math"}
        assert all("head_dim" in row["fallback_reasons"] for row in plan)
        assert server.value("hallmark_attention_fallback_total") == 0
        body = {"model": "wide", "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        fallback = "hallmark_attention_fallback_total"
        server.wait_for(lambda: server.value(fallback, reason="head_dim", phase="decode") >= 3, "the fallbacks", 60)
        assert server.value(fallback, reason="head_dim", phase="prefill", to="sdpa.math") == 1
        assert server.value(fallback, reason="head_dim", phase="decode", to="sdpa.math") == 3


def test_a_hung_engine_is_not_ready_long_before_it_is_killed(start_server: StartServer) -> None:
    with start_server() as server:
        server.wait_ready()
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        try:
            server.wait_for(lambda: server.status_of("/readyz") == 503, "the server to notice", 60)
            assert "the engine's last heartbeat is " in server.get("/readyz").json()["reasons"][0]
            assert server.status_of("/livez") == 200
            assert server.value("hallmark_engine_restarts_total") == 0
        finally:
            os.kill(engine, signal.SIGCONT)
        server.wait_for(lambda: server.status_of("/readyz") == 200, "the engine to go on", 60)
        assert server.engine_pid() == engine
