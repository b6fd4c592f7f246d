"""Noise for sampling that depends on a row's seed, its position and the token, and on nothing else.

A counter-based hash in place of a generator: a row draws the same token alone or in any batch, after a preemption,
on a CPU or a GPU.
"""

import torch
from torch import Tensor

# The 32-bit mixer "lowbias32" of github.com/skeeto/hash-prospector, a bijection. Signed: int32 wraps like uint32.
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - 2**32
_GOLDEN = 0x9E3779B9 - 2**32  # spreads consecutive token ids over all bits
_SALT = 0x85EBCA6B - 2**32  # makes the second key independent of the first


def gumbel_noise(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel noise, one value for each row and token id.

    seeds      [R] int64, any value
    positions  [R] int64, where the token to be drawn will stand in its sequence
    Returns [R, num_tokens] fp32 in [-2.9, 22.2].
    """
    low, high = seeds.contiguous().view(torch.int32).view(-1, 2).unbind(1)
    place = positions.to(torch.int32)
    first_key = _mix(_mix(_mix(low.clone()) ^ high) ^ place)
    second_key = _mix(_mix(_mix(high ^ _SALT) ^ low) ^ place)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=seeds.device).mul_(_GOLDEN)
    bits = _mix(_mix(tokens + first_key[:, None]).bitwise_xor_(second_key[:, None]))
    # A uniform in (0, 1) from 31 bits: fine near 0, where the noise is large (an fp32 there keeps every bit); rounding
    # would make it 1 at the other end, where the logarithm has no value.
    uniform = bits.bitwise_and_(2**31 - 1).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """Scramble x (int32, in place): every bit of the result depends on every bit of x."""
    _xor_shift(x, 16)
    x.mul_(_MULTIPLIER_1)
    _xor_shift(x, 15)
    x.mul_(_MULTIPLIER_2)
    return _xor_shift(x, 16)


def _xor_shift(x: Tensor, num_bits: int) -> Tensor:
    """x ^= x >> num_bits, the shift filling with zeros though x is signed."""
    return x.bitwise_xor_((x >> num_bits).bitwise_and_((1 << (32 - num_bits)) - 1))
