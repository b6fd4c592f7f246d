"""Steps as CUDA graphs: captured before ready, replayed in service, at rest while a decision is not their own."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from kernels.vocabulary.operators import AnyShape
from qualification.decision.decision import Decision
from server.engine.execution.capture import Capture
from server.engine.execution.graph_keys import GraphKey, GraphSizes, key_of
from server.engine.execution.step_buffer import StepLayout
from server.engine.execution.worker import Worker
from server.engine.operators.attention_table import Choice
from server.engine.operators.decisions import NoPathError
from server.engine.operators.dispatch import PhasePart
from server.engine.operators.step_attention import StepAttention
from server.engine.scheduling.sequence import Batch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Graph:
    """A captured step. `choices`: what its attention ran on; `launches`: how often, by kind of layers, for each part.

    others  the decisions for its other operators
    latest  the attention of its latest step, and how many rows and tokens that had
    """

    choices: tuple[Choice, ...]
    others: tuple[Decision[AnyShape], ...]
    launches: tuple[Mapping[int, int], ...]
    latest: "tuple[tuple[int, ...], StepAttention] | None" = None


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A batch that a graph can compute, with its decisions made."""

    key: GraphKey
    batch: Batch
    attention: StepAttention
    rows: tuple[int, ...]  # of the graph's results, one for each token that its sampled rows choose


class StepGraphs:
    """Rank 0's table of graphs: which batch is which graph's, and which graphs hold the decisions that stand now.

    A graph computes a whole step: embedding, layers, logits of the rows that may be sampled and their likeliest tokens.
    """

    def __init__(self, worker: Worker, sizes: GraphSizes, *, max_context: int) -> None:
        """Declare every graph of these sizes to the worker; none is captured yet."""
        self._worker = worker
        self._sizes = sizes
        self.layouts: dict[GraphKey, StepLayout] = worker.declare(sizes, max_context)
        self._graphs: dict[GraphKey, _Graph] = {}
        self._resting: frozenset[GraphKey] = frozenset()
        self._revision = worker.dispatcher.revision

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Return the keys that are captured with the decisions that stand now."""
        return tuple(key for key in self._graphs if key not in self._resting)

    @property
    def num_replays(self) -> int:
        return self._worker.num_replays

    def capture(self, capture: Capture, progress: Callable[[str], None]) -> None:
        """Record a graph for each key whose decisions allow it. Raises what a capture raises.

        Each key runs eagerly first: a launch failure then changes the decision instead of breaking the capture, and
        libraries load their kernels and take their workspaces.
        """
        for key in self.layouts:
            if self._is_capturable(key):
                self._worker.run_padding(key)
        for index, key in enumerate(self.layouts, start=1):
            if not self._is_capturable(key):
                continue
            progress(f"{index}/{len(self.layouts)} {key.label}")
            attention = self._worker.capture(key, capture)
            self._graphs[key] = _Graph(attention.choices, attention.other_decisions(), attention.launches)
        self._revision = self._worker.dispatcher.revision

    def find(self, batch: Batch) -> GraphStep | None:
        """Return the graph's view of a batch; None where no graph computes it as it is decided now."""
        key = key_of(batch, self._sizes)
        graph = None if key is None else self._graphs.get(key)
        if key is None or graph is None or _num_state_writes(batch) > (self.layouts[key].num_state_writes or 0):
            return None
        if self._revision != self._worker.dispatcher.revision:  # of any operator's decisions
            self._note_changed()
        has_changed = key in self._resting
        if has_changed or (key.has_loose_bounds and not self._has_same_paths(key, batch, graph)):
            return None
        rows = tuple(batch.sampled_tokens) if batch.verifies else batch.sampled_rows
        if key.prompts is not None:
            num_prompts = batch.num_prefill + batch.num_extend
            shift = self._sizes.num_prompts - num_prompts
            rows = tuple(row if row < num_prompts else row + shift for row in rows)
        return GraphStep(key, batch, self._counted(key, graph, batch), rows)

    def kernels(self, batch: Batch) -> Counter[str] | None:
        """Return the kernels of this batch's graph; None where no graph computes it, or they were not recorded."""
        step = self.find(batch)
        return None if step is None else self._worker.kernels(step.key)

    def graph(self, batch: Batch) -> torch.cuda.CUDAGraph | None:
        """Return the CUDA graph that computes this batch; None where none does."""
        step = self.find(batch)
        return None if step is None else self._worker.graph(step.key)

    def _has_same_paths(self, key: GraphKey, batch: Batch, graph: _Graph) -> bool:
        """Return whether the batch's own shapes are decided for the paths that the graph's bounds are."""
        parts = [_of_lengths(part, batch) for part in self._worker.parts(key)]
        try:
            own = self._worker.attend(parts).choices
        except NoPathError:
            return False
        return [choice.use.path for choice in own] == [choice.use.path for choice in graph.choices]

    def _note_changed(self) -> None:
        """Note which graphs hold another decision than the one that stands now: they rest until it comes back."""
        self._revision = self._worker.dispatcher.revision
        resting = frozenset(key for key, graph in self._graphs.items() if self._has_changed(key, graph))
        if resting != self._resting:
            logger.warning("%d graphs rest: a decision changed", len(resting))
            self._resting = resting

    def _has_changed(self, key: GraphKey, graph: _Graph) -> bool:
        try:
            now = self._worker.attend_graph(key)
        except NoPathError:
            return True
        return now.choices != graph.choices or now.other_decisions() != graph.others

    def _counted(self, key: GraphKey, graph: _Graph, batch: Batch) -> StepAttention:
        """Return the attention that counts a replay: of the batch's sequences and tokens, not of the padded ones."""
        counts = (batch.num_prefill, batch.num_extend, batch.num_rows, batch.num_tokens)
        if graph.latest is None or graph.latest[0] != counts:  # equal steps share it
            attention = self._worker.attend_graph(key, [_counted(part, batch) for part in self._worker.parts(key)])
            attention.count(graph.launches)
            graph.latest = counts, attention
        return graph.latest[1]

    def _is_capturable(self, key: GraphKey) -> bool:
        experts = self._worker.dispatcher.experts
        if experts is not None and not experts.is_capturable:  # since the step before, where a launch failed
            return False
        choices = self._choices(key)
        return choices is not None and all(choice.is_capturable for choice in choices)

    def _choices(self, key: GraphKey) -> tuple[Choice, ...] | None:
        """Return what would serve it now; None where a part has no path: no batch is as long, or no path is left."""
        parts, dispatcher = self._worker.parts(key), self._worker.dispatcher
        try:
            return tuple([dispatcher.choice(part, kind) for part in parts for kind in dispatcher.kinds])
        except NoPathError:
            return None


def _num_state_writes(batch: Batch) -> int:
    return 0 if batch.states is None else len(batch.states.writes)


def _counted(part: PhasePart, batch: Batch) -> PhasePart:
    rows = batch.rows_of(part.phase)
    return replace(part, num_sequences=len(rows), num_tokens=sum(batch.query_lens[rows.start : rows.stop]))


def _of_lengths(part: PhasePart, batch: Batch) -> PhasePart:
    """Return the part with the batch's own lengths in place of the graph's bounds."""
    rows = batch.rows_of(part.phase)
    queries, contexts = (max(lens[rows.start : rows.stop]) for lens in (batch.query_lens, batch.context_lens))
    return replace(part, batch=replace(part.batch, max_seqlen_q=queries, max_context=contexts))
