"""Receipts of one server's process, verified by another, as a user does it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from running_server import DEMO, Server, StartServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "receipt": True}


def verify(receipt: Path, *flags: str, cache: str | None = None) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "server.cli", "verify", str(receipt), *flags]
    environ = None if cache is None else {**os.environ, "HALLMARK_CACHE_DIR": cache}
    return subprocess.run(program, capture_output=True, text=True, timeout=500, check=False, env=environ)


def test_a_receipt_of_an_ended_process_is_verified(start_server: StartServer, tmp_path: Path) -> None:
    """Answers behind a prefix hit, with others beside them, and bound to a grammar, computed again alone."""
    prompt = "The keeper of the lighthouse wrote down everything that passed. " * 8
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "n": 3, **SAMPLED}
    flags = ("--reproducible", "--max-model-len", "256", "--max-num-batched-tokens", "128")  # few shapes to prove
    with start_server(*flags) as yesterday:
        yesterday.wait_ready(540)
        yesterday.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})  # so that the next one hits the cache
        answers = [
            yesterday.post("/v1/completions", {"prompt": prompt, "logprobs": 0, **SAMPLED}).json(),
            yesterday.post("/v1/chat/completions", chat).json(),
            yesterday.post("/v1/completions", {"prompt": "A", "guided_regex": "[a-f]{8}", **SAMPLED}).json(),
        ]
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert all(answer["receipt"]["content"]["reproducible"] for answer in answers)
    file = tmp_path / "answer.json"
    with start_server(*flags) as today:
        today.wait_ready()
        for answer in answers:
            file.write_text(json.dumps(answer))
            done = verify(file, "--url", today.url)
            assert done.returncode == 0, done.stdout + done.stderr
        text = file.read_text()
        altered = text.replace('"num_tokens": ', '"num_tokens": 1', 1)
        assert altered != text
        file.write_text(altered)
        done = verify(file, "--url", today.url)
    assert (done.returncode, done.stdout.count("\n")) == (3, 1), done.stdout
    assert "it was changed since key" in done.stdout


def test_a_models_folder_computes_the_answer_again(demo: Server, tmp_path: Path) -> None:
    answer = demo.post("/v1/completions", {"prompt": "Once upon a time", "logprobs": 0, **SAMPLED}).json()
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer))
    cache = psutil.Process(demo.process.pid).environ()["HALLMARK_CACHE_DIR"]
    done = verify(file, "--model", str(DEMO), cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_key_file_that_others_may_read_ends_the_start(start_server: StartServer, tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    file.touch(0o644)
    file.chmod(0o644)
    with start_server("--receipt-key-file", str(file)) as server:
        assert server.process.wait(120) == 2
        [line] = server.log.splitlines()
    assert "has mode 0644" in line


def test_a_folder_is_served_with_the_settings_of_the_receipt(start_server: StartServer, tmp_path: Path) -> None:
    """Without them the answer is another one: weights and cache have other numbers, in another dtype."""
    flags = ("--dtype", "bfloat16", "--quantization", "fp8", "--kv-cache-dtype", "fp8", "--max-model-len", "64")
    draft = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}')
    with start_server(*flags, *draft) as server:
        server.wait_ready(540)
        cache = psutil.Process(server.process.pid).environ()["HALLMARK_CACHE_DIR"]
        answer = server.post("/v1/completions", {"prompt": "Once upon a time", "logprobs": 0, **SAMPLED}).json()
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer))
    done = verify(file, "--model", str(DEMO), cache=cache)
    assert (done.returncode, " now" in done.stdout) == (0, False), done.stdout + done.stderr
