"""A mixture whose experts have no gate one expert after the other, by PyTorch, on any device."""

from torch import Tensor

from kernels.experts.one_by_one import Multiply, multiply_alone, multiply_tile, sum_one_by_one
from kernels.experts.ungated.weights import UngatedExperts, UngatedFewBitExperts
from kernels.fused.ungated_kind import Ungated
from kernels.linear.weights import LinearWeight, PlainWeight


def run_ungated(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: UngatedExperts | UngatedFewBitExperts,
    activation: Ungated, out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(up)).

    hidden [T, H]; experts [T, k], each below the number of experts; weights [T, k] fp32
    An expert's result is rounded to hidden's dtype; the sum over k is in fp32, in the order of k, rounded once. Waits
    for the device to learn which experts are visited.
    """
    _run(hidden, experts, weights, expert_weights, activation, out, multiply_alone)


def run_ungated_tiles(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: UngatedExperts, activation: Ungated, out: Tensor
) -> None:
    """The same by tiles of 16 of the rows that visit an expert: a row's bits do not depend on the other rows."""
    _run(hidden, experts, weights, expert_weights, activation, out, multiply_tile)


def _run(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: UngatedExperts | UngatedFewBitExperts,
    activation: Ungated, out: Tensor, multiply: Multiply,
) -> None:  # fmt: skip
    assert activation is Ungated.RELU2, "there is one activation without a gate"

    def compute(rows: Tensor, expert: int) -> Tensor:
        up, down = _weights_of(expert_weights, expert)
        return multiply(multiply(rows, up).float().clamp(min=0).square().to(hidden.dtype), down)

    sum_one_by_one(hidden, experts, weights, out, compute)


def _weights_of(of: UngatedExperts | UngatedFewBitExperts, expert: int) -> tuple[LinearWeight, LinearWeight]:
    if isinstance(of, UngatedFewBitExperts):
        return of.weights_of(expert)
    return PlainWeight(of.gate_up[expert]), PlainWeight(of.down[expert])
