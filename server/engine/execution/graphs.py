"""Steps as CUDA graphs: captured before ready, replayed in service, at rest while a decision is not their own."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.sampling.sampling import greedy
from qualification.attest.driver_record import DriverError, Recorder
from server.engine.attention.dispatch import Choice, Dispatcher, NoPathError, PhasePart
from server.engine.attention.step_attention import StepAttention
from server.engine.execution.graph_inputs import GraphInputs
from server.engine.execution.graph_keys import GraphKey, GraphSizes, key_of
from server.engine.execution.step_tokens import StepTokens
from server.engine.scheduling.sequence import Batch, Sequence
from server.engine.scheduling.step_parts import Mark, Part, unmarked
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.step import Step

logger = logging.getLogger(__name__)


class Replayable(Protocol):
    """Recorded work: torch.cuda.CUDAGraph, or a closure in the tests."""

    def replay(self) -> None:
        """Start the work again on the same memory."""


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A CUDA graph, and the kernels that the driver says are in it, by how often."""

    graph: torch.cuda.CUDAGraph
    kernels: Counter[str] | None  # None: the driver does not say

    def replay(self) -> None:
        self.graph.replay()


Capture = Callable[[Callable[[], None]], Replayable]


class CudaCapture:
    """Records work into CUDA graphs that share one pool of memory: only one of them may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._recorder = Recorder(device)

    def __call__(self, work: Callable[[], None]) -> "RecordedGraph":
        graph = torch.cuda.CUDAGraph()
        # Only this thread launches anything; the others must not spoil the capture, whatever they ask CUDA for.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            work()
            kernels = self._kernels()
        return RecordedGraph(graph, kernels)

    def _kernels(self) -> Counter[str] | None:
        """What is in the graph so far. A driver that does not say costs the attestation, not the graph."""
        try:
            return self._recorder.kernels()
        except DriverError as error:
            logger.warning("nobody knows what is in the graphs: %s", error)
            return None


@dataclass(slots=True)
class _Graph:
    """A captured step. `choices`: what its attention ran on; `launches`: how often, by window, for each part.

    latest  the attention of its latest step, and how many rows and tokens that had
    """

    replayable: Replayable
    choices: tuple[Choice, ...]
    launches: tuple[Mapping[int | None, int], ...]
    latest: "tuple[tuple[int, ...], StepAttention] | None" = None


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A batch that a graph can compute, with its decisions made."""

    key: GraphKey
    batch: Batch
    attention: StepAttention
    rows: tuple[int, ...]  # of the graph's results, one for each sampled row of the batch


