"""Attention of a draft head's one layer, by the decisions of the model's own layers of its kind."""

from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import Index
from kernels.calls.plan import plan
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.shape import Phase
from qualification.decision.decision import Decision
from qualification.model.config import AttentionConfig
from server.engine.operators.attention_table import Choice
from server.engine.operators.dispatch import Dispatcher, PhasePart
from server.engine.operators.dispatch_key import Heads
from server.engine.operators.launch_errors import LAUNCH_ERRORS
from server.engine.operators.rows_table import StepSizes, phase_of_step
from server.engine.operators.step_attention import ReplaceChoice, TakeCall, count_of
from server.model.kv_cache import KVLayer
from server.protocol.messages import DispatchCount


class HeadAttention:
    """Attention of a pass of the draft head, in place of `StepAttention`. It is of no request, so nothing is timed."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        parts: list[PhasePart],
        layer: KVLayer,
        attention: AttentionConfig,
        *,
        num_sampled: int = 0,
        tap: TakeCall | None = None,
        replace_choice: ReplaceChoice | None = None,
    ) -> None:
        """`layer`: its pages. `num_sampled`, `tap`, `replace_choice`: as of `StepAttention`. Raises NoPathError."""
        self._dispatcher = dispatcher
        self._tap = tap
        self._replace = dispatcher.replace if replace_choice is None else replace_choice
        self._layer = layer
        self._flags = AttentionFlags(attention.scale, window=attention.window, softcap=attention.softcap)
        kind = attention.window, Heads.of(attention)
        self._parts: list[tuple[PhasePart, Choice]] = [
            (part, dispatcher.attention.choice(part.phase, part.batch, kind)) for part in parts
        ]
        self._sizes = StepSizes(
            max((part.tokens.stop for part in parts), default=0),
            num_sampled,
            sum(part.num_sequences for part in parts),
            phase_of_step([part.phase for part in parts]),
            is_of_head=True,
        )
        dispatcher.check_others(self._sizes)
        self._counts: list[DispatchCount] = []  # of a pass that is launched

    @property
    def is_capturable(self) -> bool:
        return all(choice.is_capturable for _, choice in self._parts)

    def counts(self) -> list[DispatchCount]:
        """Return each decision that served the pass, with the launches of its path: of attention one a part.

        The same object for every replay of a graph that holds the pass.
        """
        if not self._counts:
            found = [count_of(part, choice, 1) for part, choice in self._parts]
            self._counts = [*found, *self._dispatcher.other_counts(self._sizes)]
        return self._counts

    def served(self) -> list[tuple[Choice, int]]:
        """Return each choice that runs in the pass, with its launches."""
        return [(choice, 1) for _, choice in self._parts]

    def other_decisions(self) -> tuple[Decision[AnyShape], ...]:
        """Return the decisions beside attention's that serve the pass now."""
        return self._dispatcher.other_decisions(self._sizes)

    def __call__(self, _: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, index: Index | None = None, /) -> None:
        """Fill `out`: see `StepAttention`."""
        assert index is None, "no draft head attends to chosen keys"
        for place, (part, choice) in enumerate(self._parts):
            own_k, own_v = (k[part.tokens], v[part.tokens]) if part.phase is Phase.PREFILL else self._layer.read()
            # A call that is watched plans for itself: it is judged, and may be captured, without the others.
            planned = part.batch if self._dispatcher.is_watched else plan(part.batch)
            given = q[part.tokens], own_k, own_v, planned
            ran = self._run(choice, given, out[part.tokens])
            self._parts[place] = part, ran
            if self._tap is not None:
                self._tap(ran, part, 0, *given[:3], out[part.tokens])

    def _run(self, choice: Choice, given: tuple[Tensor, Tensor, Tensor, AttentionBatch], out: Tensor) -> Choice:
        """Run a choice, or what replaces one that cannot be launched; return what ran."""
        while True:
            try:
                with self._dispatcher.marked(choice):
                    choice.run(*given, self._flags, out)
            except LAUNCH_ERRORS as error:
                choice = self._replace(choice, error)
            else:
                return choice
