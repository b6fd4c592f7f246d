"""Every answer names the kernels that served it: in its headers, in an object where asked, and in the log."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from server.log import fields_of
from server.protocol.messages import AttestationReport, FinishReason, PathUse, TokenDelta
from support.api.edge_fakes import USES, Served, delta, events, served
from support.api.running_api import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
STATUS, PLAN = "x-hallmark-status", "x-hallmark-plan"
PREFILL, DECODE = USES
QUARANTINED = PathUse("decode", "sdpa.math", "quarantined", ["quarantined"])


def one_by_one(*, first: list[PathUse], last: list[PathUse]) -> list[TokenDelta]:
    """Send decisions as an engine does: with the first token, with a new one, and with the last."""
    begun = TokenDelta("", list(b"Hel"), times=delta("", is_first=True).times, path_uses=first)
    return [
        begun,
        TokenDelta("", list(b"lo"), path_uses=last),
        TokenDelta("", [256], FinishReason.STOP, path_uses=last),
    ]


def serving(folder: Path) -> Served:
    it = served(folder, lambda _: one_by_one(first=[PREFILL], last=[PREFILL, DECODE]))
    it.engine.attestations.put(AttestationReport("start", "match", 12.5, 0.1, [], [], id="0af1"))
    return it


def expected(phases: list[PathUse], **changes: object) -> dict[str, object]:
    served_phases = [
        {"phase": it.phase, "path": it.path, "status": it.status, "fallback_reasons": it.fallback_reasons}
        for it in phases
    ]
    return {
        "status": "provisional",
        "phases": served_phases,
        "bucket": "le_128",
        "cached_tokens": 0,
        "matrix_digest": "abc123",
        "attestation": {"id": "0af1", "at": 12.5, "result": "match"},
        "layers": "not checked",
        **changes,
    }


def without_time(found: dict[str, Any]) -> dict[str, Any]:
    assert found.pop("ttft_ms") > 0
    return found


@pytest.mark.parametrize(("route", "body"), [(COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": USER})])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("way", ["field", "header"])
def test_an_answer_names_its_kernels_where_asked(
    folder: Path, route: str, body: dict[str, object], is_stream: bool, way: str
) -> None:
    it = serving(folder)
    asked = {"hallmark": True} if way == "field" else {}
    answer = it.post(route, {**body, **asked, "stream": is_stream}, headers={"X-Hallmark": "1"} if not asked else {})
    assert (answer.headers[STATUS], answer.headers[PLAN]) == ("provisional", "abc123")
    if is_stream:
        *others, last, done = events(answer)
        assert done == "[DONE]"
        assert all("hallmark" not in chunk for chunk in others)  # type: ignore[operator]
        assert last["choices"][0]["finish_reason"] == "stop"  # type: ignore[index,call-overload]
    else:
        last = answer.json()
    assert without_time(last["hallmark"]) == expected([PREFILL, DECODE])  # type: ignore[index,call-overload]


@pytest.mark.parametrize("headers", [{}, {"X-Hallmark": "0"}])
def test_an_answer_has_headers_and_no_object_unasked(folder: Path, headers: dict[str, str]) -> None:
    answer = serving(folder).post(COMPLETIONS, {"prompt": "abc"}, headers=headers)
    assert answer.headers[STATUS] == "provisional"
    assert "hallmark" not in answer.json()


def test_the_status_is_the_worst_of_the_phases(folder: Path) -> None:
    it = served(folder, lambda _: one_by_one(first=[DECODE], last=[DECODE, QUARANTINED]))
    whole = it.post(COMPLETIONS, {"prompt": "abc", "hallmark": True})
    assert whole.headers[STATUS] == whole.json()["hallmark"]["status"] == "quarantined"
    stream = it.post(COMPLETIONS, {"prompt": "abc", "hallmark": True, "stream": True})
    assert stream.headers[STATUS] == "proven"  # what was known when it began
    assert events(stream)[-2]["hallmark"]["status"] == "quarantined"  # type: ignore[index,call-overload]


def test_with_usage_its_chunk_is_the_last_and_names_the_kernels(folder: Path) -> None:
    body = {"prompt": "abc", "hallmark": True, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    *others, last, _ = events(serving(folder).post(COMPLETIONS, body))
    assert all("hallmark" not in chunk for chunk in others)  # type: ignore[operator]
    assert last["choices"] == []  # type: ignore[index,call-overload]
    assert without_time(last["hallmark"]) == expected([PREFILL, DECODE])  # type: ignore[index,call-overload]


def test_of_several_answers_the_last_chunk_alone_has_the_object(folder: Path) -> None:
    chunks = events(serving(folder).post(COMPLETIONS, {"prompt": "abc", "hallmark": True, "stream": True, "n": 3}))
    assert [i for i, chunk in enumerate(chunks) if "hallmark" in chunk] == [len(chunks) - 2]  # type: ignore[operator]


def test_a_head_written_with_the_first_token_names_the_kernels(folder: Path) -> None:
    it = Running(serving(folder))  # our own server: the first token writes the head itself
    body = json.dumps({"prompt": "abc", "stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    with it.connect() as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    it.stop()
    fields = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert b"x-hallmark-status: provisional" in fields
    assert b"x-hallmark-plan: abc123" in fields


def test_an_error_names_no_kernels(folder: Path) -> None:
    answer = serving(folder).post(COMPLETIONS, {"prompt": 5})
    assert answer.status_code == 400
    assert not {STATUS, PLAN} & set(answer.headers)


BROKEN = TokenDelta("", [], FinishReason.ERROR, error_code="nonfinite_logits", error_message="no finite logit")


def failing(folder: Path, *before: TokenDelta) -> Served:
    it = served(folder, lambda _: [*before, BROKEN])
    it.engine.attestations.put(AttestationReport("start", "match", 12.5, 0.1, [], [], id="0af1"))
    return it


BEGUN = TokenDelta("", list(b"Hel"), times=delta("", is_first=True).times, path_uses=[PREFILL])
ROUTES = [
    (COMPLETIONS, {"prompt": "abc"}),
    (CHAT, {"messages": USER}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 9}),
]


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_an_error_behind_a_first_step_names_the_kernels(folder: Path, route: str, body: dict[str, object]) -> None:
    answer = failing(folder, BEGUN).post(route, {**body, "hallmark": True})
    assert answer.status_code == 500
    assert (answer.headers[STATUS], answer.headers[PLAN]) == (PREFILL.status, "abc123")
    assert without_time(answer.json()["hallmark"]) == expected([PREFILL], status=PREFILL.status)
    assert "hallmark" not in failing(folder, BEGUN).post(route, body).json()
    assert "hallmark" not in failing(folder).post(route, {**body, "hallmark": True}).json()  # no step was computed


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_stream_that_fails_names_the_kernels_last(folder: Path, route: str, body: dict[str, object]) -> None:
    answer = failing(folder, BEGUN).post(route, {**body, "stream": True, "hallmark": True})
    assert answer.status_code == 200
    data = [json.loads(it[6:]) for it in answer.text.splitlines() if it.startswith("data: {")]
    assert without_time(data[-1]["hallmark"]) == expected([PREFILL], status=PREFILL.status)
    assert all("hallmark" not in it for it in data[:-1])
    assert any("error" in (*it, it.get("type")) for it in data)


def test_another_value_of_the_header_is_refused(folder: Path) -> None:
    answer = serving(folder).post(COMPLETIONS, {"prompt": "abc"}, headers={"X-Hallmark": "yes"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_header"


def test_the_log_line_has_paths_and_status(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "server.edge.guard"):
        serving(folder).post(COMPLETIONS, {"prompt": "abc"})
    fields = dict(fields_of(caplog.records[-1]))
    assert fields["kernels"] == "prefill:sdpa.math,decode:sdpa.cpu"
    assert fields["kernel_status"] == "provisional"
