"""The steps whose layers are checked at the start: prompts whole and in chunks at odd borders, a prefix hit, decode.

They belong to no request and use the first pages of the cache, before anything else is in them. All tokens are drawn by
a fixed seed, so that a failure comes again.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from random import Random

from kernels.vocabulary.shape import Phase
from server.engine.scheduling.sequence import Batch, Sequence, phase_of
from server.engine.scheduling.states import BatchStates, StateWrite
from server.protocol.messages import SamplingParams

_SEED = 20261128
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_CHUNKS = (7, 13, 9)  # tokens: borders on no tile and, in most models, on no page
_BEHIND_PAGE = 5  # tokens of the whole prompt behind its first page
_BEHIND_HIT = 6
_IMAGE = 11  # tokens that see each other both ways, in a prompt and in a chunk
_PROMPT_WITH_IMAGE, _CHUNK_WITH_IMAGE = 5 + _IMAGE + 1, 3 + _IMAGE + 2  # with tokens before and behind it


class _Slot(Enum):
    """Slots of recurrent states, which no request has yet."""

    WHOLE = 0
    CHUNKED = 1
    SHORT = 2  # of sequences that one step computes, one after the other
    SNAPSHOT = 3


NUM_SLOTS = len(_Slot)


class TooSmall(Exception):
    """The cache or the longest sequence is too small for the steps."""


@dataclass(slots=True)
class _Sequence:
    """A sequence while its steps are made.

    pages    of the cache
    tokens   by position: which of all steps' tokens wrote its keys and values, the first of which is 0
    slot     of its recurrent state
    source   the slot that its next step reads that from
    spans    whose tokens see each other both ways
    """

    ids: list[int]
    pages: list[int]
    tokens: list[int] = field(default_factory=list)
    slot: int = 0
    source: int = 0
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """One sequence's part of a step.

    name       of what it shows, for messages
    tokens     its tokens among those of all steps
    positions  of these tokens
    keys       for each position up to the last: which of all steps' tokens wrote it. None: attention is not judged
    is_behind_copies  whether earlier chunks of positions are one page again and again: attention to them is not judged
    spans      of positions, whose tokens see each other both ways
    """

    name: str
    tokens: range
    positions: range
    keys: tuple[int, ...] | None
    is_behind_copies: bool = False
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CheckedStep:
    batch: Batch
    rows: tuple[CheckedRow, ...]

    @property
    def token_ids(self) -> list[int]:
        """Return the ids of the step's tokens."""
        batch = self.batch
        lengths = zip(batch.sequences, batch.context_lens, batch.query_lens, strict=True)
        return [token for seq, end, count in lengths for token in seq.tokens[end - count : end]]


