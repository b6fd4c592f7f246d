"""Traces, logs and latencies of a real server: what a collector and a client see of the same requests."""

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from running_server import Server, StartServer, free_port

from support.telemetry.otlp_collectors import Collector, attributes, events, http_collector

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
COMPLETIONS = "/v1/completions"
SERVER, OPERATION = f"POST {COMPLETIONS}", "text_completion demo"
CANARY = "xyzzy-canary"


@dataclass(frozen=True, slots=True)
class Observed:
    server: Server
    collector: Collector
    admin_port: int

    def spans_of(self, trace_id: str) -> Collector:
        """The spans of one trace, once its last one, the server's, has arrived."""

        def found() -> Collector:
            trace = Collector()
            trace.spans = [span for span in self.collector.spans if span.trace_id.hex() == trace_id]
            return trace

        self.server.wait_for(lambda: SERVER in {span.name for span in found().spans}, "the trace")
        return found()


@pytest.fixture(scope="module")
def observed(start_server: StartServer) -> Iterator[Observed]:
    admin_port = free_port()
    with http_collector() as collector:
        flags = ("--otlp-endpoint", collector.url, "--admin-port", str(admin_port), "--log-format", "json")
        # A replay's span joins the trace of the request when it is over: of these only where it is idle in time.
        with start_server(*flags, "--replay-share", "0") as server:
            server.wait_ready()
            yield Observed(server, collector, admin_port)


@dataclass(slots=True)
class Stream:
    """A streamed completion over a plain connection: as little of a client as can be."""

    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    ttft_s: float  # from the request's first byte to the first event

    @property
    def trace_id(self) -> str:
        header = self.response.headers["traceparent"]
        return header.split("-")[1]

    def leave(self) -> None:
        self.response.close()
        self.connection.close()

    def rest(self) -> bytes:
        """Return what is left of the stream."""
        body = self.response.read()
        self.leave()
        return body


def begin(server: Server, prompt: object, max_tokens: int, headers: dict[str, str] | None = None) -> Stream:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.connect()
    fields = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    body = json.dumps(fields).encode()
    began_at = time.perf_counter()
    connection.request("POST", COMPLETIONS, body, {"content-type": "application/json", **(headers or {})})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return Stream(connection, response, time.perf_counter() - began_at)


def test_a_stream_is_a_tree_in_the_clients_trace(observed: Observed) -> None:
    trace_id, parent_id = os.urandom(16).hex(), os.urandom(8).hex()
    stream = begin(observed.server, CANARY, 8, {"traceparent": f"00-{trace_id}-{parent_id}-01"})
    assert stream.rest().endswith(b"data: [DONE]\n\n")
    trace = observed.spans_of(trace_id)
    assert trace.tree() == {
        "": [SERVER],
        SERVER: [OPERATION],
        OPERATION: ["hallmark.tokenize", "hallmark.queue", "hallmark.prefill", "hallmark.decode"],
    }
    assert trace.named(SERVER).parent_span_id.hex() == parent_id
    found = attributes(trace.named(OPERATION))
    assert found["gen_ai.usage.output_tokens"] == 8
    assert found["hallmark.attention.path"]
    names = [name for name, _ in events(trace.named(OPERATION))]
    assert "first_token" in names
    assert "attention.selected" in names


def test_a_client_that_leaves_is_on_its_trace(observed: Observed) -> None:
    stream = begin(observed.server, "Once upon a time", 3000)
    stream.leave()
    trace = observed.spans_of(stream.trace_id)
    assert ("client.disconnect", {"stage": "streaming"}) in events(trace.named(OPERATION))
    assert attributes(trace.named("hallmark.decode"))["hallmark.is_complete"] is False
    assert trace.named(OPERATION).status.code == Span().status.code  # unset: the client's going is no error


def test_the_servers_time_to_first_token_is_the_clients(observed: Observed) -> None:
    """Allow 5 % or 2 ms, whichever is more, at two lengths of the prompt."""
    for num_tokens in (64, 400):
        streams = []
        for _ in range(10):
            stream = begin(observed.server, list(range(100, 100 + num_tokens)), 2)
            stream.rest()
            streams.append(stream)
        pairs = []
        for stream in streams:  # not one by one: spans are sent once a second
            operation = observed.spans_of(stream.trace_id).named(OPERATION)
            server_s = attributes(operation)["gen_ai.response.time_to_first_chunk"]
            assert isinstance(server_s, float)
            pairs.append((server_s, stream.ttft_s))
        # Of the request with the least gap: a client that waits for a core, which others use too, only ever adds.
        server_s, client_s = min(pairs, key=lambda pair: pair[1] - pair[0])
        assert abs(client_s - server_s) <= max(0.05 * client_s, 0.002), f"{num_tokens} tokens: {pairs}"


def test_the_log_is_json_with_trace_ids_and_without_prompts(observed: Observed) -> None:
    stream = begin(observed.server, CANARY, 4)
    stream.rest()
    observed.server.wait_for(lambda: stream.trace_id in observed.server.log, "the request's line")
    lines = [line for line in observed.server.log.splitlines() if line.startswith("{")]
    [event] = [event for event in map(json.loads, lines) if event.get("trace_id") == stream.trace_id]
    assert event["message"] == SERVER
    assert (event["status"], event["outcome"]) == (200, "ok")
    assert CANARY not in observed.server.log
    assert CANARY.encode() not in observed.collector.raw


def test_metrics_are_on_the_admin_port_alone_and_lead_to_traces(observed: Observed) -> None:
    assert observed.server.get("/metrics").status_code == 404
    admin = http.client.HTTPConnection("127.0.0.1", observed.admin_port, timeout=10)
    admin.request("GET", "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    response = admin.getresponse()
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    lines = response.read().decode().splitlines()
    admin.close()
    assert lines[-1] == "# EOF"
    exemplars = [line for line in lines if line.startswith("hallmark_time_to_first_token") and 'trace_id="' in line]
    assert exemplars
    for line in exemplars:
        observed.spans_of(line.split('trace_id="')[1][:32])  # none leads nowhere


def test_an_engine_that_dies_is_an_error_in_the_trace(observed: Observed) -> None:
    """The last test of this server: its engine is restarted behind it."""
    stream = begin(observed.server, "Once upon a time", 3000)
    os.kill(observed.server.engine_pid(), signal.SIGKILL)
    error = stream.rest().decode()
    assert "engine_died" in error
    assert f'"trace_id":"{stream.trace_id}"' in error
    trace = observed.spans_of(stream.trace_id)
    for name in (SERVER, OPERATION):
        assert trace.named(name).status.code == 2
        assert attributes(trace.named(name))["error.type"] == "engine_died"
