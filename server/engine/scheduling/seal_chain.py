"""The seals of a sequence's pages, by which they are known beside their names."""

from array import array
from hashlib import blake2b

from server.engine.scheduling.positions import Positions
from server.protocol.messages import EmbeddedSpan

_DIGEST_BYTES = 16


class SealChain:
    """Each covers salt, tokens, positions and embedded spans up to the end of its page. Each is hashed once."""

    def __init__(
        self,
        page_size: int,
        salt: bytes,
        tokens: list[int],
        embedded: tuple[EmbeddedSpan, ...] = (),
        positions: Positions | None = None,
    ) -> None:
        """`page_size` in tokens. `tokens` grows with the sequence, `positions` are those of its prompt."""
        self._page_size = page_size
        self._tokens = tokens
        self._embedded = embedded
        self._positions = positions
        self._last = blake2b(salt, digest_size=_DIGEST_BYTES, person=b"page seals").digest()
        self._seals: list[bytes] = []

    def __getitem__(self, index: int) -> bytes:
        """Return the seal of a page, which must be full and never change."""
        while len(self._seals) <= index:
            self._last = self._next(len(self._seals) * self._page_size)
            self._seals.append(self._last)
        return self._seals[index]

    def _next(self, start: int) -> bytes:
        stop = start + self._page_size
        digest = blake2b(self._last, digest_size=_DIGEST_BYTES)
        digest.update(array("q", (start, *self._tokens[start:stop])).tobytes())
        if self._positions is not None:
            digest.update(self._positions[:, start:stop].tobytes())
        for span in self._embedded:
            if span.start < stop and start < span.stop:
                digest.update(array("q", (span.start, span.num_tokens)).tobytes() + span.digest)
        return digest.digest()
