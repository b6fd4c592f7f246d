"""The weights of lightning attention, as a recurrence takes them."""

from dataclasses import dataclass

from torch import Tensor

from kernels.recurrence.calls import RecurrenceWeights


@dataclass(frozen=True, slots=True)
class FixedDecayWeights(RecurrenceWeights):
    """Weights of which `a_log` alone is read: exp(a_log) is the slope of a head, e^-slope its decay.

    no_skip  [value_heads] fp32, zero: the factor of a value in the result, which a state space has (D)
    """

    no_skip: Tensor

    @classmethod
    def of(cls, a_log: Tensor, conv_dim: int) -> "FixedDecayWeights":
        """Return the weights of heads with these logarithms of slopes, [value_heads] fp32; conv_dim: of the layer."""
        return cls(
            a_log.new_ones(1, 1).expand(conv_dim, 1), a_log, a_log.new_zeros(len(a_log)), a_log.new_zeros(len(a_log))
        )
