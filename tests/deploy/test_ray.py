"""Replicas on Ray Serve, without Ray: what stands before its proxy, around a replica, and in the YAML.

`make test-ray` runs the whole with Ray.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.ray.affinity import chosen, key_of, ranked
from deploy.ray.arguments import check_gpus, read_arguments
from deploy.ray.front import MAX_RERUNS, Front, FrontLimits
from deploy.ray.replica import REPLICA_HEADER, Health, Replica
from server.edge.lifecycle import Lifecycle
from server.errors import SettingsError, StartError
from server.http.services import Services
from server.supervisor.client import EngineState

SHIPPED = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "hallmark.yaml"
LIMITS = FrontLimits(1000, 10_000, 30.0, retry_for_s=3600, pauses_s=(0.0, 0.0))
Run = Callable[[Scope, Receive, Send], Awaitable[None]]


def answering(status: int, body: bytes, *, kind: bytes = b"application/json", of_replica: bool = True) -> Run:
    """A run that is answered, by a replica or by Ray itself."""

    async def run(_scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        headers = [(b"content-type", kind), *([(REPLICA_HEADER, b"a")] if of_replica else [])]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return run


def cut(*events: bytes) -> Run:
    """A stream whose replica dies behind these events; without any, before it has begun."""

    async def run(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (REPLICA_HEADER, b"a")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})

    return run


async def dead(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """A replica dies before it answers: Ray's proxy then sends nothing."""


def refusing(code: str) -> Run:
    return answering(503, json.dumps({"error": {"code": code}}).encode())


OK = answering(200, b"{}")


class Asked:
    """One request through the front, whose runs behave as given; the last one again and again."""

    def __init__(self, *runs: Run, path: str = "/v1/completions", body: bytes = b"{}", **headers: str) -> None:
        self.scopes: list[Scope] = []
        self.sent: list[Message] = []

        async def ray(scope: Scope, receive: Receive, send: Send) -> None:
            self.scopes.append(scope)
            await runs[min(len(self.scopes), len(runs)) - 1](scope, receive, send)

        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": given}
        asyncio.run(self._ask(Front(ray, limits=LIMITS), scope, body))

    async def _ask(self, front: ASGIApp, scope: Scope, body: bytes) -> None:
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if is_read:
                await asyncio.get_running_loop().create_future()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            self.sent.append(message)

        await front(scope, receive, send)

    @property
    def status(self) -> int:
        return cast(int, self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        assert not self.sent[-1].get("more_body", False)
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def code(self) -> str:
        return cast(str, json.loads(self.body)["error"]["code"])


@pytest.mark.parametrize("first", [dead, cut(), refusing("engine_died")], ids=["replica", "stream", "engine"])
def test_a_request_whose_replica_or_engine_dies_is_run_again(first: Run) -> None:
    it = Asked(first, OK)
    assert (it.status, it.body, len(it.scopes)) == (200, b"{}", 2)


def test_a_request_run_again_is_not_bound_to_its_replica() -> None:
    it = Asked(refusing("not_ready"), OK, body=b'{"prompt":"a"}', x_session_id="mine")
    assert [b"x-session-id" in dict(scope["headers"]) for scope in it.scopes] == [True, False]


def test_what_kills_every_engine_is_not_run_for_ever() -> None:
    for killing in (dead, refusing("engine_died")):
        it = Asked(killing)
        assert (it.status, it.code, len(it.scopes)) == (503, "engine_died", 1 + MAX_RERUNS)


def test_a_refusal_by_an_ending_replica_is_tried_elsewhere() -> None:
    it = Asked(*[refusing("shutting_down"), refusing("not_ready")] * MAX_RERUNS, OK)
    assert it.status == 200


def test_a_cut_stream_ends_with_an_error_event() -> None:
    it = Asked(cut(b"data: {}\n\n"))
    first, error, done = it.body.decode().split("\n\n")[:3]
    assert (first, done, len(it.scopes)) == ("data: {}", "data: [DONE]", 1)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_died"


def test_a_cut_event_does_not_swallow_the_error_event() -> None:
    assert b'data: {"half\n\ndata: {"error"' in Asked(cut(b'data: {"half')).body


def test_a_cut_stream_of_messages_ends_as_anthropics_do() -> None:
    it = Asked(cut(b"event: ping\ndata: {}\n\n"), path="/v1/messages")
    assert it.body.split(b"\n\n")[1].startswith(b"event: error\n")


def test_a_cut_stream_of_responses_ends_as_a_failed_response() -> None:
    created = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"}}\n\n'
    it = Asked(cut(created, b"event: a\ndata: {}\n\n"), path="/v1/responses")
    events = [event.partition(b"data: ")[2] for event in it.body.split(b"\n\n")[2:-1]]
    error, failed = map(json.loads, events)
    assert (error["type"], error["code"], error["sequence_number"]) == ("error", "engine_died", 2)
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 3)
    assert failed["response"] | {"error": None} == {"id": "resp_1", "status": "failed", "error": None}


