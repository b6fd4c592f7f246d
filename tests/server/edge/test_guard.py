"""Requests that the guard admits, and its refusals."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import EngineDied
from server.log import LineFormatter
from server.protocol.messages import FinishReason
from support.api.edge_fakes import Served, delta, events, impatient, leave, playing, scope_of, served, with_keys
from support.on_a_loop import on_a_loop

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "a"}]


def test_an_unexpected_error_is_a_500_that_says_nothing_of_it(folder: Path) -> None:
    def broken(_: list[int]) -> list[object]:
        raise RuntimeError("0x7f3a secret")

    it = served(folder, broken)  # type: ignore[arg-type]
    answer = it.post(COMPLETIONS, {"prompt": "a"}, headers={"x-request-id": "r-1"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.json()["error"]["request_id"] == "r-1"
    assert "secret" not in answer.text
    assert it.services.admission.num_requests == 0


def test_an_unknown_path_is_refused_with_the_likely_one(folder: Path) -> None:
    it = served(folder)
    missing = it.get("/v1/audio/speech").json()["error"]
    assert (missing["code"], missing["message"]) == ("not_found", "There is nothing at '/v1/audio/speech'.")
    for path in ("/v1/completion", "/v1/completions/"):  # no redirect: behind TLS it leads to http
        answer = it.post(path, {})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"There is nothing at {path!r}; did you mean {COMPLETIONS!r}?"
    assert it.value("requests_total", route="other", outcome="client_error") == 3


def test_a_wrong_method_is_in_the_envelope_with_the_right_ones(folder: Path) -> None:
    wrong = served(folder).get(COMPLETIONS)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


def test_what_can_be_got_can_be_probed_with_head(folder: Path) -> None:
    it = served(folder)
    for path in ("/livez", "/readyz", "/v1/models", "/metrics"):
        assert it.request("HEAD", path).status_code == 200
    assert it.request("HEAD", COMPLETIONS).status_code == 405


def test_the_clients_request_id_comes_back_if_it_is_plain(folder: Path) -> None:
    it = served(folder)
    assert it.get("/livez", headers={"x-request-id": "abc-1.2:3_4"}).headers["x-request-id"] == "abc-1.2:3_4"
    for hostile in ("a" * 129, "a b", "<script>", ""):
        assert it.get("/livez", headers={"x-request-id": hostile}).headers["x-request-id"].startswith("req-")


@on_a_loop
async def test_two_requests_with_one_id_are_served_both(folder: Path) -> None:
    it = served(folder)
    async with it.client() as client:
        posts = [client.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "same"}) for _ in range(2)]
        answers = await asyncio.gather(*posts)
    assert [answer.status_code for answer in answers] == [200, 200]


def test_a_body_over_the_limit_is_refused_while_it_arrives(folder: Path) -> None:
    num_sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(1000):
            num_sent += 1
            yield b"x" * 1000

    answer = served(folder, max_body_bytes=5000).request("POST", COMPLETIONS, content=body(), headers=JSON)
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert answer.json()["error"]["message"] == "The body may have 5000 bytes, it has more."
    assert num_sent < 1000


def test_a_body_announced_too_large_is_refused_unread(folder: Path) -> None:
    answer = served(folder, max_body_bytes=10).request("POST", COMPLETIONS, content=b"x" * 11, headers=JSON)
    assert answer.status_code == 413
    assert "11" in answer.json()["error"]["message"]


def test_a_body_that_stops_arriving_is_a_408(folder: Path) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    answer = served(folder, receive_timeout_s=0.05).request("POST", COMPLETIONS, content=body(), headers=JSON)
    assert (answer.status_code, answer.headers["connection"]) == (408, "close")
    assert "0.05 s; 1 bytes did" in answer.json()["error"]["message"]


def test_too_many_or_too_large_headers_are_a_431(folder: Path) -> None:
    it = served(folder)
    assert it.get("/livez", headers={f"x-{i}": "1" for i in range(101)}).status_code == 431
    assert it.get("/livez", headers={"x-big": "a" * 33_000}).status_code == 431


@pytest.mark.parametrize(
    ("headers", "value"),
    [
        ({"content-type": "text/plain; charset=utf-8"}, "'text/plain; charset=utf-8'"),
        ({}, "none"),
        (JSON | {"content-encoding": "gzip"}, "'gzip'"),
    ],
)
def test_a_body_that_is_no_plain_json_by_its_headers_is_a_415(
    folder: Path, headers: dict[str, str], value: str
) -> None:
    answer = served(folder).request("POST", COMPLETIONS, content=b"{}", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert answer.json()["error"]["message"].endswith(f" {value}.")


def test_a_body_that_calls_itself_uncompressed_is_taken(folder: Path) -> None:
    headers = JSON | {"content-encoding": "identity"}
    answer = served(folder).request("POST", "/tokenize", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 200


PROBES = {"/livez", "/readyz", "/health", "/ping"}
OPERATORS = {"/metrics", "/plan", "/attention", "/attention/attest", "/attention/quarantine", "/version"}


@pytest.fixture(scope="module")
def routes(folder: Path) -> list[tuple[str, str]]:
    """The method and path of each route: FastAPI takes 0.3 s to list them, of each application."""
    paths = served(folder).app.openapi()["paths"]
    found = [(method.upper(), path.replace("{name}", "x")) for path, methods in paths.items() for method in methods]
    assert {COMPLETIONS, "/v1/chat/completions", "/tokenize", *PROBES, *OPERATORS} <= {path for _, path in found}
    return found


def _statuses(it: Served, headers: dict[str, str], routes: list[tuple[str, str]]) -> dict[str, int]:
    """Return every route's status by path; DELETE /attention/quarantine as DELETE."""
    others = [("GET", "/openapi.json"), ("GET", "/nope"), ("GET", "/docs"), ("GET", "/livez/")]
    answers = {}
    for method, path in [*routes, *others]:
        name = path if method != "DELETE" else f"DELETE {path}"
        answers[name] = it.request(method, path, headers=headers).status_code
    return answers


