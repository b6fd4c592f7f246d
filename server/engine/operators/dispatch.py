"""Runs each phase of a batch on the path that was decided for its shape, and counts every launch by path."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import Index, with_index
from kernels.vocabulary.operators import AnyShape, Operator
from kernels.vocabulary.path import KernelPath
from kernels.vocabulary.shape import AttentionShape, Mask, Phase
from kernels.vocabulary.value_shape import values_of
from qualification.decision.decision import Decision, Pairs
from server.engine.operators.attention_table import AttentionTable, Choice
from server.engine.operators.attention_timer import AttentionTimer
from server.engine.operators.chunked import bounded
from server.engine.operators.collective import CollectiveTable
from server.engine.operators.convolution import ConvolutionTable
from server.engine.operators.decisions import Redecide
from server.engine.operators.dispatch_key import CAUSAL, SPANS, Heads, LayerKind
from server.engine.operators.experts import ExpertsTable
from server.engine.operators.linear import LinearTable
from server.engine.operators.recurrence import RecurrenceTable
from server.engine.operators.rows_table import RowsTable, StepSizes
from server.engine.operators.state_table import StateTable
from server.engine.operators.table import OperatorTable
from server.engine.operators.tower import TowerTables
from server.engine.scheduling.sequence import Batch
from server.protocol.messages import AttentionSample, DispatchCount, PathUse

Lane = Phase | Operator  # what is quarantined together: a phase of attention, or another operator
# Gives the context in which a choice is run for one layer: the profiler's mark.
Watch = Callable[[Choice], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class PhasePart:
    """The rows of one phase in a step's tensors. `tokens` are rows of q; k and v are pages unless it is a prefill.

    spans   [tokens, 2] int32: positions that a token sees beside those before it, as in AttentionFlags; None: it sees
            none
    index   of these tokens in one layer, that attends to chosen keys; None of another layer, and of the part as a whole
    """

    phase: Phase
    tokens: slice
    batch: AttentionBatch
    num_sequences: int
    num_tokens: int
    spans: Tensor | None = None
    index: Index | None = None


class Dispatcher:
    """The tables of all operators of an engine.

    A launch or an attestation that fails quarantines (path, shape) pairs, an operator's order takes them out.
    """

    def __init__(
        self,
        decisions: Mapping[AttentionShape, Decision[AttentionShape]],
        paths: Iterable[KernelPath],
        flags: tuple[AttentionFlags, ...],
        *,
        redecide: Redecide[AttentionShape],
        timer: AttentionTimer | None = None,
        quarantined: Pairs = frozenset(),
        overridden: Pairs = frozenset(),
        tables: Iterable[RowsTable[Any, Any]] = (),
        layers: tuple[int, ...] | None = None,
        heads: tuple[Heads, ...] | None = None,
        chunks: tuple[int | None, ...] | None = None,
        tower: TowerTables | None = None,
    ) -> None:
        """`decisions`, `paths`, `flags`: of attention; flags one a layer that attends. `tables`: of other operators.

        `layers`: which layer of the model each of `flags` belongs to; None where all attend. `heads`: of each of
        them; None where all have those of the decisions. `chunks` of positions likewise; None where no layer has any.
        `tower`: of a model that sees images.
        """
        self.flags = flags
        self.layers = tuple(range(len(flags))) if layers is None else layers
        if heads is None:
            heads = (_heads_of(decisions),) * len(flags)
        self.sees_spans = tuple([it.sees_spans for it in heads])
        self.chunks = (None,) * len(flags) if chunks is None else chunks
        kinds = [(layer.window, own) for layer, own in zip(flags, heads, strict=True)]
        of_layers = list(zip(kinds, self.chunks, strict=True))
        # Each with its chunk: two kinds that differ in nothing else have the same shapes.
        self.kinds: tuple[tuple[LayerKind, int | None], ...] = tuple(dict.fromkeys(of_layers))
        self.chunk_sizes = tuple(dict.fromkeys(chunk for chunk in self.chunks if chunk is not None))
        # By layer its place among `kinds`: a number is found faster than a kind.
        self.kind_places = tuple(self.kinds.index(kind) for kind in of_layers)
        self.attention = AttentionTable(
            decisions, paths, redecide=redecide, quarantined=quarantined, overridden=overridden
        )
        self.tables = tuple(tables)
        self.tower = tower
        of_tower = () if tower is None else tower.tables
        self._all: tuple[OperatorTable[Any, Any], ...] = (self.attention, *self.tables, *of_tower)
        self._watch: Watch | None = None
        self.timer = timer

    @property
    def linear(self) -> LinearTable | None:
        """Return the table of products with weights, where there is one."""
        return next((it for it in self.tables if isinstance(it, LinearTable)), None)

    @property
    def experts(self) -> ExpertsTable | None:
        """Return the table of a model with mixtures."""
        return next((it for it in self.tables if isinstance(it, ExpertsTable)), None)

    @property
    def recurrence(self) -> RecurrenceTable | None:
        """Return the table of a model with gated delta rules or state spaces."""
        return next((it for it in self.tables if isinstance(it, RecurrenceTable)), None)

    @property
    def convolution(self) -> ConvolutionTable | None:
        """Return the table of a model with short convolutions."""
        return next((it for it in self.tables if isinstance(it, ConvolutionTable)), None)

    @property
    def of_states(self) -> tuple[StateTable[Any, Any, Any, Any], ...]:
        """Return the tables of layers with a state."""
        return tuple(it for it in self.tables if isinstance(it, StateTable))

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold every choice beside attention's that may wait for the host."""
        return all(it is None or it.is_capturable for it in (self.experts, *self.of_states))

    @property
    def collective(self) -> CollectiveTable | None:
        """Return the table of sums over the ranks, where there are several."""
        return next((it for it in self.tables if isinstance(it, CollectiveTable)), None)

    @property
    def decisions(self) -> dict[AttentionShape, Decision[AttentionShape]]:
        """Return the decision that serves each shape of attention now."""
        return {choice.decision.shape: choice.decision for choice in self.choices}

    @property
    def plan(self) -> dict[AttentionShape, Decision[AttentionShape]]:
        """Return attention's decision for each shape now, shapes that no path serves any more included."""
        return self.attention.plan

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the choice that serves each shape of attention now."""
        return self.attention.choices

    @property
    def all_decisions(self) -> list[Decision[AnyShape]]:
        """Return the decision for each shape now, those of other operators behind attention's, a tower's last."""
        found = {decision.shape: decision for table in self._all for decision in table.plan.values()}
        return list(found.values())

    @property
    def paths_served(self) -> dict[str, str | None]:
        """Return by shape of any operator the path that is launched for it now; None where none is."""
        return {shape: path for table in self._all for shape, path in table.paths_served.items()}

    @property
    def overridden(self) -> Pairs:
        """The (path, shape) pairs that an operator took out of service."""
        return self.attention.decided.overridden

    @property
    def revision(self) -> int:
        """A number that grows whenever a decision of any operator changes."""
        return sum(table.decided.revision for table in self._all)

    def check_others(self, sizes: StepSizes) -> None:
        """Raises NoPathError where no path is left for a call beside attention of such a step."""
        for table in self.tables:
            table.check(sizes)

    def other_decisions(self, sizes: StepSizes) -> tuple[Decision[AnyShape], ...]:
        """Return the decisions beside attention's that serve such a step."""
        return tuple(chain.from_iterable(table.served(sizes) for table in self.tables))

    def other_counts(self, sizes: StepSizes) -> list[DispatchCount]:
        """Return the decisions beside attention's that serve such a step, with their launches."""
        return [count for table in self.tables for count in table.counts(sizes)]

    def other_uses(self, sizes: StepSizes) -> list[PathUse]:
        """Return what a request says of them: of the products of all models only what is no proven first choice."""
        return [use for table in self.tables for use in table.uses(sizes)]

    def other_pairs(self, sizes: StepSizes) -> list[tuple[str, str]]:
        """Return their (path, shape) pairs: whom to blame when the device is lost in such a step."""
        return [pair for table in self.tables for pair in table.pairs(sizes)]

    def take_quarantined(self) -> list[tuple[str, str]]:
        """The (path, shape) pairs of all operators quarantined since the last call."""
        return list(dict.fromkeys(pair for table in self._all for pair in table.decided.take_quarantined()))

    def choice(self, part: PhasePart, kind: tuple[LayerKind, int | None]) -> Choice:
        """One dictionary hit. Raises NoPathError for a shape without a path, which no start-up lets through."""
        of_shape, chunk = kind
        batch = part.batch if chunk is None else bounded(part.batch, chunk)
        has_spans = part.spans is not None and of_shape[1].sees_spans
        return self.attention.choice(part.phase, batch, of_shape, SPANS if has_spans else CAUSAL)

    def flags_of(self, layer: int, part: PhasePart) -> AttentionFlags:
        """Return the flags of a layer for a part of a step."""
        if part.index is not None:
            return with_index(self.flags[layer], part.index)
        if part.spans is None or not self.sees_spans[layer]:
            return self.flags[layer]
        return replace(self.flags[layer], spans=part.spans)

    def begin(self, batch: Batch) -> None:
        """A step is about to be launched."""
        if self.timer is not None and self._watch is None:
            self.timer.begin(batch)

    def replayed(self, choice: Choice, part: PhasePart, kind: tuple[LayerKind, int | None]) -> None:
        """A graph that holds this choice was replayed; `kind` of the layers that it served."""
        if self.timer is not None and self._watch is None:
            self.timer.replayed(choice.decision.shape, part.batch, kind)

    def take_samples(self) -> tuple[list[AttentionSample], dict[str, int]]:
        """Return what the timer has measured since the last call."""
        return ([], {}) if self.timer is None else self.timer.take()

    @property
    def is_watched(self) -> bool:
        """Return whether calls are made for an attestation now."""
        return self._watch is not None

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Every call of a path, until the end of the context, is made inside of what `watch` gives for it."""
        if self.timer is not None:
            self.timer.finish()  # a replay of the same graph would record the same events again
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def marked(self, choice: Choice) -> AbstractContextManager[object]:
        """Return what a call is made inside of: what `watched` gives for it now, or nothing."""
        return nullcontext() if self._watch is None else self._watch(choice)

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Time no call until the end of the context: what is captured in it serves no request."""
        timer, self.timer = self.timer, None
        try:
            yield
        finally:
            self.timer = timer

    def call(
        self, choice: Choice, q: Tensor, k: Tensor, v: Tensor, part: PhasePart, layer: int, out: Tensor, *,
        planned: AttentionBatch,
    ) -> None:  # fmt: skip
        """Run a choice for one layer. `planned`: the part's batch as it sees it, with what its step has planned.

        A call that is watched plans for itself: it is judged, and may be captured, without the others.
        """
        flags = self.flags_of(layer, part)
        if self._watch is not None:
            with self._watch(choice):
                choice.run(q, k, v, replace(planned, plans=None), flags, out)
        elif self.timer is not None and self.timer.measures(part.phase, layer):
            work = partial(choice.run, q, k, v, planned, flags, out)
            self.timer.around(work, choice.decision.shape, layer, part.batch)
        else:
            choice.run(q, k, v, planned, flags, out)

    def replace(self, choice: Choice, error: Exception) -> Choice:
        """The next path for a choice that failed to launch. Raises NoPathError, or `error` when it is another kind."""
        return self.attention.replace(choice, error)

    def decide(self, decisions: Iterable[Decision[AnyShape]]) -> None:
        """Serve by these decisions of all operators from now on: another rank has made them."""
        found = list(decisions)
        for table in self._all:
            table.decide({it.shape: it for it in found if it.shape in table.decided})

    def quarantine(self, path: str, lane: Lane) -> list[tuple[str, str]]:
        """Serve no shape of the phase or operator on this path any more. Returns the (path, shape) pairs it served.

        `take_quarantined` no longer returns them. A shape that no other path may serve is left without one, and its
        requests end with an error.
        """
        for table in self._all:
            table.quarantine(path, lane.value)
        return self.take_quarantined()

    def override(self, pairs: Pairs) -> list[AnyShape]:
        """Serve without these (path, shape) pairs, and with those again that earlier calls had named, from now on.

        Returns the shapes that would be left without a path; when there are any, nothing has changed.
        """
        changes = [(table.decided, table.decided.without(pairs)) for table in self._all]
        stranded = [shape for decided, changed in changes for shape in decided.stranded(changed)]
        if stranded:
            return stranded
        for decided, changed in changes:
            decided.override(pairs, changed)
        return []

    def substitute(self, path: KernelPath) -> None:
        """Run `path` wherever the path of its name serves: this is how faults are planted in an engine that runs."""
        self.attention.substitute(path)


def _heads_of(decisions: Collection[AttentionShape]) -> Heads:
    """Return the heads of all shapes; of no shape, none. Raises ValueError where they differ."""
    has_spans = any(it.mask is Mask.SPANS for it in decisions)
    found = {
        Heads(it.num_heads, it.num_kv_heads, it.head_dim, sees_spans=has_spans, values=values_of(it))
        for it in decisions
    }
    if len(found) > 1:
        raise ValueError(f"layers have {len(found)} kinds of heads: name those of each")
    return next(iter(found), Heads(0, 0, 0))
