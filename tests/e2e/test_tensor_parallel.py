"""The demo model by two processes: the tokens of one, and an end and a new start when a rank is lost."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from running_server import Server, StartServer, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
# The shorter, the fewer shapes to prove; LONG is several chunks of a prompt.
TWO = ("--tensor-parallel-size", "2", "--max-model-len", "512", "--max-num-batched-tokens", "128")
LONG = "It was a dark and stormy night, and the rain fell in torrents. " * 16
GREEDY: dict[str, Any] = {
    "prompt": ["Once upon a time", "The king", LONG + "Then", LONG + "But"],
    "max_tokens": 24,
    "temperature": 0,
}
# Rank 1 finds another instruction set than rank 0.
OTHER_MACHINE = """
import os, sys
if "server.engine.follower" in sys.orig_argv:
    os.environ["ATEN_CPU_CAPABILITY"] = "default"
"""
# Attention of rank 1 does not get the memory that it asks for, in decode steps of short contexts.
FAILING_RANK = """
import sys
if "server.engine.follower" in sys.orig_argv:
    import torch
    from server.engine.operators.dispatch import Dispatcher
    call = Dispatcher.call
    def failing(self, choice, *given, **named):
        shape = choice.decision.shape
        if choice.use.path == "sdpa.cpu" and (shape.phase.value, shape.context_bucket.label) == ("decode", "le_128"):
            raise torch.OutOfMemoryError("planted")
        return call(self, choice, *given, **named)
    Dispatcher.call = failing
"""
# What CUDA says in containers without a common IPC namespace.
UNSHARED = """
import sys
if "server.engine.follower" in sys.orig_argv or "server.engine.process" in sys.orig_argv:
    from kernels.collective.inboxes import PeerMemoryError
    from server.model.ranks import Ranks
    def refused(*_):
        raise PeerMemoryError("cuIpcOpenMemHandle_v2 failed with CUDA's error 801 on rank 1 of 2")
    Ranks.connected = refused
"""
DRAWN: dict[str, Any] = {"prompt": "The cat", "max_tokens": 24, "temperature": 0.9, "seed": 7, "n": 3}
SCORED: dict[str, Any] = {"prompt": "The sea was calm", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}


def texts(server: Server, body: dict[str, Any]) -> list[str]:
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def scores(server: Server) -> list[float]:
    (choice,) = server.post("/v1/completions", SCORED).json()["choices"]
    return [value for value in choice["logprobs"]["token_logprobs"] if value is not None]


def followers(server: Server) -> list[psutil.Process]:
    family = psutil.Process(server.process.pid).children(recursive=True)
    return [each for each in family if "server.engine.follower" in each.cmdline()]


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # whose parent has not asked yet
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def two_ranks(start_server: StartServer) -> Iterator[Server]:
    with start_server(*TWO) as server:
        server.wait_ready()
        yield server


def test_two_ranks_answer_as_one_does(two_ranks: Server, demo: Server) -> None:
    assert len(followers(two_ranks)) == 1
    assert texts(two_ranks, GREEDY) == texts(demo, GREEDY)
    assert texts(two_ranks, DRAWN) == texts(demo, DRAWN)
    assert scores(two_ranks) == pytest.approx(scores(demo), abs=1e-3)
    assert two_ranks.get("/attention").json()["attestation"]["result"] == "match"
    assert two_ranks.value("hallmark_shadow_checks_total", result="mismatch") == 0


def test_a_lost_rank_ends_the_group_which_starts_again(two_ranks: Server) -> None:
    events: list[str] = []
    began = threading.Event()

    def read() -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 500, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", two_ranks.url + "/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                events.append(line)
                began.set()

    client = threading.Thread(target=read)
    client.start()
    assert began.wait(60)
    (lost,) = followers(two_ranks)
    engine = two_ranks.engine_pid()
    os.kill(lost.pid, signal.SIGKILL)
    lost_at = time.monotonic()
    client.join(timeout=60)
    assert time.monotonic() - lost_at < 10
    errors = [json.loads(line.removeprefix("data: ")) for line in events if '"error"' in line]
    assert [error["error"]["code"] for error in errors] == ["engine_died"]
    two_ranks.wait_for(lambda: has_ended(engine), "rank 0 to end")
    two_ranks.wait_ready()
    (new,) = followers(two_ranks)
    assert new.pid != lost.pid
    assert texts(two_ranks, {**GREEDY, "prompt": "Once", "max_tokens": 4})


def changed(start_server: StartServer, folder: Path, code: str) -> AbstractContextManager[Server]:
    """A server of two ranks, whose processes run this code first."""
    (folder / "sitecustomize.py").write_text(code)
    port = free_port()
    program = ["env", f"PYTHONPATH={folder}", sys.executable, "-m", "server.cli", "serve", "--port", str(port)]
    return start_server(command=[*program, *TWO], port=port)


def test_a_path_that_fails_on_another_rank_serves_no_more(start_server: StartServer, tmp_path: Path) -> None:
    """Ranks that share no memory besides, which is counted and ends nothing."""
    with changed(start_server, tmp_path, UNSHARED + FAILING_RANK) as server:
        server.wait_ready()
        assert "sdpa.cpu could not be launched on rank 1 of 2: planted" in server.log
        rows = server.get("/plan").json()["shapes"]
        [row] = [it for it in rows if it["phase"] == "decode" and it["context_bucket"] == "le_128"]
        assert row["path"] != "sdpa.cpu"
        assert "all sums over ranks go by NCCL" in server.log
        assert server.value("hallmark_peer_memory_refused_total") >= 1
        assert server.value("hallmark_engine_restarts_total", cause="device") == 1
        assert server.value("hallmark_engine_restarts_total") == 1
        assert texts(server, {**GREEDY, "prompt": "Once", "max_tokens": 4})


def test_ranks_on_different_machines_end_the_start(start_server: StartServer, tmp_path: Path) -> None:
    with changed(start_server, tmp_path, OTHER_MACHINE) as server:
        assert server.process.wait(timeout=120) == 2
        assert "rank 1 runs on another machine than rank 0: instruction_set is DEFAULT there" in server.log
        assert [it.pid for it in psutil.process_iter() if str(tmp_path) in environ_of(it).get("PYTHONPATH", "")] == []


def environ_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
