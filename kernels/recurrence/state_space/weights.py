"""The weights of a state space."""

from dataclasses import dataclass

from torch import Tensor

from kernels.recurrence.calls import RecurrenceWeights


@dataclass(frozen=True, slots=True)
class StateSpaceWeights(RecurrenceWeights):
    """Beside those of every recurrence, whose `dt_bias` is added to the step before its softplus:

    conv_bias  [conv_dim] in the dtype of the tokens
    skip       [value_heads] fp32: factor of x in the result (D)
    least_step, most_step  that a step is held between, behind its softplus
    """

    conv_bias: Tensor
    skip: Tensor
    least_step: float
    most_step: float
