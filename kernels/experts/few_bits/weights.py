"""The weights of all experts of a layer in 8 or 4 bits: those of one product, each expert's rows behind another's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.experts.formats import FewBitFormat
from kernels.experts.weights import ExpertWeights, Mxfp4Weights
from kernels.linear.formats.fp8_weights import Fp8BlocksWeight, Fp8RowsWeight, Fp8StaticWeight, Fp8Weight
from kernels.linear.formats.int4_weights import Int4Weight, Int4Weight32, Int4Weight64, Int4Weight128

FewBitWeight = Fp8Weight | Int4Weight
CLASSES: dict[FewBitFormat, type[FewBitWeight]] = {
    FewBitFormat.FP8_ROWS: Fp8RowsWeight,
    FewBitFormat.FP8_STATIC: Fp8StaticWeight,
    FewBitFormat.FP8_BLOCKS: Fp8BlocksWeight,
    FewBitFormat.INT4_32: Int4Weight32,
    FewBitFormat.INT4_64: Int4Weight64,
    FewBitFormat.INT4_128: Int4Weight128,
}


@dataclass(frozen=True, slots=True)
class FewBitExperts:
    """E experts of width I for a hidden size of H, without biases.

    gate_up  [E * 2 * I, H]: of each expert the rows of gate, then those of up
    down     [E * H, I]
    """

    gate_up: FewBitWeight
    down: FewBitWeight

    @property
    def width(self) -> int:
        return self.down.size[1]

    @property
    def num_experts(self) -> int:
        return self.gate_up.size[0] // (2 * self.width)

    @property
    def gate_up_bias(self) -> None:
        return None

    @property
    def down_bias(self) -> None:
        return None

    def weights_of(self, expert: int) -> tuple[FewBitWeight, FewBitWeight]:
        """Return views of gate and up [2 * I, H], and of down [H, I], of one expert."""
        rows, hidden = 2 * self.width, self.gate_up.size[1]
        return self.gate_up.rows(expert * rows, rows), self.down.rows(expert * hidden, hidden)

    def of(self, expert: int, _dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return their exact numbers, in fp64."""
        gate_up, down = self.weights_of(expert)
        return gate_up.dequantized().double(), down.dequantized().double()

    def why_unusable(self) -> str | None:
        """Return why an expert's tensors, now that they are filled, cannot be multiplied by; None where all can."""
        for expert in range(self.num_experts):
            for weight in self.weights_of(expert):
                if (reason := weight.why_unusable()) is not None:
                    return f"expert {expert}: {reason}"
        return None


AnyExperts = ExpertWeights | Mxfp4Weights | FewBitExperts
