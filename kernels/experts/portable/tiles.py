"""`torch.experts.tiles`: a mixture's products one expert after the other, by tiles of 16 of the rows that visit it."""

from torch import Tensor

from kernels.experts.kinds import ClampedSwiglu, ExpertActivation
from kernels.experts.one_by_one import sum_one_by_one
from kernels.experts.weights import AnyExpertWeights
from kernels.fused.alike import gated_alike, sigmoid_alike
from kernels.linear.ordered.tile_products import multiply_tiles


def run_experts_tiles(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: AnyExpertWeights, activation: ExpertActivation,
    out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden [T, H]; experts [T, k], each below the number of experts; weights [T, k] fp32
    An expert's result is rounded to hidden's dtype, with its biases; the sum over k is in fp32, in the order of k,
    rounded once.
    """

    def compute(rows: Tensor, expert: int) -> Tensor:
        gate_up, down = expert_weights.of(expert, hidden.dtype)
        gate_up_bias, down_bias = (
            None if bias is None else bias[expert] for bias in (expert_weights.gate_up_bias, expert_weights.down_bias)
        )
        return multiply_tiles(_activated(multiply_tiles(rows, gate_up, gate_up_bias), activation), down, down_bias)

    sum_one_by_one(hidden, experts, weights, out, compute)


def _activated(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """activation(gate_up[:, :I]) * gate_up[:, I:], or its clamped kind: [T, I], computed in fp32, rounded once."""
    if not isinstance(activation, ClampedSwiglu):
        return gated_alike(gate_up, activation)
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (gate * sigmoid_alike(activation.alpha * gate) * (up + 1)).to(gate_up.dtype)
