"""Computes batches: rank 0 writes them into step buffers, workers launch those, the host reads token ids later.

What a rank must not decide alone is decided here: which graph computes a step, and what follows when a step fails.
"""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, takewhile
from typing import TypeVar

import torch
from torch import Tensor

from kernels.sampling.sampling import SamplingTensors, sampling_tensors
from server.engine.execution.commands import ImageRows
from server.engine.execution.grammars import BoundRow, Grammars
from server.engine.execution.graphs import GraphStep, StepGraphs
from server.engine.execution.sampling import (
    EXHAUSTED,
    NOT_FINITE,
    ScoredRows,
    is_plain_greedy,
    row_sampling,
    score_prompts,
    scored_rows,
    scores_to_host,
    start_pooling,
    token_scores,
    wants_hidden,
    wants_prompt_scores,
)
from server.engine.execution.step_buffer import StepLayout
from server.engine.execution.step_writer import StepWriter
from server.engine.execution.worker import ComputedImages, Worker
from server.engine.operators.decisions import NoPathError
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.launch_errors import is_device_lost
from server.engine.operators.observation import Observation
from server.engine.operators.step_attention import ServedStep, StepAttention
from server.engine.proof.shadow_check import ShadowCheck, Tap
from server.engine.scheduling.runner_api import BatchError, ChoiceError, StepResult
from server.engine.scheduling.sequence import Batch, HeldSpan, Sequence
from server.engine.scheduling.step_parts import Mark, Part
from server.protocol.messages import TokenScores

Computed = TypeVar("Computed")


class OpenTokens:
    """The tokens of a step that grammars bind: they are chosen when those of the step before are known."""

    def __init__(self, choose: Callable[[], Callable[[], list[int]]]) -> None:
        """`choose` starts the choice, once, and returns what waits for it."""
        self._choose = choose
        self._read: Callable[[], list[int]] | None = None

    def choose(self) -> Callable[[], list[int]]:
        if self._read is None:
            self._read = self._choose()
        return self._read

    def __call__(self) -> list[int]:
        return self.choose()()


@dataclass(frozen=True, slots=True)
class Launched:
    """A batch on its way through the device. `rows`: where the tokens that it chooses are among those read.

    is_dense       whether they are all of those, in their order
    counts         how many of those each drawn sequence has; None: one
    num_drafted    drafted tokens that are read behind those, to be known at last
    read_scores    give the scores of drawn sequences when `read` has returned
    prompt_scores  of the batch's prompts, by row
    """

    read: Callable[[], list[int]]
    rows: tuple[int, ...]
    is_dense: bool
    served: ServedStep
    quarantined: list[tuple[str, str]]
    on_read: Callable[[], None]
    mark: Mark
    counts: tuple[int, ...] | None = None
    num_drafted: int = 0
    read_scores: list[Callable[[], dict[int, TokenScores]]] = field(default_factory=list)
    prompt_scores: dict[int, TokenScores] = field(default_factory=dict)
    pooled: Callable[[], dict[int, bytes]] = dict
    images: ComputedImages | None = None

    def choose(self) -> None:
        """Choose the tokens that grammars bind."""
        if isinstance(self.read, OpenTokens):
            self.read.choose()

    def result(self) -> StepResult:
        """Wait for the step. Errors mean that the device is lost."""
        self.mark(Part.WAIT)
        sampled = self.read()
        self.mark(Part.REPORT)
        self.on_read()
        first = len(sampled) - self.num_drafted
        drafted, sampled = sampled[first:], sampled[:first]
        chosen = sampled if self.is_dense else [sampled[row] for row in self.rows]
        tokens = [[token_id] for token_id in chosen] if self.counts is None else _split(chosen, self.counts)
        nonfinite: tuple[int, ...] = ()
        exhausted: tuple[int, ...] = ()
        if min(chosen, default=0) < 0:
            nonfinite, exhausted = (
                tuple([place for place, of_sequence in enumerate(tokens) if of_sequence[0] == why])
                for why in (NOT_FINITE, EXHAUSTED)
            )
            tokens = [[*takewhile(_is_token, of_sequence)] for of_sequence in tokens]
        return StepResult(
            tokens,
            self.served.dispatches,
            self.served.uses,
            quarantined=self.quarantined,
            prompt_scores=self.prompt_scores,
            token_scores={row: scores for read in self.read_scores for row, scores in read().items()},
            pooled=self.pooled(),
            nonfinite=nonfinite,
            exhausted=exhausted,
            tower=self.images,
            drafted=drafted,
        )


