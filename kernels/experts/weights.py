"""The weights of all experts of a layer: in the model's dtype, or as 4-bit blocks with scales (mxfp4)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.experts.bit_order import checkpoint_order
from kernels.experts.kinds import MXFP4_BLOCK

# The numbers of 4 bits: sign, two bits of exponent, one of mantissa. Source: OCP Microscaling Formats 1.0, table 5.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127
_LARGEST_SCALE_OF_ONE_FACTOR = _SCALE_BIAS + 1  # 2: 2^126 times it is the largest power of two in bf16


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """E experts of width I for a hidden size of H, in the model's dtype, contiguous.

    gate_up       [E, 2 * I, H], the rows of gate, then those of up
    down          [E, H, I]
    gate_up_bias  [E, 2 * I] or None
    down_bias     [E, H] or None
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def width(self) -> int:
        return self.gate_up.shape[1] // 2

    def of(self, expert: int, _dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gate and up [2 * I, H], and down [H, I], of one expert; the dtype must be the weights' own."""
        return self.gate_up[expert], self.down[expert]


@dataclass(frozen=True, slots=True)
class Mxfp4Weights:
    """The same, each row as blocks of 32 numbers of 4 bits, always in the order of bit_order.py.

    gate_up_blocks  [E, 2 * I, H / 32, 16] uint8, the rows of gate, then those of up
    gate_up_scales  [E, 2 * I, H / 32] uint8: a block is multiplied by 2 ** (scale - 127)
    down_blocks     [E, H, I / 32, 16] uint8
    down_scales     [E, H, I / 32] uint8
    gate_up_bias    [E, 2 * I] or None, in the model's dtype
    down_bias       [E, H] or None
    has_large_scales  whether a scale is above 2 or NaN; True where it was not looked for, which is right and slower
    Source: OCP Microscaling Formats 1.0.
    """

    gate_up_blocks: Tensor
    gate_up_scales: Tensor
    down_blocks: Tensor
    down_scales: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    has_large_scales: bool = True

    def inspected(self) -> "Mxfp4Weights":
        """The same, with `has_large_scales` by their scales, which must not change any more. Waits for the device."""
        largest = max(int(scales.max()) for scales in (self.gate_up_scales, self.down_scales))
        return replace(self, has_large_scales=largest > _LARGEST_SCALE_OF_ONE_FACTOR)

    @property
    def num_experts(self) -> int:
        return self.gate_up_blocks.shape[0]

    @property
    def width(self) -> int:
        return self.gate_up_blocks.shape[1] // 2

    def of(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gate and up [2 * I, H], and down [H, I], of one expert, as numbers of `dtype`."""
        gate_up = dequantized(self.gate_up_blocks[expert], self.gate_up_scales[expert], dtype)
        return gate_up, dequantized(self.down_blocks[expert], self.down_scales[expert], dtype)


AnyExpertWeights = ExpertWeights | Mxfp4Weights


def dequantized(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., 32 * G] of `dtype`, exact in fp32, then rounded. blocks [..., G, 16], scales [..., G] of `Mxfp4Weights`."""
    table = torch.tensor((*_FP4, *(-value for value in _FP4)), device=blocks.device)
    blocks = checkpoint_order(blocks)
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    numbers = torch.ldexp(table[codes.int()], scales.int()[..., None] - _SCALE_BIAS)
    return numbers.to(dtype).view(*scales.shape[:-1], scales.shape[-1] * MXFP4_BLOCK)
