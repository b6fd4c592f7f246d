"""Drafts by look-up: tokens that followed where a sequence's newest tokens stood in it before."""

from collections import OrderedDict
from dataclasses import dataclass, field

from server.engine.scheduling.sequence import Sequence

_MOST_INDEXED = 2**14  # tokens of a sequence, its newest ones when it is first looked at: 6 ms of one core
_MOST_TRIED = 8  # places, the newest first, of which the one with the longest match is chosen


@dataclass(slots=True)
class _Index:
    """The places of a sequence's n-grams of the least length.

    num_tokens  of the sequence, that are indexed
    latest      by n-gram the place behind its newest occurrence
    before      by place behind an n-gram that of the occurrence before it
    """

    seq: Sequence
    num_tokens: int
    latest: dict[tuple[int, ...], int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)


class NgramDrafter:
    """Drafts what followed an earlier occurrence of a sequence's newest tokens, in its prompt or its answer.

    Of `least` to `longest` tokens that are alike the longest match counts, of several the newest. Where it reaches into
    the draft the sequence repeats itself, and so does the draft.
    """

    def __init__(self, *, least: int, longest: int, most_sequences: int) -> None:
        """`most_sequences`: that run at once; the indices of others are forgotten."""
        self._least = least
        self._longest = longest
        self._most_sequences = most_sequences
        self._indices: OrderedDict[str, _Index] = OrderedDict()  # the one looked at last at the end

    def __call__(self, seq: Sequence, most: int) -> list[int]:
        """Return at most `most` tokens that may come next in the sequence, all of whose tokens are known."""
        found = self._match(self._index_of(seq), seq.tokens)
        if found is None:
            return []
        tokens, period = seq.tokens, len(seq.tokens) - found
        drafted = tokens[found : found + most]
        while len(drafted) < most:
            drafted += drafted[-period:][: most - len(drafted)]
        return drafted

    def _index_of(self, seq: Sequence) -> _Index:
        """Return the index of a sequence, but for its newest n-gram, which is what is looked up."""
        index = self._indices.pop(seq.request_id, None)
        num_tokens, least = len(seq.tokens), self._least
        if index is None or index.seq is not seq or index.num_tokens > num_tokens:
            index = _Index(seq, max(least - 1, num_tokens - _MOST_INDEXED))
        tokens = seq.tokens
        for end in range(index.num_tokens + 1, num_tokens):
            gram = tuple(tokens[end - least : end])
            if gram in index.latest:
                index.before[end] = index.latest[gram]
            index.latest[gram] = end
        index.num_tokens = max(index.num_tokens, num_tokens - 1)
        self._indices[seq.request_id] = index
        if len(self._indices) > self._most_sequences:
            self._indices.popitem(last=False)
        return index

    def _match(self, index: _Index, tokens: list[int]) -> int | None:
        """Return the place behind the best earlier occurrence of the newest tokens; None where there is none."""
        num_tokens, least = len(tokens), self._least
        place = index.latest.get(tuple(tokens[num_tokens - least :])) if num_tokens > least else None
        best, longest = None, 0
        for _ in range(_MOST_TRIED):
            if place is None:
                break
            length = self._length(tokens, place)
            if length > longest:
                best, longest = place, length
            if length == self._longest:
                break
            place = index.before.get(place)
        return best

    def _length(self, tokens: list[int], place: int) -> int:
        """Return how many tokens before a place are the newest ones, from `least` to `longest`."""
        length, most = self._least, min(self._longest, place)
        while length < most and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
