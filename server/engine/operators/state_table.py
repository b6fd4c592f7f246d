"""Table of an operator that computes layers with a state: one call a layer and step, of all of its rows."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Generic, TypeVar, Unpack

from torch import Tensor

from kernels.vocabulary.operators import Operator, RowsShape
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Phase
from qualification.decision.decision import Decision
from qualification.model.config import ModelConfig, RecurrenceConfig
from server.engine.operators.rows_table import Calls, RowsTable
from server.engine.operators.table import RunT, TableOptions

ShapeT = TypeVar("ShapeT", bound=RowsShape)
MixerT = TypeVar("MixerT", bound=RecurrenceConfig)
CallT = TypeVar("CallT")


class StateTable(RowsTable[ShapeT, RunT], Generic[ShapeT, RunT, MixerT, CallT]):
    """The decisions for a model's layers with mixers of one class.

    layers  those layers, in their order
    """

    def __init__(
        self,
        operator: Operator,
        config: ModelConfig,
        mixer_class: type[MixerT],
        shape_of: Callable[[MixerT, Phase, TokenRows], ShapeT],
        phases: Collection[Phase],
        decisions: Mapping[ShapeT, Decision[ShapeT]],
        paths: Iterable[AnyPath],
        **options: Unpack[TableOptions[ShapeT]],
    ) -> None:
        """`config`: of this rank's part of the model. Shapes that are not decided are not planned."""
        super().__init__(operator, decisions, paths, reports_all=True, **options)
        layers = ((index, mixer) for index, layer in enumerate(config.layers) for mixer in layer.mixers)
        mixers = {index: mixer for index, mixer in layers if isinstance(mixer, mixer_class)}
        self.layers = tuple(mixers)
        # Of a checked step, before each call: what it reads of a state is overwritten by it.
        self.before: Callable[[CallT], None] | None = None
        self._of_mixer: dict[MixerT, dict[Phase, Calls[ShapeT]]] = {}
        for mixer in mixers.values():
            of_phase = {phase: [shape_of(mixer, phase, rows) for rows in TokenRows] for phase in phases}
            self._of_mixer[mixer] = {
                phase: self.add([shape for shape in shapes if shape in self.decided], phase=phase)
                for phase, shapes in of_phase.items()
            }

    def _compute(self, calls: Calls[ShapeT], call: Callable[..., CallT], place: int, *given: Any) -> None:
        """Run what is decided for a layer's tokens, which `given` begins with.

        place  of the layer among the recurrent ones; call: makes of it and `given` what a check is shown
        """
        tokens: Tensor = given[0]
        if self.before is not None:
            self.before(call(place, *given))
        choice = self.launch(calls, tokens.shape[0], *given)
        if self.tap is not None:
            self.tap(choice, call(place, *given))
