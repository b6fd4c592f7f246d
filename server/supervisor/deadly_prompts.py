"""Prompts that an engine died of: their digests, so that a client that tries again cannot end every engine."""

import hashlib
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterable, Sequence

logger = logging.getLogger(__name__)

DEATHS_UNTIL_REFUSED = 2
MEMORY_S = 3600.0  # after the latest death
MOST_REMEMBERED = 1024  # prompts, 16 bytes each
MOST_SUSPECTS = 8  # of one death that counts whole: of more, most did not do it, and each gets its share of 8


class DeadlyPrompts:
    """Counts the engines that died while a prompt was being read. Nothing is kept of a prompt but a keyed digest.

    After a death the clients of all open streams try again at once. So with 64 clients there may be 64 suspects of each
    death from then on, and if none of them was counted one prompt could end engine after engine. Each counts an eighth
    then: what is not answered in 16 lives of an engine is refused, and what is answered meanwhile is forgiven.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = os.urandom(16)
        # digest -> (deaths, their share that is counted, when the latest was); the latest last
        self._deaths: dict[bytes, tuple[int, float, float]] = {}

    def blame(self, prompts: Iterable[Sequence[int]]) -> None:
        """Count a death for each of these prompts, which had no answer yet; a part of it where they are many."""
        digests = {self._digest(prompt) for prompt in prompts}
        now, share = self._clock(), min(1.0, MOST_SUSPECTS / max(1, len(digests)))
        for digest in digests:
            num_deaths, counted = self._count(digest)
            was_refused = counted >= DEATHS_UNTIL_REFUSED
            num_deaths, counted = num_deaths + 1, counted + share
            self._deaths.pop(digest, None)
            self._deaths[digest] = num_deaths, counted, now
            if counted >= DEATHS_UNTIL_REFUSED and not was_refused:
                logger.error("%d engines died while they read the same prompt; it is refused from now on", num_deaths)
        while len(self._deaths) > MOST_REMEMBERED:
            del self._deaths[next(iter(self._deaths))]

    def forgive(self, prompt: Sequence[int]) -> None:
        """Forget a prompt: an engine has answered it."""
        if self._deaths:
            self._deaths.pop(self._digest(prompt), None)

    def refusal(self, prompt: Sequence[int]) -> str | None:
        """Return why the prompt is refused; None where it is not."""
        if not self._deaths:
            return None
        num_deaths, counted = self._count(self._digest(prompt))
        if counted < DEATHS_UNTIL_REFUSED:
            return None
        return (
            f"{num_deaths} engines died while they read this prompt of {len(prompt)} tokens, so it is not tried again "
            f"for {MEMORY_S / 60:.0f} minutes. Send a shorter prompt, or ask the operator to read the server's log."
        )

    def _count(self, digest: bytes) -> tuple[int, float]:
        """Return how many engines died while the prompt was being read, and the share of that that is counted."""
        num_deaths, counted, at = self._deaths.get(digest, (0, 0.0, 0.0))
        return (num_deaths, counted) if self._clock() - at <= MEMORY_S else (0, 0.0)

    def _digest(self, prompt: Sequence[int]) -> bytes:
        return hashlib.blake2b(array("q", prompt), key=self._key, digest_size=16).digest()
