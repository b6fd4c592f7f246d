"""Answers of /v1/responses that are kept to be read and continued: in this process's memory, and not for ever."""

import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass

from server.errors import ResponseNotFound

_ENTRY_BYTES = 1024  # of what holds an entry


@dataclass(frozen=True, slots=True)
class Stored:
    response: bytes  # the answer's JSON
    items: bytes  # the whole conversation as input items: what it continued, its input and its output

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items) + _ENTRY_BYTES


class ResponseStore:
    """Answers by tenant, each of which sees only its own. Safe to use from several threads.

    Where there is no room the oldest answer goes, of the tenant whose answers take the most bytes: no tenant
    drives out the answers of those who keep less.
    """

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.num_bytes = 0
        self.num_entries = 0
        self._lock = threading.Lock()
        self._tenants: dict[bytes, OrderedDict[str, Stored]] = {}
        self._bytes_of: defaultdict[bytes, int] = defaultdict(int)

    def put(self, tenant: bytes, response_id: str, stored: Stored) -> None:
        """Keep an answer; one that alone is larger than the limit is not kept."""
        if stored.num_bytes > self.max_bytes or not self.max_entries:
            return
        with self._lock:
            self._tenants.setdefault(tenant, OrderedDict())[response_id] = stored
            self._count(tenant, stored.num_bytes, 1)
            while self.num_bytes > self.max_bytes or self.num_entries > self.max_entries:
                largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
                self._remove(largest, next(iter(self._tenants[largest])))

    def get(self, tenant: bytes, response_id: str, *, param: str | None = None) -> Stored:
        """Raises ResponseNotFound. `param`: the field that names it."""
        with self._lock:
            stored = self._of(tenant).get(response_id)
        if stored is None:
            raise _not_found(response_id, param)
        return stored

    def delete(self, tenant: bytes, response_id: str) -> None:
        """Raises ResponseNotFound."""
        with self._lock:
            if response_id not in self._of(tenant):
                raise _not_found(response_id, None)
            self._remove(tenant, response_id)

    def _of(self, tenant: bytes) -> OrderedDict[str, Stored]:
        return self._tenants.get(tenant) or OrderedDict()

    def _remove(self, tenant: bytes, response_id: str) -> None:
        self._count(tenant, -self._tenants[tenant].pop(response_id).num_bytes, -1)
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._bytes_of[tenant]

    def _count(self, tenant: bytes, num_bytes: int, num_entries: int) -> None:
        self.num_bytes += num_bytes
        self.num_entries += num_entries
        self._bytes_of[tenant] += num_bytes


def _not_found(response_id: str, param: str | None) -> ResponseNotFound:
    message = f"No response {response_id[:128]!a} is stored here for this key; send the whole conversation as input."
    return ResponseNotFound(message, param=param)
