"""The check of a path of convolutions that claims an order: a sequence whole, cut anywhere, decoded, beside others."""

import torch

from kernels.convolution.calls import RunConvolution
from kernels.convolution.shape import ConvolutionShape
from qualification.evidence.evidence import Invariance
from qualification.measure.inputs.convolution_inputs import Content, drawn_tokens, drawn_weights
from qualification.measure.inputs.sequence_inputs import NUM_DRAFTED
from qualification.measure.inputs.state_slots import convolution_slots
from qualification.measure.orders.sequence_order import MOST_NEIGHBOURS, Pool, check_sequences

_SEED = 113
_POOL = (Content.PLAIN, Content.CANCELS, Content.OUTLIER)
_LENGTH = 41  # tokens of each sequence of the pool: tiles of 16, and a part of one
_CUTS = ((1, 14, 2), (16,), (15, 1, 1), (7, 5, 11, 3))  # tokens of calls, in turn
_NEIGHBOURS = (1, 3, 16, 17)  # tokens of neighbours, in turn


def check_convolution_order(
    run: RunConvolution,
    shape: ConvolutionShape,
    device: torch.device,
    *,
    seed: int,
    order: str,
    ends_early: bool = False,
) -> Invariance:
    """Return what was seen of a path. Errors of a call are not caught.

    The sequences of the pool are the same for all shapes of a class, and so are the digests.
    """
    generator = torch.Generator().manual_seed(seed + _SEED)
    weights = drawn_weights(shape, generator, device)
    pool = Pool(
        {it.value: drawn_tokens(shape, it, _LENGTH, weights, generator) for it in _POOL},
        [drawn_tokens(shape, it, max(_NEIGHBOURS), weights, generator) for it in Content],
        _NEIGHBOURS,
        MOST_NEIGHBOURS[device.type],
        _CUTS,
    )
    return check_sequences(
        run, pool, shape.phase, lambda count: convolution_slots(shape, weights, count, NUM_DRAFTED, device),
        order=order, ends_early=ends_early,
    )  # fmt: skip
