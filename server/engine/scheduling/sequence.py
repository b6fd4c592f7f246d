"""A request inside the engine, and the batch that one step computes. Pure data: no tensors."""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kernels.vocabulary.shape import Phase
from server.engine.scheduling.matcher import Matcher
from server.engine.scheduling.page_keys import PageKeys
from server.engine.scheduling.seal_chain import SealChain
from server.engine.scheduling.states import BatchStates
from server.engine.scheduling.tower_run import TowerRun
from server.protocol.messages import EmbeddedSpan, FinishReason, PathUse, SamplingParams, TokenScores

PENDING = -1  # stands for a token that a launched step samples, or a head drafts, and that the host has not read yet

_DECODE_ONLY, _VERIFY_ONLY = (Phase.DECODE,), (Phase.VERIFY,)


@dataclass(frozen=True, slots=True, eq=False)
class HeldSpan:
    """An embedded span of a prompt, and the row of the workers' embedding buffers of each token that has one."""

    span: EmbeddedSpan
    rows: "NDArray[np.int64]"

    def row_of_each(self) -> "NDArray[np.int64]":
        """Return the row of each of its tokens, 0 for those between two lines."""
        if self.span.line is None:
            return self.rows
        return np.insert(self.rows, range(self.span.line, self.rows.size, self.span.line), 0)


class SequenceStatus(Enum):
    WAITING = "waiting"  # owns no page
    RUNNING = "running"  # owns pages for all of its tokens but the newest ones
    FINISHED = "finished"  # owns no page, never planned again


@dataclass(slots=True)
class AnswerRecord:
    """Record of an answer while it is served, so that it can be compared when it is computed again.

    sampling, seed  as they were when it was queued
    logprobs  fp32, little endian, of each token so far: their scores are computed even where no client asks for them
    """

    sampling: SamplingParams
    seed: int
    logprobs: bytearray = field(default_factory=bytearray)
    has_neighbours: bool = False  # whether a step that chose a token of it had other rows

    def add(self, scores: TokenScores, num_rows: int) -> None:
        """Add the scores of new tokens, of a step of `num_rows` rows."""
        self.logprobs += scores.logprobs
        self.has_neighbours |= num_rows > 1


