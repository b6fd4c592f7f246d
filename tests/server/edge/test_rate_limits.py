"""Requests and tokens a minute of each API key, as clients see them and as they refill."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from server.edge.rate_limits import Quota, RateLimits
from server.errors import RateLimited, SettingsError
from server.settings import Settings
from support.api.edge_fakes import saying, served, with_keys

COMPLETIONS = "/v1/completions"


@dataclass(eq=False)
class Request:
    num_tokens: int = 0


class Limited:
    """Limits whose clock a test sets."""

    def __init__(self, requests: int | None = None, tokens: int | None = None) -> None:
        self.seconds = 0.0
        self._limits = RateLimits(requests, tokens, clock=lambda: self.seconds)

    def quota(self, key: bytes = b"a") -> Quota:
        quota = self._limits.quota(key)
        assert quota is not None
        return quota


def test_requests_refill_evenly_and_each_key_has_its_own() -> None:
    it = Limited(requests=60)
    for _ in range(60):
        it.quota().enter(Request())
    with pytest.raises(RateLimited, match="60 requests a minute"):
        it.quota().enter(Request())
    it.quota(b"b").enter(Request())
    it.seconds = 1.0
    it.quota().enter(Request())
    with pytest.raises(RateLimited) as refused:
        it.quota().enter(Request())
    assert refused.value.retry_after_s == 1


def test_tokens_count_while_they_are_computed() -> None:
    it = Limited(tokens=600)
    running = Request(num_tokens=500)
    it.quota().enter(running)
    it.quota().enter(Request())
    running.num_tokens = 610
    with pytest.raises(RateLimited, match="600 tokens a minute"):
        it.quota().enter(Request())
    it.quota().leave(running)
    with pytest.raises(RateLimited) as refused:
        it.quota().enter(Request())
    assert refused.value.retry_after_s == 2  # 11 tokens at 10 a second
    it.seconds = 1.2
    it.quota().enter(Request())


@pytest.mark.parametrize("seed", range(20))
def test_a_burst_uses_no_more_than_its_key_has(seed: int) -> None:
    """Whatever is reserved and used, only the last request to start may pass the limit, by its own tokens."""
    rng, it, used = random.Random(seed), Limited(tokens=1000), []

    async def run(reserved: int) -> None:
        request = Request()
        it.quota().enter(request)
        try:
            await it.quota().start(request, reserved)
            for _ in range(rng.randrange(1, 5)):
                await asyncio.sleep(0)
                request.num_tokens = min(reserved, request.num_tokens + rng.randrange(1 + reserved))
            used.append(request.num_tokens)
        finally:
            it.quota().leave(request)

    async def burst() -> list[BaseException | None]:
        sizes = [rng.randrange(1, 400) for _ in range(60)]
        async with asyncio.timeout(30):
            return await asyncio.gather(*map(run, sizes), return_exceptions=True)

    refused = [error for error in asyncio.run(burst()) if error is not None]
    assert 1000 - 400 < sum(used) < 1000 + 400
    assert len(refused) == 60 - len(used)
    assert all(isinstance(error, RateLimited) for error in refused)


def test_tokens_that_are_not_used_are_the_next_ones() -> None:
    it, order = Limited(tokens=6), []  # a token refills in 10 s

    async def run(name: str) -> None:
        request = Request()
        it.quota().enter(request)
        await it.quota().start(request, 6)
        order.append(name)
        await asyncio.sleep(0)
        request.num_tokens = 1
        it.quota().leave(request)

    async def all_at_once() -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*map(run, "abcdef"))

    asyncio.run(all_at_once())
    assert "".join(order) == "abcdef"


def test_one_that_waits_starts_when_its_tokens_refill() -> None:
    it = RateLimits(None, 60_000)  # by the real clock: a token a millisecond

    async def wait() -> None:
        quota, ended, first, second = it.quota(b"a"), Request(30_000), Request(), Request()
        assert quota is not None
        for request in (ended, first, second):
            quota.enter(request)
        quota.leave(ended)
        await quota.start(first, 30_020)
        async with asyncio.timeout(30):
            await quota.start(second, 1)

    asyncio.run(wait())


def test_of_a_burst_those_without_tokens_left_get_a_429(folder: Path) -> None:
    settings = {"api_key_file": "k", "key_tokens_per_minute": 300}
    it = with_keys(served(folder, saying("x" * 49), **settings), "right", "other")
    bodies = [{"prompt": "p" * 50, "max_tokens": 50}] * 30

    async def burst() -> list[int]:
        async with it.client() as client:
            posts = [
                client.post(COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"})
                for key in ("right", "other")
                for body in bodies
            ]
            return [answer.status_code for answer in await asyncio.gather(*posts)]

    codes = asyncio.run(burst())
    for of_key in (codes[:30], codes[30:]):
        assert sorted(of_key) == [200] * 3 + [429] * 27
    assert len(it.engine.submitted) == 6
    assert it.value("rejected_total", reason="key_tokens") == 54


def test_a_request_that_was_refused_costs_nothing() -> None:
    it, refused = Limited(requests=1, tokens=60), Request(num_tokens=1000)
    it.quota().enter(Request())
    with pytest.raises(RateLimited):
        it.quota().enter(refused)
    it.quota().leave(refused)
    it.seconds = 60.0
    it.quota().enter(Request())


def test_a_client_sees_its_limits_and_a_429_in_openais_words(folder: Path) -> None:
    it = with_keys(
        served(folder, saying("Hello"), api_key_file="k", key_requests_per_minute=2, key_tokens_per_minute=1000),
        "right",
        operator="root",
    )
    key = {"authorization": "Bearer right"}
    assert "x-ratelimit-limit-requests" not in it.get("/v1/models", headers=key).headers
    first = it.post(COMPLETIONS, {"prompt": "four"}, headers=key)
    assert (first.headers["x-ratelimit-limit-requests"], first.headers["x-ratelimit-remaining-requests"]) == ("2", "1")
    assert first.headers["x-ratelimit-remaining-tokens"] == "990"  # four of the prompt, six of the answer
    it.post(COMPLETIONS, {"prompt": 1}, headers=key)  # a 400 counts too
    refused = it.post(COMPLETIONS, {"prompt": "four"}, headers=key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 28 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"] in ("59s", "1m0s")
    assert it.value("rejected_total", reason="key_requests") == 1
    for _ in range(3):
        answer = it.post(COMPLETIONS, {"prompt": "a"}, headers={"authorization": "Bearer root"})
        assert (answer.status_code, "x-ratelimit-limit-requests" in answer.headers) == (200, False)


def test_limits_without_keys_stop_the_start() -> None:
    with pytest.raises(SettingsError, match=r"^--key-tokens-per-minute is a limit of each API key"):
        RateLimits.of(Settings(key_tokens_per_minute=5))
