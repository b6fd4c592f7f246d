"""Requests at random: some forked, some cancelled, often in the middle of a chunk."""

import random
from collections.abc import Sequence
from typing import Protocol

from server.engine.scheduling.engine import Engine


class ForkingSession(Protocol):
    """A session whose requests may have forks, named "REQUEST FORK"."""

    engine: Engine

    def ask(self, request_id: str, prompt: list[int], num_forks: int = 0) -> object:
        """Submit a request."""

    def step(self) -> None:
        """Run a step."""


def ask_at_random(
    session: ForkingSession,
    rng: random.Random,
    prompts: Sequence[list[int]],
    *,
    num_requests: int,
    most_steps: int,
    share_cancelled: float,
) -> dict[str, list[int]]:
    """Return the prompts of the answers that are still to come, by their names."""
    asked: dict[str, list[int]] = {}
    for index in range(num_requests):
        prompt, num_forks = rng.choice(prompts), rng.choice((0, 0, 2))
        session.ask(str(index), prompt, num_forks)
        asked |= dict.fromkeys((str(index), *(f"{index} {i}" for i in range(num_forks))), prompt)
        for _ in range(rng.randrange(most_steps + 1)):
            session.step()
        if rng.random() < share_cancelled:
            cancelled = rng.choice(list(asked))
            session.engine.cancel(cancelled)
            del asked[cancelled]
    return asked
