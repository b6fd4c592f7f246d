"""The owners of the slots of recurrent states, and the keys by which snapshots are found. The memory is elsewhere."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Container
from dataclasses import dataclass

from server.engine.scheduling.integrity import IntegrityError
from server.protocol.messages import StateCounts


@dataclass(frozen=True, slots=True)
class StateWrite:
    """A slot that gets a copy of the state of a batch's row, as it is behind the first tokens of its sequence.

    num_tokens  of the sequence, of which the batch computes the last one
    """

    row: int
    num_tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class BatchStates:
    """The slots of the states of a batch.

    sources  of each row the slot that its state is read from: its own one, a snapshot's, or the one that is zero
    targets  of each row the slot of its own, that its state is written to
    writes   what else gets a state on the way: snapshots, and the slots of forks
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    writes: tuple[StateWrite, ...] = ()


class StatePool:
    """A fixed number of slots, each with the states of all recurrent layers, in one of four states:

    free      its content is worthless
    owned     by one request, whose state it is
    pending   gets a snapshot of a request by a step that is not settled
    snapshot  the state at the end of a full page, found by that page's key and forgotten with it; reused, the least
              recently used first, when no slot is free, unless a request is about to begin from it

    Two more slots belong to nobody: `zero_slot`, which is never written, and `padding_slot`, which is never read.
    """

    def __init__(self, num_slots: int) -> None:
        """Raises ValueError when there is none."""
        if num_slots < 1:
            raise ValueError(f"a pool needs at least 1 slot, got {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: slot 0 is handed out first
        self._slots: dict[str, int] = {}
        self._beginnings: dict[str, int] = {}  # what an owner's state is read from, until its first step is launched
        self._num_readers: Counter[int] = Counter()  # owners that are about to begin from a snapshot, by its slot
        self._pending: dict[StateWrite, str] = {}  # and the owner of each
        self._idle: OrderedDict[int, None] = OrderedDict()  # snapshots without readers, the least recently used first
        self._slot_of_key: dict[bytes, int] = {}
        self._key_of_slot: dict[int, bytes] = {}
        self._made: dict[str, list[bytes]] = {}  # keys of the snapshots that each owner made
        self._num_restored = self._num_missed = 0  # since they were taken

    @property
    def zero_slot(self) -> int:
        return self.num_slots

    @property
    def padding_slot(self) -> int:
        return self.num_slots + 1

    @property
    def num_used(self) -> int:
        """Slots that are owned or pending."""
        return len(self._slots) + len(self._pending)

    @property
    def num_snapshots(self) -> int:
        return len(self._slot_of_key)

    @property
    def has_beginnings(self) -> bool:
        """Return whether an owner's state is to be read from another slot than its own."""
        return bool(self._beginnings)

    def has_snapshot(self, key: bytes) -> bool:
        return key in self._slot_of_key

    @property
    def has_room(self) -> bool:
        """Return whether there is a slot for one more owner."""
        return bool(self._free or self._idle)

    @property
    def has_free(self) -> bool:
        """Return whether there is a slot that is no snapshot's."""
        return bool(self._free)

    def take_counts(self) -> StateCounts:
        """Return the slots as they are, and how owners began since the last call."""
        found = StateCounts(self.num_used, self.num_snapshots, self._num_restored, self._num_missed)
        self._num_restored = self._num_missed = 0
        return found

    def admit(self, owner: str, key: bytes | None = None, *, is_missed: bool = False) -> None:
        """Give a new owner a slot; its state begins as the snapshot of `key`, or as zero. There must be room.

        Where no other slot is left the owner takes the snapshot's own, which is then found no more. `is_missed`:
        whether its pages were found further than the snapshot.
        """
        self._num_restored += key is not None and not is_missed
        self._num_missed += is_missed
        source = self.zero_slot
        if key is not None:
            source = self._slot_of_key[key]
            if not self._free and self._idle.keys() == {source}:
                self._slots[owner] = self._take()
                return
            self._idle.pop(source, None)
            self._num_readers[source] += 1
        self._beginnings[owner] = source
        self._slots[owner] = self._take()

    def fork(self, owner: str) -> int:
        """Give a new owner a slot, which a write of the next step fills. There must be room."""
        slot = self._slots[owner] = self._take()
        return slot

    def slot(self, owner: str) -> int:
        """Return the slot of an owner."""
        return self._slots[owner]

    def source(self, owner: str) -> int:
        """Return the slot that an owner's state is read from in its next step."""
        return self._beginnings.get(owner, self._slots[owner])

    def note_launched(self, owners: Collection[str]) -> None:
        """Record that a step of these owners is launched: their states are in their own slots from now on."""
        for owner in [it for it in self._beginnings if it in owners]:
            self._end_reading(owner)

    def reserve(self, owner: str, row: int, num_tokens: int) -> StateWrite | None:
        """Return a write of a snapshot by the owner's next step, in that row; None where no slot is left for it."""
        if not self.has_room:
            return None
        write = StateWrite(row, num_tokens, self._take())
        self._pending[write] = owner
        return write

    def cancel(self, write: StateWrite) -> None:
        """Give up a snapshot, if it is still pending."""
        if self._pending.pop(write, None) is not None:
            self._free.append(write.slot)

    def is_pending(self, write: StateWrite) -> bool:
        return write in self._pending

    def publish(self, write: StateWrite, key: bytes) -> None:
        """Let a pending snapshot be found by the key of the page that ends with it; of two alike the first stays."""
        owner = self._pending.pop(write)
        if key in self._slot_of_key:
            self._free.append(write.slot)
            return
        self._slot_of_key[key], self._key_of_slot[write.slot] = write.slot, key
        self._idle[write.slot] = None
        self._made.setdefault(owner, []).append(key)

    def forget(self, key: bytes) -> None:
        """Have no owner find the snapshot of `key`, if there is one: its page is found no more."""
        slot = self._slot_of_key.pop(key, None)
        if slot is None:
            return
        del self._key_of_slot[slot]
        if slot in self._idle:
            del self._idle[slot]
            self._free.append(slot)

    def release(self, owner: str, *, is_sound: bool = True) -> None:
        """Take the slot of `owner`, and its pending snapshots, if it has any.

        Unless `is_sound`, the snapshots that it made are found no more.
        """
        if owner in self._beginnings:
            self._end_reading(owner)
        slot = self._slots.pop(owner, None)
        if slot is not None:
            self._free.append(slot)
        for write in [it for it, of_owner in self._pending.items() if of_owner == owner]:
            self.cancel(write)
        made = self._made.pop(owner, [])
        if not is_sound:
            for key in made:
                self.forget(key)

    def check_integrity(self, owners: Collection[str], keys: Container[bytes]) -> None:
        """Prove free + owned + pending + snapshots = total, no slot in two places, and that only `owners` own.

        `owners` own a slot each, and only pages that are found by `keys` have snapshots. Raises IntegrityError.
        """
        if self._slots.keys() != set(owners):
            wrong = sorted(self._slots.keys() ^ set(owners))
            raise IntegrityError(f"requests without a slot, or slots of unknown requests: {wrong}")
        strangers = {*self._beginnings, *self._pending.values(), *self._made} - set(owners)
        if strangers:
            raise IntegrityError(f"states are made or read for unknown requests: {sorted(strangers)}")
        pending = [write.slot for write in self._pending]
        left = [slot for slot in self._num_readers if slot not in self._key_of_slot]  # forgotten, and about to be read
        slots = [*self._free, *self._slots.values(), *pending, *self._key_of_slot, *left]
        if sorted(slots) != list(range(self.num_slots)):
            parts = f"{len(self._free)} free + {len(self._slots)} owned + {len(pending)} pending"
            parts += f" + {len(self._key_of_slot) + len(left)} snapshots"
            raise IntegrityError(f"{parts}, the pool has {self.num_slots}; or a slot is in two places")
        readers = Counter(slot for slot in self._beginnings.values() if slot != self.zero_slot)
        if readers != self._num_readers:
            raise IntegrityError(f"snapshots have the readers {readers}, {self._num_readers} are on record")
        if self._idle.keys() != self._key_of_slot.keys() - readers.keys():
            raise IntegrityError("a snapshot may be reused while it is read, or never")
        if any(self._slot_of_key.get(key) != slot or key not in keys for slot, key in self._key_of_slot.items()):
            raise IntegrityError("a snapshot is found by another's key, or by that of no page")
        if len(self._slot_of_key) != len(self._key_of_slot):
            raise IntegrityError("a key finds a snapshot that has none")

    def _take(self) -> int:
        """Return a slot that is free from now on: one that is, or the least recently used snapshot's."""
        if self._free:
            return self._free.pop()
        slot, _ = self._idle.popitem(last=False)
        del self._slot_of_key[self._key_of_slot.pop(slot)]
        return slot

    def _end_reading(self, owner: str) -> None:
        """Have an owner read its own slot from now on."""
        source = self._beginnings.pop(owner)
        if source == self.zero_slot:
            return
        self._num_readers[source] -= 1
        if self._num_readers[source]:
            return
        del self._num_readers[source]
        if source in self._key_of_slot:
            self._idle[source] = None
        else:
            self._free.append(source)
