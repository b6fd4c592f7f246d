"""The engine: requests in, tokens out, one step at a time. It touches no tensor and no socket.

A step has five states, and while one is computed the next may be planned and launched:

    plan     the scheduler chooses the rows of a batch                           Scheduler.plan
    launch   the runner starts the batch; each sampled row gets a PENDING token  Runner.launch, Scheduler.advance
    choose   tokens that grammars bind, when those before them are known         Pending.choose
    land     the host waits for the batch and reads the sampled token ids        Pending.result
    settle   pages may be found by others, tokens go out, sequences end          Scheduler.settle, Outputs.add_tokens

With a drafter nothing is launched ahead: it drafts from tokens that are known. A step then verifies several tokens of a
sequence, and settling it begins with what holds: the sampled tokens as far as they are those that were drafted, and one
more, unless an earlier one ends the sequence. The rest is rolled back, and the next step launched before its output is
made.
"""

import logging
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kernels.vocabulary.shape import Phase
from server.engine.scheduling.answer_tap import AnswerTap
from server.engine.scheduling.drafter import Drafter, DraftTally
from server.engine.scheduling.embeddings import EmbeddingFormat
from server.engine.scheduling.head_drafter import HeadDrafter
from server.engine.scheduling.image_spans import image_spans, images_refusal
from server.engine.scheduling.matcher import CompileGrammar, Matcher
from server.engine.scheduling.outputs import Outputs
from server.engine.scheduling.positions import positions_of
from server.engine.scheduling.runner_api import (
    BatchError,
    ChoiceError,
    Pending,
    Runner,
    StepError,
    StepResult,
    StepStatistics,
    TakeStatistics,
)
from server.engine.scheduling.scheduler import Scheduler, SequenceTooLong
from server.engine.scheduling.sequence import PENDING, Batch, Sequence, SequenceStatus
from server.engine.scheduling.step_parts import Mark, Part, unmarked
from server.errors import InvalidGrammar, InvalidValue, error_of_code
from server.log import trace_fields
from server.protocol.messages import (
    FinishReason,
    Fork,
    StepOutput,
    StepRecord,
    Submit,
)

logger = logging.getLogger(__name__)

# The most log probabilities of a prompt, those of the likeliest tokens included: all are in one message, 16 bytes each.
MOST_PROMPT_LOGPROBS = 3 * 2**19
_COMPILE_WAIT_S = 0.01  # that an engine with nothing else to do waits at a time
_LEAST_PACKED = 1024  # tokens: numpy's first touch of an array takes 70 us after a pause, Python's of 1024 ints 10


