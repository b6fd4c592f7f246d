"""The load generator against a scripted server, over real HTTP."""

import math
import statistics
import time
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import pytest

from qualification.load.client import LoadClient
from qualification.load.discovery import DiscoveryError, discover
from qualification.load.events import EventReader
from qualification.load.sample import LoadRequest
from qualification.load.trace import Lengths, Seed, at_once, open_loop, shared_prefix
from qualification.load.workers import run_in_workers
from support.scripted_server import Script, serving

SEED = Seed("a", "b", 500)


@pytest.fixture
def client(url: str) -> Generator[LoadClient, None, None]:
    client = LoadClient(discover(url)[0], timeout_s=60)
    yield client
    client.close()


def requests(*lengths: int, num_output: int = 4) -> list[LoadRequest]:
    prompts = SEED.prompts()
    return [LoadRequest(0.0, prompts.draw(length), num_output) for length in lengths]


# --- what comes back --------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_server(script: Script, client: LoadClient) -> None:
    script.first_token_s = lambda _: 0.05
    script.token_s = 0.02
    began_at = time.monotonic()
    [sample] = client.run(requests(9)).samples
    took_s = time.monotonic() - began_at
    assert sample.error is None
    assert (sample.num_prompt_tokens, sample.num_tokens, len(sample.read_at)) == (9, 4, 4)
    assert sample.ttft_s is not None
    assert sample.tpot_s is not None
    assert sample.ttft_s >= 0.05
    assert sample.ttft_s + 3 * sample.tpot_s >= 0.05 + 3 * 0.02  # a late first token shortens the gap after it
    assert sample.ttft_s + 3 * sample.tpot_s <= took_s + 1e-6
    assert len(sample.gaps_s) == 3


