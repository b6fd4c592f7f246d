"""Samples of served convolutions: some tokens of one sequence in some channels, and the inputs that they read.

Rule and limits are those of qualification (kernels/reference/convolution.py, docs/limits.md). A state that is wrong as
a whole, as of another sequence, is right by this: replays of answers find it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from kernels.convolution.calls import ConvolutionWeights
from kernels.reference.convolution import convolution_reference_from
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.recurrence_operator import CONVOLUTION
from server.engine.operators.convolution import ConvolutionCall
from server.engine.proof.product_sample import judged_rows
from server.engine.proof.recurrence_sample import SampledRow
from server.engine.proof.shadow_sample import Judgement, digest_of

_MOST_TOKENS, _MOST_CHANNELS = 64, 256


@dataclass(frozen=True, slots=True)
class ConvolutionSample:
    """Copies of what a layer's convolution read and wrote for the first tokens of one row, in some channels.

    kept       [ring, n] of the row's slot before the step
    projected  [T, 3 n], out [T, n]
    """

    path: str
    layer: int
    first_channel: int
    row: SampledRow
    kept: Tensor
    projected: Tensor
    weights: ConvolutionWeights
    out: Tensor

    @property
    def lane(self) -> Operator:
        return CONVOLUTION

    @property
    def digest(self) -> str:
        return digest_of(self.projected)

    @property
    def weight(self) -> None:
        """Return None: a sample is of all weights of a layer."""
        return None

    @torch.inference_mode()
    def judge(self, rng: Random) -> Judgement:  # noqa: ARG002
        """Compute the tokens in fp64 and compare. Waits for the device. Raises torch.OutOfMemoryError."""
        row, width, ring = self.row, self.weights.taps.shape[1], self.kept.shape[0]
        places = [position % ring for position in range(row.first - width + 1, row.first)]
        is_before = torch.tensor([place >= 0 for place in range(row.first - width + 1, row.first)])
        kept = self.kept[places] if places else self.kept[:0]
        kept = torch.where(is_before.to(kept.device)[:, None], kept, torch.zeros_like(kept))
        reference = convolution_reference_from(kept, self.projected, self.weights)
        rows = range(row.start, row.start + self.out.shape[0])
        where = f"convolution of layer {self.layer}, channels from {self.first_channel} on"
        return judged_rows(self.path, where, rows, self.projected, self.out, reference, first_column=self.first_channel)


def before_convolution(
    call: ConvolutionCall, row: SampledRow, rng: Random
) -> "Callable[[str, int, Tensor], ConvolutionSample]":
    """Copy what a call reads for a row, in some channels, without waiting for the device; it overwrites some.

    Returns what makes the sample of it, of the path, the layer and the results. Raises torch.OutOfMemoryError.
    """
    channels = call.weights.taps.shape[0]
    first = rng.randrange(max(1, channels - _MOST_CHANNELS + 1))
    own = slice(first, first + _MOST_CHANNELS)
    num_tokens = min(row.num_tokens, _MOST_TOKENS)
    tokens = slice(row.start, row.start + num_tokens)
    kept = call.state.inputs.index_select(0, call.rows.sources[row.row : row.row + 1])[0, :, own].clone()
    projected = torch.cat([part[:, own] for part in call.projected[tokens].split(channels, dim=1)], dim=1)  # type: ignore[no-untyped-call]
    bias = None if call.weights.bias is None else call.weights.bias[own]
    weights = ConvolutionWeights(call.weights.taps[own], bias)

    def sample(path: str, layer: int, out: Tensor) -> ConvolutionSample:
        of_row = SampledRow(row.row, row.start, num_tokens, row.first)
        return ConvolutionSample(path, layer, first, of_row, kept, projected, weights, out[tokens, own].clone())

    return sample
