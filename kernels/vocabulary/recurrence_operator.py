"""The operator of recurrent layers, and the list of all operators.

It is a member of an enum of its own: digests of committed evidence cover `operators.py`, as it is written.
TODO: make it a member of `Operator` when `cublaslt.linear.ordered` is next proven on the GPUs of the matrix.
"""

from enum import Enum
from typing import cast

from kernels.vocabulary.operators import Operator
from kernels.vocabulary.shape import Phase


class _StateOperator(Enum):
    RECURRENCE = "recurrence"


RECURRENCE = cast(Operator, _StateOperator.RECURRENCE)
EVERY_OPERATOR = (*Operator, RECURRENCE)


def place_of_phase(phase: str) -> int:
    """The place of `phase_of` in reports: attention's phases, then the operators."""
    return [*(it.value for it in Phase), *(it.value for it in EVERY_OPERATOR)].index(phase)