def test_a_refusal_of_rays_own_comes_in_our_envelope() -> None:
    it = Asked(answering(503, b"Request dropped", kind=b"text/plain", of_replica=False))
    assert (it.status, it.code) == (503, "not_ready")


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (411, b"{}", {"transfer_encoding": "chunked"}),
        (413, b"a" * 1001, {}),
        (413, b"", {"content_length": "1001"}),
        (431, b"{}", {f"x-{i}": "" for i in range(101)}),
    ],
)
def test_what_our_own_server_would_not_take_is_refused(status: int, body: bytes, headers: Mapping[str, str]) -> None:
    it = Asked(OK, body=body, **headers)
    assert (it.status, it.scopes) == (status, [])


def test_a_client_cannot_speak_to_ray_by_headers() -> None:
    it = Asked(OK, body=b"no json", x_request_disconnect_disabled="?1", serve_multiplexed_model_id="a", x_other="b")
    assert [name for name, _ in it.scopes[0]["headers"]] == [b"x-other", b"x-request-id"]


def test_an_answer_has_one_request_id() -> None:
    async def ray(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"x-request-id", b"ours"), (b"x-request-id", b"Ray's")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    assert Asked(ray).sent[0]["headers"] == [(b"x-request-id", b"ours")]


def engine_in(state: EngineState) -> SimpleNamespace:
    return SimpleNamespace(state=state, refused=None, ready=None, last_heartbeat=None)


def services_of(engine: SimpleNamespace) -> Services:
    loop_seen_at = float("inf")
    metrics = SimpleNamespace(traffic=SimpleNamespace(loop_seen_at=loop_seen_at))
    why = f"The engine is {engine.state.value}."
    telemetry = SimpleNamespace(metrics=metrics)
    fields = {"engine": engine, "telemetry": telemetry, "lifecycle": Lifecycle(), "why_not_ready": lambda: why}
    return cast(Services, SimpleNamespace(**fields))


@pytest.mark.parametrize("scope", [{"type": "lifespan"}, {"type": "http", "method": "POST"}])
def test_nothing_comes_through_before_the_engine_is_ready(scope: dict[str, Any]) -> None:
    engine, sent = engine_in(EngineState.RESTARTING), []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        kind = "lifespan.startup.complete" if scope["type"] == "lifespan" else "http.response.start"
        await send({"type": kind})

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append((message["type"], engine.state))

    async def ask() -> None:
        asking = asyncio.create_task(Replica(app, services_of(engine), name="a", hold_s=3600)(scope, receive, send))
        for _ in range(20):
            await asyncio.sleep(0)
        assert sent == []
        engine.state = EngineState.READY
        await asking

    asyncio.run(ask())
    assert [state for _, state in sent] == [EngineState.READY]


class Held:
    """Replica around an application that notes each request, by an engine that never becomes ready."""

    def __init__(self, engine: SimpleNamespace) -> None:
        self.engine = engine
        self.num_asked = 0

    async def ask(self, method: str, *, hold_s: float, within_s: float = 30.0) -> None:
        async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
            self.num_asked += 1

        async def nothing(*_: object) -> Message:
            return {}

        replica = Replica(app, services_of(self.engine), name="a", hold_s=hold_s)
        async with asyncio.timeout(within_s):
            await replica({"type": "http", "method": method}, nothing, cast(Send, nothing))


def test_a_request_is_held_no_longer_than_it_may_be() -> None:
    held = Held(engine_in(EngineState.RESTARTING))
    asyncio.run(held.ask("POST", hold_s=0.05))
    asyncio.run(held.ask("GET", hold_s=3600))  # health and metrics are never held
    assert held.num_asked == 2
    with pytest.raises(TimeoutError):
        asyncio.run(held.ask("POST", hold_s=3600, within_s=0.1))
    assert held.num_asked == 2


@pytest.mark.parametrize(("is_final", "is_held"), [(True, False), (False, True)])
def test_only_a_refusal_that_may_end_is_waited_for(is_final: bool, is_held: bool) -> None:
    held = Held(engine_in(EngineState.REFUSED))
    held.engine.refused = SimpleNamespace(is_final=is_final)
    if is_held:
        with pytest.raises(TimeoutError):
            asyncio.run(held.ask("POST", hold_s=3600, within_s=0.1))
    else:
        asyncio.run(held.ask("POST", hold_s=3600))
    assert held.num_asked == (0 if is_held else 1)


def test_the_time_without_an_engine_counts_from_its_last_end() -> None:
    now, engine = 0.0, engine_in(EngineState.READY)
    health = Health(services_of(engine), replace_after_s=10, clock=lambda: now)
    for died_at in (100.0, 200.0):
        now, engine.state = died_at, EngineState.READY
        health.check()
        now, engine.state = died_at + 10, EngineState.RESTARTING
        health.check()
    now += 0.1
    with pytest.raises(StartError, match="not ready for 10 s, the limit is 10 s: The engine is "):
        health.check()


