"""Short convolutions of recurrent layers by the plan's decisions: one call a layer and step, of all of its rows."""

from collections.abc import Callable, Iterable, Mapping
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
from server.engine.operators.rows_table import Calls, RowsTable
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


class ConvolutionTable(RowsTable[ConvolutionShape, RunConvolution]):
    """The decisions for a model's short convolutions.

    layers  the layers of the model with a convolution, in their order
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: Dtype,
        decisions: Mapping[ConvolutionShape, Decision[ConvolutionShape]],
        paths: Iterable[ConvolutionPath] = CONVOLUTION_PATHS,
        **options: Unpack[TableOptions[ConvolutionShape]],
    ) -> None:
        """`config`: of this rank's part of the model."""
        super().__init__(CONVOLUTION, decisions, paths, reports_all=True, **options)
        mixers = [(i, it.mixer) for i, it in enumerate(config.layers)]
        self.layers = tuple(i for i, mixer in mixers if isinstance(mixer, ShortConvolutionConfig))
        # Of a checked step, before each call: what it reads of a state is overwritten by it.
        self.before: Callable[[ConvolutionCall], None] | None = None
        self._of_mixer: dict[ShortConvolutionConfig, dict[Phase, Calls[ConvolutionShape]]] = {}
        for _, mixer in mixers:
            if isinstance(mixer, ShortConvolutionConfig):
                self._of_mixer[mixer] = {
                    phase: self.add(self._planned(mixer, phase, dtype), phase=phase) for phase in CONVOLUTION_PHASES
                }

    def run_of(self, mixer: ShortConvolutionConfig, place: int) -> RunConvolution:
        """Return what computes a layer, the one of this place, by the choice for a step's phase and tokens."""
        of_phase = self._of_mixer[mixer]

        def run(
            projected: Tensor, weights: ConvolutionWeights, rows: RecurrenceRows, state: ConvolutionState, out: Tensor
        ) -> None:
            given = projected, weights, rows, state, out
            if self.before is not None:
                self.before(ConvolutionCall(place, *given))
            choice = self.launch(of_phase[rows.phase], projected.shape[0], *given)
            if self.tap is not None:
                self.tap(choice, ConvolutionCall(place, *given))

        return run

    def _planned(self, mixer: ShortConvolutionConfig, phase: Phase, dtype: Dtype) -> list[ConvolutionShape]:
        every = (ConvolutionShape.of(mixer.sizes, phase, dtype, rows) for rows in TokenRows)
        return [shape for shape in every if shape in self.decided]