class StepGraphs:
    """Whole steps: embedding, layers, logits of the rows that may be sampled and their likeliest tokens.

    Graphs write their results to memory of this object, which the next step overwrites.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        dispatcher: Dispatcher,
        *,
        sizes: GraphSizes,
        inputs: GraphInputs,
        tokens: StepTokens,
    ) -> None:
        """Without graphs as yet. `inputs` for every key that will be captured."""
        self._decoder = decoder
        self._kv = kv
        self._dispatcher = dispatcher
        self._sizes = sizes
        self._inputs = inputs
        self._tokens = tokens
        self._logits = torch.empty(
            sizes.max_sampled, decoder.config.vocab_size, dtype=torch.float32, device=tokens.latest.device
        )
        self._graphs: dict[GraphKey, _Graph] = {}
        self._resting: frozenset[GraphKey] = frozenset()
        self.num_replays = 0

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """What is captured and holds the decisions that stand now."""
        return tuple(key for key in self._graphs if key not in self._resting)

    @torch.inference_mode()
    def capture(self, keys: Iterable[GraphKey], capture: Capture, progress: Callable[[str], None]) -> None:
        """Record a graph for each key whose decisions allow it. Raises what a capture raises.

        Each key runs eagerly first: a launch failure then changes the decision instead of breaking the capture, and
        libraries load their kernels and take their workspaces.
        """
        keys = list(keys)
        for key in keys:
            if self._is_capturable(key):
                self._compute(key, self._attention(key))
        for index, key in enumerate(keys, start=1):
            if not self._is_capturable(key):
                continue
            progress(f"{index}/{len(keys)} {key.label}")
            attention = self._attention(key)
            replayable = capture(lambda key=key, attention=attention: self._compute(key, attention))  # type: ignore[misc]
            self._graphs[key] = _Graph(replayable, attention.choices, attention.launches)

    def find(self, batch: Batch) -> GraphStep | None:
        """The graph's view of a batch; None where no graph computes it as it is decided now."""
        key = key_of(batch, self._sizes)
        graph = None if key is None else self._graphs.get(key)
        if key is None or graph is None:
            return None
        has_changed = self._choices(key) != graph.choices
        if has_changed != (key in self._resting):
            self._tell_changed()
        if has_changed or (key.has_loose_bounds and not self._keeps_paths(key, batch, graph)):
            return None
        rows = batch.sampled_rows
        if key.prompts is not None:
            num_prompts = batch.num_prefill + batch.num_extend
            shift = self._sizes.num_prompts - num_prompts
            rows = tuple(row if row < num_prompts else row + shift for row in rows)
        return GraphStep(key, batch, self._counted(key, graph, batch), rows)

    def kernels(self, batch: Batch) -> Counter[str] | None:
        """What the graph of this batch holds; None where no graph computes it, or nobody recorded what it holds."""
        step = self.find(batch)
        found = None if step is None else self._graphs[step.key].replayable
        return found.kernels if isinstance(found, RecordedGraph) else None

    def replay(self, step: GraphStep, chosen_at: Mapping[Sequence, int], mark: Mark = unmarked) -> Tensor:
        """Start a step that `find` returned. Returns logits [num_rows, vocab] fp32, scratch until the next one.

        `chosen_at`: the rows of the latest tokens where those are that the host does not know yet.
        """
        graph = self._graphs[step.key]
        mark(Part.FILL)
        self._inputs.fill(step.key, step.batch, chosen_at)
        mark(Part.FORWARD)
        graph.replayable.replay()
        self.num_replays += 1
        step.attention.replayed()
        return self._logits

    def _keeps_paths(self, key: GraphKey, batch: Batch, graph: _Graph) -> bool:
        """Whether the batch's own shapes are decided for the paths that the graph's bounds are."""
        parts = [_of_lengths(part, batch) for part in self._inputs.tensors(key).parts]
        try:
            own = StepAttention(self._dispatcher, parts, self._kv.k, self._kv.v).choices
        except NoPathError:
            return False
        return [choice.use.path for choice in own] == [choice.use.path for choice in graph.choices]

    def _tell_changed(self) -> None:
        """Note which graphs hold another decision than the one that stands now: they rest until it comes back."""
        changed = (key for key, graph in self._graphs.items() if self._choices(key) != graph.choices)
        resting = frozenset(changed)
        if resting != self._resting:
            logger.warning("%d graphs rest: a decision changed", len(resting))
            self._resting = resting

    def _attention(self, key: GraphKey) -> StepAttention:
        return StepAttention(self._dispatcher, self._inputs.tensors(key).parts, self._kv.k, self._kv.v)

    def _counted(self, key: GraphKey, graph: _Graph, batch: Batch) -> StepAttention:
        """Of a replay: the batch's sequences and tokens count, not the padded ones. Equal steps share it."""
        counts = (batch.num_prefill, batch.num_extend, batch.num_rows, batch.num_tokens)
        if graph.latest is None or graph.latest[0] != counts:
            parts = [_counted(part, batch) for part in self._inputs.tensors(key).parts]
            attention = StepAttention(self._dispatcher, parts, self._kv.k, self._kv.v)
            attention.count(graph.launches)
            graph.latest = counts, attention
        return graph.latest[1]

    def _is_capturable(self, key: GraphKey) -> bool:
        choices = self._choices(key)
        return choices is not None and all(choice.is_capturable for choice in choices)

    def _choices(self, key: GraphKey) -> tuple[Choice, ...] | None:
        """What would serve it now; None where a part has no path: no batch is as long, or no path is left."""
        parts, windows = self._inputs.tensors(key).parts, self._dispatcher.windows
        try:
            return tuple([self._dispatcher.choice(part, window) for part in parts for window in windows])
        except NoPathError:
            return None

    def _compute(self, key: GraphKey, attention: StepAttention) -> None:
        """What a graph holds: a padded step from the inputs' memory to the results'."""
        tensors = self._inputs.tensors(key)
        token_ids = tensors.token_ids
        if tensors.chosen_at is not None and tensors.is_pending is not None:
            ends = token_ids[token_ids.shape[0] - tensors.chosen_at.shape[0] :]  # the decode rows
            torch.where(tensors.is_pending, self._tokens.latest.index_select(0, tensors.chosen_at), ends, out=ends)
        hidden = self._decoder.forward(Step(token_ids, tensors.positions, tensors.slots, self._kv, attention))
        if tensors.sampled is not None:
            hidden = hidden.index_select(0, tensors.sampled)
        self._tokens.keep(greedy(self._decoder.logits(hidden, out=self._logits[: hidden.shape[0]])))


def _counted(part: PhasePart, batch: Batch) -> PhasePart:
    rows = batch.rows_of(part.phase)
    return replace(part, num_sequences=len(rows), num_tokens=sum(batch.query_lens[rows.start : rows.stop]))


def _of_lengths(part: PhasePart, batch: Batch) -> PhasePart:
    """The part with the batch's own lengths in place of the graph's bounds."""
    rows = batch.rows_of(part.phase)
    queries, contexts = (max(lens[rows.start : rows.stop]) for lens in (batch.query_lens, batch.context_lens))
    return replace(part, batch=replace(part.batch, max_seqlen_q=queries, max_context=contexts))