@dataclass(slots=True, eq=False)
class Sequence:
    """The one object here that changes; only the engine's stepping thread changes it.

    tokens        prompt, then generated tokens; the last one may be PENDING, and so may those that were drafted
    num_computed  tokens [0, num_computed) have their keys and values in pages; less again after a preemption
    num_drafted   tokens that were drafted and are not verified yet: its newest ones, but for a PENDING one behind them
    is_drafted_for  whether tokens may be drafted for it, where there is a drafter
    folded        tokens that its recurrent state is folded up to, where a step has verified drafted tokens since; None:
                  up to the last border of a chunk among those that are computed
    followers     other answers to its prompt, which wait until that is computed; `leader` is this one for each of them
    rank          order among all prompts of its priority, and the number of its arrival; set by the scheduler
    page_keys     names of its full pages; None where pages are not shared. `page_seals` are what they hold
    max_len       the most tokens it may have; set by the scheduler
    matcher       what its grammar allows next; None without a grammar
    embedded      spans of its prompt that have embeddings of their own; `held` are those of them that it has rows for,
                  from its admission until its prompt is computed
    whole_spans   [start, stop) of parts of its prompt, in order, whose tokens see each other both ways, as those of an
                  image may: a step computes none or all of the tokens of one
    positions     [3, num_prompt] of its prompt's tokens, and `position_delta` what is added to the place of a generated
                  one for its position; None and 0 where each position is the token's place
    record        of an answer that may be computed again; None of most
    tower_runs    the images that were computed for it, with others: each time how many of its own
    is_greedy     whether its next token is the likeliest one, unless stop ids are still banned by min_tokens
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    seed: int
    submitted_at: float
    stop_ids: frozenset[int] = frozenset()  # every token id that ends it, EOS included
    cache_salt: bytes = b""  # it shares pages only with sequences of the same salt
    priority: int = 0  # lower ones go first
    followers: "list[Sequence]" = field(default_factory=list)
    leader: "Sequence | None" = None
    rank: tuple[int, int] = (0, 0)
    page_keys: PageKeys | None = None
    page_seals: SealChain | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_drafted: int = 0
    is_drafted_for: bool = True
    folded: int | None = None
    num_published: int = 0  # its pages that other sequences may find, or that it found
    num_cached: int = 0  # tokens it found in pages when it was first admitted
    num_chunks: int = 0  # batches that computed a part of its prompt before its first token
    num_preemptions: int = 0
    scheduled_at: float | None = None  # first admitted
    path_uses: dict[tuple[str, str, str], PathUse] = field(
        default_factory=dict
    )  # every distinct decision that served it
    scores: list[TokenScores] = field(
        default_factory=list
    )  # log probabilities that no delta has reported yet: until the first token those of the prompt's chunks
    traceparent: str | None = None  # of its trace, for the log
    max_len: int = 0
    prompt: "NDArray[np.int64] | None" = None  # of a long prompt, its token ids as an array
    matcher: Matcher | None = None
    pooled: bytes | None = None
    embedded: tuple[EmbeddedSpan, ...] = ()
    held: tuple[HeldSpan, ...] = ()
    whole_spans: tuple[tuple[int, int], ...] = ()
    positions: "NDArray[np.int32] | None" = None
    position_delta: int = 0
    record: AnswerRecord | None = None
    tower_runs: list[tuple[TowerRun, int]] = field(default_factory=list)
    is_forked: bool = False  # whether its first pages are those of its leader
    is_greedy: bool = field(init=False)
    wants_hidden: bool = field(init=False)  # whether the hidden states of its prompt are used by more than sampling

    def __post_init__(self) -> None:
        wanted = self.sampling
        self.wants_hidden = wanted.prompt_logprobs is not None or wanted.pooling is not None
        self.is_greedy = wanted.temperature == 0 and not wanted.edits_logits and wanted.grammar is None

    @property
    def num_scored_beside(self) -> int | None:
        """Return beside how many likeliest tokens its tokens are scored; None where they are not."""
        if self.sampling.logprobs is None and self.record is not None:
            return 0
        return self.sampling.logprobs

    def token_ids(self, start: int, stop: int) -> "NDArray[np.int64] | list[int]":
        """Return tokens [start, stop), from the array where there is one: a list of 8k tokens costs numpy 0.15 ms."""
        if self.prompt is not None and stop <= self.num_prompt:
            return self.prompt[start:stop]
        return self.tokens[start:stop]

    def positions_of(self, places: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """Return the positions of its tokens at these places in order, of three parts ([3, tokens]) where it has such.

        A place may be beyond its tokens, as one is that a step launched ahead computes.
        """
        if self.positions is None:
            return places
        of_prompt = int(np.searchsorted(places, self.num_prompt))
        found = np.broadcast_to(places + self.position_delta, (3, places.size)).copy()
        found[:, :of_prompt] = self.positions[:, places[:of_prompt]]
        return found

    def has_embedded(self, start: int, stop: int) -> bool:
        """Return whether a token of its tokens [start, stop) has an embedding of its own that it has a row for."""
        return any(it.span.start < stop and start < it.span.stop for it in self.held)

    def border(self, num_tokens: int) -> int:
        """Return the last of the places up to `num_tokens` between two steps: within none of its whole spans."""
        return next((start for start, stop in self.whole_spans if start < num_tokens < stop), num_tokens)

    def next_border(self, num_tokens: int) -> int:
        """Return the first of these places behind `num_tokens`, which is one."""
        return next((stop for start, stop in self.whole_spans if start == num_tokens), num_tokens + 1)

    def sees_ahead(self, start: int, stop: int) -> bool:
        """Return whether a token of its tokens [start, stop) sees one behind it."""
        return any(first < stop and start < end for first, end in self.whole_spans)

    def seen_spans(self, start: int, stop: int, window: int | None) -> "NDArray[np.int32]":
        """Return the positions [lo, hi) that each of its tokens [start, stop) sees beside those before it, [n, 2].

        Those of a whole span see all of it, but none farther back than the shortest window of a layer; 0, 0 for others.
        """
        found = np.zeros((stop - start, 2), np.int32)
        for first, end in self.whole_spans:
            places = np.arange(max(first, start), min(end, stop))
            found[places - start, 0] = first if window is None else np.maximum(first, places - window + 1)
            found[places - start, 1] = end
        return found

    def finish_reason(self, num_tokens: int) -> FinishReason | None:
        """Return why generation ends with the newest of its first `num_tokens` tokens, None where it goes on.

        A stop id (EOS is one unless `ignore_eos`) ends it once `min_tokens` are generated; a grammar that allows
        nothing more and the length limit always.
        """
        is_complete = self.matcher is not None and self.matcher.is_complete
        may_stop = is_complete or num_tokens - self.num_prompt >= self.sampling.min_tokens
        if self.tokens[num_tokens - 1] in self.stop_ids and may_stop:
            return FinishReason.STOP
        if is_complete:
            return FinishReason.COMPLETE
        return FinishReason.LENGTH if num_tokens >= self.max_len else None

    def rollback(self, num_tokens: int) -> None:
        """Cut it to its first `num_tokens` tokens, one at least, of which the newest counts as not computed."""
        del self.tokens[num_tokens:]
        self.num_computed = min(self.num_computed, num_tokens - 1)
        self.num_drafted = 0

    def lead(self, followers: "list[Sequence]") -> None:
        """Have `followers` wait for the prompt of this sequence, beside those that do."""
        self.followers += followers
        for seq in followers:
            seq.leader = self

    def leave_group(self) -> "Sequence | None":
        """Wait for no leader, and lead none. Return the first follower, which leads the others from now on."""
        if self.leader is not None:
            self.leader.followers.remove(self)
            self.leader = None
        if not self.followers:
            return None
        (first, *others), self.followers = self.followers, []
        first.leader = None
        first.lead(others)
        return first

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt - self.num_drafted

    @property
    def is_pending(self) -> bool:
        """Return whether its newest token is not known yet."""
        return self.tokens[-1] == PENDING

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def reads_drafts(self) -> bool:
        """Return whether the host must know what is drafted to say how the tokens behind it are chosen."""
        return self.matcher is not None or self.sampling.needs_history

    @property
    def is_decoding(self) -> bool:
        """Return whether only the newest token is left to compute."""
        return self.num_computed > 0 and len(self.tokens) - self.num_computed == 1


@dataclass(frozen=True, slots=True)
class BatchFork:
    """A sequence that begins with a step as a copy of the one in `row`, whose prompt that step ends."""

    row: int
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows that one step computes. Row i belongs to `sequences[i]`; rows are ordered prefill | extend | decode.

    Where a sequence has drafted tokens, the decode rows are rows of the phase `verify`: all of them, so that one launch
    computes them. Such a row computes its newest token and those drafted behind it, and a token is sampled behind each.

    query_lens    tokens of the sequence computed in this step: [context_len - query_len, context_len)
    context_lens  tokens of the sequence in pages after this step
    page_tables   page numbers (int32) that cover exactly context_len tokens when the step is launched; a decode row's
                  table is the sequence's own and grows with it
    sampled_rows  rows of which no token is left to compute after this step: a next token is sampled for each
    forks         each gets a next token too, by the logits of its row, which is a sampled one
    page_copies   (source, target) of pages that the forks would write to; copied behind the step's own keys and values
    states        the slots of its recurrent states; None for a model without, or where no state is kept
    drafted_at    where the device finds the drafted tokens that are PENDING, those of one row behind those of another
    embeddings    spans whose rows are to be written to the embedding buffers before the step
    has_embedded  whether a token of the step has an embedding of its own
    """

    sequences: tuple[Sequence, ...]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    page_tables: tuple["array[int]", ...]
    sampled_rows: tuple[int, ...]
    num_prefill: int
    num_extend: int
    num_preempted: int = 0  # sequences preempted to make room for this batch
    num_prefix_queried_tokens: int = 0  # tokens of newly admitted prompts that were looked up in cached pages
    num_prefix_hit_tokens: int = 0  # those of them that were found and need not be computed
    forks: tuple[BatchFork, ...] = ()
    page_copies: tuple[tuple[int, int], ...] = ()
    states: BatchStates | None = None
    verifies: bool = False  # whether the decode rows are of the phase `verify`
    drafted_at: tuple[int, ...] = ()
    embeddings: tuple[HeldSpan, ...] = ()
    has_embedded: bool = False

    @property
    def drawn_rows(self) -> tuple[int, ...]:
        """Return the row of each drawn sequence: the sampled rows, then those of the forks."""
        return (*self.sampled_rows, *[fork.row for fork in self.forks]) if self.forks else self.sampled_rows

    @property
    def drawn_sequences(self) -> tuple[Sequence, ...]:
        """Return each sequence that the step chooses tokens for."""
        if len(self.sampled_rows) == len(self.sequences):
            drawn = self.sequences
        else:
            drawn = tuple([self.sequences[row] for row in self.sampled_rows])
        return (*drawn, *[fork.sequence for fork in self.forks]) if self.forks else drawn

    def drawn_positions(self, row: int) -> range:
        """Return the positions of the tokens that a sampled row chooses: one, or one behind each that it verifies."""
        stop = self.context_lens[row] + 1
        is_verified = self.verifies and row >= self.num_prefill + self.num_extend
        return range(stop - (self.query_lens[row] if is_verified else 1), stop)

    @property
    def draws(self) -> list[tuple[Sequence, int]]:
        """Return sequence and position of each token that the step chooses, in the order of the drawn sequences."""
        if not self.verifies:
            is_all = len(self.sampled_rows) == len(self.sequences) and not self.forks  # of most steps
            lens = self.context_lens
            return list(
                zip(self.drawn_sequences, lens if is_all else map(lens.__getitem__, self.drawn_rows), strict=True)
            )
        drawn = zip(self.drawn_sequences, self.drawn_rows, strict=True)
        return [(seq, position) for seq, row in drawn for position in self.drawn_positions(row)]

    @property
    def sampled_tokens(self) -> list[int]:
        """Return which of the step's tokens those are that tokens of the sampled rows are chosen behind."""
        ends = list(accumulate(self.query_lens))
        if not self.verifies:
            return [ends[row] - 1 for row in self.sampled_rows]
        counts = [(ends[row], len(self.drawn_positions(row))) for row in self.sampled_rows]
        return [token for end, count in counts for token in range(end - count, end)]

    @property
    def num_rows(self) -> int:
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of its rows."""
        if not self.num_prefill and not self.num_extend:
            return _VERIFY_ONLY if self.verifies else _DECODE_ONLY
        return tuple(phase for phase in Phase if self.rows_of(phase))

    def sees_ahead(self, phase: Phase) -> bool:
        """Return whether a token of the rows of a phase sees one behind it. A row of decode has one token."""
        if phase not in (Phase.PREFILL, Phase.EXTEND):
            return False
        rows = [row for row in self.rows_of(phase) if self.sequences[row].whole_spans]
        ends, lengths = self.context_lens, self.query_lens
        return any(self.sequences[row].sees_ahead(ends[row] - lengths[row], ends[row]) for row in rows)

    def rows_of(self, phase: Phase) -> range:
        """Return the rows of one phase, empty where the batch has none."""
        extend_at = self.num_prefill
        decode_at = self.num_prefill + self.num_extend
        if phase is Phase.PREFILL:
            return range(extend_at)
        if phase is Phase.EXTEND:
            return range(extend_at, decode_at)
        is_there = self.verifies is (phase is Phase.VERIFY)
        return range(decode_at, self.num_rows) if is_there else range(0)


def phase_of(query_len: int, context_len: int) -> Phase:
    """Return the attention phase of a row: a prompt's last token, computed alone, is a decode row to a kernel."""
    if query_len == context_len:
        return Phase.PREFILL
    return Phase.DECODE if query_len == 1 else Phase.EXTEND
