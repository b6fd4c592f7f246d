"""The gated short convolution of one sequence in fp64, with the limits of docs/limits.md ("Layers").

Source: LFM2's class in transformers: c * conv1d(b * x), of which b * x is kept in the dtype of the model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from qualification.model.forward.bounded import Bounded, Precision, U


def convolve(projected: Tensor, taps: Tensor, bias: Tensor | None, precision: Precision) -> Bounded:
    """Return the results [T, channels] of a sequence from its first token on.

    projected  [T, 3 * channels]: b, c and x, as a server hands them out
    taps       [channels, width] fp64, the factor of the newest token last; bias [channels] fp64
    """
    gates, result_gates, values = projected.double().chunk(3, dim=1)
    inputs = (gates * values).to(precision.dtype).double()
    width = taps.shape[1]
    terms = F.pad(inputs, (0, 0, width - 1, 0)).unfold(0, width, 1) * taps
    added = torch.zeros_like(taps[:, 0]) if bias is None else bias
    truth = result_gates * (terms.sum(dim=-1) + added)
    sizes = result_gates.abs() * (terms.abs().sum(dim=-1) + added.abs())
    # Each of at most width + 3 roundings in fp32 is of a number that is no larger than these sizes.
    return precision.rounded(Bounded(truth, (width + 3) * U * sizes, torch.zeros_like(truth)))
