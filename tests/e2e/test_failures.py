"""Failures and ends: an engine that hangs or is killed, SIGTERM, and a model that no first-tier kernel path takes."""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch
from running_server import DEMO, Server, StartServer, free_port
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


def ended_after_sigterm(server: Server, lines: Iterator[str]) -> list[str]:
    """Send SIGTERM to the server alone, as a service manager does, while a stream runs; return the stream's rest."""
    engine = server.engine_pid()
    assert os.getpgid(engine) == engine  # it leads a process group of its own
    os.kill(server.process.pid, signal.SIGTERM)
    server.wait_for(lambda: server.status_of("/readyz") == 503, "the server to drain", 10)
    assert server.status_of("/livez") == 200
    refused = server.post("/v1/completions", LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    rest = [line for line in lines if line]
    assert server.process.wait(timeout=60) == 0
    for leader in (server.process.pid, engine):
        with pytest.raises(ProcessLookupError):  # the process group is empty
            os.killpg(leader, 0)
    return rest


@pytest.fixture(scope="module")
def server(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a long TMPDIR, whose engine hangs, then dies, and which is told to end: in this order."""
    long, port = tmp_path_factory.mktemp("t") / ("t" * 120), free_port()
    long.mkdir()
    serve = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), "--shutdown-grace-s", "300"]
    with start_server(command=["env", f"TMPDIR={long}", *serve], port=port) as server:
        server.wait_ready()
        assert "the limit is 103; the socket is in /tmp/" in server.log
        yield server


def test_a_hung_engine_is_not_ready_long_before_it_is_killed(server: Server) -> None:
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


def test_a_killed_engine_ends_streams_and_the_server_recovers(server: Server) -> None:
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


def test_sigterm_drains_and_ends_with_status_0(server: Server) -> None:
    body = LONG | {"max_tokens": 300}
    with httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        next(lines)
        *events, last = ended_after_sigterm(server, lines)
    assert last == "data: [DONE]"
    parsed = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [event for event in parsed if "error" in event] == []
    assert parsed[-1]["choices"][0]["finish_reason"] == "length"


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


def test_a_start_that_cannot_succeed_is_one_line_and_exit_2(start_server: StartServer, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model", copy_function=shutil.copyfile))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "part-1.safetensors"}}')
    with start_server("--model", str(folder)) as server:
        assert server.process.wait(timeout=300) == 2
        *progress, line = server.log.splitlines()
    assert "part-1.safetensors does not exist, " in line
    assert [it.startswith("hallmark: ") for it in (*progress, line)] == [False] * len(progress) + [True]
    assert "Traceback" not in server.log


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