@dataclass(frozen=True, slots=True)
class EngineOptions:
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    seed: int
    runs_ahead: bool = False  # a step is launched before the tokens of the one before it are read
    embeddings: EmbeddingFormat | None = None  # None: no token of a prompt has an embedding of its own


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch that was launched, or whose launch or choice of tokens failed."""

    batch: Batch
    outcome: Pending | BatchError | ChoiceError
    started_at: float
    num_compiles: int  # during the launch
    is_bound: bool  # a grammar binds a sequence of the engine, perhaps one of the batch


class Engine:
    """Steps a scheduler and a runner. Only one thread may call it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        options: EngineOptions,
        *,
        num_compiles: Callable[[], int] = lambda: 0,
        take_statistics: TakeStatistics = StepStatistics,
        compile_grammar: CompileGrammar | None = None,
        drafter: Drafter | HeadDrafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_compiles` returns how many kernels this process has compiled; `clock` is monotonic, in seconds.

        `take_statistics` returns what was measured since its last call. Without `compile_grammar` no request may have a
        grammar, without a `drafter` no tokens are drafted.
        """
        self.step_index = 0
        self.mark: Mark = unmarked  # set by a bench
        self.answers: AnswerTap | None = None  # set by the process that computes answers again
        self._scheduler = scheduler
        self._runner = runner
        self._options = options
        self._num_compiles = num_compiles
        self._take_statistics = take_statistics
        self._clock = clock
        self._seeds = random.Random(options.seed)
        self._sequences: dict[str, Sequence] = {}
        self._ahead: _Launched | None = None  # launched before the step before it has landed
        self._landed_at = 0.0
        self._num_with_history = (
            0  # sequences whose next token depends on earlier ones (penalties), which the host counts
        )
        self._compile_grammar = compile_grammar
        self.drafter = drafter
        self._drafts = DraftTally()
        self._compiling: dict[str, tuple[Sequence, Future[Matcher]]] = {}  # requests that wait for their matchers
        self._num_with_grammar = 0
        self._outputs = Outputs()
        self._is_checked = True  # whether the pages were checked since the last step

    @property
    def has_work(self) -> bool:
        is_idle = self._scheduler.is_idle and not self._compiling
        return bool(self._outputs) or self._ahead is not None or not is_idle

    @property
    def max_len(self) -> int:
        """The most tokens a sequence may have."""
        return self._scheduler.max_len

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting + sum(1 + len(seq.followers) for seq, _ in self._compiling.values())

    def submit(self, message: Submit) -> None:
        """Queue a request, and its forks. One that cannot be served ends with an error at the next step."""
        seq = self._sequence(message)
        forks = [self._forked(seq, fork) for fork in message.forks]
        refusal = self._refusal(message, seq)
        grammar = message.sampling.grammar
        if refusal is None and message.images:
            self._add_images(message, [seq, *forks])
            refusal = self._span_refusal(seq)
        if refusal is not None:
            self._end([seq, *forks], *refusal)
            return
        if any(span.offsets or span.num_positions is not None for span in seq.embedded):
            for it in (seq, *forks):
                it.positions, it.position_delta = positions_of(seq.embedded, seq.num_prompt)
        num_top = message.sampling.prompt_logprobs
        shares_prompt = num_top is None or (1 + len(forks)) * (1 + num_top) * seq.num_prompt <= MOST_PROMPT_LOGPROBS
        if shares_prompt:
            seq.lead(forks)
        for it in [seq] if shares_prompt else [seq, *forks]:
            if grammar is None or self._compile_grammar is None:
                self._queue(it)
            else:
                self._compiling[it.request_id] = it, self._compile_grammar(grammar)

    def _queue(self, seq: Sequence) -> None:
        """Queue a sequence and those that follow it."""
        group = [seq, *seq.followers]
        try:
            self._scheduler.add(seq)
        except SequenceTooLong as error:
            self._end(group, "context_length_exceeded", str(error))
            return
        for it in group:
            self._sequences[it.request_id] = it
            self._num_with_history += it.sampling.needs_history
            self._num_with_grammar += it.matcher is not None
            if self.answers is not None:
                self.answers.begin(it)
        self._is_checked = False

    def _end(self, sequences: Iterable[Sequence], code: str, message: str) -> None:
        """End sequences that are not queued with an error."""
        for seq in sequences:
            self._outputs.add_end(seq, FinishReason.ERROR, code, message)

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammars are compiled by now; wait a little where there is nothing else to do."""
        if self._ahead is None and self._scheduler.is_idle and not self._outputs:
            wait([future for _, future in self._compiling.values()], _COMPILE_WAIT_S, FIRST_COMPLETED)
        for request_id, (seq, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            try:
                seq.matcher = future.result()
            except InvalidGrammar as error:
                self._end([seq, *seq.followers], error.code, error.message)
                continue
            for follower in seq.followers:
                follower.matcher = seq.matcher.copy()
            self._queue(seq)

    def cancel(self, request_id: str) -> None:
        """Stop a request and free its pages. Unknown ids are ignored: it may have finished on the way."""
        seq = self._sequences.get(request_id)
        if seq is not None:  # often because a stop string came: what there is of the answer is right or wrong as ever
            self._drop(seq)
            self._outputs.add_end(seq, FinishReason.CANCELLED)
        else:
            self._cancel_compiling(request_id)

    def _cancel_compiling(self, request_id: str) -> None:
        for leader, future in list(self._compiling.values()):
            found = [seq for seq in (leader, *leader.followers) if seq.request_id == request_id]
            for seq in found:
                heir = seq.leave_group()
                if seq is leader:
                    del self._compiling[request_id]
                    if heir is not None:
                        self._compiling[heir.request_id] = heir, future
                self._outputs.add_end(seq, FinishReason.CANCELLED)

    def step(self, *, may_run_ahead: bool = True) -> StepOutput | None:
        """Finish one batch, launching the next one first where it can be planned. None when there is no work.

        Unless `may_run_ahead`, no batch is launched and unfinished afterwards. Raises IntegrityError when pages are
        lost, and whatever the runner does not survive.
        """
        if self._compiling:
            self._queue_compiled()
        launched = self._ahead or self._launch()
        self._ahead = None
        if launched is None:
            if not self._is_checked:
                self._scheduler.check_integrity()
                self._is_checked = True
            if not self._outputs:
                return None
            return self._output(self._clock(), StepResult([]), num_compiles=0)
        launched = _chosen(launched)
        if may_run_ahead and self._can_run_ahead(launched):
            self._ahead = self._launch()
        return self._land(launched, may_go_on=may_run_ahead)

    def _launch(self) -> _Launched | None:
        """Plan a batch and start it, as if every earlier batch had succeeded. None when there is nothing to do."""
        started_at, compiles_before = self._clock(), self._num_compiles()
        self.mark(Part.PLAN)
        batch = self._scheduler.plan(started_at, self.drafter)
        self.mark(Part.LAUNCH)
        if batch is None:
            return None
        try:
            outcome: Pending | BatchError = self._runner.launch(batch)
        except BatchError as error:
            self._scheduler.abandon(batch)
            outcome = error
        else:
            self._scheduler.advance(batch)
            for seq in batch.drawn_sequences:
                seq.tokens.append(PENDING)
            if isinstance(self.drafter, HeadDrafter):
                self.drafter.follow_at_once(batch)
        self.mark(Part.REPORT)
        is_bound = self._num_with_grammar > 0
        return _Launched(batch, outcome, started_at, self._num_compiles() - compiles_before, is_bound)

    def _can_run_ahead(self, launched: _Launched) -> bool:
        """Return whether the next batch can be planned before this one's tokens are known (its rows may still stop)."""
        is_launched = not isinstance(launched.outcome, StepError)
        if not self._options.runs_ahead or not is_launched or self._num_with_history or self.drafter is not None:
            return False
        # A prompt's scores are waited for at the launch, before a grammar knows the tokens of the step before.
        return not self._num_with_grammar or all(
            seq.sampling.prompt_logprobs is None for seq in self._sequences.values()
        )

    def _land(self, launched: _Launched, *, may_go_on: bool) -> StepOutput:
        """Wait for a batch, settle it, and return its output; launch the next one before, if one `may_go_on`."""
        self.step_index += 1
        batch = launched.batch
        match launched.outcome:
            case BatchError() as error:
                result = self._end_failed([batch.sequences[row] for row in error.rows], error)
            case ChoiceError() as error:  # prompts of which it computed a chunk go on
                waiting = [*batch.drawn_sequences, *(seq for seq in batch.sequences if seq.wants_hidden)]
                result = self._end_failed(waiting, error)
                self._follow(batch, [[] for _ in batch.drawn_sequences])
                self._scheduler.settle(batch)
            case pending:
                result = self._settle(batch, pending.result())
        started_at = max(launched.started_at, self._landed_at)  # until then the device computed the step before
        self._landed_at = ended_at = self._clock()
        if may_go_on and self._options.runs_ahead and self.drafter is not None:
            self._ahead = self._launch()
        num_compiles = launched.num_compiles
        return self._output(started_at, result, num_compiles=num_compiles, batch=batch, ended_at=ended_at)

    def _end_failed(self, sequences: Iterable[Sequence], error: StepError) -> StepResult:
        """End those of a step's sequences that have not finished, and what follows them; return its result."""
        groups = ([*seq.followers, seq] for seq in sequences)  # one that has finished since the launch leads nothing
        lost = dict.fromkeys(it for group in groups for it in group if it.status is not SequenceStatus.FINISHED)
        logger.error("step %d: %d requests end: %s", self.step_index, len(lost), error)
        for seq in lost:
            self._fail(seq, error.code, str(error))
        return StepResult([], quarantined=error.quarantined, oom_stage=error.oom_stage)

    def _sequence(self, message: Submit) -> Sequence:
        sampling = message.sampling
        stop_ids = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._options.eos_token_ids))
        return Sequence(
            request_id=message.request_id,
            tokens=list(message.prompt_token_ids),
            num_prompt=len(message.prompt_token_ids),
            sampling=sampling,
            seed=self._seed(sampling.seed),
            submitted_at=self._clock(),
            stop_ids=frozenset(token_id for token_id in stop_ids if 0 <= token_id < self._options.vocab_size),
            cache_salt=message.cache_salt,
            traceparent=message.traceparent,
            priority=message.priority,
            prompt=_packed(message.prompt_token_ids),
            embedded=message.embedded,
        )

    def _add_images(self, message: Submit, sequences: list[Sequence]) -> None:
        """Give the sequences of a request the spans of its images."""
        embeddings = self._options.embeddings
        assert embeddings is not None and embeddings.tower is not None, "images are refused without a tower"  # noqa: PT018
        three = embeddings.has_three_positions
        spans = image_spans(message.images, embeddings.tower, message.cache_salt, has_three_positions=three)
        for seq in sequences:
            seq.embedded = tuple(sorted((*message.embedded, *spans), key=lambda span: span.start))
            seq.whole_spans = tuple([(it.start, it.stop) for it in spans]) if embeddings.sees_both_ways else ()

    def _forked(self, seq: Sequence, fork: Fork) -> Sequence:
        """Return the sequence of one more answer to the prompt of `seq`."""
        return replace(
            seq,
            request_id=fork.request_id,
            tokens=seq.tokens.copy(),
            seed=self._seed(fork.seed),
            path_uses={},
            scores=[],
            followers=[],
        )

    def _seed(self, asked: int | None) -> int:
        seed = self._seeds.getrandbits(31) if asked is None else asked
        return (seed + 2**63) % 2**64 - 2**63  # any integer a client may send, as an int64

    def _refusal(self, message: Submit, seq: Sequence) -> tuple[str, str] | None:
        """Return code and message of what the API should have refused: an id out of range reads foreign memory."""
        if message.sampling.grammar is not None and self._compile_grammar is None:
            return "invalid_grammar", "this model's tokenizer cannot be bound by a grammar"
        ids = [message.request_id, *[fork.request_id for fork in message.forks]]
        compiling = [it.request_id for leader, _ in self._compiling.values() for it in (leader, *leader.followers)]
        if len(set(ids)) < len(ids) or not self._sequences.keys().isdisjoint(ids) or not set(compiling).isdisjoint(ids):
            return "internal_error", "a request with this id is being served"
        vocab_size = self._options.vocab_size
        if not (prompt := message.prompt_token_ids):
            return "invalid_value", "the prompt has 0 tokens, the least is 1"
        num_top = message.sampling.prompt_logprobs
        if num_top is not None and len(prompt) > (most := MOST_PROMPT_LOGPROBS // (1 + num_top)):
            limit = f"log probabilities beside {num_top} likeliest are given of at most {most}"
            return "invalid_value", f"the prompt has {len(prompt)} tokens, {limit}"
        if seq.sampling.allowed_token_ids and not _is_choosable(seq):
            return "invalid_value", "of the allowed tokens each is a stop token before min_tokens, or ends a bad word"
        labels = () if message.sampling.pooling is None else message.sampling.pooling.label_ids
        if any(not 0 <= label < vocab_size for label in labels):
            return "invalid_value", f"a label is outside the vocabulary of {vocab_size}"
        least, most = (min(prompt), max(prompt)) if seq.prompt is None else (seq.prompt.min(), seq.prompt.max())
        if not 0 <= least <= most < vocab_size:
            wrong = str(least if least < 0 else most)[:24]
            return "invalid_value", f"prompt token {wrong} is outside the vocabulary of {vocab_size}"
        if message.images:
            tower = None if self._options.embeddings is None else self._options.embeddings.tower
            why = images_refusal(message.images, len(prompt), tower)
            return None if why is None else ("invalid_value", why)
        return self._span_refusal(seq) if message.embedded else None

    def _span_refusal(self, seq: Sequence) -> tuple[str, str] | None:
        """Return code and message of what is wrong with a sequence's embedded spans."""
        if (embeddings := self._options.embeddings) is None:
            return "invalid_value", "no token of this model's prompts may have an embedding of its own"
        why = embeddings.refusal(seq.embedded, seq.num_prompt, self._scheduler.max_embedded_tokens)
        return None if why is None else ("invalid_value", why)

    def _settle(self, batch: Batch, result: StepResult) -> StepResult:
        """Return the result, without what is rolled back."""
        self._outputs.record_uses(batch, result)
        if batch.verifies:
            _note_drafted(batch, result.drafted)
            result = self._forgive(batch, result)
        if result.nonfinite or result.exhausted:
            drawn = batch.drawn_sequences
            for place in (*result.nonfinite, *result.exhausted):
                if drawn[place].status is SequenceStatus.FINISHED:
                    continue
                if place in result.exhausted:
                    self._fail(drawn[place], InvalidValue.code, _no_token_left(drawn[place]))
                else:
                    self._fail(drawn[place], "nonfinite_logits", "The model's output held no finite number.")
        if batch.verifies:
            result = self._verify(batch, result)
        elif self._num_with_grammar:
            self._accept(batch, result)
        self._follow(batch, result.tokens)
        self._scheduler.settle(batch)
        for seq in self._outputs.add_tokens(batch, result, self._clock()):
            self._drop(seq)
        return result

    def _follow(self, batch: Batch, tokens: list[list[int]]) -> None:
        """Have a draft head compute the step's tokens too, before others may find its pages."""
        if isinstance(self.drafter, HeadDrafter):
            self.drafter.follow(batch, tokens)

    def _forgive(self, batch: Batch, result: StepResult) -> StepResult:
        """Return the result without sequences whose logits a drafted token may have spoilt.

        A key or value that is not finite spoils the rows of its tile, those before it too. The next step computes such
        a sequence's newest token alone, and so do all later ones.
        """
        if not result.nonfinite:
            return result
        drawn = batch.drawn_sequences
        spoilt = [place for place in result.nonfinite if drawn[place].num_drafted]
        for place in spoilt:
            drawn[place].is_drafted_for = False
        return replace(result, nonfinite=tuple([place for place in result.nonfinite if place not in spoilt]))

    def _accept(self, batch: Batch, result: StepResult) -> None:
        """Move the matchers of the batch's sequences on; end those whose grammar cannot go on."""
        for seq, tokens in zip(batch.drawn_sequences, result.tokens, strict=True):
            if seq.matcher is None or not tokens or seq.status is SequenceStatus.FINISHED:
                continue
            try:
                seq.matcher.accept(tokens[0])
            except InvalidGrammar as error:
                self._fail(seq, error.code, error.message)

    def _verify(self, batch: Batch, result: StepResult) -> StepResult:
        """Leave each sequence of the batch, and the result, with those of the sampled tokens that hold."""
        tokens, scores = [], dict(result.token_scores)
        drawn = zip(batch.drawn_sequences, batch.drawn_rows, result.tokens, strict=True)
        for place, (seq, row, sampled) in enumerate(drawn):
            first, num_kept = batch.drawn_positions(row).start, 0
            if seq.status is not SequenceStatus.FINISHED:
                num_kept, num_accepted = self._num_holding(seq, first, sampled)
                if seq.num_drafted:
                    self._drafts.add(seq.num_drafted, num_accepted)
            if seq.status is not SequenceStatus.FINISHED:
                self._scheduler.rollback(seq, first + num_kept)
            tokens.append(sampled[:num_kept])
            if place in scores:
                scores[place] = scores[place].first(num_kept)
        return replace(result, tokens=tokens, token_scores=scores)

    def _num_holding(self, seq: Sequence, first: int, sampled: list[int]) -> tuple[int, int]:
        """Write `sampled` tokens from position `first` on over the drafted ones, as far as they hold.

        Return how many do, and how many of them had been drafted.

        The first one does; one behind it where the token before it was drafted right and did not end the sequence. The
        matcher moves on with them. Where it cannot by the first one, the sequence is ended; where it cannot by another,
        that one is left to the next step, in which it will be the first.
        """
        num_holding = num_accepted = 0
        for position, token_id in enumerate(sampled, start=first):
            drafted, seq.tokens[position] = seq.tokens[position], token_id
            if seq.matcher is not None:
                try:
                    seq.matcher.accept(token_id)
                except InvalidGrammar as error:
                    if position == first:
                        self._fail(seq, error.code, error.message)
                    break
            num_holding += 1
            num_accepted += token_id == drafted and position - first < seq.num_drafted
            if token_id != drafted or seq.finish_reason(position + 1) is not None:
                break
        return num_holding, num_accepted

    def _fail(self, seq: Sequence, code: str, message: str) -> None:
        is_clients_fault = error_of_code(code, message).status < 500
        ids = trace_fields(seq.request_id, seq.traceparent)
        level = logging.INFO if is_clients_fault else logging.ERROR
        logger.log(level, "a request ends early", extra={"step": self.step_index, "code": code, **ids})
        self._drop(seq, is_sound=False)
        self._outputs.add_end(seq, FinishReason.ERROR, code, message)

    def _drop(self, seq: Sequence, *, is_sound: bool = True) -> None:
        del self._sequences[seq.request_id]
        self._num_with_history -= seq.sampling.needs_history
        self._num_with_grammar -= seq.matcher is not None
        if self.answers is not None and seq.record is not None:
            self.answers.end(seq, is_sound=is_sound)
        self._scheduler.finish(seq, is_sound=is_sound)

    def _output(
        self,
        started_at: float,
        result: StepResult,
        *,
        num_compiles: int,
        batch: Batch | None = None,
        ended_at: float | None = None,
    ) -> StepOutput:
        statistics = self._take_statistics()
        record = StepRecord(
            step=self.step_index,
            started_at=started_at,
            duration_s=(self._clock() if ended_at is None else ended_at) - started_at,
            dispatches=[*result.dispatches, *statistics.head_dispatches],
            num_running=self._scheduler.num_running,
            num_waiting=self.num_waiting,
            num_waiting_tokens=self._scheduler.num_waiting_tokens,
            num_pages_used=self._scheduler.num_pages_used,
            num_pages=self._scheduler.num_pages,
            num_preemptions=batch.num_preempted if batch else 0,
            num_nonfinite=len(result.nonfinite),
            num_compiles=num_compiles,
            quarantined=result.quarantined,
            attention_samples=statistics.attention_samples,
            peak_temporary_bytes=statistics.peak_temporary_bytes,
            matmul_fallbacks=statistics.matmul_fallbacks,
            oom_stage=result.oom_stage,
            num_prefix_queried_tokens=batch.num_prefix_queried_tokens if batch else 0,
            num_prefix_hit_tokens=batch.num_prefix_hit_tokens if batch else 0,
            num_page_mismatches=self._scheduler.take_page_mismatches(),
            tower_times=statistics.tower_times,
            states=self._scheduler.take_state_counts(),
            drafts=self._drafts.take(),
            num_undrafted_steps=self._scheduler.take_undrafted_steps(),
        )
        return StepOutput(record, self._outputs.take())


def _chosen(launched: _Launched) -> _Launched:
    """Choose the tokens that grammars bind; return the batch, or what kept them from being chosen."""
    if not launched.is_bound or isinstance(launched.outcome, StepError):
        return launched
    try:
        launched.outcome.choose()
    except ChoiceError as error:
        return replace(launched, outcome=error)
    return launched


def _note_drafted(batch: Batch, drafted: list[int]) -> None:
    """Write the tokens that were drafted where they stood PENDING."""
    ids = iter(drafted)
    for row in batch.rows_of(Phase.VERIFY) if drafted else ():
        seq, stop = batch.sequences[row], batch.context_lens[row]
        for position in range(stop - batch.query_lens[row] + 1, stop):
            seq.tokens[position] = next(ids)


def _is_choosable(seq: Sequence) -> bool:
    """Return whether one of the allowed tokens can be chosen at any time."""
    wanted = seq.sampling
    banned = {word[-1] for word in wanted.bad_words} | (seq.stop_ids if wanted.min_tokens else set())
    return not banned.issuperset(wanted.allowed_token_ids)


def _no_token_left(seq: Sequence) -> str:
    """Return the message of an answer that its request's limits on tokens let go no further."""
    wanted = seq.sampling
    limits = [] if wanted.grammar is None else [wanted.grammar.param or "the grammar"]
    limits += ["allowed_token_ids"] if wanted.allowed_token_ids else []
    limits += ["bad_words"] if wanted.bad_words else []
    limits += ["min_tokens"] if seq.num_generated <= wanted.min_tokens else []
    return f"The answer ended where no token is left that {' and '.join(limits)} allow; loosen one of them."


def _packed(token_ids: list[int]) -> "NDArray[np.int64] | None":
    """Return the ids as an array; None for few ids, where a list is faster, or where one is no int64."""
    if len(token_ids) < _LEAST_PACKED:
        return None
    try:
        return np.array(token_ids, np.int64)
    except OverflowError:
        return None
