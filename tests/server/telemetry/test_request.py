"""The latencies that a request leaves in the metrics: from when, to when, and under which bucket."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from server.protocol.messages import FinishReason, TokenDelta
from server.telemetry.metrics import Metrics
from server.telemetry.request import RequestRecord
from server.telemetry.tracing import Tracing
from server.text.tokenizer import Tokenizer
from support.api.edge_fakes import Served, saying, served, with_model
from support.scraped import scraped_value

TTFT, TPOT = "time_to_first_token_seconds", "time_per_output_token_seconds"


class Requests:
    """Records of requests whose clock a test sets."""

    def __init__(self) -> None:
        self.metrics = Metrics("tiny", CollectorRegistry(), version="1.0")
        self.seconds = 0.0

    def begin(self, arrived_at: float) -> RequestRecord:
        tracing = Tracing(None, version="1.0", count_dropped=self.metrics.traffic.spans_dropped)
        trace = tracing.begin("POST", "/v1/completions", {}, request_id="mine", arrived_at=arrived_at)
        return RequestRecord(self.metrics, trace, "id-1", operation="text_completion", now=lambda: self.seconds)

    def value(self, name: str, bucket: str) -> float | None:
        return scraped_value(self.metrics.registry, f"hallmark_{name}", {"model": "tiny", "bucket": bucket})


def test_ttft_is_from_arrival_and_under_each_prompts_own_bucket() -> None:
    it = Requests()
    record = it.begin(arrived_at=10.0)
    it.seconds = 12.0
    record.tokenized(11.0)
    first, second = record.sequence(100), record.sequence(100)
    it.seconds = 12.5
    first.delta(TokenDelta("a", [1]))
    it.seconds = 13.0
    second.delta(TokenDelta("b", [1]))
    second.delta(TokenDelta("b", [2]))
    assert (it.value(f"{TTFT}_count", "le_128"), it.value(f"{TTFT}_sum", "le_128")) == (2, 2.5 + 3.0)
    assert not it.value(f"{TTFT}_count", "le_512")


@pytest.mark.parametrize(("num_tokens", "mean_s"), [(2, 3.0), (4, 1.0)])
def test_time_per_token_is_the_mean_gap_between_tokens(num_tokens: int, mean_s: float) -> None:
    it = Requests()
    sequence = it.begin(arrived_at=0.0).sequence(100)
    for at, ids in ((5.0, [1]), (8.0, [*range(num_tokens - 1)])):
        sequence.delta(TokenDelta("a", ids, FinishReason.STOP if at > 5 else None), at)
        sequence.tokens(len(ids))
    sequence.end("stop")
    assert (it.value(f"{TPOT}_count", "le_128"), it.value(f"{TPOT}_sum", "le_128")) == (1, mean_s)


class SlowTokenizer(Tokenizer):
    """Takes 0.1 s for a text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        time.sleep(0.1)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_ttft_holds_the_time_to_receive_and_to_tokenize(folder: Path, stream: bool) -> None:
    fast = served(folder, saying("Hel", "lo"))
    it = Served(with_model(fast.services, tokenizer=SlowTokenizer.load(folder)), fast.engine)
    prompts = f'["{"a" * 100}", "{"b" * 100}"]'.encode()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.sleep(0.1)
        yield prompts + b', "stream": true}' if stream else prompts + b"}"

    headers = {"content-type": "application/json"}
    assert it.request("POST", "/v1/completions", content=body(), headers=headers).status_code == 200
    of_prompts = {"model": "tiny", "bucket": "le_128"}
    assert it.value(f"{TTFT}_count", **of_prompts) == 2
    total = it.value(f"{TTFT}_sum", **of_prompts)
    assert total is not None
    assert total >= 2 * (0.1 + 2 * 0.1) - 0.01  # both wait for the body, and for both texts
    assert it.value(f"{TTFT}_count", model="tiny", bucket="le_512") == 0
