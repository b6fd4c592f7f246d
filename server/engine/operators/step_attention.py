"""Attention of one step: what the decoder calls for each layer; every launch is counted by its choice."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from kernels.calls.batch import AttentionBatch
from kernels.calls.indexed import Index
from kernels.calls.plan import plan
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.shape import Phase
from qualification.decision.decision import Decision
from server.engine.operators.attention_table import Choice
from server.engine.operators.chunked import within
from server.engine.operators.dispatch import Dispatcher, PhasePart
from server.engine.operators.launch_errors import LAUNCH_ERRORS
from server.engine.operators.rows_table import StepSizes, phase_of_step
from server.model.kv_cache import KVLayer
from server.protocol.messages import DispatchCount, PathUse

# The next path for a choice whose kernel could not be launched. Raises NoPathError, or what else ends the step.
ReplaceChoice = Callable[[Choice, Exception], Choice]
# Called after each layer of a checked step, with what the path had: its choice and part, the layer, q, k, v and out.
TakeCall = Callable[[Choice, PhasePart, int, Tensor, Tensor, Tensor, Tensor], None]
Beat = Callable[[], None]  # the step makes progress


@dataclass(frozen=True, slots=True)
class ServedStep:
    """Report of what served a step: each decision with its launches, and the distinct ones of each phase."""

    dispatches: list[DispatchCount]
    uses: dict[Phase, list[PathUse]]


@dataclass(slots=True)
class _Lane:
    """The choice for the layers of one kind in one phase of a step, and how often it ran."""

    choice: Choice
    num_launches: int = 0


@dataclass(slots=True)
class _Part:
    """planned  the part's batch with the plans that the layers of this step share; None: not to be launched now
    within   by their chunk: what layers see of it that see one chunk of positions, planned likewise
    """

    part: PhasePart
    lanes: dict[int, _Lane] = field(default_factory=dict)  # by the place of the kind of layers
    retired: list[_Lane] = field(default_factory=list)  # ran some layers, then failed to launch
    planned: AttentionBatch | None = None
    within: dict[int, AttentionBatch] = field(default_factory=dict)


class StepAttention:
    """Attention of one step: what the decoder calls for each layer. Its decisions are made here, before the first."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        parts: list[PhasePart],
        kv_layers: tuple[KVLayer, ...],
        *,
        tap: TakeCall | None = None,
        replace_choice: ReplaceChoice | None = None,
        num_sampled: int = 0,
        beat: Beat | None = None,
    ) -> None:
        """`kv_layers`: the pages of each layer that attends. Raises NoPathError.

        `num_sampled`: tokens of the step whose logits are computed, for the products that serve beside attention.
        `replace_choice`: what to do where a kernel cannot be launched; without it the dispatcher's next path serves.
        `beat`: called before and after each layer's attention, where a layer may take seconds.
        """
        self._dispatcher = dispatcher
        self._tap = tap
        self._beat = beat
        self._replace = dispatcher.replace if replace_choice is None else replace_choice
        self._report: ServedStep | None = None
        self._kv_layers = kv_layers
        # Rows of a CUDA graph with its padding.
        self._sizes = StepSizes(
            max((part.tokens.stop for part in parts), default=0),
            num_sampled,
            sum(part.num_sequences for part in parts),
            phase_of_step([part.phase for part in parts]),
        )
        dispatcher.check_others(self._sizes)
        self._parts = [
            _Part(part, {place: _Lane(dispatcher.choice(part, kind)) for place, kind in enumerate(dispatcher.kinds)})
            for part in parts
        ]

    def plan(self) -> None:
        """Plan the batch of each part for all layers: once a step, before the first one, where its launches go.

        Inside of the capture of a CUDA graph, that is: its plans are nodes of the graph, whose batch outlives the step.
        """
        for entry in self._parts:
            whole = entry.part.batch
            entry.planned = plan(whole)
            for chunk in self._dispatcher.chunk_sizes:
                seen = within(whole, chunk, page_size=self._kv_layers[0].k.shape[1])
                entry.within[chunk] = entry.planned if seen is whole else plan(seen)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, index: Index | None = None, /) -> None:
        """Fill `out` [tokens, heads, head_dim] for q of its shape and packed k, v [tokens, kv_heads, head_dim].

        `index`: of a layer that attends to chosen keys. The step is planned before.
        """
        if self._beat is not None:
            self._beat()
        is_alone = len(self._parts) == 1  # all rows are its own: a view of each would take 5 us (one core, torch 2.13)
        for entry in self._parts:
            tokens = entry.part.tokens
            own_q, own_out = (q, out) if is_alone else (q[tokens], out[tokens])
            if entry.part.phase is not Phase.PREFILL:
                own_k, own_v = self._kv_layers[layer].read()
            else:
                own_k, own_v = (k, v) if is_alone else (k[tokens], v[tokens])
            own_index = None if index is None else index if is_alone else index.rows(tokens)
            self._run(entry, layer, own_q, own_k, own_v, own_out, own_index)
            if self._tap is not None:
                choice = entry.lanes[self._dispatcher.kind_places[layer]].choice
                seen = self._seen(entry, layer)
                seen = seen if own_index is None else replace(seen, index=own_index)
                self._tap(choice, seen, layer, own_q, own_k, own_v, own_out)
        if self._beat is not None:
            self._beat()

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the choices that serve now, one for each part and kind of layers."""
        return tuple(lane.choice for entry in self._parts for lane in entry.lanes.values())

    @property
    def launches(self) -> tuple[dict[int, int], ...]:
        """Return how often the choice of each kind of layers ran, for each part."""
        return tuple({place: lane.num_launches for place, lane in entry.lanes.items()} for entry in self._parts)

    def count(self, launches: Iterable[Mapping[int, int]]) -> None:
        """Count what a replay of a CUDA graph launches: the `launches` of the step that it captured."""
        for entry, counts in zip(self._parts, launches, strict=True):
            for place, num_launches in counts.items():
                entry.lanes[place].num_launches += num_launches

    def replayed(self) -> None:
        """The CUDA graph that this counts was replayed."""
        for entry in self._parts:
            for place, lane in entry.lanes.items():
                self._dispatcher.replayed(lane.choice, entry.part, self._dispatcher.kinds[place])

    def report(self) -> ServedStep:
        """Return what served the step, which is launched: the same object for every replay that this counts."""
        if self._report is None:
            for entry in self._parts:
                entry.planned = None  # every layer is launched: the memory is the next step's
                entry.within.clear()
            lanes = self._lanes()
            uses = {phase: [lane.choice.use for entry, lane in lanes if entry.part.phase is phase] for phase in Phase}
            served = self._dispatcher.other_uses(self._sizes)
            if served:
                uses = {phase: [*of_phase, *served] if of_phase else [] for phase, of_phase in uses.items()}
            self._report = ServedStep(self.counts(), uses)
        return self._report

    def counts(self) -> list[DispatchCount]:
        """Return each decision that served, with the launches of its path; those of products behind attention's."""
        found = [count_of(entry.part, lane.choice, lane.num_launches) for entry, lane in self._lanes()]
        return [*found, *self._dispatcher.other_counts(self._sizes)]

    def served(self) -> list[tuple[Choice, int]]:
        """Return each choice that ran in this step, with its launches."""
        return [(lane.choice, lane.num_launches) for _, lane in self._lanes()]

    def suspects(self) -> list[tuple[str, str]]:
        """Every (path, shape) of this step: whom to blame when the device is lost in it."""
        found = [(lane.choice.use.path, str(lane.choice.decision.shape)) for _, lane in self._lanes()]
        return [*found, *self._dispatcher.other_pairs(self._sizes)]

    def other_decisions(self) -> tuple[Decision[AnyShape], ...]:
        """Return the decisions beside attention's that serve the step now."""
        return self._dispatcher.other_decisions(self._sizes)

    def _lanes(self) -> list[tuple[_Part, _Lane]]:
        return [(entry, lane) for entry in self._parts for lane in (*entry.retired, *entry.lanes.values())]

    def _seen(self, entry: _Part, layer: int) -> PhasePart:
        """Return a part as a layer sees it."""
        chunk = self._dispatcher.chunks[layer]
        return entry.part if chunk is None else replace(entry.part, batch=replace(entry.within[chunk], plans=None))

    def _run(self, entry: _Part, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, index: Index | None) -> None:
        part = entry.part if index is None else replace(entry.part, index=index)
        place, chunk = self._dispatcher.kind_places[layer], self._dispatcher.chunks[layer]
        lane, planned = entry.lanes[place], entry.planned if chunk is None else entry.within[chunk]
        assert planned is not None, "a step is planned before its first layer"
        while True:
            try:
                self._dispatcher.call(lane.choice, q, k, v, part, layer, out, planned=planned)
            except LAUNCH_ERRORS as error:
                if lane.num_launches:
                    entry.retired.append(lane)
                lane = entry.lanes[place] = _Lane(self._replace(lane.choice, error))
            else:
                lane.num_launches += 1
                return


def count_of(part: PhasePart, choice: Choice, num_launches: int) -> DispatchCount:
    """Return the count of a choice that served a part, with its launches."""
    decision, use = choice.decision, choice.use
    return DispatchCount(
        phase=part.phase.value,
        bucket=decision.shape.context_bucket.label,
        path=use.path,
        status=use.status,
        wanted=decision.wanted,
        fallback_reasons=use.fallback_reasons,
        num_sequences=part.num_sequences,
        num_tokens=part.num_tokens,
        num_launches=num_launches,
    )
