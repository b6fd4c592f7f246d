"""The owners of the pages of the KV cache, and the keys by which pages are found again. The memory is elsewhere."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

from server.engine.scheduling.integrity import IntegrityError
from server.engine.scheduling.states import StatePool


class PagePool:
    """A fixed number of pages, each in one of three states:

    free    without an owner, its content is worthless
    cached  without an owner, but full and found by its key; reused, the least recently used first, when none is free
    owned   by one request, or by several that found it by its key or were forked; a page that has a key is never
            written to, and one that a fork shares only by the step that forks

    Where there are states, each owner has a slot of them beside its pages, and leading pages are found as far as the
    last one that has a snapshot: what is behind it would have to be computed for the state in any case.
    """

    def __init__(self, num_pages: int, page_size: int, states: StatePool | None = None) -> None:
        """`page_size` in tokens; `states` of a model with recurrent layers. Raises ValueError for a size below 1."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least 1 page of at least 1 token, got {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.states = states
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 is handed out first
        self._cached: OrderedDict[int, None] = OrderedDict()  # in the order in which they lost their last owner
        self._tables: dict[str, array[int]] = {}
        self._num_owners = [0] * num_pages
        self.page_of_key: dict[bytes, int] = {}
        self.key_of_page: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages without an owner, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` tokens need."""
        return -(-num_tokens // self.page_size)

    def room_of(self, owner: str) -> int:
        """Return how many tokens fit into the pages of `owner`."""
        return len(self._tables[owner]) * self.page_size

    def admit(self, owner: str, num_tokens: int, keys: Iterable[bytes] = (), *, headroom: int = 0) -> int | None:
        """Give a new owner pages for `num_tokens` tokens: those that its leading keys find, and free ones.

        keys      names of its first pages, fewer than it needs; read up to the first unknown one
        headroom  pages that must stay without an owner
        Returns how many pages were found; None, and changes nothing, when there are too few pages or no slot.
        """
        found, snapshot = self._find(keys), None
        num_pages_found = len(found)
        if self.states is not None:
            while found and not self.states.has_snapshot(self.key_of_page[found[-1]]):
                found.pop()
            snapshot = self.key_of_page[found[-1]] if found else None
            if not self.states.has_room:
                return None
        num_unowned = sum(page in self._cached for page in found)
        if self.pages_for(num_tokens) - len(found) + num_unowned + headroom > self.num_free:
            return None
        for page in found:
            self._cached.pop(page, None)
            self._num_owners[page] += 1
        if self.states is not None:
            self.states.admit(owner, snapshot, is_missed=len(found) < num_pages_found)
        self._tables[owner] = array("i", found)
        self.grow(owner, num_tokens)
        return len(found)

    def admit_unused(self, owner: str, num_tokens: int, *, most_cached: int) -> bool:
        """Give a new owner free pages for `num_tokens` tokens, `most_cached` of them cached ones, and a free slot.

        Returns False, and changes nothing, where too few are.
        """
        has_slot = self.states is None or self.states.has_free
        if not has_slot or self.pages_for(num_tokens) > len(self._free) + most_cached:
            return False
        return self.admit(owner, num_tokens) is not None

    def fork(
        self, source: str, owner: str, num_tokens: int, *, headroom: int = 0, has_own_last: bool = False
    ) -> list[tuple[int, int]] | None:
        """Give a new owner the pages of another's first `num_tokens` tokens: the full ones, and one like the last.

        headroom  pages that must stay without an owner, where one is taken
        has_own_last  whether a last page that is full is not shared either
        Returns the (source, target) pages that must be copied, one or none; None, and changes nothing, when there are
        too few pages or no slot.
        """
        num_full, num_in_last = divmod(num_tokens, self.page_size)
        if has_own_last and not num_in_last:
            num_full, num_in_last = num_full - 1, self.page_size
        if num_in_last and 1 + headroom > self.num_free:
            return None
        if self.states is not None:
            if not self.states.has_room:
                return None
            self.states.fork(owner)
        shared = self._tables[source][:num_full]
        for page in shared:
            self._num_owners[page] += 1
        self._tables[owner] = shared
        if not num_in_last:
            return []
        shared.append(self._take())
        return [(self._tables[source][num_full], shared[num_full])]

    def grow(self, owner: str, num_tokens: int) -> bool:
        """Give `owner` all pages that it lacks for `num_tokens` tokens, or none of them and return False."""
        table = self._tables.get(owner)
        num_missing = self.pages_for(num_tokens) - (0 if table is None else len(table))
        if num_missing <= 0:
            return True
        if num_missing > self.num_free:
            return False
        if table is None:
            table = self._tables[owner] = array("i")
        for _ in range(num_missing):
            table.append(self._take())
        return True

    def shrink(self, owner: str, num_tokens: int) -> None:
        """Take those pages of `owner` that its first `num_tokens` tokens do not need; none of them may have a key."""
        table = self._tables[owner]
        for _ in range(len(table) - self.pages_for(num_tokens)):
            self._disown(table.pop())

    def publish(self, owner: str, first: int, keys: Iterable[bytes]) -> None:
        """Let the pages of `owner` from index `first` on be found by `keys`; they must be full and computed.

        Where another page has the same key already, the other page stays the one that is found.
        """
        table = self._tables[owner]
        for index, key in enumerate(keys, start=first):
            page = table[index]
            if key not in self.page_of_key and page not in self.key_of_page:
                self.page_of_key[key] = page
                self.key_of_page[page] = key

    def forget(self, page: int) -> None:
        """Have nobody find a page any more; those that own it keep it."""
        self._forget(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def table(self, owner: str, num_pages: int | None = None) -> "array[int]":
        """Return a copy of the owner's (first `num_pages`) page numbers in token order; empty for an unknown owner."""
        table = self._tables.get(owner)
        return array("i") if table is None else table[:num_pages]

    def pages(self, owner: str) -> "array[int]":
        """Return the owner's page numbers, not a copy: while it owns pages, new ones are only appended."""
        return self._tables[owner]

    def release(self, owner: str, *, is_sound: bool = True) -> None:
        """Take every page of `owner`, if it has any, and its state.

        Unless `is_sound`, none of them can be found any more: the cause of a bad result may be in their content.
        """
        if self.states is not None:
            self.states.release(owner, is_sound=is_sound)
        table = self._tables.pop(owner, array("i"))
        for page in reversed(table):  # the last page first: a cached page is useless without the pages before it
            if not is_sound:
                self._forget(page)
            self._disown(page)

    def check_integrity(self, owners: Iterable[str]) -> None:
        """Prove free + cached + owned = total, no page in two places, only `owners` own. Raises IntegrityError."""
        owners = set(owners)
        strangers = self._tables.keys() - owners
        if strangers:
            raise IntegrityError(f"pages owned by unknown requests: {sorted(strangers)}")
        counts = Counter(page for table in self._tables.values() for page in table)
        pages = [*self._free, *self._cached, *counts]
        if len(pages) != self.num_pages:
            parts = f"{len(self._free)} free + {len(self._cached)} cached + {len(counts)} owned pages"
            raise IntegrityError(f"{parts}, the pool has {self.num_pages}")
        if sorted(pages) != list(range(self.num_pages)):
            raise IntegrityError("a page is in two places, or is no page of this pool")
        wrong = [page for page, count in enumerate(self._num_owners) if counts[page] != count]
        if wrong:
            page = wrong[0]
            raise IntegrityError(f"page {page} has {counts[page]} owners, {self._num_owners[page]} are on record")
        if any(self.page_of_key.get(key) != page for page, key in self.key_of_page.items()):
            raise IntegrityError("a page is found by another page's key")
        if len(self.page_of_key) != len(self.key_of_page) or not self._cached.keys() <= self.key_of_page.keys():
            raise IntegrityError("a key finds a page that has none, or a cached page has no key")
        if self.states is not None:
            self.states.check_integrity(owners, self.page_of_key)

    def _disown(self, page: int) -> None:
        """Take one owner from a page."""
        self._num_owners[page] -= 1
        if self._num_owners[page]:
            return
        if page in self.key_of_page:
            self._cached[page] = None
        else:
            self._free.append(page)

    def _find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the leading keys, up to the first unknown key."""
        found = []
        for key in keys:
            page = self.page_of_key.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def _take(self) -> int:
        """Return a page without an owner, which now has one."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
        self._num_owners[page] = 1
        return page

    def _forget(self, page: int) -> None:
        key = self.key_of_page.pop(page, None)
        if key is not None:
            del self.page_of_key[key]
            if self.states is not None:
                self.states.forget(key)
