"""The inputs of a convolution besides its tokens: factors, and the latest inputs of sequences in their slots."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.recurrence.calls import RecurrenceRows


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """taps  [channels, width] in the dtype of the tokens: of each channel the factors, that of the newest token last
    bias     [channels] in that dtype; None: nothing is added
    """

    taps: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ConvolutionState:
    """inputs  [slots, ring, channels] in the dtype of the tokens: what the convolution reads of the latest ones

    The token of position p stands at p % ring.
    """

    inputs: Tensor


# Fills out [T, channels], its last argument, and the rows' states; zero where a token has no row.
# projected [T, 3 * channels]: gates of the inputs, gates of the results, inputs; its rows may be further apart than
# they are long. Of channel c and token t, with z = (gate * input) rounded to the dtype, and z = 0 before a sequence:
#   out[t] = result gate[t] * (sum over tap of taps[c, tap] * z[t - width + 1 + tap] + bias[c])
RunConvolution = Callable[[Tensor, ConvolutionWeights, RecurrenceRows, ConvolutionState, Tensor], None]
