"""Limits of requests and tokens a minute, of each API key on its own."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from typing import Protocol

from server.errors import RateLimited, SettingsError
from server.settings import Settings

_LEAST_WAIT_S = 0.1  # of requests for tokens to refill, before they look again


class Spender(Protocol):
    """A request while it runs."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""


class Budget:
    """Units that refill evenly, a minute's worth at most; it may be overdrawn, and refills from there."""

    def __init__(self, per_minute: int, now: float) -> None:
        """`now`: monotonic seconds, as everywhere here."""
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def left(self, now: float) -> float:
        refilled = self._left + (now - self._at) * self.per_minute / 60
        self._left, self._at = min(float(self.per_minute), refilled), now
        return self._left

    def take(self, amount: float, now: float) -> None:
        self._left = self.left(now) - amount

    def seconds_for(self, amount: float) -> float:
        """The time in which `amount` is refilled."""
        return max(0.0, amount) * 60 / self.per_minute


class Quota:
    """Requests and tokens that one key may still use. A request counts when it comes, tokens as they are computed.

    A request that is being computed also reserves tokens that it has not used yet: of many that come at once, only
    those start for which any are left. The others wait for them.
    """

    def __init__(self, requests: Budget | None, tokens: Budget | None, clock: Callable[[], float]) -> None:
        self._requests = requests
        self._tokens = tokens
        self._clock = clock
        self._running: dict[Spender, int] = {}  # with the tokens that each reserves
        self._turn = asyncio.Lock()  # of the first that waits; the others wait behind it, in order
        self._has_ended = asyncio.Event()  # one of those that run

    def enter(self, spender: Spender) -> None:
        """Count a request. Raises RateLimited, and counts nothing, where no request or no token is left."""
        now = self._clock()
        if self._requests is not None and (left := self._requests.left(now)) < 1:
            raise _refusal("requests", self._requests, 1 - left)
        if self._tokens is not None:
            self._check(self._tokens, now)
        if self._requests is not None:
            self._requests.take(1, now)
        self._running[spender] = 0

    async def start(self, spender: Spender, num_tokens: int) -> None:
        """Wait until a token is left that no other request reserves, and reserve `num_tokens` until the request ends.

        Raises RateLimited where none are left when its turn comes. One that did not enter starts at once.
        """
        tokens = self._tokens
        if tokens is None or spender not in self._running:
            return
        async with self._turn:
            while (left := self._unreserved(tokens, self._clock())) < 1:
                self._check(tokens, self._clock())
                self._has_ended.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(_LEAST_WAIT_S, tokens.seconds_for(1 - left))):
                        await self._has_ended.wait()
            self._running[spender] = num_tokens

    def leave(self, spender: Spender) -> None:
        """Subtract what a request has used in all; nothing for one that did not enter."""
        if spender in self._running:
            del self._running[spender]
            if self._tokens is not None:
                self._tokens.take(spender.num_tokens, self._clock())
            self._has_ended.set()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers x-ratelimit-*: limit, what is left, and the time until the whole limit is left again."""
        now, found = self._clock(), []
        for kind, budget in (("requests", self._requests), ("tokens", self._tokens)):
            if budget is not None:
                left = self._tokens_left(budget, now) if budget is self._tokens else budget.left(now)
                reset_s = budget.seconds_for(budget.per_minute - left)
                values = (("limit", budget.per_minute), ("remaining", max(0, math.floor(left))))
                found += [(f"x-ratelimit-{name}-{kind}".encode(), b"%d" % value) for name, value in values]
                found.append((f"x-ratelimit-reset-{kind}".encode(), _duration(reset_s).encode()))
        return found

    def _tokens_left(self, tokens: Budget, now: float) -> float:
        return tokens.left(now) - sum([spender.num_tokens for spender in self._running])

    def _unreserved(self, tokens: Budget, now: float) -> float:
        return tokens.left(now) - sum([max(it.num_tokens, reserved) for it, reserved in self._running.items()])

    def _check(self, tokens: Budget, now: float) -> None:
        if (left := self._tokens_left(tokens, now)) < 1:
            raise _refusal("tokens", tokens, 1 - left)


class RateLimits:
    """The quotas of all tenants' keys; operators' keys have none."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_minute = (requests_per_minute, tokens_per_minute)
        self._clock = clock
        self._quotas: dict[bytes, Quota] = {}  # by digest of the key

    @classmethod
    def of(cls, settings: Settings) -> "RateLimits":
        """Raises SettingsError for limits without keys."""
        limits = {
            "--key-requests-per-minute": settings.key_requests_per_minute,
            "--key-tokens-per-minute": settings.key_tokens_per_minute,
        }
        given = [flag for flag, limit in limits.items() if limit is not None]
        if given and settings.api_key_file is None:
            raise SettingsError(f"{given[0]} is a limit of each API key: it needs --api-key-file")
        return cls(*limits.values())

    def quota(self, digest: bytes) -> Quota | None:
        """The quota of a key; None where nothing is limited."""
        if self._per_minute == (None, None):
            return None
        quota = self._quotas.get(digest)
        if quota is None:
            now = self._clock()
            requests, tokens = [None if limit is None else Budget(limit, now) for limit in self._per_minute]
            quota = self._quotas[digest] = Quota(requests, tokens, self._clock)
        return quota


def _refusal(kind: str, budget: Budget, missing: float) -> RateLimited:
    wait_s = budget.seconds_for(missing)
    return RateLimited(
        f"This API key may use {budget.per_minute} {kind} a minute, and has used them; the next in {wait_s:.1f} s.",
        retry_after_s=max(1, math.ceil(wait_s)),
        is_of_tokens=kind == "tokens",
    )


def _duration(seconds: float) -> str:
    """Write a duration as OpenAI does: 250ms, 12s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
