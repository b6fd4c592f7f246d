"""mxfp4 weights of a layer as 16-bit ones, for calls of so many tokens that this costs less than tiles of codes."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.kinds import MXFP4_BLOCK
from kernels.experts.portable.codes import factors_of, unpacked
from kernels.experts.weights import ExpertWeights, Mxfp4Weights

_BLOCKS_AT_ONCE = 256  # of 32 numbers, that one program writes


@triton.jit(do_not_specialize=["num_blocks"])
def hallmark_experts_dequantize(w_ptr, scales_ptr, out_ptr, num_blocks, BLOCKS: tl.constexpr):
    """One program: BLOCKS blocks of 32 numbers. w int32 of 8 codes; exact in fp32, rounded once."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    blocks = first + tl.arange(0, BLOCKS)
    is_block = blocks < num_blocks
    factors = factors_of(tl.load(scales_ptr + blocks, mask=is_block, other=127))
    words = blocks[:, None] * 4 + tl.arange(0, 4)[None, :]
    codes = tl.load(w_ptr + words, mask=is_block[:, None], other=0)
    out = unpacked(codes, tl.broadcast_to(factors[:, None], [BLOCKS, 2]), out_ptr.dtype.element_ty)
    at = out_ptr + blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(at, out, mask=is_block[:, None])


def dequantized_on_device(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., 32 * G] of `dtype`, as `weights.dequantized`. blocks [..., G, 16], scales [..., G]: uint8, contiguous."""
    out = torch.empty(*scales.shape[:-1], scales.shape[-1] * MXFP4_BLOCK, dtype=dtype, device=blocks.device)
    num_blocks = scales.numel()
    hallmark_experts_dequantize[(triton.cdiv(num_blocks, _BLOCKS_AT_ONCE),)](
        blocks.view(torch.int32), scales, out, num_blocks, BLOCKS=_BLOCKS_AT_ONCE, num_warps=8
    )
    return out


def plain_weights(weights: Mxfp4Weights, dtype: torch.dtype) -> ExpertWeights:
    """The same weights in `dtype`, 3.8 times as large, for the time of a call. Two launches."""
    gate_up = dequantized_on_device(weights.gate_up_blocks, weights.gate_up_scales, dtype)
    down = dequantized_on_device(weights.down_blocks, weights.down_scales, dtype)
    return ExpertWeights(gate_up, down, weights.gate_up_bias, weights.down_bias)
