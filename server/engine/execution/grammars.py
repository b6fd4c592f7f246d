"""Grammars in the engine: compiled beside the stepping thread, and the tokens that each allows next as a bit mask."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import llguidance
import numpy as np
import torch
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from torch import Tensor

from server.engine.scheduling.matcher import Matcher
from server.engine.scheduling.sequence import Batch
from server.engine.scheduling.sequence import Sequence as SequenceOfTokens
from server.errors import InvalidGrammar
from server.grammar.compiled import check, compiled
from server.model.load.tokenizer_files import tokenizer_json
from server.protocol.messages import Grammar

_NUM_CACHED = 64  # compiled grammars; one takes less than 60 MB, mostly 0.1
_NUM_COMPILING = 2  # at once
_FEWEST_PARALLEL = 4  # rows; below that threads cost more than they spare


class GrammarMatcher:
    """The place in its grammar that one answer has reached."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher
        self.is_complete = False
        self.has_refused = False  # a token that it was given

    def accept(self, token_id: int) -> None:
        """Move on by a token. Raises InvalidGrammar."""
        if not self.matcher.consume_token(token_id):
            self.has_refused = True
            check(self.matcher)
            raise InvalidGrammar("The grammar cannot be followed: it does not allow the token that was chosen.")
        self.is_complete = self.matcher.is_stopped()

    def copy(self) -> "GrammarMatcher":
        """Return one at the same place, for another answer."""
        return GrammarMatcher(self.matcher.deep_copy())

    def behind(self, drafted: int) -> "GrammarMatcher":
        """Return one behind a drafted token, or at the same place where the grammar forbids it: then it cannot hold."""
        found = self.copy()
        found.matcher.try_consume_tokens([drafted])
        return found


@dataclass(frozen=True, slots=True)
class BoundRow:
    """A token that a grammar binds: the `index`th of those that a step chooses.

    banned  tokens that must not come next either, unless the grammar allows nothing else
    """

    index: int
    matcher: GrammarMatcher
    banned: tuple[int, ...]


class Grammars:
    """Compiles grammars for one tokenizer, and computes masks. `compile` and `allowed` are the stepping thread's."""

    def __init__(self, tokens: llguidance.LLTokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._tokens = tokens
        self._eos_token_ids = eos_token_ids
        self._threads = ThreadPoolExecutor(_NUM_COMPILING, thread_name_prefix="grammar")
        num_threads = min(8, (os.cpu_count() or 1) // 2)
        self._executor = llguidance.LLExecutor(num_threads) if num_threads > 1 else None
        self._cache: OrderedDict[Grammar, Future[llguidance.LLMatcher]] = OrderedDict()

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "Grammars":
        """Read the folder's tokenizer, 1 s for 128,000 tokens. Raises ValueError where the library cannot use it."""
        try:
            text = tokenizer_json(folder)
            eos = [*eos_token_ids] or None
            tokens = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
        except Exception as error:  # the library raises nothing more exact for a tokenizer of another kind
            raise ValueError(str(error).partition("\n")[0][:200]) from error
        return cls(tokens, eos_token_ids)

    def compile(self, grammar: Grammar) -> "Future[Matcher]":
        """Return the matcher of a new answer, at once where the grammar is known. The future may raise InvalidGrammar.

        A grammar that fails is not remembered: it may have failed for want of memory.
        """
        made: Future[Matcher] = Future()
        source = self._cache.get(grammar)
        if source is None or (source.done() and source.exception() is not None):
            source = self._cache[grammar] = self._threads.submit(compiled, self._tokens, grammar)
            if len(self._cache) > _NUM_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(grammar)

        def copy(done: "Future[llguidance.LLMatcher]") -> None:
            error = done.exception()
            if error is None:
                made.set_result(GrammarMatcher(done.result().deep_copy()))
            else:
                made.set_exception(error)

        source.add_done_callback(copy)
        return made

    def bound_rows(self, batch: Batch) -> tuple[BoundRow, ...]:
        """Return the tokens of a step that grammars bind. Call it when a batch is launched."""
        if not [seq for seq in batch.drawn_sequences if seq.matcher is not None]:
            return ()
        found: list[BoundRow] = []
        latest = None
        for index, (seq, position) in enumerate(batch.draws):
            if not isinstance(seq.matcher, GrammarMatcher):
                continue
            matcher = seq.matcher
            if seq is latest:  # the one before is drafted, and all earlier tokens are known
                matcher = found[-1].matcher.behind(seq.tokens[position - 1])
            latest = seq
            found.append(BoundRow(index, matcher, self._banned(seq, position)))
        return tuple(found)

    def bound_along(self, seq: SequenceOfTokens, matcher: GrammarMatcher, positions: range) -> tuple[BoundRow, ...]:
        """Return the tokens at `positions` as an answer's grammar binds them; `matcher`, at the first, is moved on.

        Fewer where the grammar forbids a token of the answer: that one is the last.
        """
        found: list[BoundRow] = []
        for index, position in enumerate(positions):
            found.append(BoundRow(index, matcher.copy(), self._banned(seq, position)))
            try:
                matcher.accept(seq.tokens[position])
            except InvalidGrammar:
                break
        return tuple(found)

    def _banned(self, seq: SequenceOfTokens, position: int) -> tuple[int, ...]:
        banned = self._eos_token_ids if seq.sampling.ignore_eos else ()
        if position - seq.num_prompt < seq.sampling.min_tokens:
            return (*banned, *seq.stop_ids)
        return banned

    def allowed(self, rows: Sequence[BoundRow], num_rows: int) -> Tensor:
        """Return which tokens may come next: [num_rows, words] int32 on the CPU, bit i % 32 of word i // 32 for i.

        A row that no grammar binds allows all, and so does one whose grammar has failed: its token will be refused.
        """
        mask = np.full((num_rows, (self._tokens.vocab_size + 31) // 32), -1, np.int32)
        if self._executor is None or len(rows) < _FEWEST_PARALLEL:
            for row in rows:
                fill_next_token_bitmask(row.matcher.matcher, mask, row.index)
        else:
            fill_next_token_bitmask_par(self._executor, [(row.matcher.matcher, row.index) for row in rows], mask)
        for row in rows:
            if row.matcher.matcher.is_error():
                mask[row.index] = -1
            elif row.banned and not _ban(mask[row.index], row.banned):
                # Of stop tokens that the grammar needs one must come; the end still need not.
                _ban(mask[row.index], [token_id for token_id in row.banned if token_id in self._eos_token_ids])
        return torch.from_numpy(mask)


def _ban(mask: "np.ndarray[tuple[int], np.dtype[np.int32]]", token_ids: Sequence[int]) -> bool:
    """Clear the bits of tokens, unless none were left. Return whether they are cleared."""
    left = mask.view(np.uint32).copy()
    for token_id in token_ids:
        left[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
    if not left.any():
        return False
    mask[:] = left.view(np.int32)
    return True