def test_a_final_refusal_replaces_the_replica_with_its_reason() -> None:
    engine = engine_in(EngineState.REFUSED)
    engine.refused = SimpleNamespace(is_final=True, message="no such model", plan=[])
    with pytest.raises(StartError, match="no such model"):
        Health(services_of(engine), replace_after_s=10).check()


def chat(*texts: str) -> bytes:
    roles = ("system", "user", "assistant", "user")
    return json.dumps(
        {"messages": [{"role": role, "content": it} for role, it in zip(roles, texts, strict=False)]}
    ).encode()


def test_the_turns_of_a_conversation_have_one_key() -> None:
    assert key_of(chat("be brief", "hello"), {}) == key_of(chat("be brief", "hello", "hi", "and?"), {})
    assert key_of(chat("be brief", "hello"), {}) != key_of(chat("be brief", "goodbye"), {})


def test_callers_who_share_no_pages_share_no_key() -> None:
    assert key_of(chat("a", "b"), {b"authorization": b"Bearer 1"}) != key_of(chat("a", "b"), {})


def test_a_session_goes_before_the_prompt() -> None:
    assert key_of(b'{"prompt":"a"}', {b"x-session-id": b"s"}) == key_of(b'{"prompt":"b"}', {b"x-session-id": b"s"})
    assert key_of(b'{"prompt":"a","prompt_cache_key":"s"}', {}) == key_of(b'{"prompt":"b","prompt_cache_key":"s"}', {})


@pytest.mark.parametrize("field", ["prompt", "instructions", "system", "input", "messages", "prompt_cache_key"])
def test_each_field_that_begins_a_prompt_is_in_the_key(field: str) -> None:
    others = {"input": [{"role": "user", "content": "c"}]} if field in ("instructions", "system") else {}
    keys = [key_of(json.dumps({field: text, **others}).encode(), {}) for text in ("a", "b", "a")]
    assert keys[0] == keys[2] != keys[1]
    assert None not in keys


def test_parts_that_join_alike_are_other_keys() -> None:
    bodies = [b'{"system":1,"instructions":23,"prompt":4}', b'{"system":12,"instructions":3,"prompt":4}']
    keys = {key_of(body, {}) for body in (*bodies, b'{"system":123,"prompt":4}', b'{"instructions":123,"prompt":4}')}
    assert len(keys) == 4
    assert key_of(b"{}", {b"x-session-id": b"as", b"authorization": b"session"}) != key_of(
        b"{}", {b"x-session-id": b"s", b"authorization": b"sessiona"}
    )


def test_a_lost_replica_moves_only_its_own_keys() -> None:
    names = ["a", "b", "c"]
    owners = []
    for key in map(str, range(300)):
        before = ranked(key, names)
        owners.append(before[0])
        for lost in names:
            assert ranked(key, [name for name in names if name != lost]) == [name for name in before if name != lost]
    assert all(60 < owners.count(name) < 140 for name in names)  # each has about a third


def test_affinity_yields_to_a_queue_that_is_too_long() -> None:
    own = ranked("key", ["a", "b"])[0]
    loads = {"a": 0, "b": 0} | {own: 8}
    assert chosen("key", loads, 8)[0] == [own]
    assert chosen("key", loads | {own: 9}, 8) == [["a", "b"]]


def test_the_shipped_yaml_is_read() -> None:
    (application,) = yaml.safe_load(SHIPPED.read_text())["applications"]
    arguments, settings = read_arguments(application["args"], {})
    assert (settings.admin_port, arguments.hold_s) == (0, 5)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"hold": 1}, "args.hold is no setting; did you mean hold_s?"),
        ({"settings": {"max_num_seq": 1}}, "args.settings.max_num_seq is no setting; did you mean max_num_seqs?"),
        ({"settings": {"max_num_seqs": 0}}, "--max-num-seqs: Expected `int` >= 1, got '0'"),
        ({"settings": {"port": 1}}, "args.settings.port: on Ray Serve this is http_options.port"),
        ({"settings": {"admin_port": 9000}}, "args.settings.admin_port: replicas share a machine"),
        (
            {"settings": {"dtype": ["bf16"]}},
            "args.settings.dtype: expected a text, a number or a truth value, got list",
        ),
        ({"hold_s": -1}, "args.hold_s: expected 0 to 86400 seconds, got -1"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(args: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why.replace("?", r"\?")):
        read_arguments(args, {})


def test_a_replica_has_a_gpu_for_each_of_its_ranks() -> None:
    _, settings = read_arguments({"settings": {"tensor_parallel_size": 2}}, {})
    for options in ({}, {"num_cpus": 1}, {"num_gpus": 2}):
        check_gpus([{"ray_actor_options": options}], settings)
    with pytest.raises(SettingsError, match="expected 2, a GPU for each rank of tensor_parallel_size, got 1"):
        check_gpus([{"ray_actor_options": {"num_gpus": 1}}], settings)
