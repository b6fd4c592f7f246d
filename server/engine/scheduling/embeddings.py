"""The owners of the rows of the workers' embedding buffers. The memory is elsewhere."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

    def refusal(self, spans: tuple[EmbeddedSpan, ...], num_tokens: int, num_rows: int) -> str | None:
        """Return why a prompt of so many tokens cannot have these spans, in a buffer of `num_rows`; None if it can."""
        ends = [0, *[span.stop for span in spans]]
        starts = [*[span.start for span in spans], num_tokens]
        if any(span.num_tokens < 1 for span in spans) or any(a > b for a, b in zip(ends, starts, strict=True)):
            return f"embedded spans must be in order, apart and within the prompt of {num_tokens} tokens"
        if (num_embedded := num_rows_of(spans)) > num_rows:
            return f"{num_embedded} tokens of the prompt have embeddings of their own, the limit is {num_rows}"
        for span in spans:
            if len(span.rows) != 4 * self.hidden_size * span.num_tokens or not span.digest:
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


_Name = tuple[bytes, int]  # digest and number of tokens


class EmbeddingPool:
    """Rows for the embedded spans of prompts that are computed; row 0 stands for none.

    A running sequence holds the rows of each of its spans from its admission until its prompt is computed. Spans with
    the same digest share rows. Any free rows will do: a step names the row of each token.
    """

    def __init__(self, num_rows: int) -> None:
        """`num_rows` that spans may own."""
        self.num_rows = num_rows
        self._free = list(range(num_rows, 0, -1))
        self._entries: dict[_Name, _Entry] = {}

    @property
    def num_used(self) -> int:
        return self.num_rows - len(self._free)

    def hold(self, seq: Sequence, num_computed: int) -> bool:
        """Give a sequence rows for its spans behind its first `num_computed` tokens. False, and no change, if too few.

        It holds none before.
        """
        spans = [span for span in seq.embedded if span.stop > num_computed]
        new = {_name(span): span for span in spans if _name(span) not in self._entries}
        if sum(span.num_tokens for span in new.values()) > len(self._free):
            return False
        for name, span in new.items():
            rows = np.array([self._free.pop() for _ in range(span.num_tokens)], np.int64)
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
                self._free += entry.held.rows.tolist()
        seq.held = ()

    def take_unwritten(self) -> tuple[HeldSpan, ...]:
        """Return the spans whose rows are still to be written; from now on they count as written."""
        entries = [entry for entry in self._entries.values() if not entry.is_written]
        for entry in entries:
            entry.is_written = True
        return tuple([entry.held for entry in entries])

    def put_back(self, spans: Iterable[HeldSpan]) -> None:
        """Take back that these were written, where they are still held."""
        for it in spans:
            if (entry := self._entries.get(_name(it.span))) is not None and entry.held is it:
                entry.is_written = False

    def check_integrity(self, owners: Iterable[Sequence]) -> None:
        """Prove free + held = total, and that only `owners` hold rows. Raises IntegrityError."""
        counts = Counter(name for seq in owners for name in _names(seq))
        if counts != {name: entry.num_owners for name, entry in self._entries.items()}:
            raise IntegrityError(f"embeddings have other owners than the {len(counts)} spans of running requests")
        rows = [*self._free, *[row for entry in self._entries.values() for row in entry.held.rows.tolist()]]
        if sorted(rows) != list(range(1, self.num_rows + 1)):
            raise IntegrityError(f"{len(rows)} rows of embeddings are free or held, the buffer has {self.num_rows}")


def num_rows_of(spans: Iterable[EmbeddedSpan]) -> int:
    """Return the rows that these spans take together."""
    return sum(num_tokens for _, num_tokens in {_name(span) for span in spans})


def embedding_rows(seq: Sequence, start: int, stop: int) -> "NDArray[np.int64]":
    """Return the buffer's row of each of a sequence's tokens [start, stop), 0 for those that have none."""
    found = np.zeros(stop - start, np.int64)
    for it in seq.held:
        first, last = max(start, it.span.start), min(stop, it.span.stop)
        if first < last:
            found[first - start : last - start] = it.rows[first - it.span.start : last - it.span.start]
    return found


def _names(seq: Sequence) -> set[_Name]:
    return {_name(it.span) for it in seq.held}


def _name(span: EmbeddedSpan) -> _Name:
    return span.digest, span.num_tokens
