"""Seeded traces: when which request is sent. Lengths and times come from the seed alone, token ids from the seed and a
salt: with another salt the same load meets no cache of prefixes that an earlier run has filled."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from qualification.load.sample import LoadRequest

FIRST_TOKEN_ID = 10  # vocabularies keep their special tokens at either end; those below are left out


@dataclass(frozen=True, slots=True)
class Seed:
    """The seed of one trace."""

    seed: str
    salt: str
    vocab_size: int  # ids below this are drawn

    def chance(self) -> random.Random:
        """The random source of lengths and times."""
        return random.Random(self.seed)

    def prompts(self) -> "Prompts":
        return Prompts(random.Random(f"{self.seed}/{self.salt}"), self.vocab_size)


class Prompts:
    """Random token ids: no two prompts share a beginning, so no cache of prefixes can answer for the kernels."""

    def __init__(self, chance: random.Random, vocab_size: int) -> None:
        self._chance = chance
        self._ids = range(FIRST_TOKEN_ID, vocab_size)

    def draw(self, length: int) -> list[int]:
        return self._chance.choices(self._ids, k=length)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal numbers of tokens, clipped to `[1, most]`; published chat traces look like that."""

    median: int
    sigma: float  # of the logarithm: 1 puts 5% beyond five times the median
    most: int

    def draw(self, chance: random.Random) -> int:
        return max(1, min(self.most, round(self.median * math.exp(chance.gauss(0.0, self.sigma)))))


def at_once(seed: Seed, *, num_requests: int, num_input: int, num_output: int) -> list[LoadRequest]:
    """All requests at the start, of one length."""
    prompts = seed.prompts()
    return [LoadRequest(0.0, prompts.draw(num_input), num_output) for _ in range(num_requests)]


def open_loop(seed: Seed, *, rate: float, num_requests: int, inputs: Lengths, outputs: Lengths) -> list[LoadRequest]:
    """Poisson arrivals, `rate` a second, sent whether or not earlier ones were answered."""
    chance, prompts = seed.chance(), seed.prompts()
    now, requests = 0.0, []
    for _ in range(num_requests):
        requests.append(LoadRequest(now, prompts.draw(inputs.draw(chance)), outputs.draw(chance)))
        now += chance.expovariate(rate)
    return requests


def stratified(seed: Seed, *, rate: float, lengths: Sequence[int], num_each: int, num_output: int) -> list[LoadRequest]:
    """Poisson arrivals in which each length comes exactly `num_each` times, in random order."""
    chance, prompts = seed.chance(), seed.prompts()
    order = [length for length in lengths for _ in range(num_each)]
    chance.shuffle(order)
    now, requests = 0.0, []
    for length in order:
        requests.append(LoadRequest(now, prompts.draw(length), num_output))
        now += chance.expovariate(rate)
    return requests


def shared_prefix(
    seed: Seed, *, num_followers: int, num_shared: int, num_own: int, num_output: int
) -> list[LoadRequest]:
    """One request with a new prefix, then `num_followers` that share it. To be sent one after another."""
    prompts = seed.prompts()
    shared = prompts.draw(num_shared)
    return [
        LoadRequest(0.0, shared + prompts.draw(num_own), num_output, "warm" if n else "cold")
        for n in range(num_followers + 1)
    ]
