"""Traces, logs and metrics of whole requests, streamed, cancelled and failed; and never a prompt."""

import io
import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from server.errors import EngineDied
from server.log import configure_logging
from server.protocol.messages import FinishReason, PathUse, TokenDelta
from server.settings import LogFormat, Settings
from server.telemetry.factory import MAX_SAMPLES
from server.telemetry.scrape import OPENMETRICS, TEXT, scrape
from server.telemetry.tracing import Tracing
from support.api.edge_fakes import END, ScriptedEngine, Served, delta, events, make_services, playing, saying
from support.telemetry.otlp_collectors import Collector, attributes, http_collector
from support.telemetry.otlp_collectors import events as span_events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SERVER, OPERATION = f"POST {COMPLETIONS}", "text_completion tiny"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
CANARY = "xyzzy-canary"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with http_collector() as it:
        yield it


class Traced:
    """A served model whose spans go to a collector; `close` sends them."""

    def __init__(self, folder: Path, collector: Collector, engine: ScriptedEngine) -> None:
        services = make_services(folder, engine, Settings(model="tiny"))
        count = services.telemetry.metrics.traffic.spans_dropped
        self.tracing = Tracing(collector.url, version="1", count_dropped=count)
        self.it = Served(replace(services, telemetry=replace(services.telemetry, tracing=self.tracing)), engine)
        self.engine = engine

    def close(self) -> None:
        self.tracing.close()


def test_a_stream_is_one_span_that_continues_the_clients_trace(folder: Path, collector: Collector) -> None:
    traced = Traced(folder, collector, ScriptedEngine(saying(*"abcdefghijklmnopqrstuvwxyz" * 4)))
    answer = traced.it.post(COMPLETIONS, {"prompt": "hello", "stream": True}, headers=TRACED)
    assert len(events(answer)) > 100
    traced.close()
    tree = {parent: sorted(children) for parent, children in collector.tree().items()}
    stages = ["hallmark.decode", "hallmark.prefill", "hallmark.queue", "hallmark.tokenize"]
    assert tree == {"": [SERVER], SERVER: [OPERATION], OPERATION: stages}
    server = collector.named(SERVER)
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert answer.headers["traceparent"] == f"00-{TRACE_ID}-{server.span_id.hex()}-01"
    assert traced.engine.traceparents == [answer.headers["traceparent"]]  # the engine's process is told
    assert next(name for name, _ in span_events(collector.named(OPERATION))) == "first_token"


def test_a_failure_before_the_first_byte_is_a_bad_event(folder: Path, collector: Collector) -> None:
    died = TokenDelta("", [], FinishReason.ERROR, error_code=EngineDied.code, error_message="gone")
    traced = Traced(folder, collector, ScriptedEngine(playing(died)))
    assert traced.it.post(COMPLETIONS, {"prompt": "hello"}).status_code == 503
    traced.close()
    labels = {"model": "tiny", "bucket": "le_128", "result": "bad"}
    assert traced.it.value("slo_events_total", sli="ttft", **labels) == 1
    assert traced.it.value("slo_events_total", sli="availability", **labels) == 1
    assert attributes(collector.named("hallmark.queue"))["hallmark.is_complete"] is False


def test_several_prompts_have_their_own_stages(folder: Path, collector: Collector) -> None:
    traced = Traced(folder, collector, ScriptedEngine(playing(delta("a", is_first=True), delta("", FinishReason.STOP))))
    traced.it.post(COMPLETIONS, {"prompt": ["one", "two"]})
    traced.close()
    which = [attributes(span)["hallmark.sequence"] for span in collector.spans if span.name == "hallmark.prefill"]
    assert sorted(which) == [0, 1]  # type: ignore[type-var]


