"""Short convolutions of layers with a state by the plan's decisions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from kernels.convolution.calls import ConvolutionState, ConvolutionWeights, RunConvolution
from kernels.convolution.paths import CONVOLUTION_PATHS, ConvolutionPath
from kernels.convolution.shape import CONVOLUTION_PHASES, ConvolutionShape
from kernels.recurrence.calls import RecurrenceRows
from kernels.vocabulary.recurrence_operator import CONVOLUTION
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.decision.decision import Decision
from qualification.model.config import ModelConfig
from qualification.model.short_convolution import ShortConvolutionConfig
from server.engine.operators.state_table import StateTable
from server.engine.operators.table import TableOptions


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """The arguments of one layer's call, as `RunConvolution` takes them.

    place  of the layer among the recurrent ones
    """

    place: int
    projected: Tensor
    weights: ConvolutionWeights
    rows: RecurrenceRows
    state: ConvolutionState
    out: Tensor


class ConvolutionTable(StateTable[ConvolutionShape, RunConvolution, ShortConvolutionConfig, ConvolutionCall]):
    """The decisions for a model's short convolutions."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: Dtype,
        decisions: Mapping[ConvolutionShape, Decision[ConvolutionShape]],
        paths: Iterable[ConvolutionPath] = CONVOLUTION_PATHS,
        **options: Unpack[TableOptions[ConvolutionShape]],
    ) -> None:
        """`config`: of this rank's part of the model."""

        def shape_of(mixer: ShortConvolutionConfig, phase: Phase, rows: TokenRows) -> ConvolutionShape:
            return ConvolutionShape.of(mixer.sizes, phase, dtype, rows)

        mixer_class, phases = ShortConvolutionConfig, CONVOLUTION_PHASES
        super().__init__(CONVOLUTION, config, mixer_class, shape_of, phases, decisions, paths, **options)

    def run_of(self, mixer: ShortConvolutionConfig, place: int) -> RunConvolution:
        """Return what computes a layer, the one of this place, by the choice for a step's phase and tokens."""
        of_phase = self._of_mixer[mixer]

        def run(
            projected: Tensor, weights: ConvolutionWeights, rows: RecurrenceRows, state: ConvolutionState, out: Tensor
        ) -> None:
            self._compute(of_phase[rows.phase], ConvolutionCall, place, projected, weights, rows, state, out)

        return run
