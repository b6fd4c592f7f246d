"""The weights of all experts of a layer whose experts have no gate."""

from dataclasses import dataclass

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
