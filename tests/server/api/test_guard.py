"""What the guard lets through, and how it refuses."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edge_fakes import Served, delta, events, playing, served, with_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from server.api.guard import Guard, GuardLimits
from server.api.schemas import CompletionFields
from server.engine.messages import FinishReason
from server.telemetry.logging import LineFormatter

COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}

HOSTILE: list[tuple[str, bytes, int, str]] = [
    ("empty", b"", 400, "invalid_json"),
    ("not json", b"{", 400, "invalid_json"),
    ("null", b"null", 400, "invalid_json"),
    ("array", b"[]", 400, "invalid_json"),
    ("string", b'"x"', 400, "invalid_json"),
    ("not utf-8", b'{"prompt": "\xff"}', 400, "invalid_json"),
    ("byte order mark", b'\xef\xbb\xbf{"prompt": "a"}', 400, "invalid_json"),
    ("deep array", b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400, "invalid_json"),
    ("deep object", b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, "invalid_json"),
    ("just too deep", b'{"user":' + b"[" * 40 + b"]" * 40 + b"}", 400, "invalid_json"),
    ("nan", b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json"),
    ("infinity", b'{"prompt": "a", "temperature": -Infinity}', 400, "invalid_json"),
    ("too large a float", b'{"prompt": "a", "temperature": 1e999}', 400, "invalid_json"),
    ("huge integer", b'{"prompt": "a", "max_tokens": ' + b"9" * 6000 + b"}", 400, "invalid_json"),
    ("large integer", b'{"prompt": "a", "max_tokens": ' + b"9" * 400 + b"}", 400, "invalid_value"),
    ("large token id", b'{"prompt": [1, ' + b"9" * 400 + b"]}", 400, "invalid_value"),
    ("duplicate key", b'{"prompt": "a", "prompt": "b"}', 400, "invalid_json"),
    ("lone surrogate", b'{"prompt": "\\ud800"}', 400, "invalid_value"),
    ("lone surrogate as a model", b'{"prompt": "a", "model": "\\ud800"}', 404, "model_not_found"),
    ("lone surrogate as a key", b'{"prompt": "a", "\\ud800": 1}', 400, "unknown_field"),
    ("lone surrogate as a stop", b'{"prompt": "a", "stop": "\\udfff"}', 400, "invalid_value"),
    ("no prompt", b"{}", 400, "invalid_value"),
    ("empty prompt", b'{"prompt": ""}', 400, "invalid_value"),
    ("empty list", b'{"prompt": []}', 400, "invalid_value"),
    ("empty inner list", b'{"prompt": [[]]}', 400, "invalid_value"),
    ("number as prompt", b'{"prompt": 5}', 400, "invalid_value"),
    ("mixed prompt", b'{"prompt": [1, "a", null]}', 400, "invalid_value"),
    ("boolean token id", b'{"prompt": [true]}', 400, "invalid_value"),
    ("negative token id", b'{"prompt": [-1]}', 400, "invalid_value"),
    ("token id beyond the vocabulary", b'{"prompt": [257]}', 400, "invalid_value"),
    ("too many prompts", b'{"prompt": [' + b'"a",' * 64 + b'"a"]}', 400, "invalid_value"),
    ("wrong model", b'{"prompt": "a", "model": "gpt"}', 404, "model_not_found"),
    ("temperature too high", b'{"prompt": "a", "temperature": 2.1}', 400, "invalid_value"),
    ("temperature as text", b'{"prompt": "a", "temperature": "1"}', 400, "invalid_value"),
    ("temperature as boolean", b'{"prompt": "a", "temperature": true}', 400, "invalid_value"),
    ("top_p of 0", b'{"prompt": "a", "top_p": 0}', 400, "invalid_value"),
    ("top_k too low", b'{"prompt": "a", "top_k": -2}', 400, "invalid_value"),
    ("no tokens wanted", b'{"prompt": "a", "max_tokens": 0}', 400, "invalid_value"),
    ("fraction of tokens", b'{"prompt": "a", "max_tokens": 1.5}', 400, "invalid_value"),
    ("min above max", b'{"prompt": "a", "max_tokens": 3, "min_tokens": 4}', 400, "invalid_value"),
    ("seed beyond 64 bits", b'{"prompt": "a", "seed": 9223372036854775808}', 400, "invalid_value"),
    ("empty stop", b'{"prompt": "a", "stop": ""}', 400, "invalid_value"),
    ("too many stops", b'{"prompt": "a", "stop": [' + b'"a",' * 16 + b'"a"]}', 400, "invalid_value"),
    ("too long a stop", b'{"prompt": "a", "stop": "' + b"a" * 257 + b'"}', 400, "invalid_value"),
    ("stop id beyond the vocabulary", b'{"prompt": "a", "stop_token_ids": [999]}', 400, "invalid_value"),
    ("several answers", b'{"prompt": "a", "n": 2}', 400, "unsupported_field"),
    ("true is not 1", b'{"prompt": "a", "n": true}', 400, "unsupported_field"),
    ("logprobs", b'{"prompt": "a", "logprobs": 1}', 400, "unsupported_field"),
    ("logit bias", b'{"prompt": "a", "logit_bias": {"5": 1}}', 400, "unsupported_field"),
    ("echo", b'{"prompt": "a", "echo": true}', 400, "unsupported_field"),
    ("unknown field", b'{"prompt": "a", "temprature": 1}', 400, "unknown_field"),
    ("messages in a completion", b'{"prompt": "a", "messages": []}', 400, "unknown_field"),
    ("options without stream", b'{"prompt": "a", "stream_options": {"include_usage": true}}', 400, "invalid_value"),
    ("unknown option", b'{"prompt": "a", "stream": true, "stream_options": {"x": 1}}', 400, "unknown_field"),
    ("too long", b'{"prompt": "' + b"a" * 1024 + b'"}', 400, "context_length_exceeded"),
    ("far too long", b'{"prompt": "' + b"a" * 1_000_000 + b'"}', 400, "context_length_exceeded"),
]


@pytest.mark.parametrize(("body", "status", "code"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_body_costs_only_its_own_request(folder: Path, body: bytes, status: int, code: str) -> None:
    it = served(folder)
    answer = it.request("POST", COMPLETIONS, content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code", "request_id"}
    assert it.engine.submitted == []
    assert it.edge.admission.num_requests == 0


CHATS: list[tuple[str, object, str]] = [
    ("no messages", [], "invalid_value"),
    ("messages as text", "hello", "invalid_value"),
    ("message as text", ["hello"], "invalid_value"),
    ("no role", [{"content": "a"}], "invalid_value"),
    ("tool's role", [{"role": "tool", "content": "a"}], "invalid_value"),
    ("number as content", [{"role": "user", "content": 5}], "invalid_value"),
    ("image", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "unsupported_field"),
    ("part without text", [{"role": "user", "content": [{"type": "text"}]}], "invalid_value"),
    ("tool calls", [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}], "unsupported_field"),
    ("unknown field", [{"role": "user", "content": "a", "mood": "good"}], "unknown_field"),
    ("refused by the template", [{"role": "user", "content": "refuse me"}], "invalid_messages"),
]


@pytest.mark.parametrize(("messages", "code"), [case[1:] for case in CHATS], ids=[case[0] for case in CHATS])
def test_hostile_messages_are_refused(folder: Path, messages: object, code: str) -> None:
    answer = served(folder).post("/v1/chat/completions", {"messages": messages})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_a_refusal_names_the_field_the_limit_and_the_value(folder: Path) -> None:
    error = served(folder).post(COMPLETIONS, {"prompt": "a", "temperature": 2.5}).json()["error"]
    assert error["param"] == "temperature"
    assert error["message"] == "temperature should be less than or equal to 2, got 2.5."
    error = served(folder).post(COMPLETIONS, {"prompt": "a" * 1000, "max_tokens": 100}).json()["error"]
    assert "1024 tokens" in error["message"]
    assert "1100" in error["message"]


def test_no_error_repeats_a_prompt(folder: Path) -> None:
    it = served(folder)
    canary = "xyzzy-canary"
    bodies: list[object] = [
        {"prompt": canary, "temperature": canary},
        {"prompt": {"text": canary}},
        {"prompt": [canary, 5]},
        {"prompt": canary, "stop": {canary: 1}},
        {"prompt": canary * 200},
        {"prompt": canary, "user": [canary]},
    ]
    for body in bodies:
        answer = it.post(COMPLETIONS, body)
        assert answer.status_code == 400
        assert canary not in answer.text


def test_a_prompt_is_never_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(prompt: list[int]) -> list[object]:
        raise RuntimeError(f"cannot do {bytes(prompt).decode()}")

    it = served(folder, broken)  # type: ignore[arg-type]
    with caplog.at_level(logging.DEBUG):
        answer = it.post(COMPLETIONS, {"prompt": "xyzzy-canary", "user": "plugh-canary"})
        served(folder).post(COMPLETIONS, {"prompt": "xyzzy-canary", "stream": True})
    assert answer.status_code == 500
    lines = [LineFormatter().format(record) for record in caplog.records if record.name.startswith("server")]
    assert any("RuntimeError at" in line for line in lines)
    assert not any("canary" in line or "\n" in line for line in lines)


def test_an_unexpected_error_is_a_500_that_says_nothing_of_it(folder: Path) -> None:
    def broken(_: list[int]) -> list[object]:
        raise RuntimeError("0x7f3a secret")

    it = served(folder, broken)  # type: ignore[arg-type]
    answer = it.post(COMPLETIONS, {"prompt": "a"}, headers={"x-request-id": "r-1"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.json()["error"]["request_id"] == "r-1"
    assert "secret" not in answer.text
    assert it.edge.admission.num_requests == 0


def test_an_unknown_path_and_a_wrong_method_are_in_the_envelope(folder: Path) -> None:
    it = served(folder)
    assert it.get("/nope").json()["error"]["code"] == "not_found"
    wrong = it.get(COMPLETIONS)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert it.value("requests_total", route="other", outcome="client_error") == 1


def test_the_clients_request_id_comes_back_if_it_is_plain(folder: Path) -> None:
    it = served(folder)
    assert it.get("/livez", headers={"x-request-id": "abc-1.2:3_4"}).headers["x-request-id"] == "abc-1.2:3_4"
    for hostile in ("a" * 129, "a b", "<script>", ""):
        assert it.get("/livez", headers={"x-request-id": hostile}).headers["x-request-id"].startswith("req-")


def test_two_requests_with_one_id_are_served_both(folder: Path) -> None:
    async def run() -> None:
        it = served(folder)
        async with it.client() as client:
            posts = [client.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "same"}) for _ in range(2)]
            answers = await asyncio.gather(*posts)
        assert [answer.status_code for answer in answers] == [200, 200]

    asyncio.run(run())


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


def test_a_body_that_announces_too_much_is_refused_before_it_is_read(folder: Path) -> None:
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


def test_a_body_that_does_not_call_itself_json_is_a_415(folder: Path) -> None:
    answer = served(folder).request("POST", COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


def _all_routes(it: Served) -> list[tuple[str, str]]:
    paths = it.app.openapi()["paths"]
    return [(method.upper(), path.replace("{name}", "x")) for path, methods in paths.items() for method in methods]


def test_every_route_but_the_probes_needs_a_key(folder: Path) -> None:
    it = with_keys(served(folder), "right")
    routes = [*_all_routes(it), ("GET", "/openapi.json"), ("GET", "/nope"), ("GET", "/docs"), ("GET", "/livez/")]
    assert len(routes) > 10
    for method, path in routes:
        answer = it.request(method, path, headers={"authorization": "Bearer wrong"})
        is_open = path in ("/livez", "/readyz", "/health")
        assert (answer.status_code == 401) != is_open, path


@pytest.mark.parametrize("header", ["Bearer wrong", "Basic right", "right", "Bearer", "Bearer right x", ""])
def test_a_wrong_key_is_refused(folder: Path, header: str) -> None:
    it = with_keys(served(folder), "left", "right")
    assert it.get("/v1/models", headers={"authorization": header}).status_code == 401


def test_each_of_several_keys_opens(folder: Path) -> None:
    it = with_keys(served(folder), "left", "right")
    for key in ("left", "right"):
        assert it.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


def _scope() -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": COMPLETIONS,
        "raw_path": COMPLETIONS.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request_and_frees_its_place(folder: Path, stream: bool) -> None:
    async def run() -> None:
        it = served(folder, playing(delta("a"), delta("b"), delta("", FinishReason.STOP)))
        it.engine.gate.clear()
        it.engine.num_free = 1 if stream else 0
        gone = asyncio.Event()
        body = json.dumps({"prompt": "x", "stream": stream}).encode()
        inbox: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if inbox:
                return inbox.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        task = asyncio.create_task(it.app(_scope(), receive, send))
        while not (it.engine.submitted and (sent or not stream)):
            await asyncio.sleep(0)
        assert it.edge.lifecycle.num_inflight == 1
        gone.set()
        await asyncio.wait_for(task, 2)
        assert it.engine.cancelled == [it.engine.submitted[0][0]]
        assert it.edge.lifecycle.num_inflight == 0
        assert it.edge.admission.num_requests == 0
        assert it.value("client_disconnects_total", stage="streaming" if stream else "queued") == 1
        assert it.value("requests_total", route=COMPLETIONS, outcome="disconnected") == 1
        assert it.value("request_duration_seconds_count", model="tiny", outcome="disconnected") == 1
        assert bool(sent) == stream

    asyncio.run(run())


def test_a_client_that_does_not_read_is_hung_up_on(folder: Path) -> None:
    async def run() -> None:
        it = served(folder)
        num_sent = 0
        has_ended = False

        async def endless(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 -- an application
            nonlocal has_ended
            try:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while True:
                    await send({"type": "http.response.body", "body": b"x", "more_body": True})
            finally:
                has_ended = True

        async def receive() -> Message:
            return {"type": "http.request", "body": b""} if num_sent == 0 else await asyncio.Future()

        async def send(_: Message) -> None:
            nonlocal num_sent
            num_sent += 1
            if num_sent > 3:
                await asyncio.Event().wait()  # the socket's buffers are full

        limits = GuardLimits(10_000, receive_timeout_s=5, request_timeout_s=5, send_timeout_s=0.05)
        nothing: frozenset[str] = frozenset()
        edge = it.edge
        options = {"keys": None, "open_paths": nothing, "routes": nothing, "lifecycle": edge.lifecycle}
        guard = Guard(endless, limits=limits, metrics=edge.metrics, **options)  # type: ignore[arg-type]
        await asyncio.wait_for(guard(_scope(), receive, send), 2)
        assert has_ended
        assert num_sent == 4
        assert edge.lifecycle.num_inflight == 0
        assert it.value("requests_total", route="other", outcome="disconnected") == 1

    asyncio.run(run())


NAMES = st.sampled_from([*CompletionFields.model_fields, "n", "tools", "logprobs", "é", "nonsense"])
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


@pytest.fixture(scope="module")
def it(folder: Path) -> Served:
    return served(folder)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(body=st.dictionaries(NAMES, VALUES, max_size=6), prompt=st.just("a") | VALUES)
def test_no_body_of_known_names_is_a_5xx(it: Served, body: dict[str, object], prompt: object) -> None:
    answer = it.post(COMPLETIONS, {"prompt": prompt} | body)
    assert answer.status_code in (200, 400, 404)
    assert it.edge.admission.num_requests == 0


def test_an_unexpected_error_mid_stream_is_an_event_too(folder: Path) -> None:
    def broken(_: list[int]) -> object:
        yield delta("a")
        raise RuntimeError("secret")

    answer = served(folder, broken).post(COMPLETIONS, {"prompt": "x", "stream": True})  # type: ignore[arg-type]
    _, error, done = events(answer)
    assert error["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert done == "[DONE]"