class LayerSteps:
    """Makes the steps, one after the other, of a model and a cache."""

    def __init__(
        self,
        *,
        vocab_size: int,
        page_size: int,
        num_pages: int,
        max_len: int,
        max_tokens: int,
        max_rows: int,
        num_slots: int | None = None,
        chunk: int | None = None,
        has_spans: bool = False,
    ) -> None:
        """`max_len`: tokens of a sequence; `max_tokens` and `max_rows`: of a step.

        `num_slots` of recurrent states; None for a model whose layers all attend. `chunk`: positions, of layers that
        see one; None where none does. `has_spans`: whether tokens of images see each other both ways.
        """
        self._has_spans = has_spans
        self._rng = Random(_SEED)
        self._vocab_size = vocab_size
        self._page_size = page_size
        self._num_pages = num_pages
        self._max_len = max_len
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._num_slots = num_slots
        self._chunk = chunk
        self._next_page = 0
        self._num_tokens = 0

    def all(self) -> list[CheckedStep]:
        """Return the steps, in the order in which they must run. Raises TooSmall."""
        size = self._page_size
        first = size + _BEHIND_PAGE
        needed = max(first, _PROMPT_WITH_IMAGE) if self._has_spans else first
        if self._max_tokens < needed:
            raise TooSmall(f"a step has at most {self._max_tokens} tokens, and the check needs {needed}")
        longest = max(first + 2, sum(_CHUNKS) + 7, size + _BEHIND_HIT)
        if self._has_spans:
            longest = max(longest, _PROMPT_WITH_IMAGE + _CHUNK_WITH_IMAGE)
        if self._num_slots is not None and self._num_slots < NUM_SLOTS:
            raise TooSmall(f"there are {self._num_slots} slots of recurrent states, and the check needs {NUM_SLOTS}")
        if self._chunk is not None and longest > self._chunk:
            raise TooSmall(f"layers see chunks of {self._chunk} positions, and the check needs {longest}")
        if longest > self._max_len:
            raise TooSmall(f"a sequence has at most {self._max_len} tokens, and the check needs {longest}")
        whole = self._sequence(first + 2, slot=_Slot.WHOLE)
        chunked = self._sequence(sum(_CHUNKS) + 7, slot=_Slot.CHUNKED)
        snapshot = StateWrite(0, size, _Slot.SNAPSHOT.value)
        steps = [self._step([(whole, first, "a whole prompt")], writes=(snapshot,))]
        done = 0
        for count in _CHUNKS:
            steps.append(self._step([(chunked, count, f"a chunk at token {done}")]))
            done += count
        hit = self._sequence(size + _BEHIND_HIT, shared=whole)
        steps.append(self._step([(hit, _BEHIND_HIT, "a prompt behind a prefix hit")]))
        decode = [(whole, 1, "decode"), (chunked, 1, "decode behind chunks")]
        steps += [self._step(rows) for rows in self._fitting(decode)]
        other = self._sequence(9)
        mixed = [
            (other, 9, "a prompt beside others"),
            (chunked, 5, "a chunk beside others"),
            (whole, 1, "decode beside others"),
        ]
        steps += [self._step(rows) for rows in self._fitting(mixed)]
        if self._chunk is not None and self._chunk + size + _BEHIND_HIT < self._max_len:
            steps += self._behind_chunk(whole, self._chunk)
        if self._has_spans:
            steps += self._with_images()
        far = self._far(whole)
        return steps if far is None else [*steps, far]

    def _fitting(self, rows: list[tuple["_Sequence", int, str]]) -> list[list[tuple["_Sequence", int, str]]]:
        """Return the rows as one step, or as one each where a step holds no so many."""
        return [rows] if len(rows) <= self._max_rows else [[row] for row in rows]

    def _sequence(self, num_tokens: int, shared: "_Sequence | None" = None, slot: "_Slot | None" = None) -> "_Sequence":
        """Return a sequence of drawn tokens; of `shared`, whose first page it takes, it has that page's tokens.

        It begins with the state at that page's end. `slot`: None for one that is computed by one step.
        """
        size = self._page_size
        ids = [self._rng.randrange(self._vocab_size) for _ in range(num_tokens)]
        pages, tokens = [], []
        if shared is not None:
            ids[:size], pages, tokens = shared.ids[:size], shared.pages[:1], shared.tokens[:size]
        pages += self._pages(-(-num_tokens // size) - len(pages))
        own = (_Slot.SHORT if slot is None else slot).value
        return _Sequence(ids, pages, tokens, own, own if shared is None else _Slot.SNAPSHOT.value)

    def _pages(self, count: int) -> list[int]:
        self._next_page += count
        if self._next_page > self._num_pages:
            raise TooSmall(f"the cache has {self._num_pages} pages, and the check needs more")
        return list(range(self._next_page - count, self._next_page))

    def _behind_chunk(self, whole: "_Sequence", chunk: int) -> list[CheckedStep]:
        """Return steps behind the first chunk, which is one page again and again, as in `_far`."""
        num_copies = chunk // self._page_size
        drawn = [self._rng.randrange(self._vocab_size) for _ in range(_BEHIND_HIT)]
        ids = whole.ids[: self._page_size] * num_copies + drawn
        pages = whole.pages[:1] * num_copies + self._pages(-(-_BEHIND_HIT // self._page_size))
        far = _Sequence(ids, pages, whole.tokens[: self._page_size] * num_copies)
        rows = [(far, _BEHIND_HIT - 1, "a prompt behind a chunk of positions"), (far, 1, "decode behind such a chunk")]
        return [self._step([row], is_behind_copies=True) for row in rows]

    def _with_images(self) -> list[CheckedStep]:
        """Return steps of a prompt and a chunk, each with tokens that see each other both ways within it."""
        seq = self._sequence(_PROMPT_WITH_IMAGE + _CHUNK_WITH_IMAGE)
        starts = 5, _PROMPT_WITH_IMAGE + 3
        seq.spans = tuple((start, start + _IMAGE) for start in starts)
        return [
            self._step([(seq, _PROMPT_WITH_IMAGE, "a prompt with an image")]),
            self._step([(seq, _CHUNK_WITH_IMAGE, "a chunk with an image")]),
        ]

    def _far(self, whole: "_Sequence") -> CheckedStep | None:
        """Return a decode step as far out as a sequence may be: over one page again and again, then its own token.

        Its attention is not judged: the roundings of equal keys are equal, and limits take them for independent.
        """
        size = self._page_size
        num_before = (self._max_len - 1) // size * size
        if num_before <= size:
            return None
        page = whole.pages[0]
        ids = whole.ids[:size] * (num_before // size) + [self._rng.randrange(self._vocab_size)]
        far = _Sequence(ids, [page] * (num_before // size) + self._pages(1), whole.tokens[:size] * (num_before // size))
        return self._step([(far, 1, f"decode at position {num_before}")], is_attended=False)

    def _step(
        self,
        rows: list[tuple["_Sequence", int, str]],
        *,
        is_attended: bool = True,
        is_behind_copies: bool = False,
        writes: tuple[StateWrite, ...] = (),
    ) -> CheckedStep:
        """Return a step that computes the next `count` tokens of each sequence; prompts first, then chunks, decode.

        `writes` of snapshots
        """
        states = None
        if self._num_slots is not None:
            sources, targets = tuple(seq.source for seq, _, _ in rows), tuple(seq.slot for seq, _, _ in rows)
            states = BatchStates(sources, targets, writes)
        for seq, _, _ in rows:
            seq.source = seq.slot
        lengths = [(count, len(seq.tokens) + count) for seq, count, _ in rows]
        phases = [phase_of(*it) for it in lengths]
        starts = list(accumulate((count for count, _ in lengths), initial=self._num_tokens))
        checked = []
        for (seq, count, name), start in zip(rows, starts, strict=False):
            before = len(seq.tokens)
            seq.tokens.extend(range(start, start + count))
            checked.append(
                CheckedRow(
                    name,
                    range(start, start + count),
                    range(before, before + count),
                    tuple(seq.tokens) if is_attended else None,
                    is_behind_copies,
                    seq.spans,
                )
            )
        self._num_tokens = starts[-1]
        batch = Batch(
            sequences=tuple(
                Sequence(
                    "",
                    seq.ids[: len(seq.tokens)],
                    len(seq.tokens),
                    _GREEDY,
                    seed=0,
                    submitted_at=0.0,
                    whole_spans=seq.spans,
                )
                for seq, _, _ in rows
            ),
            query_lens=tuple(count for count, _ in lengths),
            context_lens=tuple(length for _, length in lengths),
            page_tables=tuple(
                array("i", seq.pages[: -(-length // self._page_size)])
                for (seq, _, _), (_, length) in zip(rows, lengths, strict=True)
            ),
            sampled_rows=tuple(range(len(rows))),
            num_prefill=phases.count(Phase.PREFILL),
            num_extend=phases.count(Phase.EXTEND),
            states=states,
        )
        return CheckedStep(batch, tuple(checked))
