"""A mixture with a bounded activation one expert after the other, by PyTorch, on any device."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from kernels.experts.few_bits.weights import FewBitExperts
from kernels.experts.one_by_one import sum_one_by_one
from kernels.experts.weights import ExpertWeights
from kernels.fused.capped import capped
from kernels.fused.capped_kind import CappedSilu
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.widened import multiply_widened
from kernels.linear.ordered.tile_products import multiply_tiles
from kernels.linear.weights import LinearWeight, PlainWeight

# (x [rows, in], weight [out, in]) -> [rows, out] of x's dtype
Multiply = Callable[[Tensor, LinearWeight], Tensor]


def run_capped(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: ExpertWeights | FewBitExperts,
    activation: CappedSilu, out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] with the sum over a token's k experts of weight * down(capped(gate, up)).

    hidden [T, H]; experts [T, k], each below the number of experts; weights [T, k] fp32; experts without biases
    An expert's result is rounded to hidden's dtype; the sum over k is in fp32, in the order of k, rounded once. Waits
    for the device to learn which experts are visited.
    """
    _run(hidden, experts, weights, expert_weights, activation, out, _multiply)


def run_capped_tiles(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: ExpertWeights, activation: CappedSilu, out: Tensor
) -> None:
    """The same by tiles of 16 of the rows that visit an expert: a row's bits do not depend on the other rows."""
    _run(hidden, experts, weights, expert_weights, activation, out, _multiply_tiles)


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


def _multiply(x: Tensor, weight: LinearWeight) -> Tensor:
    if isinstance(weight, PlainWeight):
        return F.linear(x, weight.values)
    out = x.new_empty(x.shape[0], weight.size[0])
    multiply_widened(x, weight, None, Epilogue.NONE, out)
    return out


def _multiply_tiles(x: Tensor, weight: LinearWeight) -> Tensor:
    assert isinstance(weight, PlainWeight), "the path's limits say so"
    return multiply_tiles(x, weight.values, None)