OPEN = PROBES | {"/", "/docs"}
CLOSED = OPERATORS | {"DELETE /attention/quarantine"}


@pytest.mark.parametrize(
    ("tenants", "operator", "sent", "refused"),
    [
        (["right"], None, None, {401: "all but the open"}),
        (["right"], "root", "wrong", {401: "all but the open"}),
        (["right"], None, "right", {403: "the operators'"}),
        (["right"], "root", "right", {403: "the operators'"}),
        (["right"], "root", "root", {}),
        ([], "root", None, {401: "the operators'"}),
        ([], None, None, {}),
    ],
)
def test_each_route_asks_for_its_key(
    folder: Path, routes: list[tuple[str, str]], tenants: list[str], operator: str | None, sent: str | None,
    refused: dict[int, str],
) -> None:  # fmt: skip
    it = with_keys(served(folder), *tenants, operator=operator)
    statuses = _statuses(it, {} if sent is None else {"authorization": f"Bearer {sent}"}, routes)
    paths = {"all but the open": statuses.keys() - OPEN, "the operators'": CLOSED}
    for status in (401, 403):
        found = {path for path, answered in statuses.items() if answered == status}
        assert found == (paths[refused[status]] if status in refused else set())


@pytest.mark.parametrize(("operator", "advice"), [(None, "--operator-key-file or --admin-port"), ("root", "send one")])
def test_a_refused_order_names_what_it_needs(folder: Path, operator: str | None, advice: str) -> None:
    it = with_keys(served(folder), "right", operator=operator)
    answer = it.post("/attention/quarantine", {"path": "sdpa.cpu"}, headers={"authorization": "Bearer right"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_key_needed")
    assert advice in answer.json()["error"]["message"]
    assert it.engine.quarantine.by_operator == []


def test_of_two_authorization_headers_none_is_taken(folder: Path) -> None:
    it = with_keys(served(folder), "right")
    both = [("authorization", "Bearer wrong"), ("authorization", "Bearer right")]
    for headers in (both, both[::-1]):
        answer = it.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_header")
        assert answer.json()["error"]["message"] == "The request has 2 Authorization headers, send one."


@pytest.mark.parametrize("header", ["Bearer wrong", "Basic right", "right", "Bearer", "Bearer right x", ""])
def test_a_wrong_key_is_refused(folder: Path, header: str) -> None:
    it = with_keys(served(folder), "left", "right")
    answer = it.get("/v1/models", headers={"authorization": header})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    is_bearer = header.startswith("Bearer")
    assert ("'Authorization: Bearer KEY'" in answer.text) == (not is_bearer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x"}),
        (CHAT, {"messages": USER}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 9}),
    ],
)
def test_a_client_that_leaves_cancels_and_frees_its_place(
    folder: Path, path: str, body: dict[str, object], stream: bool
) -> None:
    it = served(folder, playing(delta("a"), delta("b"), delta("", FinishReason.STOP)))
    it.engine.num_free = 1 if stream else 0
    sent = leave(it, path, {**body, "stream": stream})
    assert it.engine.cancelled == [it.engine.submitted[0][0]]
    assert it.services.lifecycle.num_inflight == 0
    assert it.services.admission.num_requests == 0
    assert it.value("client_disconnects_total", stage="streaming" if stream else "queued") == 1
    assert it.value("requests_total", route=path, outcome="disconnected") == 1
    assert it.value("request_duration_seconds_count", model="tiny", outcome="disconnected") == 1
    assert bool(sent) == stream


