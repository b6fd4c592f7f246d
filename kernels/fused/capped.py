"""Gated linear units whose factors are bounded. Computed in fp32, rounded once."""

from torch import Tensor

from kernels.fused.activation_kind import Activation
from kernels.fused.alike import activated_alike
from kernels.fused.capped_kind import CappedSilu


def capped(gate_up: Tensor, activation: CappedSilu) -> Tensor:
    """min(silu(gate_up[:, :I]), limit) * gate_up[:, I:], the latter within +-limit.

    gate_up [T, 2 * I]. Returns [T, I] of its dtype, contiguous; a number's bits do not depend on its place. Two layers
    of a model have it (Step 3.5: of 45), so that on a GPU it is PyTorch's kernels, one for each operation.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = activated_alike(gate, Activation.SILU).clamp_(max=activation.limit)
    return gate.mul_(up.clamp(-activation.limit, activation.limit)).to(gate_up.dtype)
