"""Runs each phase of a batch on the path that was decided for its shape, and counts every launch by path."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.vocabulary.operators import AnyShape, Operator, operator_of
from kernels.vocabulary.path import KernelPath, RunAttention
from kernels.vocabulary.shape import AttentionShape, Phase
from qualification.decision.decision import Decision, Pairs
from server.engine.operators.attention_timer import AttentionTimer
from server.engine.operators.collective import CollectiveTable
from server.engine.operators.decisions import Decisions, NoPathError, Redecide
from server.engine.operators.dispatch_key import CAUSAL, LengthKey, bucket_index, key_of_shape
from server.engine.operators.experts import ExpertsTable
from server.engine.operators.launch_errors import launch_failure
from server.engine.operators.linear import LinearTable
from server.engine.scheduling.sequence import Batch
from server.protocol.messages import AttentionSample, DispatchCount, PathUse

logger = logging.getLogger(__name__)

Lane = Phase | Operator  # what is quarantined together: a phase of attention, or another operator
# Gives the context in which a choice is run for one layer: the profiler's mark.
Watch = Callable[["Choice"], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class PhasePart:
    """The rows of one phase in a step's tensors. `tokens` are rows of q; k and v are pages unless it is a prefill."""

    phase: Phase
    tokens: slice
    batch: AttentionBatch
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision with what is needed to run it, resolved once."""

    decision: Decision[AttentionShape]
    run: RunAttention
    use: PathUse
    is_capturable: bool  # whether a CUDA graph can hold it


class _TokenTable(Protocol):
    """The decisions of an operator whose shapes follow from the tokens of a step."""

    decided: Decisions[Any]

    def served(self, num_tokens: int) -> tuple[Decision[AnyShape], ...]: ...
    def check(self, num_tokens: int) -> None: ...
    def counts(self, num_tokens: int, num_sequences: int) -> list[DispatchCount]: ...
    def uses(self, num_tokens: int) -> list[PathUse]: ...
    def pairs(self, num_tokens: int) -> list[tuple[str, str]]: ...


class Dispatcher:
    """The decisions of the plan as a table.

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
        experts: ExpertsTable | None = None,
        products: LinearTable | None = None,
        collectives: CollectiveTable | None = None,
    ) -> None:
        """`flags`: one a layer. `decisions` were already made without the pairs `quarantined` and `overridden`.

        experts   the choices of a model with mixtures, whose layers have them by `join_weights`
        products  what multiplies with the weights of the model, which have it likewise
        collectives  what sums over the ranks, where there are several
        """
        self.flags = flags
        self.experts = experts
        self.products = products
        self.collectives = collectives
        tables: tuple[_TokenTable | None, ...] = experts, collectives
        self._of_tokens = tuple(it for it in tables if it is not None)
        self.windows = tuple(dict.fromkeys(layer.window for layer in flags))
        self._paths = {path.name: path for path in paths}
        self._of_attention = Decisions(decisions, redecide, quarantined, overridden)
        others = (() if products is None else (products.decided,)) + tuple(it.decided for it in self._of_tokens)
        self._all: tuple[Decisions[Any], ...] = (self._of_attention, *others)
        self._watch: Watch | None = None
        self.timer = timer
        self._choices: dict[Phase, dict[LengthKey, Choice]] = {phase: {} for phase in Phase}
        for shape, decision in decisions.items():
            if decision.path is not None:
                self._choices[shape.phase][key_of_shape(shape)] = self._resolve(decision)
        self._decode = self._choices[Phase.DECODE]

    @property
    def decisions(self) -> dict[AttentionShape, Decision[AttentionShape]]:
        """Return the decision that serves each shape now."""
        return {choice.decision.shape: choice.decision for choice in self.choices}

    @property
    def plan(self) -> dict[AttentionShape, Decision[AttentionShape]]:
        """Return the decision for each shape now, shapes that no path serves any more included."""
        return self._of_attention.plan

    @property
    def all_decisions(self) -> list[Decision[AnyShape]]:
        """Return the decision for each shape now, those of other operators behind attention's."""
        return [decision for of_operator in self._all for decision in of_operator.plan.values()]

    @property
    def overridden(self) -> Pairs:
        """The (path, shape) pairs that an operator took out of service."""
        return self._of_attention.overridden

    @property
    def revision(self) -> int:
        """A number that grows whenever a decision of any operator changes."""
        return sum(of_operator.revision for of_operator in self._all)

    def products_of(self, num_tokens: int, num_sampled: int) -> tuple[Decision[AnyShape], ...]:
        """Return the decisions beside attention's that serve a step of so many tokens, some of them sampled."""
        products = () if self.products is None else self.products.served(num_tokens, num_sampled)
        return (*products, *chain.from_iterable(it.served(num_tokens) for it in self._of_tokens))

    def check_products(self, num_tokens: int, num_sampled: int) -> None:
        """Raises NoPathError where no path is left for a product of such a step."""
        if self.products is not None:
            self.products.check(num_tokens, num_sampled)
        for of_operator in self._of_tokens:
            of_operator.check(num_tokens)

    def product_counts(self, num_tokens: int, num_sampled: int, num_sequences: int) -> list[DispatchCount]:
        """Return the decisions beside attention's that serve such a step, with their launches."""
        products = [] if self.products is None else self.products.counts(num_tokens, num_sampled, num_sequences)
        return [*products, *chain.from_iterable(it.counts(num_tokens, num_sequences) for it in self._of_tokens)]

    def product_uses(self, num_tokens: int, num_sampled: int) -> list[PathUse]:
        """Return what a request says of them: of the products of all models only what is no proven first choice."""
        products = [] if self.products is None else self.products.uses(num_tokens, num_sampled)
        return [*products, *chain.from_iterable(it.uses(num_tokens) for it in self._of_tokens)]

    def product_pairs(self, num_tokens: int, num_sampled: int) -> list[tuple[str, str]]:
        """Return their (path, shape) pairs: whom to blame when the device is lost in such a step."""
        products = [] if self.products is None else self.products.pairs(num_tokens, num_sampled)
        return [*products, *chain.from_iterable(it.pairs(num_tokens) for it in self._of_tokens)]

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the choice that serves each shape now, resolved."""
        return tuple(choice for of_phase in self._choices.values() for choice in of_phase.values())

    def take_quarantined(self) -> list[tuple[str, str]]:
        """The (path, shape) pairs of all operators quarantined since the last call."""
        return [pair for of_operator in self._all for pair in of_operator.take_quarantined()]

    def choice(self, part: PhasePart, window: int | None) -> Choice:
        """One dictionary hit. Raises NoPathError for a shape without a path, which no start-up lets through."""
        batch = part.batch
        if part.phase is Phase.DECODE:
            found = self._decode.get((window, 0, bucket_index(batch.max_context), CAUSAL))
        else:
            key = (window, bucket_index(batch.max_seqlen_q), bucket_index(batch.max_context), CAUSAL)
            found = self._choices[part.phase].get(key)
        if found is None:
            lengths = f"{batch.max_seqlen_q} of {batch.max_context} tokens"
            raise NoPathError(part.phase, f"no path for {part.phase.value}, window {window}, {lengths}")
        return found

    def begin(self, batch: Batch) -> None:
        """A step is about to be launched."""
        if self.timer is not None and self._watch is None:
            self.timer.begin(batch)

    def replayed(self, choice: Choice, part: PhasePart) -> None:
        """A graph that holds this choice was replayed."""
        if self.timer is not None and self._watch is None:
            self.timer.replayed(choice.decision.shape, part.batch)

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
        """Run a choice for one layer. `planned`: the part's batch, with what its step has planned.

        A call that is watched plans for itself: it is judged, and may be captured, without the others.
        """
        flags = self.flags[layer]
        if self._watch is not None:
            with self._watch(choice):
                choice.run(q, k, v, part.batch, flags, out)
        elif self.timer is not None and self.timer.measures(part.phase, layer):
            work = partial(choice.run, q, k, v, planned, flags, out)
            self.timer.around(work, choice.decision.shape, layer, part.batch)
        else:
            choice.run(q, k, v, planned, flags, out)

    def replace(self, choice: Choice, error: Exception) -> Choice:
        """The next path for a choice that failed to launch. Raises NoPathError, or `error` when it is another kind."""
        reason = launch_failure(error)
        if reason is None:
            raise error
        shape, path = choice.decision.shape, choice.use.path
        logger.error("%s failed to launch for %s (%s): %s", path, shape, reason.value, error)
        found = self._next(choice)
        if found is None:
            raise NoPathError(shape.phase, f"no path is left for {shape}")
        return found

    def quarantine(self, path: str, lane: Lane) -> list[tuple[str, str]]:
        """Serve no shape of the phase or operator on this path any more. Returns the (path, shape) pairs it served.

        `take_quarantined` no longer returns them. A shape that no other path may serve is left without one, and its
        requests end with an error.
        """
        if isinstance(lane, Phase):
            for choice in [it for it in self.choices if it.use.path == path and it.decision.shape.phase is lane]:
                self._next(choice)
        for of_operator in self._all[1:]:
            for shape, decision in of_operator.plan.items():
                if operator_of(shape) is lane and decision.path == path:
                    of_operator.quarantine(shape)
        return self.take_quarantined()

    def override(self, pairs: Pairs) -> list[AnyShape]:
        """Serve without these (path, shape) pairs, and with those again that earlier calls had named, from now on.

        Returns the shapes that would be left without a path; when there are any, nothing has changed.
        """
        changes = [(of_operator, of_operator.without(pairs)) for of_operator in self._all]
        stranded = [shape for of_operator, changed in changes for shape in of_operator.stranded(changed)]
        if stranded:
            return stranded
        for of_operator, changed in changes:
            of_operator.override(pairs, changed)
        for shape in changes[0][1]:
            decision = self._of_attention[shape]
            if decision.path is not None:
                self._choices[shape.phase][key_of_shape(shape)] = self._resolve(decision)
        return []

    def substitute(self, path: KernelPath) -> None:
        """Run `path` wherever the path of its name serves: this is how faults are planted in an engine that runs."""
        self._paths[path.name] = path
        for of_phase in self._choices.values():
            for key, choice in of_phase.items():
                if choice.use.path == path.name:
                    of_phase[key] = self._resolve(choice.decision)

    def _next(self, choice: Choice) -> Choice | None:
        """Quarantine a choice, and decide its shape again; None where no path is left."""
        shape = choice.decision.shape
        self._choices[shape.phase].pop(key_of_shape(shape), None)
        decision = self._of_attention.quarantine(shape)
        if decision is None:
            return None
        self._choices[shape.phase][key_of_shape(shape)] = found = self._resolve(decision)
        return found

    def _resolve(self, decision: Decision[AttentionShape]) -> Choice:
        assert decision.path is not None
        reasons = [reason.value for reason in decision.fallback_reasons]
        use = PathUse(decision.shape.phase.value, decision.path, decision.status.value, reasons)
        path = self._paths[decision.path]
        assert path.run is not None
        return Choice(decision, path.run, use, path.is_capturable)
