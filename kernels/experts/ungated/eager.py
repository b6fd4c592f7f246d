"""A mixture whose experts have no gate one expert after the other, by PyTorch, on any device."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.experts.ungated.weights import UngatedExperts
from kernels.fused.ungated_kind import Ungated
from kernels.linear.ordered.tile_products import multiply_tiles


def run_ungated(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: UngatedExperts, activation: Ungated, out: Tensor
) -> None:
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(up)).

    hidden [T, H]; experts [T, k], each below the number of experts; weights [T, k] fp32
    An expert's result is rounded to hidden's dtype; the sum over k is in fp32, in the order of k, rounded once. Waits
    for the device to learn which experts are visited.
    """
    _run(hidden, experts, weights, expert_weights, activation, out, F.linear)


def run_ungated_tiles(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: UngatedExperts, activation: Ungated, out: Tensor
) -> None:
    """The same by tiles of 16 of the rows that visit an expert: a row's bits do not depend on the other rows."""
    _run(hidden, experts, weights, expert_weights, activation, out, partial(multiply_tiles, bias=None))


def _run(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: UngatedExperts, activation: Ungated, out: Tensor,
    multiply: Callable[[Tensor, Tensor], Tensor],
) -> None:  # fmt: skip
    assert activation is Ungated.RELU2, "there is one activation without a gate"
    num_tokens, num_active = experts.shape
    visited = experts.flatten()
    results = hidden.new_empty(num_tokens * num_active, hidden.shape[1])
    for expert in torch.unique(visited).tolist():
        places = (visited == expert).nonzero()[:, 0]
        up, down = expert_weights.of(expert, hidden.dtype)
        inner = multiply(hidden[places // num_active], up).float().clamp(min=0).square().to(hidden.dtype)
        results[places] = multiply(inner, down)
    results = results.view(num_tokens, num_active, -1)
    total = results[:, 0].float() * weights[:, :1]
    for place in range(1, num_active):
        total += results[:, place].float() * weights[:, place, None]  # two roundings everywhere, no fused one
    out.copy_(total)
