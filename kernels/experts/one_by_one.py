"""A mixture one visited expert after the other, by PyTorch: what paths of several forms of experts have in common.

TODO: have `kernels/experts/portable/eager.py` call this when it is next proven: digests of committed evidence cover it
as it is written, and its last sum rounds once where this rounds twice.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.widened import multiply_widened
from kernels.linear.ordered.tile_products import multiply_tiles
from kernels.linear.weights import LinearWeight, PlainWeight

# (x [rows, in], weight [out, in]) -> [rows, out] of x's dtype
Multiply = Callable[[Tensor, LinearWeight], Tensor]


def sum_one_by_one(
    hidden: Tensor, experts: Tensor, weights: Tensor, out: Tensor, compute: Callable[[Tensor, int], Tensor]
) -> None:
    """Fill out [T, H] with the sum over a token's k experts of weight * compute(rows, expert).

    hidden [T, H]; experts [T, k]; weights [T, k] fp32; compute: (the rows [R, H] that visit an expert, its number) ->
    [R, H] of hidden's dtype. The sum over k is in fp32, in the order of k, rounded once. Waits for the device to learn
    which experts are visited.
    """
    num_tokens, num_active = experts.shape
    visited = experts.flatten()
    results = hidden.new_empty(num_tokens * num_active, hidden.shape[1])
    for expert in torch.unique(visited).tolist():
        places = (visited == expert).nonzero()[:, 0]
        results[places] = compute(hidden[places // num_active], expert)
    results = results.view(num_tokens, num_active, -1)
    total = results[:, 0].float() * weights[:, :1]
    for place in range(1, num_active):
        total += results[:, place].float() * weights[:, place, None]  # two roundings everywhere, no fused one
    out.copy_(total)


def multiply_alone(x: Tensor, weight: LinearWeight) -> Tensor:
    """Return x [rows, in] @ weight^T: of few bits in fp32, inputs rounded as the format says."""
    if isinstance(weight, PlainWeight):
        return F.linear(x, weight.values)
    out = x.new_empty(x.shape[0], weight.size[0])
    multiply_widened(x, weight, None, Epilogue.NONE, out)
    return out


def multiply_tile(x: Tensor, weight: LinearWeight) -> Tensor:
    """Return the same of a plain weight by tiles of 16 rows: a row's bits do not depend on the other rows."""
    assert isinstance(weight, PlainWeight), "the path's limits say so"
    return multiply_tiles(x, weight.values, None)
