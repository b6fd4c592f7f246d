"""The owners of the rows of the workers' embedding buffers. The memory is elsewhere."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qualification.model.tower import TowerConfig
from server.engine.scheduling.integrity import IntegrityError
from server.engine.scheduling.positions import positions_of
from server.engine.scheduling.sequence import HeldSpan, Sequence
from server.protocol.messages import EmbeddedSpan


@dataclass(slots=True)
class _Entry:
    """A span that is held once, for all the sequences that have yet to compute it."""

    held: HeldSpan
    num_owners: int
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingFormat:
    """Form of the embeddings that a model takes for tokens of a prompt."""

    hidden_size: int
    has_three_positions: bool = False
    tower: TowerConfig | None = None  # reads images; None: they are refused
    sees_both_ways: bool = False  # whether an image's tokens see each other both ways

    def refusal(self, spans: tuple[EmbeddedSpan, ...], num_tokens: int, num_rows: int) -> str | None:
        """Return why a prompt of so many tokens cannot have these spans, in a buffer of `num_rows`; None if it can."""
        ends = [0, *[span.stop for span in spans]]
        starts = [*[span.start for span in spans], num_tokens]
        if any(span.num_tokens < 1 for span in spans) or any(a > b for a, b in zip(ends, starts, strict=True)):
            return f"embedded spans must be in order, apart and within the prompt of {num_tokens} tokens"
        if (num_embedded := num_rows_of(spans)) > num_rows:
            return f"{num_embedded} tokens of the prompt have embeddings of their own, the limit is {num_rows}"
        for span in spans:
            has_size = span.image is not None or len(span.rows) == 4 * self.hidden_size * span.num_rows
            if not has_size or not span.digest:
                sizes = f"{len(span.rows)} bytes for {span.num_tokens} tokens of {self.hidden_size} numbers"
                return f"an embedded span needs 4 bytes a number, and a digest; it has {sizes}"
        with_offsets = [span for span in spans if span.offsets or span.num_positions is not None]
        if not with_offsets:
            return None
        if not self.has_three_positions:
            return "an embedded span has offsets, and this model's positions have one part"
        if any(len(span.offsets) not in (0, 12 * span.num_tokens) for span in with_offsets):
            return "the offsets of an embedded span must be three numbers of 4 bytes for each token"
        positions, delta = positions_of(spans, num_tokens)
        if positions.min() < 0 or (positions > np.arange(num_tokens)).any() or delta > 0:
            return "an embedded span puts a token at a position before the first or beyond its place in the prompt"
        return None


SpanName = tuple[bytes, int]  # digest and number of tokens


class EmbeddingPool:
    """Rows for the embedded spans of prompts that are computed; row 0 stands for none.

    A running sequence holds the rows of each of its spans from its admission until its prompt is computed. Spans with
    the same digest share rows. Any free rows will do: a step names the row of each token. What was written stays until
    its rows are needed, those least recently held first: a span that comes again is not written again.
    """

    def __init__(self, num_rows: int) -> None:
        """`num_rows` that spans may own."""
        self.num_rows = num_rows
        self._free = list(range(num_rows, 0, -1))
        self._entries: dict[SpanName, _Entry] = {}
        self._idle: OrderedDict[SpanName, HeldSpan] = OrderedDict()  # written, held by no one
        self._num_idle_rows = 0

    @property
    def num_used(self) -> int:
        """Return the rows that are held."""
        return self.num_rows - len(self._free) - self._num_idle_rows

    def hold(self, seq: Sequence, num_computed: int) -> bool:
        """Give a sequence rows for its spans behind its first `num_computed` tokens. False, and no change, if too few.

        It holds none before.
        """
        spans = [span for span in seq.embedded if span.stop > num_computed]
        names = {_name(span): span for span in spans if _name(span) not in self._entries}
        new = {name: span for name, span in names.items() if name not in self._idle}
        num_kept = sum(names[name].num_rows for name in names.keys() - new.keys())
        if num_rows_of(new.values()) > len(self._free) + self._num_idle_rows - num_kept:
            return False
        for name in names.keys() - new.keys():
            held = self._idle.pop(name)
            self._num_idle_rows -= held.span.num_rows
            self._entries[name] = _Entry(held, 0, is_written=True)
        for name, span in new.items():
            while span.num_rows > len(self._free):
                self._forget_oldest()
            rows = np.array([self._free.pop() for _ in range(span.num_rows)], np.int64)
            self._entries[name] = _Entry(HeldSpan(span, rows), 0)
        seq.held = tuple([HeldSpan(span, self._entries[_name(span)].held.rows) for span in spans])
        for name in _names(seq):
            self._entries[name].num_owners += 1
        return True

    def release(self, seq: Sequence) -> None:
        """Take the rows of a sequence, if it has any."""
        for name in _names(seq):
            entry = self._entries[name]
            entry.num_owners -= 1
            if not entry.num_owners:
                del self._entries[name]
                if entry.is_written:
                    self._idle[name] = entry.held
                    self._num_idle_rows += entry.held.span.num_rows
                else:
                    self._free += entry.held.rows.tolist()
        seq.held = ()

    def reach(self, seq: Sequence, most: int, num_left: int, taken: Collection[SpanName]) -> int:
        """Return how many of a sequence's next `most` tokens a step may compute that writes `num_left` more rows.

        taken   what the step writes already. It may write one span that is longer if it writes no other.
        """
        start, stop = seq.num_computed, seq.num_computed + most
        for name, span in self._unwritten(seq, start, stop):
            if name in taken:
                continue
            if span.num_rows > num_left and (taken or span.start > start):
                return max(0, span.start - start)
            num_left -= span.num_rows
            taken = {*taken, name}
        return most

    def to_write(self, seq: Sequence, stop: int) -> dict[SpanName, int]:
        """Return the rows of each span that is still to be written for a sequence's tokens up to `stop`, by name."""
        return {name: span.num_rows for name, span in self._unwritten(seq, seq.num_computed, stop)}

    def _unwritten(self, seq: Sequence, start: int, stop: int) -> Iterator[tuple[SpanName, EmbeddedSpan]]:
        for it in seq.held:
            name = _name(it.span)
            if it.span.start < stop and start < it.span.stop and not self._entries[name].is_written:
                yield name, it.span

    def take_unwritten(self, names: Iterable[SpanName]) -> tuple[HeldSpan, ...]:
        """Return those of the held spans whose rows are still to be written; from now on they count as written."""
        entries = [entry for name in names if not (entry := self._entries[name]).is_written]
        for entry in entries:
            entry.is_written = True
        return tuple([entry.held for entry in entries])

    def put_back(self, spans: Iterable[HeldSpan]) -> None:
        """Take back that these were written."""
        for it in spans:
            name = _name(it.span)
            if (entry := self._entries.get(name)) is not None and entry.held is it:
                entry.is_written = False
            elif self._idle.get(name) is it:
                self._forget(name)

    def check_integrity(self, owners: Iterable[Sequence]) -> None:
        """Prove free + held = total, and that only `owners` hold rows. Raises IntegrityError."""
        counts = Counter(name for seq in owners for name in _names(seq))
        if counts != {name: entry.num_owners for name, entry in self._entries.items()}:
            raise IntegrityError(f"embeddings have other owners than the {len(counts)} spans of running requests")
        known = [*[entry.held for entry in self._entries.values()], *self._idle.values()]
        num_idle = sum(it.span.num_rows for it in self._idle.values())
        rows = [*self._free, *[row for it in known for row in it.rows.tolist()]]
        if sorted(rows) != list(range(1, self.num_rows + 1)) or num_idle != self._num_idle_rows:
            raise IntegrityError(f"{len(rows)} rows of embeddings are free or held, the buffer has {self.num_rows}")

    def _forget_oldest(self) -> None:
        self._forget(next(iter(self._idle)))

    def _forget(self, name: SpanName) -> None:
        held = self._idle.pop(name)
        self._num_idle_rows -= held.span.num_rows
        self._free += held.rows.tolist()


def num_rows_of(spans: Iterable[EmbeddedSpan]) -> int:
    """Return the rows that these spans take together."""
    return sum({_name(span): span.num_rows for span in spans}.values())


def embedding_rows(seq: Sequence, start: int, stop: int) -> "NDArray[np.int64]":
    """Return the buffer's row of each of a sequence's tokens [start, stop), 0 for those that have none."""
    found = np.zeros(stop - start, np.int64)
    for it in seq.held:
        first, last = max(start, it.span.start), min(stop, it.span.stop)
        if first < last:
            found[first - start : last - start] = it.row_of_each()[first - it.span.start : last - it.span.start]
    return found


def _names(seq: Sequence) -> set[SpanName]:
    return {_name(it.span) for it in seq.held}


def _name(span: EmbeddedSpan) -> SpanName:
    return span.digest, span.num_tokens
