"""Keys and values as a KV cache of 8 bits holds them: e4m3, over a scale for each token and head."""

import torch

from qualification.model.forward.bounded import Bounded, U

_LARGEST = 448.0  # of e4m3, which the largest magnitude of a head becomes
_DIGITS = 3  # behind the point of a number of e4m3
_LEAST_EXPONENT = -6  # numbers below have the steps of this one
_LEAST_MAGNITUDE = 2.0**-100  # taken as the largest of numbers that are all smaller


def stored_in_fp8(value: Bounded) -> Bounded:
    """Return keys or values [..., head_dim] as they are read again: numbers of e4m3 times their scale.

    A number is off by half a step of e4m3 at most; the largest, by which all of a head are scaled, is known as well as
    the value is. Division and product are rounded in fp32.
    """
    size, slack = value.truth.abs(), value.limit
    largest = size.amax(dim=-1, keepdim=True)
    scale = (largest + slack.amax(dim=-1, keepdim=True)).clamp(min=_LEAST_MAGNITUDE) / _LARGEST
    least_scale = (largest - slack.amax(dim=-1, keepdim=True)).clamp(min=_LEAST_MAGNITUDE) / _LARGEST
    scaled = ((size + slack) / least_scale).clamp(max=_LARGEST)
    exponent = torch.frexp(scaled).exponent - 1  # of 0 it is below the least
    half_step = scale * (exponent.clamp(min=_LEAST_EXPONENT) - _DIGITS - 1).double().exp2()
    return Bounded(value.truth, value.most + half_step + 4 * U * size, value.deviation)
