"""Rotary embedding, from its definitions, in fp64.

Sources: Su et al. 2021; linear: Chen et al. 2023; yarn: Peng et al. 2023; llama3: Llama 3.1's model card; longrope:
Ding et al. 2024.
"""

import math

import torch
from torch import Tensor

from qualification.model.config import RopeConfig, RopeKind
from qualification.model.forward.bounded import Bounded, Precision, U


def frequencies(rope: RopeConfig, head_dim: int, context: int) -> Tensor:
    """Return the radians a position of each pair of dimensions, fp64. `context`: positions that are served."""
    size = _num_rotated(rope, head_dim)
    pairs = torch.arange(_num_pairs(size), dtype=torch.float64)
    plain = rope.theta ** (-2 * pairs / size)
    original = rope.original_max_position or 0
    match rope.kind:
        case RopeKind.NONE:
            return torch.zeros_like(plain)
        case RopeKind.PLAIN:
            return plain
        case RopeKind.LINEAR:
            return plain / rope.factor
        case RopeKind.LLAMA3:
            turns = original * plain / (2 * math.pi)
            share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            blend = (1 - share) * plain / rope.factor + share * plain
            return torch.where(
                turns < rope.low_freq_factor,
                plain / rope.factor,
                torch.where(turns > rope.high_freq_factor, plain, blend),
            )
        case RopeKind.YARN:
            return _yarn(rope, plain, size, original)
        case RopeKind.LONGROPE:
            factors = rope.long_factors if context > original else rope.short_factors
            return plain / torch.tensor(factors, dtype=torch.float64)
        case RopeKind.PROPORTIONAL:
            return torch.where(2 * pairs + 2 <= int(head_dim * rope.rotated_share), plain / rope.factor, 0.0)


def _num_rotated(rope: RopeConfig, head_dim: int) -> int:
    """Return the dimensions of a head that belong to pairs: the proportional kind pairs all, and turns some by 0."""
    return head_dim if rope.kind is RopeKind.PROPORTIONAL else int(head_dim * rope.rotated_share)


def _num_pairs(size: int) -> int:
    """Return the pairs of `size` dimensions; an odd one is paired with the one behind them, as in transformers."""
    return -(-size // 2)


def _yarn(rope: RopeConfig, plain: Tensor, size: int, original: int) -> Tensor:
    def pair_that_turns(count: float) -> float:
        return size * math.log(original / (count * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(_num_pairs(size), dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / rope.factor * ramp


def rotate(
    x: Bounded, positions: Tensor, rope: RopeConfig, context: int, precision: Precision, *, neighbours: bool
) -> Bounded:
    """Rotate x [T, heads, d] by positions [T], and round; the dimensions of pairs are in the order of `turn`."""
    head_dim = x.truth.shape[-1]
    size = 2 * _num_pairs(_num_rotated(rope, head_dim))
    angles = positions.double()[:, None] * frequencies(rope, head_dim, context).to(positions.device)
    turned = turn(x.columns(slice(size)), angles, rope.theta, rope.attention_factor, neighbours=neighbours)
    kinds = zip((turned.truth, turned.most, turned.deviation), (x.truth, x.most, x.deviation), strict=True)
    return precision.rounded(Bounded(*(torch.cat((own, rest[..., size:]), dim=-1) for own, rest in kinds)))


def turn(x: Bounded, angles: Tensor, theta: float, factor: float = 1.0, *, neighbours: bool = False) -> Bounded:
    """Return the pairs of x [T, heads, 2 n] turned by angles [T, n], times a factor, not yet rounded.

    neighbours  whether dimensions of a pair stand beside each other in x; else all first ones stand before all second
                ones, as in the result
    Angles are computed in fp32: they err by roundings of a few units of themselves, those of a power of theta among
    them, which grow with the logarithm of theta.
    """
    error = ((8 + math.log(max(theta, math.e))) * U * angles.abs() + 4 * U)[:, None] * factor
    cos, sin = (f(angles)[:, None] * factor for f in (torch.cos, torch.sin))
    num_pairs = angles.shape[1]
    halves = (slice(0, None, 2), slice(1, None, 2)) if neighbours else (slice(num_pairs), slice(num_pairs, None))
    first, second = (x.columns(half) for half in halves)
    turned = []
    for one, other, sign in ((first, second, -1.0), (second, first, 1.0)):
        both = one.times(cos).plus(other.times(sign * sin))
        size = one.truth.abs() + other.truth.abs()
        turned.append((both.truth, both.most + error * size, both.deviation + 2 * U * size))
    return Bounded(*(torch.cat(parts, dim=-1) for parts in zip(*turned, strict=True)))
