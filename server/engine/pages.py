"""Who owns which page of the KV cache. Counts only: the memory itself is the runner's."""

from array import array
from collections.abc import Iterable


class IntegrityError(Exception):
    """The accounting of pages is wrong; the engine must not go on, for sequences could read each other's keys."""


class PagePool:
    """A fixed number of pages, each free or owned by exactly one request."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """`page_size` in tokens. Raises ValueError when either is below 1."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least 1 page of at least 1 token, got {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 is handed out first
        self._tables: dict[str, array[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def grow(self, owner: str, num_tokens: int) -> bool:
        """Give `owner` pages until it has room for `num_tokens` tokens: all that are missing, or none and False."""
        table = self._tables.get(owner)
        num_missing = self.pages_for(num_tokens) - (0 if table is None else len(table))
        if num_missing <= 0:
            return True
        if num_missing > len(self._free):
            return False
        if table is None:
            table = self._tables[owner] = array("i")
        for _ in range(num_missing):
            table.append(self._free.pop())
        return True

    def table(self, owner: str) -> "array[int]":
        """A copy of the owner's page numbers, in the order of its tokens; empty for an unknown owner."""
        table = self._tables.get(owner)
        return array("i") if table is None else table[:]

    def release(self, owner: str) -> None:
        """Take back every page of `owner`; nothing for an owner without pages."""
        table = self._tables.pop(owner, None)
        if table is not None:
            self._free.extend(reversed(table))

    def check_integrity(self, owners: Iterable[str]) -> None:
        """Prove free + owned = total, no page twice, and no owner besides `owners`. Raises IntegrityError."""
        strangers = self._tables.keys() - set(owners)
        if strangers:
            raise IntegrityError(f"pages owned by unknown requests: {sorted(strangers)}")
        pages = [*self._free, *(page for table in self._tables.values() for page in table)]
        if len(pages) != self.num_pages:
            num_owned = len(pages) - len(self._free)
            raise IntegrityError(f"{len(self._free)} free + {num_owned} owned pages, the pool has {self.num_pages}")
        if sorted(pages) != list(range(self.num_pages)):
            raise IntegrityError("a page is owned twice, or is no page of this pool")
