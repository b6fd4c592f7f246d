"""SIGTERM to a real server: it drains, ends with status 0 and leaves no process behind."""

import json
import os
import signal
from collections.abc import Iterator

import httpx2
import pytest
from running_server import Server, StartServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a start on a busy machine takes minutes
BODY = {"model": "demo", "prompt": "Once upon a time", "stream": True, "ignore_eos": True}


def ended_after_sigterm(server: Server, lines: Iterator[str]) -> list[str]:
    """Send SIGTERM to the server alone, as a service manager does, while a stream runs; return the stream's rest."""
    engine = server.engine_pid()
    assert os.getpgid(engine) == engine  # it leads a process group of its own
    os.kill(server.process.pid, signal.SIGTERM)
    server.wait_for(lambda: server.status_of("/readyz") == 503, "the server to drain", 10)
    assert server.status_of("/livez") == 200
    refused = server.post("/v1/completions", BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    rest = [line for line in lines if line]
    assert server.process.wait(timeout=60) == 0
    for leader in (server.process.pid, engine):
        with pytest.raises(ProcessLookupError):  # the process group is empty
            os.killpg(leader, 0)
    return rest


@pytest.mark.parametrize(
    ("grace_s", "max_tokens", "error"),
    [("300", 600, None), ("1", 3000, "shutting_down")],
    ids=["within the grace", "beyond the grace"],
)
def test_sigterm_drains_and_ends_with_status_0(
    start_server: StartServer, grace_s: str, max_tokens: int, error: str | None
) -> None:
    with start_server("--shutdown-grace-s", grace_s) as server:
        server.wait_ready()
        body = BODY | {"max_tokens": max_tokens}
        with httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            *events, last = ended_after_sigterm(server, lines)
        assert last == "data: [DONE]"
        parsed = [json.loads(event.removeprefix("data: ")) for event in events]
        assert [event["error"]["code"] for event in parsed if "error" in event] == ([] if error is None else [error])
        if error is None:
            assert parsed[-1]["choices"][0]["finish_reason"] == "length"
