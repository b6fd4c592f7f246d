"""Attention of a draft head's one layer, by the decisions of the model's own layers of its kind."""

from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.plan import plan
from kernels.vocabulary.shape import Phase
from qualification.model.config import AttentionConfig
from server.engine.operators.attention_table import Choice
from server.engine.operators.dispatch import Dispatcher, PhasePart
from server.engine.operators.dispatch_key import Heads
from server.engine.operators.launch_errors import LAUNCH_ERRORS
from server.engine.operators.step_attention import ReplaceChoice, TakeCall
from server.model.kv_cache import KVLayer


class HeadAttention:
    """Attention of a draft head's step, in place of `StepAttention`: of no request, so nothing is timed or counted."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        parts: list[PhasePart],
        layer: KVLayer,
        attention: AttentionConfig,
        *,
        tap: TakeCall | None = None,
        replace_choice: ReplaceChoice | None = None,
    ) -> None:
        """`layer`: its pages. `tap`, `replace_choice`: as of `StepAttention`. Raises NoPathError."""
        self._tap = tap
        self._replace = dispatcher.replace if replace_choice is None else replace_choice
        self._layer = layer
        self._flags = AttentionFlags(attention.scale, window=attention.window, softcap=attention.softcap)
        kind = attention.window, Heads.of(attention)
        self._parts: list[tuple[PhasePart, Choice]] = [
            (part, dispatcher.attention.choice(part.phase, part.batch, kind)) for part in parts
        ]

    @property
    def is_capturable(self) -> bool:
        return all(choice.is_capturable for _, choice in self._parts)

    def __call__(self, _: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Fill `out`: see `StepAttention`."""
        for index, (part, choice) in enumerate(self._parts):
            own_k, own_v = (k[part.tokens], v[part.tokens]) if part.phase is Phase.PREFILL else self._layer.read()
            given = q[part.tokens], own_k, own_v, plan(part.batch)
            ran = self._run(choice, given, out[part.tokens])
            self._parts[index] = part, ran
            if self._tap is not None:
                self._tap(ran, part, 0, *given[:3], out[part.tokens])

    def _run(self, choice: Choice, given: tuple[Tensor, Tensor, Tensor, AttentionBatch], out: Tensor) -> Choice:
        """Run a choice, or what replaces one that cannot be launched; return what ran."""
        while True:
            try:
                choice.run(*given, self._flags, out)
            except LAUNCH_ERRORS as error:
                choice = self._replace(choice, error)
            else:
                return choice
