"""The weights of all experts of a layer whose experts have no gate."""

from dataclasses import dataclass

from kernels.experts.few_bits.weights import FewBitExperts, FewBitWeight
from kernels.experts.weights import ExpertWeights


@dataclass(frozen=True, slots=True)
class UngatedExperts(ExpertWeights):
    """E experts of width I for a hidden size of H, without biases, in the model's dtype, contiguous.

    gate_up  [E, I, H], the rows of up alone
    down     [E, H, I]
    """

    @property
    def width(self) -> int:
        return self.gate_up.shape[1]


@dataclass(frozen=True, slots=True)
class UngatedFewBitExperts(FewBitExperts):
    """The same in 8 or 4 bits.

    gate_up  [E * I, H]: of each expert the rows of up alone
    down     [E * H, I]
    """

    @property
    def num_experts(self) -> int:
        return self.gate_up.size[0] // self.width

    def weights_of(self, expert: int) -> tuple[FewBitWeight, FewBitWeight]:
        """Return views of up [I, H], and of down [H, I], of one expert."""
        hidden = self.gate_up.size[1]
        return self.gate_up.rows(expert * self.width, self.width), self.down.rows(expert * hidden, hidden)


ANY_UNGATED = UngatedExperts, UngatedFewBitExperts