class ModelRunner:
    """Drives the worker with batches. Only the stepping thread may call it."""

    def __init__(self, worker: Worker, graphs: StepGraphs | None = None, *, grammars: Grammars | None = None) -> None:
        """Drive the worker: without `graphs` kernel by kernel, without `grammars` only sequences that have none."""
        self.worker = worker
        self.grammars = grammars
        self.graphs = graphs
        self.shadow: ShadowCheck | None = None  # set by the process that judges its samples
        self.writer = StepWriter(
            page_size=worker.kv.page_size,
            num_pages=worker.kv.num_pages,
            is_pinned=worker.device.type == "cuda",
            num_slots=None if worker.states is None else worker.states.num_slots,
            token_arrays=worker.token_arrays,
            window=min((it.window for it in worker.decoder.config.attentions if it.window is not None), default=None),
        )
        if graphs is not None:
            self.writer.declare(graphs.layouts)
        self.max_drafted_tokens = 0  # of a sequence that one step verifies: set where there are any
        self._latest_layout: StepLayout | None = None
        self._plain: tuple[Sequence, ...] = ()  # rows that were looked at last and were plain
        self._chosen: tuple[tuple[Sequence, ...], tuple[int, ...], tuple[int, ...]] = ((), (), ())
        self._chosen_at: dict[Sequence, int] = {}  # where the latest step chose each sequence's token

    @property
    def num_pages(self) -> int:
        return self.worker.kv.num_pages

    @property
    def dispatcher(self) -> Dispatcher:
        return self.worker.dispatcher

    @property
    def attention(self) -> StepAttention | None:
        """The attention of the latest step."""
        return self.worker.attention

    def recorded_kernels(self, batch: Batch) -> Counter[str] | None:
        """Return the kernels of this batch's graph by the driver's record; None where no graph computes it."""
        return None if self.graphs is None else self.graphs.kernels(batch)

    def step_graph(
        self, batch: Batch, capture: Callable[[Callable[[], None]], torch.cuda.CUDAGraph]
    ) -> torch.cuda.CUDAGraph | None:
        """Return what computes a batch as a CUDA graph: its own one, or one that `capture` makes of its launches.

        The batch must have run last, so that its inputs are in place. None where it cannot be captured.
        """
        graph = None if self.graphs is None else self.graphs.graph(batch)
        return self.worker.record(self.writer.write(batch, {}), capture) if graph is None else graph

    def suspects(self) -> list[tuple[str, str]]:
        """Return the (path, shape) pairs of the steps that may not be done, or else of the latest one."""
        return self.worker.suspects()

    def launch(self, batch: Batch) -> Launched:
        """Start a batch; its complete rows are sampled. At most one launched batch may be unread.

        Tokens that are PENDING are those that the launch before this one chooses. Raises BatchError.
        """
        self.worker.dispatcher.begin(batch)
        return self._guarded(batch, self._launch)

    def compute(self, batch: Batch) -> Tensor:
        """Compute a batch that samples no row, kernel by kernel; return the hidden states [T, hidden] of its tokens.

        It is of no request: nothing of it is timed, checked or counted. No launched batch may be unread. Raises
        BatchError.
        """
        with self.worker.dispatcher.watched(lambda _: nullcontext()):
            return self._guarded(batch, self._compute)

    def _compute(self, batch: Batch) -> Tensor:
        hidden = self.worker.launch(self.writer.write(batch, {}))
        self.worker.synchronize()
        attention = self.worker.attention
        assert attention is not None
        self.worker.finish(attention)
        return hidden

    def _guarded(self, batch: Batch, compute: Callable[[Batch], Computed]) -> Computed:
        """Compute a batch. Raises BatchError, when nothing of it is on its way any more, and what it does not survive.

        After other errors only an attestation goes on, where the device is not lost.
        """
        num_unread = self.worker.num_unread
        try:
            return compute(batch)
        except NoPathError as error:
            rows = range(batch.num_rows) if error.phase is None else batch.rows_of(error.phase)
            raise self._batch_error(rows, str(error)) from error
        except torch.OutOfMemoryError as error:
            num_prompts = batch.num_prefill + batch.num_extend
            rows_to_end = range(num_prompts or batch.num_rows)  # prompts need more memory than single tokens
            message = f"out of memory in a step of {batch.num_tokens} tokens"
            stage = "prefill" if num_prompts else "decode"
            raise self._batch_error(rows_to_end, message, oom_stage=stage) from error
        except Exception as error:
            if not is_device_lost(error):  # whose suspects are the steps that are not done
                self.worker.drop_unread(num_unread)
            raise

    def token_places(self, batch: Batch) -> list[int]:
        """Return where the first token of each row is among those of the latest step, padding included."""
        layout, starts = self._latest_layout, [0, *accumulate(batch.query_lens)][:-1]
        num_prompts = batch.num_prefill + batch.num_extend
        if layout is None or batch.verifies or num_prompts == batch.num_rows:
            return starts
        first = layout.num_tokens - layout.num_decode
        return [*starts[:num_prompts], *range(first, first + batch.num_rows - num_prompts)]

    def observe(self, batch: Batch) -> tuple[Tensor, Observation]:
        """Run a batch kernel by kernel; return the hidden states [T, hidden] and what its layers handed out.

        Waits for the device, which copies the inputs from memory that the step after the next one is written to. Raises
        BatchError, LaunchFailed.
        """
        observation = self.worker.observation()
        try:
            buffer = self.writer.write(batch, {})
            self._latest_layout = buffer.layout
            hidden = self.worker.launch(buffer, observation=observation)
        except NoPathError as error:
            raise self._batch_error(range(batch.num_rows), str(error)) from error
        self.worker.drop_unread()
        self.worker.synchronize()
        return hidden, observation

    def run(self, batch: Batch) -> StepResult:
        """Launch a batch and wait for it."""
        return self.launch(batch).result()

    def _launch(self, batch: Batch) -> Launched:
        tap = None if self.shadow is None or self.worker.dispatcher.is_watched else self.shadow.begin(batch)
        images = self._write_embeddings(batch.embeddings, tap) if batch.embeddings else None
        tap = None if tap is None or tap.is_of_tower else tap
        is_plain = self._is_plain(batch)
        scored = None if is_plain else self._scored(batch)
        needs_hidden = not is_plain and wants_hidden(batch)
        bound = () if is_plain or self.grammars is None else self.grammars.bound_rows(batch)
        hidden = None
        started_at = time.monotonic()
        # A graph gives no hidden states.
        step = None if self.graphs is None or needs_hidden else self.graphs.find(batch)
        if step is not None and tap is None:
            rows = self._replay(step, scored, leaves_open=bool(bound))
        else:
            rows, hidden = self._launch_eagerly(batch, tap, scored, leaves_open=bool(bound))
        self.worker.mark(Part.LAUNCH)
        self._note_chosen(batch, rows)
        # Before the tokens are read, whose event then stands for these copies too.
        pooled: Callable[[], dict[int, bytes]] = dict
        if hidden is not None and needs_hidden:
            pooled = start_pooling(self.worker.decoder.normed, self.worker.logits, hidden, batch)
        scores = [] if scored is None or bound else self._score_readers(batch, scored)
        read = self._open_tokens(batch, bound, rows, scored, scores) if bound else self._read(rows, batch)
        if batch.page_copies:
            self.worker.copy_pages(batch.page_copies)
        launched = self._launched(batch, read, rows, None if tap is None or step is None else started_at)
        if images is not None:
            served = replace(launched.served, dispatches=[*launched.served.dispatches, *images.counts])
            launched = replace(launched, served=served, images=images)
        if scored is not None or needs_hidden:
            launched = replace(launched, read_scores=scores, pooled=pooled)
        if hidden is None or not needs_hidden or not wants_prompt_scores(batch):
            return launched
        # This waits for the step: a graph gives no hidden states, and all of a prompt's are memory.
        return replace(launched, prompt_scores=self._prompt_scores(hidden, batch))

    def _write_embeddings(self, spans: tuple[HeldSpan, ...], tap: Tap | None) -> ComputedImages | None:
        """Write embedded spans; return what served the images among them, None where there are none."""
        images = []
        for it in spans:
            if it.span.image is None:
                self.worker.write_embeddings(it.rows.tolist(), it.span.rows)
            else:
                _, height, width = it.span.image.grid
                images.append(ImageRows((height, width), it.span.image.pixels, it.rows.tolist()))
        if not images:
            return None
        with nullcontext() if tap is None else tap.watching_images():
            return self.worker.write_images(images)

    def _prompt_scores(self, hidden: Tensor, batch: Batch) -> dict[int, TokenScores]:
        worker = self.worker
        return score_prompts(worker.logits, hidden, batch, is_reproducible=worker.decoder.is_reproducible)

    def _score_readers(self, batch: Batch, scored: ScoredRows) -> list[Callable[[], dict[int, TokenScores]]]:
        """Start the copy of the step's scores to the host; call it before the tokens' copy, for which both wait.

        Returns what gives them by place among the drawn sequences.
        """
        if self.worker.scores is None:
            return []
        read = scores_to_host(self.worker.scores)
        draws = batch.draws
        places = range(len(draws)) if not batch.verifies else _places(batch)

        def by_place() -> dict[int, TokenScores]:
            found = {}
            rows = zip(scored.rows, read(), strict=True)
            for place, of_place in groupby(rows, lambda it: places[it[0]]):
                (first, values), *others = of_place
                seq, position = draws[first]
                rest = [later for _, later in others]
                found[place] = token_scores(position, [values, *rest], seq.sampling.logprobs or 0)
            return found

        return [by_place]

    def _read(self, rows: tuple[int, ...], batch: Batch) -> Callable[[], list[int]]:
        return self.worker.tokens.copy_to_host(max(rows, default=-1) + 1, batch.drafted_at)

    def _open_tokens(
        self,
        batch: Batch,
        bound: tuple[BoundRow, ...],
        rows: tuple[int, ...],
        scored: ScoredRows | None,
        scores: list[Callable[[], dict[int, TokenScores]]],
    ) -> OpenTokens:
        """Return the tokens of a step whose masks are not known yet: the device computes its logits meanwhile.

        `scores` gets what reads those of `scored` when the tokens are chosen.
        """
        sampling = self._sampling(batch)
        grammars = self.grammars
        assert grammars is not None

        def choose() -> Callable[[], list[int]]:
            allowed = grammars.allowed(bound, len(rows))
            try:
                self.worker.choose(replace(sampling, allowed=allowed), scored)
                if scored is not None:
                    scores.extend(self._score_readers(batch, scored))
                return self._read(rows, batch)
            except torch.OutOfMemoryError as error:
                raise self._choice_error(batch) from error

        return OpenTokens(choose)

    def _launched(
        self, batch: Batch, read: Callable[[], list[int]], rows: tuple[int, ...], checked_at: float | None
    ) -> Launched:
        """`checked_at`: when the launch of a step began that only a check kept from being a graph."""
        attention = self.worker.attention
        assert attention is not None

        def on_read() -> None:
            self.worker.finish(attention)
            if checked_at is not None and self.shadow is not None:
                self.shadow.spend(time.monotonic() - checked_at)

        quarantined = self.worker.dispatcher.take_quarantined()
        is_dense = not rows or rows[-1] == len(rows) - 1  # they ascend
        if batch.forks:  # whose rows may be those of their leaders
            is_dense = rows == tuple(range(len(rows)))
        served, mark = attention.report(), self.worker.mark
        counts = None
        if batch.verifies:
            counts = tuple([len(batch.drawn_positions(row)) for row in batch.drawn_rows])
        return Launched(read, rows, is_dense, served, quarantined, on_read, mark, counts, len(batch.drafted_at))

    def _launch_eagerly(
        self, batch: Batch, tap: Tap | None, scored: ScoredRows | None, *, leaves_open: bool
    ) -> tuple[tuple[int, ...], Tensor]:
        """Return where the tokens that the step chooses will be, and the hidden states of all tokens."""
        self.worker.mark(Part.FILL)
        buffer = self.writer.write(batch, self._chosen_at)
        self._latest_layout = buffer.layout
        is_likeliest = leaves_open or self._is_plain(batch) or not batch.sampled_rows
        sampling = None if is_likeliest else self._sampling(batch)
        num_sampled = buffer.layout.num_sampled
        assert num_sampled is not None, "only a graph samples behind all of its tokens"
        draws = _with_forks(batch, tuple(range(num_sampled))) if batch.forks else None
        with nullcontext() if tap is None else tap.watching():
            taken, checked = (None, None) if tap is None else (tap.attention, tap.call)
            hidden = self.worker.launch(
                buffer, sampling, taken, scored=scored, draws=draws, leaves_open=leaves_open, checked=checked
            )
        if tap is not None:
            tap.launched()
        return tuple(range(num_sampled + len(batch.forks))), hidden

    def _replay(self, step: GraphStep, scored: ScoredRows | None, *, leaves_open: bool) -> tuple[int, ...]:
        """Return where the tokens that the step chooses will be."""
        batch, rows = step.batch, step.rows
        if batch.forks:
            rows = _with_forks(batch, rows)
        is_greedy = self._is_plain(batch) or all(is_plain_greedy(batch.sequences[row]) for row in batch.sampled_rows)
        sampling = None if is_greedy or leaves_open else self._sampling(batch)
        self.worker.mark(Part.FILL)
        buffer = self.writer.write(batch, self._chosen_at, step.key)
        self._latest_layout = buffer.layout
        # The graph's other rows are padding, or ends of chunks whose last token has no successor yet.
        self.worker.replay(buffer, step.attention, rows, sampling, scored=scored, leaves_open=leaves_open)
        return rows if sampling is None and not leaves_open else tuple(range(len(rows)))

    def _sampling(self, batch: Batch) -> SamplingTensors:
        """Return on the CPU how the tokens of the drawn sequences are chosen."""
        rows = [row_sampling(seq, position) for seq, position in batch.draws]
        return sampling_tensors(rows, self.worker.decoder.config.vocab_size, torch.device("cpu"))

    def _scored(self, batch: Batch) -> ScoredRows | None:
        """Return which of the tokens that a step chooses are scored."""
        return scored_rows([seq for seq, _ in batch.draws] if batch.verifies else batch.drawn_sequences)

    def _is_plain(self, batch: Batch) -> bool:
        """Return whether every row wants its likeliest token and no more. Sequences that are plain stay so."""
        if batch.sequences is not self._plain:
            if not all(_is_plain(seq) for seq in batch.sequences):
                return False
            self._plain = batch.sequences
        return True

    def _note_chosen(self, batch: Batch, rows: tuple[int, ...]) -> None:
        """Note where this step chooses each sequence's token: mostly where the one before did.

        No step is launched before the tokens of one that verifies drafted tokens are read.
        """
        if batch.verifies:
            self._chosen, self._chosen_at = ((), (), ()), {}
            return
        chosen = (batch.sequences, batch.sampled_rows, rows)
        if chosen[0] is not self._chosen[0] or chosen != self._chosen:
            self._chosen = chosen
            self._chosen_at = dict(zip(batch.drawn_sequences, rows, strict=True))

    def _choice_error(self, batch: Batch) -> ChoiceError:
        message = f"out of memory in the choice of the tokens of a step of {batch.num_tokens}"
        stage = "prefill" if batch.num_prefill + batch.num_extend else "decode"
        return ChoiceError("internal_error", message, self._give_up(), oom_stage=stage)

    def _batch_error(self, rows: range, message: str, *, oom_stage: str | None = None) -> BatchError:
        return BatchError("internal_error", message, rows, self._give_up(), oom_stage=oom_stage)

    def _give_up(self) -> list[tuple[str, str]]:
        """Wait for the failed step's launches and drop their results; return what is quarantined."""
        self.worker.synchronize()
        self.worker.drop_unread()
        return self.worker.dispatcher.take_quarantined()


def _with_forks(batch: Batch, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the tokens of all drawn sequences are, those of the sampled rows in `rows`: a fork's is its row's.

    A row that ends a prompt has one.
    """
    ends = accumulate(len(batch.drawn_positions(row)) for row in batch.sampled_rows)
    last = {row: rows[end - 1] for row, end in zip(batch.sampled_rows, ends, strict=True)}
    return (*rows, *[last[fork.row] for fork in batch.forks])


def _places(batch: Batch) -> list[int]:
    """Return for each token that a step chooses the place of its sequence among the drawn ones."""
    counts = [len(batch.drawn_positions(row)) for row in batch.drawn_rows]
    return [place for place, count in enumerate(counts) for _ in range(count)]


def _split(chosen: list[int], counts: tuple[int, ...]) -> list[list[int]]:
    """Return the tokens of each drawn sequence, which has `counts` of them."""
    ends = accumulate(counts)
    return [chosen[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _is_token(token_id: int) -> bool:
    return token_id >= 0


def _is_plain(seq: Sequence) -> bool:
    return is_plain_greedy(seq) and seq.num_scored_beside is None and not seq.wants_hidden
