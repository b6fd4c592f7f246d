"""The drill's traffic: one request after the other, split by weight on the client's side and timed there.

Of each bucket as many requests are sent as its quantiles need; its share of the traffic weighs them afterwards.
"""

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx2
from model import VOCAB_SIZE

# Prompt tokens (from, to), their bucket and their share: two requests in a hundred are long.
MIX = ((16, 96, "le_128", 0.70), (130, 170, "le_512", 0.28), (1400, 1600, "le_2k", 0.02))
HIT = "le_2k"  # the bucket where the math path is slow
SHARES = {bucket: share for _, _, bucket, share in MIX}
SAMPLES = {"le_128": 300, "le_512": 200, HIT: 120}  # of a round and side; a p99 needs 100


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to come."""

    bucket: str
    token_ids: list[int]
    is_moved: bool  # to the upgraded server, once there is one


@dataclass(frozen=True, slots=True)
class Timed:
    """A request that got its first token `ttft_s` after it was sent."""

    bucket: str
    ttft_s: float


def plan(samples: Mapping[str, int], moved_share: float, seed: int) -> list[Planned]:
    """The same for the same seed. Of every bucket the exact share moves."""
    rng = random.Random(seed)
    requests = []
    for lo, hi, bucket, _ in MIX:
        for i in range(samples[bucket]):
            token_ids = [rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randint(lo, hi))]
            requests.append(Planned(bucket, token_ids, i < round(samples[bucket] * moved_share)))
    rng.shuffle(requests)
    return requests


@dataclass(slots=True)
class Times:
    """Times of the same requests: as before the upgrade, the same once more, and as after it."""

    before: list[Timed] = field(default_factory=list)
    again: list[Timed] = field(default_factory=list)
    after: list[Timed] = field(default_factory=list)


def compare(stable: str, upgraded: str, requests: Iterable[Planned], times: Times) -> None:
    """Send each request to all three sides, one after the other and each of them first in turn: noise hits all alike.

    Adds to `times`. Raises httpx2.HTTPError.
    """
    with httpx2.Client(timeout=60) as client:
        for number, request in enumerate(requests):
            sides = [(times.before, stable), (times.again, stable)]
            sides.append((times.after, upgraded if request.is_moved else stable))
            first = number % len(sides)
            for found, url in sides[first:] + sides[:first]:
                found.append(Timed(request.bucket, first_token_s(client, url, request.token_ids)))


def first_token_s(client: httpx2.Client, url: str, token_ids: list[int]) -> float:
    """Seconds until the first event of a stream."""
    body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "stream": True, "ignore_eos": True}
    sent, first = time.perf_counter(), 0.0
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not first and line.startswith("data: {"):
                first = time.perf_counter()
    return first - sent


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile: a value that was measured. Raises ValueError without any."""
    if not values:
        raise ValueError("no quantile of no values")
    ordered = sorted(values)
    rank = -int(-len(ordered) * share // 1)  # ceiling
    return ordered[max(0, rank - 1)]
