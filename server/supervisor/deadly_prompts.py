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
MOST_REMEMBERED = 256  # prompts, 16 bytes each
MOST_SUSPECTS = 8  # of one death: of more, who did it cannot be said, and most of them did not


class DeadlyPrompts:
    """Counts the engines that died while a prompt was being read. Nothing is kept of a prompt but a keyed digest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = os.urandom(16)
        self._deaths: dict[bytes, tuple[int, float]] = {}  # digest -> (deaths, of the latest); the latest last

    def blame(self, prompts: Iterable[Sequence[int]]) -> None:
        """Count a death for each of these prompts, which had no answer yet; for none where they are many."""
        digests = {self._digest(prompt) for prompt in prompts}
        if len(digests) > MOST_SUSPECTS:
            return
        now = self._clock()
        for digest in digests:
            num_deaths = self._count(digest) + 1
            self._deaths.pop(digest, None)
            self._deaths[digest] = num_deaths, now
            if num_deaths == DEATHS_UNTIL_REFUSED:
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
        num_deaths = self._count(self._digest(prompt))
        if num_deaths < DEATHS_UNTIL_REFUSED:
            return None
        return (
            f"{num_deaths} engines died while they read this prompt of {len(prompt)} tokens, so it is not tried again "
            f"for {MEMORY_S / 60:.0f} minutes. Send a shorter prompt, or ask the operator to read the server's log."
        )

    def _count(self, digest: bytes) -> int:
        num_deaths, at = self._deaths.get(digest, (0, 0.0))
        return num_deaths if self._clock() - at <= MEMORY_S else 0

    def _digest(self, prompt: Sequence[int]) -> bytes:
        return hashlib.blake2b(array("q", prompt), key=self._key, digest_size=16).digest()
