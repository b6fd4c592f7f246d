"""Recurrences of layers with a state by the plan's decisions: gated delta rules, and state spaces."""

from collections.abc import Iterable, Mapping
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
from server.engine.operators.state_table import StateTable
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


class RecurrenceTable(StateTable[RecurrenceShape, RunRecurrence, GatedDeltaConfig, RecurrenceCall]):
    """The decisions for a model's gated delta rules and state spaces."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: Dtype,
        decisions: Mapping[RecurrenceShape, Decision[RecurrenceShape]],
        paths: Iterable[RecurrencePath] = RECURRENCE_PATHS,
        **options: Unpack[TableOptions[RecurrenceShape]],
    ) -> None:
        """`config`: of this rank's part of the model."""

        def shape_of(mixer: GatedDeltaConfig, phase: Phase, rows: TokenRows) -> RecurrenceShape:
            return recurrence_shape(mixer, phase, dtype, rows)

        mixer_class, phases = GatedDeltaConfig, RECURRENCE_PHASES
        super().__init__(RECURRENCE, config, mixer_class, shape_of, phases, decisions, paths, **options)

    def run_of(self, mixer: GatedDeltaConfig, place: int) -> RunRecurrence:
        """Return what computes a layer, the one of this place, by the choice for a step's phase and tokens."""
        of_phase = self._of_mixer[mixer]

        def run(
            qkv: Tensor, a: Tensor, b: Tensor, weights: RecurrenceWeights, rows: RecurrenceRows, state: RecurrenceState,
            out: Tensor,
        ) -> None:  # fmt: skip
            self._compute(of_phase[rows.phase], RecurrenceCall, place, qkv, a, b, weights, rows, state, out)

        return run
