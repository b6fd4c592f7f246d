"""Seals of pages: what a page holds by the sequence that filled it, compared when another one finds it.

A page is found by its name (page_keys.py). A seal says the same once more, by another way: it is kept by the page's
number and not by its name, and is made of the sequence itself. So a name that two pages share, a salt that is left out,
a name that is given to the wrong page and a page that is written again under its old name all show at the next hit.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Protocol

from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.seal_chain import SealChain

logger = logging.getLogger(__name__)

SEALED_SHARE = 1 / 64  # of the calls that publish pages, whose bytes are sealed too
_MOST_PAGES = 2  # of such a call


class PageBytes(Protocol):
    """Digests of the bytes of pages; see server/engine/execution/page_bytes.py."""

    def seal(self, pages: Sequence[int]) -> None:
        """Keep the digests of what these pages hold when all that was launched is done."""

    def differing(self, pages: Sequence[int]) -> list[int]:
        """Return those of the pages whose bytes are not those that were sealed. Waits for the device."""


class NoPageBytes:
    """Digests where no bytes are at hand."""

    def seal(self, pages: Sequence[int]) -> None: ...

    def differing(self, pages: Sequence[int]) -> list[int]:  # noqa: ARG002
        return []


class PageSeals:
    """The seals of a pool's pages."""

    def __init__(
        self,
        pool: PagePool,
        page_bytes: PageBytes | None = None,
        *,
        share: float = SEALED_SHARE,
        rng: Random | None = None,
    ) -> None:
        """`share` of the calls of `seal` seals bytes too, of some of the pages."""
        self._pool = pool
        self._bytes: PageBytes = NoPageBytes() if page_bytes is None else page_bytes
        self._share = share
        self._rng = Random() if rng is None else rng
        self._seals: dict[int, bytes] = {}
        self._with_bytes: set[int] = set()
        self._num_mismatches = 0

    def take_mismatches(self) -> int:
        """Return how many pages were dropped since the last call, because they did not hold what they should."""
        found, self._num_mismatches = self._num_mismatches, 0
        return found

    def seal(self, chain: SealChain, pages: Sequence[int], first: int) -> None:
        """Seal pages that are full and computed, of which the first is the sequence's page `first`."""
        for index, page in enumerate(pages, start=first):
            self._seals[page] = chain[index]
            self._with_bytes.discard(page)
        if self._rng.random() < self._share:
            drawn = self._rng.sample(pages, min(_MOST_PAGES, len(pages)))
            self._bytes.seal(drawn)
            self._with_bytes.update(drawn)

    def sound(self, chain: SealChain, keys: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the names of a sequence's pages up to the first one whose page has another seal: that is dropped."""
        for index, key in enumerate(keys):
            page = self._pool.page_of_key.get(key)
            if page is not None and self._seals.get(page) != chain[index]:
                self._drop(page, "holds other tokens than its name says")
                return
            yield key

    def drop_differing(self, pages: Sequence[int]) -> bool:
        """Drop those of the pages whose bytes are not those that were sealed; return whether there is one."""
        sealed = [page for page in pages if page in self._with_bytes]
        differing = self._bytes.differing(sealed) if sealed else []
        for page in differing:
            self._drop(page, "holds other bytes than were computed")
        return bool(differing)

    def _drop(self, page: int, why: str) -> None:
        logger.error("page %d of the KV cache %s: it is dropped, and computed again", page, why)
        self._num_mismatches += 1
        self._with_bytes.discard(page)
        self._pool.forget(page)
