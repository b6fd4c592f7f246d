"""The operators of layers with a state, and the list of all operators.

They are members of an enum of their own: digests of committed evidence cover `operators.py`, as it is written.
TODO: make them members of `Operator` when `cublaslt.linear.ordered` is next proven on the GPUs of the matrix.
"""

from enum import Enum
from typing import cast

from kernels.vocabulary.operators import Operator
from kernels.vocabulary.shape import Phase


class _StateOperator(Enum):
    RECURRENCE = "recurrence"
    CONVOLUTION = "convolution"


RECURRENCE = cast(Operator, _StateOperator.RECURRENCE)
CONVOLUTION = cast(Operator, _StateOperator.CONVOLUTION)
EVERY_OPERATOR = (*Operator, RECURRENCE, CONVOLUTION)


def place_of_phase(phase: str) -> int:
    """The place of `phase_of` in reports: attention's phases, then the operators."""
    return [*(it.value for it in Phase), *(it.value for it in EVERY_OPERATOR)].index(phase)
