"""Lightning attention of one sequence, token by token in fp64, with the limits of docs/limits.md ("Layers").

Source: Qin et al. 2024 (Lightning Attention-2), whose decays are fixed, and modeling_bailing_moe_v2_5.py, as published:
S = e^-slope S + k v^T; o = S^T q, which the latter divides by sqrt(dim). Its slopes are ALiBi's (Press et al. 2022)
times 1 - (i - 1) / (n - 1) + 1e-5 in layer i of n, counted from 0.
"""

import math

import torch
from torch import Tensor

from qualification.model.forward.bounded import Bounded, Precision
from qualification.model.forward.state_space import CHUNK, result_of


def slopes_of(num_heads: int, layer: int, num_layers: int) -> Tensor:
    """Return the slopes [heads] fp64 of a layer, counted from 0."""

    def of_power(count: int) -> list[float]:
        ratio = 2 ** -(2 ** -(math.log2(count) - 3))
        return [ratio ** (head + 1) for head in range(count)]

    power = 1 << (num_heads.bit_length() - 1)
    found = of_power(power) + of_power(2 * power)[::2][: num_heads - power]
    return torch.tensor(found, dtype=torch.float64) * (1 - (layer - 1) / (num_layers - 1) + 1e-5)


def mix_lightning(given: Tensor, slopes: Tensor, dim: int, precision: Precision, state_unit: float) -> Bounded:
    """Return the results [T, heads, dim] of a sequence from its first token on, before they are divided by sqrt(dim).

    given       [T, 3 * heads * dim]: queries, keys and values, normed and rotated, as a server hands them out
    state_unit  share that a number of a state is off when a server stores it, every 64 tokens
    """
    heads, kept = slopes.shape[0], (-slopes).exp()[:, None]
    unit = torch.finfo(precision.dtype).eps / 2 if precision.is_narrow else 0.0
    queries, keys, values = given.double().view(len(given), 3, heads, dim).unbind(1)
    log_errors = (4 + 14 * slopes[:, None]) ** 2
    state = given.new_zeros(heads, dim, dim, dtype=torch.float64)
    # Errors of a column of the state, as of a state space, whose queries, keys and values are rounded besides.
    squares, worst, off = (state.new_zeros(heads, dim) for _ in range(3))
    found = []
    for token in range(len(given)):
        key, value = keys[token][:, :, None], values[token]
        length = key.square().sum(dim=1)
        state = kept[..., None] * state
        off = kept**2 * off + (log_errors + 4) * state.square().sum(dim=1)
        state = state + key * value[:, None]
        square = 2 * unit**2 * length * value.square()
        squares, worst = kept**2 * squares + square, kept * worst + 2 * square.sqrt()
        off = off + length * (20 + dim / 6 + CHUNK / 6) * value.square()
        if (token + 1) % CHUNK == 0:
            square = state_unit**2 * state.square().sum(dim=1)
            squares, worst = squares + square, worst + square.sqrt()
        query = queries[token]
        found.append(result_of(state, query, torch.zeros_like(query), squares, worst, off, unit))
    return precision.rounded(Bounded(*(torch.stack(it) for it in zip(*found, strict=True))))