class Unread:
    """A guard around an application, and a client that sends its request and then reads three messages at most."""

    def __init__(self, it: Served, app: ASGIApp) -> None:
        self._guard = impatient(it, app)
        self._is_sent = False
        self.num_messages = 0

    async def run(self) -> None:
        await asyncio.wait_for(self._guard(scope_of(COMPLETIONS), self._receive, self._send), 30)

    async def _receive(self) -> Message:
        if self._is_sent:
            await asyncio.Future()
        self._is_sent = True
        return {"type": "http.request", "body": b""}

    async def _send(self, _: Message) -> None:
        self.num_messages += 1
        if self.num_messages > 3:
            await asyncio.Event().wait()  # the socket's buffers are full


def test_a_client_that_does_not_read_a_failure_is_hung_up_on(folder: Path) -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 -- an application
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(2):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        raise EngineDied("gone")

    it = served(folder)
    client = Unread(it, failing)
    asyncio.run(client.run())
    assert client.num_messages == 4
    assert it.value("requests_total", route="other", outcome="server_error") == 1
    assert not it.value("requests_total", route="other", outcome="disconnected")


def test_an_unexpected_error_mid_stream_is_an_event_too(folder: Path) -> None:
    def broken(_: list[int]) -> object:
        yield delta("a")
        raise RuntimeError("secret")

    answer = served(folder, broken).post(COMPLETIONS, {"prompt": "x", "stream": True})  # type: ignore[arg-type]
    _, error, done = events(answer)
    assert error["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("path", "body", "logged"),
    [
        (COMPLETIONS, {"prompt": "a", "top_p": 2}, "top_p"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),  # known, and not implemented
        (COMPLETIONS, {"prompt": "a", "sk-12345": 1}, None),
        (COMPLETIONS, {"prompt": "a", "secret[0]": 1}, None),
        (CHAT, {"messages": [{"role": "user", "content": "a", "secret": 1}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "x", "content": "a"}]}, "messages[0].role"),
        ("/v1/responses", {"input": "a", "metadata": {"secret": 5}}, "metadata"),
    ],
)
def test_the_log_names_known_fields_alone(
    path: str, body: dict[str, object], logged: str | None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert served(folder).post(path, body).status_code == 400
    [line] = [LineFormatter().format(record) for record in caplog.records if record.name == "server.edge.guard"]
    assert re.findall(r" param=(\S+)", line) == ([] if logged is None else [logged])
