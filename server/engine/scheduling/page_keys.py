"""Hashes that name full KV pages: two pages with the same name hold the same keys and values."""

from array import array
from collections.abc import Iterator
from hashlib import blake2b
from struct import Struct

from server.protocol.messages import EmbeddedSpan

_DIGEST_BYTES = 32  # 256 bits: no prompt can be made whose page has the name of another's
# Of a span: where it starts, counted from the page's first token; its tokens; the bytes of its digest.
_CONTENT = Struct("<qqq")


class PageKeys:
    """The names of a sequence's pages. Each is hashed once, when it is first needed.

    A page's name is the hash of its token ids and of the previous page's name, so it covers all tokens up to the end
    of the page; the first page's covers the salt. Sequences with different salts never share a page. Of tokens with
    embeddings of their own, whose ids are placeholders, it covers the digest of their span and their places in it.
    Where pages look ahead, as those of a draft head do, a name covers the token behind its page too.
    """

    def __init__(
        self, page_size: int, salt: bytes = b"", embedded: tuple[EmbeddedSpan, ...] = (), *, looks_ahead: bool = False
    ) -> None:
        """`page_size` in tokens."""
        self._page_size = page_size
        self._looks_ahead = looks_ahead
        self._embedded = embedded
        self._keys: list[bytes] = []
        self._last = blake2b(salt, digest_size=_DIGEST_BYTES).digest()

    def copy(self) -> "PageKeys":
        """Return the names so far, for a sequence that begins with the same tokens."""
        found = PageKeys(self._page_size, embedded=self._embedded, looks_ahead=self._looks_ahead)
        found._keys, found._last = self._keys.copy(), self._last
        return found

    def first(self, num_pages: int, tokens: list[int]) -> list[bytes]:
        """Return the names of the first `num_pages` pages of `tokens`, which must fill these pages and never change.

        Where pages look ahead there must be a token behind the last of them.
        """
        while len(self._keys) < num_pages:
            self._name_next(tokens)
        return self._keys[:num_pages]

    def each(self, num_pages: int, tokens: list[int]) -> Iterator[bytes]:
        """Yield the names that `first` returns, each hashed on demand: a search stops at the first unknown page."""
        for index in range(num_pages):
            if index == len(self._keys):
                self._name_next(tokens)
            yield self._keys[index]

    def _name_next(self, tokens: list[int]) -> None:
        start = len(self._keys) * self._page_size
        content = array("i", tokens[start : start + self._page_size + self._looks_ahead]).tobytes()
        for span in self._embedded:
            if span.start < start + self._page_size and start < span.stop:
                content += _CONTENT.pack(span.start - start, span.num_tokens, len(span.digest)) + span.digest
        self._last = blake2b(self._last + content, digest_size=_DIGEST_BYTES).digest()
        self._keys.append(self._last)
