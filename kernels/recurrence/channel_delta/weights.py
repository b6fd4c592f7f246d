"""The weights of a delta rule whose decay is of each channel."""

from dataclasses import dataclass

from kernels.recurrence.calls import RecurrenceWeights


@dataclass(frozen=True, slots=True)
class ChannelDeltaWeights(RecurrenceWeights):
    """dt_bias  [value_heads * key_dim] fp32: added to `a`, which has as many columns; others as of every recurrence."""