def test_a_prompt_is_nowhere_in_logs_spans_metrics_and_errors(folder: Path, collector: Collector) -> None:
    def repeating(prompt: list[int]) -> Sequence[TokenDelta]:
        if b"break" in bytes(prompt):
            raise RuntimeError(f"cannot do {bytes(prompt).decode()}")
        return [TokenDelta("", [*prompt, END], FinishReason.STOP, path_uses=[PathUse("prefill", "p", "proven", [])])]

    log = io.StringIO()
    before = logging.getLogger().handlers[:], logging.getLogger().level
    configure_logging(LogFormat.JSON, log)
    logging.getLogger().setLevel(logging.DEBUG)
    traced = Traced(folder, collector, ScriptedEngine(repeating))
    try:
        it = traced.it
        answers = [
            it.post(COMPLETIONS, {"prompt": f"{CANARY} break"}),
            it.post(COMPLETIONS, {"prompt": f"{CANARY} break", "stream": True}),
            it.post(COMPLETIONS, {"prompt": CANARY, "max_tokens": -1}),
            it.post(COMPLETIONS, {"prompt": CANARY * 1000}),
            it.post(COMPLETIONS, {"prompt": [CANARY, 5]}),
            it.post(COMPLETIONS, {"prompt": {"text": CANARY}, "user": [CANARY]}),
            it.post(COMPLETIONS, {"prompt": CANARY, "stop": {CANARY: 1}}),
            it.post(COMPLETIONS, {"prompt": CANARY, "stop": [CANARY], "user": CANARY, "logit_bias": {CANARY: 2}}),
            it.post(CHAT, {"messages": [{"role": "user", "content": f"{CANARY} break"}]}),
            it.post(CHAT, {"messages": [{"role": "nobody", "content": CANARY}]}),
            it.post("/tokenize", {"prompt": CANARY, "add_special_tokens": "?"}),
            it.request(
                "POST", COMPLETIONS, content=f'{{"prompt": "{CANARY}', headers={"content-type": "application/json"}
            ),
        ]
        served = it.post(COMPLETIONS, {"prompt": CANARY, "stream": True})
        asked = it.request("POST", f"{COMPLETIONS}?prompt={CANARY}", json={"prompt": CANARY}, headers=TRACED)
    finally:
        traced.close()
        logging.basicConfig(level=before[1], handlers=before[0], force=True)
    assert CANARY in served.text  # the answer, and nothing else, repeats it
    assert asked.status_code == 200
    assert all(answer.status_code >= 400 for answer in answers)
    assert not any(CANARY in answer.text for answer in answers)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert len(lines) >= len(answers)
    assert CANARY not in log.getvalue()
    assert any(line.get("trace_id") == TRACE_ID for line in lines)
    assert CANARY.encode() not in collector.raw
    assert len(collector.spans) > 20
    registry = it.services.telemetry.metrics.registry
    assert CANARY.encode() not in scrape(registry, TEXT) + scrape(registry, OPENMETRICS)


def test_no_request_whatever_it_says_makes_a_new_series(folder: Path) -> None:
    engine = ScriptedEngine()
    it = Served(make_services(folder, engine, Settings(model="tiny")), engine)
    assert it.app  # which makes the series of all routes
    random_of = random.Random(0)

    def word() -> str:
        return "".join(random_of.choice("abc/%{}\"'\\éß0") for _ in range(random_of.randrange(1, 12)))

    def fuzz() -> None:
        body: dict[str, object] = {
            "prompt": word() * random_of.randrange(1, 150),
            "max_tokens": random_of.randrange(-1, 9),
        }
        body |= random_of.choice([{}, {"model": word()}, {"stream": True}, {word(): 1}, {"user": word()}, {"n": 3}])
        path = random_of.choice(
            [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/models/" + quote(word()), "/" + quote(word(), safe="")]
        )
        method = random_of.choice(["POST", "POST", "POST", "GET", "PUT"])
        headers = {"x-request-id": word().encode().hex(), "traceparent": word().encode().hex()}
        it.request(method, path, json=body, headers=headers)

    before = series(it)
    for _ in range(150):
        fuzz()
    assert series(it) == before
    assert len(before) <= MAX_SAMPLES
    answered = it.value("requests_total", route=COMPLETIONS, outcome="ok")
    assert answered is not None
    assert answered > 5  # the fuzz was not refused altogether


def series(it: Served) -> set[str]:
    lines = scrape(it.services.telemetry.metrics.registry, TEXT).decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}
