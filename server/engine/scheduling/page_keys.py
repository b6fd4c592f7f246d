"""Names of full pages: two pages of one name hold the same keys and values."""

from array import array
from collections.abc import Iterator
from hashlib import blake2b

_DIGEST_BYTES = 32  # nobody can make two prompts whose pages share a name, not even on purpose


class PageKeys:
    """The names of a sequence's pages, hashed as they are asked for and only once.

    A page's name is the hash of its token ids and of the name before it, so of all tokens up to its end; the first
    one's is of the salt. Sequences of different salts never share a page.
    """

    def __init__(self, page_size: int, salt: bytes = b"") -> None:
        """`page_size` in tokens."""
        self._page_size = page_size
        self._keys: list[bytes] = []
        self._last = blake2b(salt, digest_size=_DIGEST_BYTES).digest()

    def first(self, num_pages: int, tokens: list[int]) -> list[bytes]:
        """The names of the first `num_pages` pages of `tokens`, which fill them all and never change."""
        while len(self._keys) < num_pages:
            self._name_next(tokens)
        return self._keys[:num_pages]

    def each(self, num_pages: int, tokens: list[int]) -> Iterator[bytes]:
        """As `first`, each hashed when it is asked for: who looks for pages stops at the first that nobody has."""
        for index in range(num_pages):
            if index == len(self._keys):
                self._name_next(tokens)
            yield self._keys[index]

    def _name_next(self, tokens: list[int]) -> None:
        start = len(self._keys) * self._page_size
        content = array("i", tokens[start : start + self._page_size]).tobytes()
        self._last = blake2b(self._last + content, digest_size=_DIGEST_BYTES).digest()
        self._keys.append(self._last)
