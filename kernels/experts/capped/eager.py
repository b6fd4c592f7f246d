"""A mixture with a bounded activation one expert after the other, by PyTorch, on any device."""

from torch import Tensor

from kernels.experts.few_bits.weights import FewBitExperts
from kernels.experts.one_by_one import Multiply, multiply_alone, multiply_tile, sum_one_by_one
from kernels.experts.weights import ExpertWeights
from kernels.fused.capped import capped
from kernels.fused.capped_kind import CappedSilu
from kernels.linear.weights import LinearWeight, PlainWeight


def run_capped(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: ExpertWeights | FewBitExperts,
    activation: CappedSilu, out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] with the sum over a token's k experts of weight * down(capped(gate, up)).

    hidden [T, H]; experts [T, k], each below the number of experts; weights [T, k] fp32; experts without biases
    An expert's result is rounded to hidden's dtype; the sum over k is in fp32, in the order of k, rounded once. Waits
    for the device to learn which experts are visited.
    """
    _run(hidden, experts, weights, expert_weights, activation, out, multiply_alone)


def run_capped_tiles(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: ExpertWeights, activation: CappedSilu, out: Tensor
) -> None:
    """The same by tiles of 16 of the rows that visit an expert: a row's bits do not depend on the other rows."""
    _run(hidden, experts, weights, expert_weights, activation, out, multiply_tile)


def _run(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: ExpertWeights | FewBitExperts,
    activation: CappedSilu, out: Tensor, multiply: Multiply,
) -> None:  # fmt: skip
    def compute(rows: Tensor, expert: int) -> Tensor:
        gate_up, down = _weights_of(expert_weights, expert)
        return multiply(capped(multiply(rows, gate_up), activation), down)

    sum_one_by_one(hidden, experts, weights, out, compute)


def _weights_of(of: ExpertWeights | FewBitExperts, expert: int) -> tuple[LinearWeight, LinearWeight]:
    if isinstance(of, FewBitExperts):
        return of.weights_of(expert)
    return PlainWeight(of.gate_up[expert]), PlainWeight(of.down[expert])