def test_a_request_is_greedy_whole_and_of_token_ids(script: Script, client: LoadClient) -> None:
    [request] = requests(3)
    client.run([request])
    assert script.bodies == [
        {
            "model": "demo",
            "prompt": request.token_ids,
            "max_tokens": 4,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize(
    ("changes", "has_usage", "error"),
    [
        ({"tokens_per_event": 3}, True, None),
        ({"has_usage": False, "token_s": 0.001}, False, None),  # an event counts as a token
        ({"is_spaced": True}, True, None),
        ({"status": 503}, False, "HTTP 503: go away"),
        ({"error_event": True}, False, "the engine died"),
        ({"is_cut": True}, False, "the connection was lost: closed by the server"),
    ],
)
def test_a_sample_has_its_tokens_or_an_error_of_one_line(
    changes: dict[str, Any], has_usage: bool, error: str | None
) -> None:
    script = Script(**changes)
    with serving(script) as url:
        client = LoadClient(discover(url)[0], timeout_s=60)
        [sample] = client.run(requests(3)).samples
        client.close()
    assert (sample.error, sample.ttft_s is None) == (error, error is not None)
    if error is None:
        assert (sample.num_tokens, sample.has_usage) == (4, has_usage)
        assert len(sample.read_at) <= -(-4 // script.tokens_per_event)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_are_read_wherever_the_bytes_are_cut(end: str) -> None:
    text = 'data: {"choices":[{"text":"\\"error\\":{"}]}\n\ndata: {"choices":[{"text":"€"}]}\n\n'
    text += 'data: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n'
    reader = EventReader()
    assert sum(reader.feed(bytes([byte])) for byte in text.replace("\n", end).encode()) == 2
    assert (reader.num_events, reader.num_tokens, reader.error) == (2, 7, None)


@pytest.mark.parametrize("usage", ["5", '{"completion_tokens": "7"}', "[" * 100_000])
def test_a_usage_that_is_none_is_an_error_of_the_request(usage: str) -> None:
    reader = EventReader()
    reader.feed(f'data: {{"choices": [], "usage": {usage}}}\n\n'.encode())
    assert (reader.num_tokens, reader.error) == (None, "an event is no JSON of a completion")


def test_an_answer_that_does_not_end_is_given_up(script: Script, url: str) -> None:
    script.token_s = 0.5
    client = LoadClient(discover(url)[0], timeout_s=0.1)
    [sample] = client.run(requests(3)).samples
    client.close()
    assert sample.error == "no end of the answer within 0.1 s"


@pytest.mark.parametrize("drops_idle", [False, True])
def test_connections_are_kept_or_opened_again(script: Script, client: LoadClient, drops_idle: bool) -> None:
    script.drops_idle, before = drops_idle, script.num_connections
    samples = client.run_in_turn(requests(3, 4, 5)).samples
    assert [sample.error for sample in samples] == [None] * 3
    assert script.num_connections == before + (3 if drops_idle else 1)


def test_requests_at_once_overlap_and_a_trace_is_kept_to(script: Script, client: LoadClient) -> None:
    script.first_token_s = lambda _: 0.4
    trace = [LoadRequest(0.01 * n, [11, 12], 1) for n in range(5)]
    result = client.run(trace)
    assert [sample.planned_at for sample in result.samples] == [request.at_s for request in trace]
    assert all(sample.sent_at >= sample.planned_at for sample in result.samples)
    assert max(sample.sent_at for sample in result.samples) < min(sample.read_at[0] for sample in result.samples)
    assert 0 <= result.lag.send_p99_s <= result.lag.send_max_s


def test_workers_send_every_request_once(script: Script, url: str) -> None:
    script.token_s = 0.001
    seen = []
    trace = requests(3, 4, 5, 6, 7)
    result = run_in_workers(discover(url)[0], trace, 2, timeout_s=60, progress=seen.append)
    assert sorted(sample.num_prompt_tokens for sample in result.samples) == [3, 4, 5, 6, 7]
    assert [sample.error for sample in result.samples] == [None] * 5
    assert max(seen) == 5


def test_a_server_that_is_not_there_fails_each_request(script: Script) -> None:
    with serving(script) as url:
        target, _ = discover(url)
    result = run_in_workers(target, requests(3, 4), 2, timeout_s=60, progress=lambda _: None)
    assert [(sample.error or "")[:15] for sample in result.samples] == ["cannot connect:"] * 2


def test_a_model_is_found_with_or_without_v1_in_the_url(script: Script, url: str) -> None:
    script.max_model_len = None
    assert discover(url + "/v1", bearer="k")[0] == discover(url, bearer="k")[0]
    assert discover(url)[1] is None
    assert script.keys == {"Bearer k", None}


def test_a_url_where_no_model_is_says_so_in_a_line(refused_url: str) -> None:
    for url in ("127.0.0.1:8000", "ftp://127.0.0.1", refused_url):
        with pytest.raises(DiscoveryError, match=url):
            discover(url)


@pytest.mark.parametrize("fault", [{"model": 5}, {"max_model_len": "long"}], ids=str)
def test_malformed_model_name_is_one_line(url: str, script: Script, fault: dict) -> None:
    for name, value in fault.items():
        setattr(script, name, value)
    with pytest.raises(DiscoveryError, match="names no model at /v1/models: id "):
        discover(url)


# --- traces -----------------------------------------------------------------------------------------------------------


def test_salt_changes_only_the_tokens_of_a_trace() -> None:
    def trace(salt: str) -> list[LoadRequest]:
        lengths = Lengths(20, 1.0, 400)
        return open_loop(Seed("a", salt, 500), rate=5, num_requests=50, inputs=lengths, outputs=lengths)

    assert trace("x") == trace("x")
    for one, other in zip(trace("x"), trace("y"), strict=True):
        assert (one.at_s, len(one.token_ids), one.max_tokens) == (other.at_s, len(other.token_ids), other.max_tokens)
        assert len(one.token_ids) < 3 or one.token_ids != other.token_ids


def test_arrivals_are_poisson_and_lengths_log_normal() -> None:
    lengths = Lengths(100, 0.5, 1000)
    trace = open_loop(SEED, rate=10, num_requests=4000, inputs=lengths, outputs=lengths)
    gaps = [b.at_s - a.at_s for a, b in pairwise(trace)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.1)
    logs = [math.log(len(request.token_ids)) for request in trace]
    assert math.exp(statistics.mean(logs)) == pytest.approx(100, rel=0.05)
    assert statistics.stdev(logs) == pytest.approx(0.5, rel=0.05)


def test_token_ids_are_in_the_vocabulary_and_not_special() -> None:
    [request] = at_once(SEED, num_requests=1, num_input=5000, num_output=1)
    assert 10 <= min(request.token_ids) <= max(request.token_ids) < 500


def test_followers_share_only_the_prefix() -> None:
    cold, *warm = shared_prefix(SEED, num_followers=3, num_shared=20, num_own=5, num_output=1)
    assert (cold.label, {request.label for request in warm}) == ("cold", {"warm"})
    assert all(request.token_ids[:20] == cold.token_ids[:20] for request in warm)
    assert len({tuple(request.token_ids[20:]) for request in [cold, *warm]}) == 4
