"""Gated delta rules of recurrent layers by the plan's decisions: one call a layer and step, of all of its rows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights, RunRecurrence
from kernels.recurrence.paths import RECURRENCE_PATHS, RecurrencePath
from kernels.recurrence.shape import RECURRENCE_PHASES, RecurrenceShape
from kernels.vocabulary.recurrence_operator import RECURRENCE
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.decision.decision import Decision
from qualification.decision.model_shapes import recurrence_shape
from qualification.model.config import ModelConfig
from qualification.model.gated_delta import GatedDeltaConfig
from server.engine.operators.rows_table import Calls, RowsTable
from server.engine.operators.table import TableOptions


@dataclass(frozen=True, slots=True)
class RecurrenceCall:
    """The arguments of one layer's call, as `RunRecurrence` takes them.

    place  of the layer among the recurrent ones
    """

    place: int
    qkv: Tensor
    a: Tensor
    b: Tensor
    weights: RecurrenceWeights
    rows: RecurrenceRows
    state: RecurrenceState
    out: Tensor


class RecurrenceTable(RowsTable[RecurrenceShape, RunRecurrence]):
    """The decisions for a model's gated delta rules.

    layers  the recurrent layers of the model, in their order
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: Dtype,
        decisions: Mapping[RecurrenceShape, Decision[RecurrenceShape]],
        paths: Iterable[RecurrencePath] = RECURRENCE_PATHS,
        **options: Unpack[TableOptions[RecurrenceShape]],
    ) -> None:
        """`config`: of this rank's part of the model."""
        super().__init__(RECURRENCE, decisions, paths, reports_all=True, **options)
        mixers = [(i, it.mixer) for i, it in enumerate(config.layers)]
        self.layers = tuple(i for i, mixer in mixers if isinstance(mixer, GatedDeltaConfig))
        # Of a checked step, before each call: what it reads of a state is overwritten by it.
        self.before: Callable[[RecurrenceCall], None] | None = None
        self._of_mixer: dict[GatedDeltaConfig, dict[Phase, Calls[RecurrenceShape]]] = {}
        for _, mixer in mixers:
            if isinstance(mixer, GatedDeltaConfig):
                self._of_mixer[mixer] = {
                    phase: self.add(self._planned(mixer, phase, dtype), phase=phase) for phase in RECURRENCE_PHASES
                }

    def run_of(self, mixer: GatedDeltaConfig, place: int) -> RunRecurrence:
        """Return what computes a layer, the one of this place, by the choice for a step's phase and tokens."""
        of_phase = self._of_mixer[mixer]

        def run(
            qkv: Tensor, a: Tensor, b: Tensor, weights: RecurrenceWeights, rows: RecurrenceRows, state: RecurrenceState,
            out: Tensor,
        ) -> None:  # fmt: skip
            given = qkv, a, b, weights, rows, state, out
            if self.before is not None:
                self.before(RecurrenceCall(place, *given))
            choice = self.launch(of_phase[rows.phase], qkv.shape[0], *given)
            if self.tap is not None:
                self.tap(choice, RecurrenceCall(place, *given))

        return run

    def _planned(self, mixer: GatedDeltaConfig, phase: Phase, dtype: Dtype) -> list[RecurrenceShape]:
        every = (recurrence_shape(mixer, phase, dtype, rows) for rows in TokenRows)
        return [shape for shape in every if shape in self.decided]
