"""One rank: its device, model shard, KV cache and CUDA graphs. It gets step buffers and sees no sequence."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kernels.sampling.sampling import SamplingTensors
from kernels.vocabulary.shape import Phase
from server.engine.execution.capture import Capture, RecordedGraph, Replayable
from server.engine.execution.commands import Allocate, CopyPages, ImageRows, WriteEmbeddings, WriteImages
from server.engine.execution.graph_keys import GraphKey, GraphSizes
from server.engine.execution.others import NO_OTHERS, Others
from server.engine.execution.sampler import Sampler
from server.engine.execution.sampling import SampledTokens, ScoredRows, staged
from server.engine.execution.step_buffer import (
    DeviceInputs,
    StepBuffer,
    StepLayout,
    StepTensors,
    graph_layouts,
    head_arrays_of,
    token_arrays_of,
)
from server.engine.operators.attention_table import Choice
from server.engine.operators.decisions import NoPathError
from server.engine.operators.dispatch import Dispatcher, PhasePart
from server.engine.operators.head_attention import HeadAttention
from server.engine.operators.launch_errors import launch_failure
from server.engine.operators.observation import Observation
from server.engine.operators.step_attention import Beat, ReplaceChoice, StepAttention, TakeCall
from server.engine.proof.rank_check import NamedCall
from server.engine.scheduling.step_parts import Mark, Part, unmarked
from server.model.decoder import Decoder
from server.model.draft_head import DraftHead
from server.model.kv_cache import KVCache
from server.model.layer_state import StateCache, StepStates
from server.model.ranks import ALONE, Ranks
from server.model.step import Step
from server.model.vision.timer import TimedImages, TowerTimer
from server.model.vision.tower import Image, Tower
from server.protocol.messages import DispatchCount, PathUse, TowerTime

Recorded = TypeVar("Recorded")


class LaunchFailed(RuntimeError):
    """An attention kernel could not be launched, and no other path may take its place.

    Where other ranks compute the step too, or where it is only recorded for its times: then it is not timed, as after
    any other RuntimeError.
    """

    def __init__(self, choice: Choice, error: Exception) -> None:
        super().__init__(str(error))
        self.choice = choice
        self.error = error


@dataclass(frozen=True, slots=True)
class ComputedImages:
    """Images that the tower has computed together, and the decisions that served them.

    uses    as a request says of them; counts: each decision with its launches
    """

    timed: TimedImages
    uses: list[PathUse]
    counts: list[DispatchCount]

    @property
    def seconds(self) -> float | None:
        """Return the time that they took; None where the device is not done."""
        return self.timed.seconds


@dataclass(slots=True)
class Drafts:
    """Tokens that a draft head has drafted.

    found   int64, those of all passes since the latest step
    hidden  of the latest pass: [rows, hidden] behind the head's norm
    logits  [rows, vocab] fp32 of these
    ids     [rows] int64, drafted by these
    """

    found: Tensor
    hidden: Tensor
    logits: Tensor
    ids: Tensor

    def reserve(self, num_rows: int) -> None:
        """Make room for so many rows; what was there is lost."""
        self.hidden = self.hidden.new_zeros(num_rows, self.hidden.shape[1])
        self.logits = self.logits.new_zeros(num_rows, self.logits.shape[1])
        self.ids = self.ids.new_zeros(num_rows)


class Worker:
    """Computes steps one after another on one stream. Only one thread may call it.

    dispatcher  the decisions that hold on this rank
    tokens      what the latest step chose; the next one reads it on the device
    attention   of the latest step; None before the first
    head_attention  of the latest pass of the draft head, likewise
    scores      of the latest step, as `score` gives them; None where no token was to be scored
    sampler     chooses and scores the tokens
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        dispatcher: Dispatcher,
        tokens: SampledTokens,
        *,
        rank: Ranks = ALONE,
        others: Others = NO_OTHERS,
        states: StateCache | None = None,
        num_embeddings: int = 0,
        tower: Tower | None = None,
        head: DraftHead | None = None,
        num_hidden: int = 0,
    ) -> None:
        """Make the worker, and those of the other ranks.

        tokens  for every row that a step may sample
        others  the ranks that this one leads
        states  of a model with recurrent layers
        num_embeddings  those that tokens of prompts may have of their own
        tower   makes them of images
        head    drafts tokens; its pages are those of the last layer of `kv`
        num_hidden  tokens of the largest step that a head computes behind the model
        """
        self.rank = rank
        self.others = others
        self.decoder = decoder
        self.kv = kv
        self.states = states
        self.dispatcher = dispatcher
        self.tokens = tokens
        self.device = tokens.latest.device
        self.attention: StepAttention | None = None
        self.scores: Tensor | None = None
        self.sampler = Sampler()
        self.num_replays = 0
        self.mark: Mark = unmarked  # set by a bench
        self.beat: Beat | None = None  # of steps on a CPU: set by who must hear that a long one makes progress
        self.token_arrays = token_arrays_of(decoder.config)
        self._inputs = DeviceInputs(self.device)
        self.tower = tower
        self.tower_timer = TowerTimer(self.device)
        self._embeddings: Tensor | None = None  # [1 + num_embeddings, row size]: the first row is no token's
        if num_embeddings:
            row_size = decoder.config.hidden_size if tower is None else tower.config.row_size
            self._embeddings = decoder.weights.embedding.new_zeros(1 + num_embeddings, row_size)
        self.head = head
        self.head_arrays = head_arrays_of(decoder.config)
        self._head_inputs = DeviceInputs(self.device)
        # [tokens, hidden] of the latest step, before the last norm, where there is a head.
        self._hidden = decoder.weights.embedding.new_zeros(num_hidden if head else 0, decoder.config.hidden_size)
        self._drafts = self.new_drafts(tokens.drafted)
        self.head_attention: HeadAttention | None = None
        self._head_counts: list[DispatchCount] = []  # of the passes since they were taken
        self._head_graphs: dict[GraphKey, tuple[Replayable, HeadAttention]] = {}
        self._graphs: dict[GraphKey, Replayable] = {}
        self.graph_logits: Tensor | None = None  # of graphs
        self._open_logits: Tensor | None = None  # of the latest step, where its tokens are still to be chosen
        self._unread: list[StepAttention] = []  # of the steps whose results are not read yet
        self._replace = None if rank.world == 1 else _end_step  # None: the dispatcher's
        num_slots = 0 if states is None else states.num_slots
        others.send(Allocate(kv.num_pages, tokens.latest.numel(), num_slots, num_embeddings))

    def declare(self, sizes: GraphSizes, max_context: int) -> dict[GraphKey, StepLayout]:
        """Make room for graphs, which share their inputs and their logits: only one of them runs at a time.

        Returns their layouts, for contexts of at most `max_context` tokens.
        """
        layouts = graph_layouts(
            sizes,
            page_size=self.kv.page_size,
            max_context=max_context,
            token_arrays=self.token_arrays,
            has_states=self.states is not None,
        )
        self.others.declare(sizes, max_context, layouts)
        self._inputs.declare(layouts)
        most = max(layout.num_tokens for layout in layouts.values())
        if self.head is not None and most > self._hidden.shape[0]:
            self._hidden = self._hidden.new_zeros(most, self._hidden.shape[1])
        vocab_size = self.decoder.config.vocab_size
        self.graph_logits = torch.empty(sizes.max_sampled, vocab_size, dtype=torch.float32, device=self.device)
        return layouts

    def parts(self, key: GraphKey) -> list[PhasePart]:
        """Return the attention's parts of a declared graph."""
        return self._inputs.of_graph(key).parts

    def attend(
        self,
        parts: list[PhasePart],
        tap: TakeCall | None = None,
        *,
        num_sampled: int = 0,
        replace_choice: ReplaceChoice | None = None,
    ) -> StepAttention:
        """Return the attention of a step over this rank's pages, decided. Raises NoPathError.

        `num_sampled`: tokens of the step whose logits are computed. `replace_choice`: None for this rank's.
        """
        return StepAttention(
            self.dispatcher,
            parts,
            self.kv.layers,
            tap=tap,
            replace_choice=self._replace if replace_choice is None else replace_choice,
            num_sampled=num_sampled,
            beat=self.beat,
        )

    def attend_graph(self, key: GraphKey, parts: list[PhasePart] | None = None) -> StepAttention:
        """Return the attention of a declared graph, of its own parts or of such as are like them."""
        tensors = self._inputs.of_graph(key)
        return self.attend(tensors.parts if parts is None else parts, num_sampled=_num_sampled(tensors))

    @torch.inference_mode()
    def run_padding(self, key: GraphKey) -> None:
        """Compute what a graph of this key will, from what is in its inputs now."""
        with self.others.padding(key, self.dispatcher):
            self._compute(self._inputs.of_graph(key), self.attend_graph(key), logits=self.graph_logits)

    @torch.inference_mode()
    def capture(self, key: GraphKey, capture: Capture) -> StepAttention:
        """Record the graph of a declared key. Returns its attention, with the launches that each replay repeats."""
        with self.others.capturing(key, self.dispatcher):
            tensors = self._inputs.of_graph(key)
            attention = self.attend_graph(key)

            def work() -> None:
                self._compute(tensors, attention, logits=self.graph_logits)

            self._graphs[key] = capture(work)
            return attention

    def kernels(self, key: GraphKey) -> Counter[str] | None:
        """Return the kernels of a graph; None where there is no graph, or the driver has not said."""
        graph = self._graphs.get(key)
        return graph.kernels if isinstance(graph, RecordedGraph) else None

    def graph(self, key: GraphKey) -> torch.cuda.CUDAGraph | None:
        """Return the CUDA graph of a key, its inputs as the latest step of that key left them; None without one."""
        self.others.choose_timed(key)
        graph = self._graphs.get(key)
        return graph.graph if isinstance(graph, RecordedGraph) else None

    @torch.inference_mode()
    def record(self, buffer: StepBuffer, capture: Callable[[Callable[[], None]], Recorded]) -> Recorded | None:
        """Capture a step's launches, its inputs in place, as `launch` makes them; nothing of it runs.

        None where a path of it cannot be captured. Raises NoPathError, and LaunchFailed, which takes no path out of
        service: nothing needs the record but an attestation's times.
        """
        with self.others.recording():
            tensors = self._inputs.load(buffer)
            is_sampled = buffer.layout.num_sampled != 0
            num_sampled = _num_sampled(tensors) if is_sampled else 0
            attention = self.attend(tensors.parts, num_sampled=num_sampled, replace_choice=_end_step)
            if not self.dispatcher.is_capturable or not all(choice.is_capturable for choice in attention.choices):
                return None

            def work() -> None:
                self._compute(tensors, attention, has_pending=buffer.has_pending, is_sampled=is_sampled)

            self.others.announce_record(buffer, self.dispatcher)
            with self.dispatcher.unmeasured():
                return capture(work)

    def replay(
        self,
        buffer: StepBuffer,
        attention: StepAttention,
        rows: tuple[int, ...] = (),
        sampling: SamplingTensors | None = None,
        *,
        scored: ScoredRows | None = None,
        leaves_open: bool = False,
    ) -> None:
        """Start a step that is a graph, which chooses the likeliest tokens itself. `attention` counts its launches.

        `sampling`, on the CPU: how the tokens of `rows` of the graph's results are chosen instead. With `leaves_open`
        those are left to `choose`. `scored`: which of `rows` get scores.
        """
        assert buffer.key is not None
        if sampling is not None:
            sampling = staged(sampling, self.device)  # sent before the graph, so that the sampler need not wait for it
        self.others.announce(buffer, self.dispatcher)
        self._begin(attention)
        self.repeat(buffer)
        self.num_replays += 1
        attention.replayed()
        if leaves_open:
            assert self.graph_logits is not None
            self._open_logits = _rows_of(self.graph_logits, rows)
        elif sampling is not None or scored is not None:
            self.mark(Part.SAMPLE)
            self._resample(rows, sampling, scored)

    def repeat(self, buffer: StepBuffer) -> None:
        """Start a step that is a graph for its results alone: ranks beside the first count nothing."""
        assert buffer.key is not None
        self._inputs.load(buffer)
        self.mark(Part.FORWARD)
        self._graphs[buffer.key].replay()

    def run_graph(self, key: GraphKey) -> None:
        """Start a graph again, on what is in its inputs."""
        self._graphs[key].replay()

    @torch.inference_mode()
    def choose(self, sampling: SamplingTensors, scored: ScoredRows | None = None) -> None:
        """Choose the tokens of the latest step, which was launched with `leaves_open`; `sampling` is on the CPU."""
        assert self._open_logits is not None
        self.mark(Part.SAMPLE)
        logits, self._open_logits = self._open_logits, None
        self._choose(logits, staged(sampling, self.device), scored)
        self.others.share_choice(self.tokens.latest[: logits.shape[0]])

    def _choose(self, logits: Tensor, sampling: SamplingTensors | None, scored: ScoredRows | None) -> None:
        """Choose a token for each row of logits, and score those of `scored` by the logits as they were."""
        raw = None if scored is None else _selected(logits, scored.rows)
        chosen = self.sampler.choose(logits, sampling)
        self.tokens.store(chosen)
        if raw is not None and scored is not None:
            tokens = _selected(chosen.token_ids, scored.rows)
            self.scores = self.sampler.score(raw, tokens, scored.num_top, is_reproducible=self.decoder.is_reproducible)

    @torch.inference_mode()
    def launch(
        self,
        buffer: StepBuffer,
        sampling: SamplingTensors | None = None,
        tap: TakeCall | None = None,
        *,
        scored: ScoredRows | None = None,
        draws: tuple[int, ...] | None = None,
        leaves_open: bool = False,
        observation: Observation | None = None,
        checked: NamedCall | None = None,
    ) -> Tensor:
        """Start a step kernel by kernel. Returns the hidden states [T, hidden] of all tokens.

        `draws`: of each token to choose, which of the sampled tokens' logits it is chosen by; None: one by each.
        `sampling`, on the CPU: how tokens are chosen; None for the likeliest ones. With `leaves_open` they are left to
        `choose`. `scored`: which of the sampled tokens get scores. `observation`, of this worker: takes what each layer
        hands out, in place of `tap`. `checked`: a call that another rank computes again. Raises NoPathError,
        LaunchFailed.
        """
        with self.others.launching():
            tensors = self._inputs.load(buffer)
            self.mark(Part.LAUNCH)
            is_sampled = buffer.layout.num_sampled != 0
            if observation is not None:
                observation.begin(tensors.tokens["slots"])
                tap = observation.take_call
            attention = self.attend(tensors.parts, tap, num_sampled=_num_sampled(tensors) if is_sampled else 0)
            self.others.announce(buffer, self.dispatcher, is_observed=observation is not None, checked=checked)
            self._begin(attention)
            return self._compute(
                tensors,
                attention,
                has_pending=buffer.has_pending,
                is_sampled=is_sampled,
                sampling=None if sampling is None else staged(sampling, self.device),
                scored=scored,
                draws=draws,
                leaves_open=leaves_open,
                observation=observation,
            )

    @torch.inference_mode()
    def follow(
        self,
        buffer: StepBuffer,
        sampling: SamplingTensors | None = None,
        *,
        is_first: bool,
        place: int = 0,
        observation: Observation | None = None,
    ) -> Tensor:
        """Compute tokens by the draft head, and draft one behind each of those that are sampled. Returns [T, hidden].

        Of a token `buffer` has the id of the next one, and its source: which of the latest step's tokens it is; unless
        `is_first` which of those that were drafted last it is, whose ids are not on the host. `sampling`, on the CPU:
        how tokens are drafted; None: the likeliest ones. What is drafted comes behind the first `place` tokens that
        were since the latest step. `observation` takes what its layer hands out. Raises NoPathError, LaunchFailed.
        """
        head = self.head
        assert head is not None, "only a worker with a head follows a step"
        with self.others.launching():
            tensors = self._head_inputs.load(buffer)
            self._reserve_drafts(buffer.layout.num_sampled or 0)
            sampling = None if sampling is None else staged(sampling, self.device)
            if buffer.key is not None:
                graph, attention = self._head_graphs[buffer.key]
                graph.replay()
                out = self._drafts.hidden
            else:
                attention = self._attend_head(tensors, observation)
                self.others.announce_head(
                    buffer, self.dispatcher, is_first=is_first, place=place, is_observed=observation is not None
                )
                if self.beat is not None:
                    self.beat()
                out = self._compute_head(
                    tensors, attention, is_first=is_first, has_pending=buffer.has_pending, observation=observation
                )
            self.head_attention = attention
            if observation is None and not self.dispatcher.is_watched:  # else it is of no request
                self._head_counts += attention.counts()
            if tensors.sampled is not None:
                drafted = self._drafts.ids[: tensors.sampled.shape[0]]
                if sampling is not None:
                    logits = self._drafts.logits[: sampling.temperature.shape[0]]
                    drafted[: logits.shape[0]].copy_(self.sampler.choose(logits, sampling).token_ids)
                if self.rank.world > 1:
                    self.rank.share(drafted)
                # Of a graph's padding what there is room for.
                found = self._drafts.found[place : place + drafted.shape[0]]
                found.copy_(drafted[: found.shape[0]])
            return out

    def declare_head(self, layouts: dict[GraphKey, StepLayout]) -> None:
        """Make room for graphs of the draft head, which no other rank has. No step drafts for more rows than these."""
        self._head_inputs.declare(layouts)
        self._reserve_drafts(max(layout.num_sampled or 0 for layout in layouts.values()))

    def _reserve_drafts(self, num_rows: int) -> None:
        if num_rows > self._drafts.ids.shape[0]:
            self._drafts.reserve(num_rows)

    def new_drafts(self, found: Tensor | None = None) -> Drafts:
        """Return memory for what is drafted, for no row yet. `found`: for the ids of all passes; None: new memory."""
        logits = torch.zeros(0, self.decoder.config.vocab_size, device=self.device)
        ids = torch.zeros(0, dtype=torch.int64, device=self.device)
        return Drafts(torch.zeros_like(self.tokens.drafted) if found is None else found, self._hidden[:0], logits, ids)

    @contextmanager
    def drafting_in(self, drafts: Drafts) -> Iterator[None]:
        """Have the passes of the draft head inside leave alone what is drafted and not taken: they are of no step."""
        own, self._drafts = self._drafts, drafts
        try:
            yield
        finally:
            self._drafts = own

    @torch.inference_mode()
    def capture_head(self, key: GraphKey, capture: Capture, *, is_first: bool) -> bool:
        """Record the graph of a declared step of the draft head, which runs once before.

        Returns False, and records none, where its attention has no path, or one that cannot be captured.
        """
        tensors = self._head_inputs.of_graph(key)
        try:
            attention = self._attend_head(tensors)
        except NoPathError:
            return False
        if not attention.is_capturable:
            return False

        def work() -> None:
            self._compute_head(tensors, attention, is_first=is_first)

        work()
        self._head_graphs[key] = capture(work), attention
        return True

    @torch.inference_mode()
    def record_head(
        self, buffer: StepBuffer, capture: Callable[[Callable[[], None]], Recorded], *, is_first: bool
    ) -> Recorded | None:
        """Capture the launches of a pass of the draft head, as `follow` makes them; nothing of it runs.

        None where a path of it cannot be captured, and where other ranks compute it too. Raises NoPathError.
        """
        tensors = self._head_inputs.load(buffer)
        self._reserve_drafts(buffer.layout.num_sampled or 0)
        attention = self._attend_head(tensors)
        if self.rank.world > 1 or not (self.dispatcher.is_capturable and attention.is_capturable):
            return None

        def work() -> None:
            self._compute_head(tensors, attention, is_first=is_first)

        return capture(work)

    def _attend_head(self, tensors: StepTensors, observation: Observation | None = None) -> HeadAttention:
        assert self.head is not None, "only a worker with a head follows a step"
        tap = None
        if observation is not None:
            observation.begin(tensors.tokens["slots"])
            tap = observation.take_call
        own = self.kv.layers[-1], self.head.attention
        num_sampled = 0 if tensors.sampled is None else tensors.sampled.shape[0]
        return HeadAttention(
            self.dispatcher, tensors.parts, *own, num_sampled=num_sampled, tap=tap, replace_choice=self._replace
        )

    def _compute_head(
        self,
        tensors: StepTensors,
        attention: HeadAttention,
        *,
        is_first: bool,
        has_pending: bool = True,
        observation: Observation | None = None,
    ) -> Tensor:
        """Compute a step of the draft head up to its likeliest tokens: what a graph holds."""
        head = self.head
        assert head is not None, "only a worker with a head follows a step"
        if is_first and has_pending:
            _fill_in(tensors, self.tokens.latest)
        inputs = dict(tensors.tokens)
        sources = inputs.pop("sources")
        if is_first:
            hidden = self.decoder.normed(self._hidden.index_select(0, sources))
        else:
            hidden = self._drafts.hidden.index_select(0, sources)
            inputs["token_ids"] = self._drafts.ids.index_select(0, sources)
        step = Step(**inputs, kv=KVCache(self.kv.layers[-1:]), attend=attention)
        out = head.forward(step, hidden, observation)
        if tensors.sampled is not None:
            rows = out.index_select(0, tensors.sampled)
            self._drafts.hidden[: rows.shape[0]].copy_(head.normed(rows))
            logits = head.logits(rows, self._drafts.logits[: rows.shape[0]])
            self._drafts.ids[: rows.shape[0]].copy_(self.sampler.choose(logits, None).token_ids)
        return out

    def take_head_counts(self) -> list[DispatchCount]:
        """Return each decision that served a pass of the draft head since the last call, with its launches."""
        found, self._head_counts = self._head_counts, []
        return found

    @torch.inference_mode()
    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages of keys and values, each (source, target), when all steps that were launched are done."""
        self.others.send(CopyPages(tuple(copies)))
        pairs = staged(torch.tensor(copies, dtype=torch.int64), self.device)
        sources, targets = pairs.unbind(dim=1)
        for pages in self.kv.tensors:
            pages.index_copy_(0, targets, pages.index_select(0, sources))

    @torch.inference_mode()
    def write_embeddings(self, rows: Sequence[int], values: bytes) -> None:
        """Write embeddings, fp32, into rows of the buffer, for the steps that are launched from now on."""
        assert self._embeddings is not None, "no request that needs a buffer is taken without one"
        self.others.send(WriteEmbeddings(list(rows), values))
        table = torch.frombuffer(bytearray(values), dtype=torch.float32).view(len(rows), -1)
        places = staged(torch.tensor(rows, dtype=torch.int64), self.device)
        found = staged(table, self.device).to(self._embeddings.dtype)
        behind = found.new_zeros(len(rows), self._embeddings.shape[1] - found.shape[1])
        self._embeddings.index_copy_(0, places, torch.cat((found, behind), dim=1))

    @torch.inference_mode()
    def write_images(self, images: Sequence[ImageRows]) -> "ComputedImages":
        """Compute images, and write what their tokens read, for the steps that are launched from now on.

        Returns what served them. Raises NoPathError.
        """
        assert self.tower is not None, "no image is taken without a tower"
        assert self._embeddings is not None, "no image is taken without a buffer"
        self.others.send(WriteImages(tuple(images)))
        side = self.tower.config.patch_size
        given = [Image.of(it.pixels, it.grid, side) for it in images]
        rows = [row for it in images for row in it.rows]
        places = staged(torch.tensor(rows, dtype=torch.int64), self.device)
        self.tower.beat = self.beat
        with self.tower_timer.timing(len(images), len(rows)) as timed:
            self._embeddings.index_copy_(0, places, self.tower.encode(given))
        tables = self.dispatcher.tower
        uses, counts = ([], []) if tables is None else tables.take()
        return ComputedImages(timed, uses, counts)

    def take_tower_times(self) -> list[TowerTime]:
        """Return what the tower has computed since the last call, as far as the device is done with it."""
        return [] if self.tower is None else self.tower_timer.take()

    def observation(self) -> Observation:
        """Return what takes the layers' tensors of one step that is launched with it."""
        return Observation(self.rank, self.kv, self.decoder.config)

    def head_observation(self) -> Observation:
        """Return what takes the tensors of the draft head's layer of one step that follows with it."""
        assert self.head is not None, "the worker has a head"
        return Observation(self.rank, KVCache(self.kv.layers[-1:]), self.head.layer.config)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Logits [R, vocab] fp32 of hidden states [R, hidden] that `launch` returned."""
        if self.beat is not None:
            self.beat()
        with self.others.computing_logits(hidden_rows, self.dispatcher) as rows:
            return self.decoder.logits(rows)

    def finish(self, attention: StepAttention) -> None:
        """Note that the result of a step was read."""
        if attention in self._unread:  # once for each step: equal ones share it
            self._unread.remove(attention)

    def suspects(self) -> list[tuple[str, str]]:
        """Return the (path, shape) pairs of the steps that may not be done, or else of the latest one."""
        latest = [] if self.attention is None else [self.attention]
        of_steps = (pair for step in self._unread or latest for pair in step.suspects())
        tower = self.dispatcher.tower
        of_images = tower.pairs() if tower is not None and self.tower_timer.is_open else ()
        return list(dict.fromkeys((*of_images, *of_steps)))

    @property
    def num_unread(self) -> int:
        """Steps that were launched and not read."""
        return len(self._unread)

    def drop_unread(self, num_left: int = 0) -> None:
        """Forget the latest steps, whose results will not be read; `num_left` before them stay."""
        del self._unread[num_left:]

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def _resample(self, rows: tuple[int, ...], sampling: SamplingTensors | None, scored: ScoredRows | None) -> None:
        """Choose tokens again for some rows of the graph that was replayed last, or only score what it has chosen."""
        assert self.graph_logits is not None
        if sampling is not None:
            self._choose(_rows_of(self.graph_logits, rows), sampling, scored)
            self.others.share_choice(self.tokens.latest[: len(rows)])
        elif scored is not None:
            places = tuple([rows[row] for row in scored.rows])
            chosen = _selected(self.tokens.latest, places)
            logits = _selected(self.graph_logits, places)
            self.scores = self.sampler.score(
                logits, chosen, scored.num_top, is_reproducible=self.decoder.is_reproducible
            )

    def _begin(self, attention: StepAttention) -> None:
        self.attention = attention
        self.scores = None
        self._unread.append(attention)

    def _compute(
        self,
        tensors: StepTensors,
        attention: StepAttention,
        *,
        logits: Tensor | None = None,
        has_pending: bool = True,
        is_sampled: bool = True,
        sampling: SamplingTensors | None = None,
        scored: ScoredRows | None = None,
        draws: tuple[int, ...] | None = None,
        leaves_open: bool = False,
        observation: Observation | None = None,
    ) -> Tensor:
        """Compute a step from its inputs to its chosen tokens: what a graph holds, and what an eager step launches.

        `logits`: memory for them; None for new memory.
        """
        is_verify = tensors.parts[-1].phase is Phase.VERIFY
        if has_pending and (self.head is not None or not is_verify):  # without a head the host knows what is drafted
            _fill_in(tensors, self.tokens.drafted if is_verify else self.tokens.latest)
        self.mark(Part.FORWARD)
        attention.plan()
        states = None
        if self.states is not None and tensors.states is not None:
            states = StepStates(self.states, tensors.states)
        inputs = Step(**tensors.tokens, kv=self.kv, attend=attention, states=states, embeddings=self._embeddings)
        hidden = self.decoder.forward(inputs, observation)
        if self.head is not None and hidden.shape[0] <= self._hidden.shape[0]:
            self._hidden[: hidden.shape[0]].copy_(hidden)
        if is_sampled:
            self.mark(Part.SAMPLE)
            rows = hidden if tensors.sampled is None else hidden.index_select(0, tensors.sampled)
            found = self.decoder.logits(rows, out=None if logits is None else logits[: rows.shape[0]])
            if draws is not None:
                found = _selected(found, draws)
            if leaves_open:
                self._open_logits = found
            else:
                self._choose(found, sampling, scored)
                if sampling is not None or draws is not None:
                    self.others.share_choice(self.tokens.latest[: found.shape[0]])
        return hidden


def _end_step(choice: Choice, error: Exception) -> Choice:
    """Replace no choice here. Raises LaunchFailed, or `error` if it is of another kind."""
    if launch_failure(error) is None:
        raise error
    raise LaunchFailed(choice, error) from error


def _fill_in(tensors: StepTensors, known: Tensor) -> None:
    """Write the token ids of a step that the device alone knows: some of those in `known`."""
    if tensors.is_pending is None or tensors.chosen_at is None:
        return
    token_ids: Tensor = tensors.tokens["token_ids"]
    ends = token_ids[token_ids.shape[0] - tensors.chosen_at.shape[0] :]
    torch.where(tensors.is_pending, known.index_select(0, tensors.chosen_at), ends, out=ends)


def _num_sampled(tensors: StepTensors) -> int:
    """Return how many rows of logits a step computes, of all its tokens where it does not choose among them."""
    if tensors.sampled is not None:
        return tensors.sampled.shape[0]
    return max((part.tokens.stop for part in tensors.parts), default=0)


def _rows_of(logits: Tensor, rows: tuple[int, ...]) -> Tensor:
    if rows == tuple(range(len(rows))):
        return logits[: len(rows)]
    return _selected(logits, rows)


def _selected(values: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Return a copy of some rows: to sample writes over the logits."""
    return values.index_select(0, staged(torch.tensor(rows, dtype=torch.int64), values.device))
