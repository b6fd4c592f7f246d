"""The truth of a gated short convolution in fp64, token by token, and what a right path may err there.

A right path rounds what the convolution reads, gate times input, to the dtype of the tokens, since it is kept so: the
product of two numbers of 16 bits is exact in fp32, and every dtype's rounding of it is one number. So the truth reads
the rounded numbers, and a state is right to the bit. Then it computes in fp32, in any order: each of at most width + 3
roundings errs by up to u of a sum that is below the sum of the terms' magnitudes. The result is rounded once.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.convolution.calls import ConvolutionWeights
from kernels.reference.compare import Reference
from kernels.reference.experts import rounding_of

_U32 = 2.0**-24
_SECOND_ORDER = 1.01  # of roundings that meet
_LEAST = 1e-30  # limit of an element whose truth is 0


@dataclass(frozen=True, slots=True)
class ConvolutionReference:
    """out    [B * T, 1, channels]: of each token; of padding it means nothing
    inputs  [B, T, channels] in the dtype of the tokens: what the convolution reads, and a state keeps
    """

    out: Reference
    inputs: Tensor

    @property
    def num_bytes(self) -> int:
        return self.out.num_bytes + self.inputs.nbytes


def convolution_reference(projected: Tensor, weights: ConvolutionWeights) -> ConvolutionReference:
    """Return the expected results of sequences [B, T, 3 * channels] from their first token on, and their inputs."""
    channels, width = weights.taps.shape
    inputs = true_inputs(projected)
    read = F.pad(inputs, (0, 0, width - 1, 0))
    gates = projected[..., channels : 2 * channels]
    found = [_judged(*each, weights) for each in zip(read, gates, strict=True)]
    truth, limit = (torch.cat(each) for each in zip(*found, strict=True))
    return ConvolutionReference(Reference(truth, limit, None, float("inf")), inputs)


def convolution_reference_from(kept: Tensor, projected: Tensor, weights: ConvolutionWeights) -> Reference:
    """Return the expected results [T, 1, channels] of consecutive tokens [T, 3 * channels] of one sequence.

    kept  [width - 1, channels]: the inputs before them, zero before the sequence's first token
    """
    channels = weights.taps.shape[0]
    read = torch.cat([kept, true_inputs(projected)])
    truth, limit = _judged(read, projected[:, channels : 2 * channels], weights)
    return Reference(truth, limit, None, float("inf"))


def true_inputs(projected: Tensor) -> Tensor:
    """Return what the convolution reads of tokens [..., 3 * channels], rounded to their dtype."""
    gates, _, values = projected.double().chunk(3, dim=-1)
    return (gates * values).to(projected.dtype)


def _judged(read: Tensor, gates: Tensor, weights: ConvolutionWeights) -> tuple[Tensor, Tensor]:
    """Return (results, limits) [T, 1, channels] fp64 of inputs [width - 1 + T, channels] and the results' gates."""
    taps = weights.taps.double()
    terms = read.double().unfold(0, taps.shape[1], 1) * taps
    bias = torch.zeros_like(taps[:, 0]) if weights.bias is None else weights.bias.double()
    gate = gates.double()
    truth = gate * (terms.sum(dim=-1) + bias)
    sizes = gate.abs() * (terms.abs().sum(dim=-1) + bias.abs())
    limit = _SECOND_ORDER * (taps.shape[1] + 3) * _U32 * sizes + rounding_of(gates.dtype).of(truth) + _LEAST
    return truth[:, None], limit[:, None]
