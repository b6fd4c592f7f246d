"""`triton.convolution`: the convolution in Triton, for any GPU of sm_80 or newer.

One launch of decode, two of prompts, whose grids depend on the numbers of tokens and rows alone, so that a CUDA graph
holds them.
"""

import triton
from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.convolution.calls import ConvolutionState, ConvolutionWeights
from kernels.convolution.portable import hallmark_convolution_keep, hallmark_convolution_tokens
from kernels.recurrence.calls import RecurrenceRows

_TOKENS = 16  # of a program
_ROWS = 64  # that it looks at together
_CHANNELS = 128  # of a program
_KEPT_CHANNELS = 512  # of a program that keeps
_EXACT = {"enable_fp_fusion": False}  # a product and a sum in two roundings, as PyTorch has them


def run_convolution(
    projected: Tensor, weights: ConvolutionWeights, rows: RecurrenceRows, state: ConvolutionState, out: Tensor
) -> None:
    """Fill `out`, and the states of the rows: see `RunConvolution`. Does not wait for the device."""
    if projected.shape[0]:
        for launch in launches(projected, weights, rows, state, out):
            launch.run()


def launches(
    projected: Tensor, weights: ConvolutionWeights, rows: RecurrenceRows, state: ConvolutionState, out: Tensor
) -> list[Launch]:
    """Return the launches of a call of one token or more."""
    (channels, width), num_tokens, num_rows = weights.taps.shape, projected.shape[0], rows.starts.shape[0]
    ring, num_writes = state.inputs.shape[1], rows.write_tokens.shape[0]
    keeps = num_writes == 0 and rows.longest <= ring - width + 1
    sizes, of_rows = {"CHANNELS": channels, "RING": ring}, (rows.starts, rows.stops, rows.firsts)
    found = [
        Launch(
            hallmark_convolution_tokens,
            (triton.cdiv(num_tokens, _TOKENS), triton.cdiv(channels, _CHANNELS)),
            (
                projected, weights.taps, weights.taps if weights.bias is None else weights.bias, *of_rows, rows.sources,
                rows.targets, state.inputs, out, num_tokens, num_rows, projected.stride(0), state.inputs.stride(0),
                out.stride(0),
            ),
            {
                **sizes, "WIDTH": width, "HAS_BIAS": weights.bias is not None, "KEEPS": keeps, "BLOCK_T": _TOKENS,
                "BLOCK_R": _ROWS, "BLOCK_C": _CHANNELS, **_EXACT,
            },
        )
    ]  # fmt: skip
    if not keeps:
        found.append(
            Launch(
                hallmark_convolution_keep,
                (num_rows, triton.cdiv(channels, _KEPT_CHANNELS)),
                (
                    projected, *of_rows, rows.sources, rows.targets, rows.write_tokens, rows.write_slots, state.inputs,
                    num_writes, projected.stride(0), state.inputs.stride(0),
                ),
                {**sizes, "BLOCK_C": _KEPT_CHANNELS, **_EXACT},
            )
        )  # fmt: skip
    return found
