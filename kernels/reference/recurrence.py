"""The truth of a recurrence in fp64, token by token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrence.calls import RecurrenceWeights
from kernels.recurrence.sizes import RecurrenceSizes

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class TrueRecurrence:
    """out     [T, value_heads, value_dim] fp64
    states  [T, value_heads, key_dim, value_dim] fp64: behind each token
    """

    out: Tensor
    states: Tensor


def recurrence_truth(
    qkv: Tensor, a: Tensor, b: Tensor, weights: RecurrenceWeights, sizes: RecurrenceSizes
) -> TrueRecurrence:
    """Compute one sequence from its first token on; nothing is rounded. Arguments as those of `RunRecurrence`."""
    num_tokens, heads = qkv.shape[0], sizes.num_value_heads
    padded = F.pad(qkv.double(), (0, 0, sizes.width - 1, 0))
    mixed = F.silu((padded.unfold(0, sizes.width, 1) * weights.conv.double()).sum(dim=-1))
    size = sizes.num_key_heads * sizes.key_dim
    queries, keys = (
        _normed(part.reshape(num_tokens, sizes.num_key_heads, -1)).repeat_interleave(sizes.group, dim=1)
        for part in (mixed[:, :size], mixed[:, size : 2 * size])
    )
    queries = queries * sizes.key_dim**-0.5
    values = mixed[:, 2 * size :].reshape(num_tokens, heads, -1)
    decays = torch.exp(-weights.a_log.double().exp() * F.softplus(a.double() + weights.dt_bias.double()))
    betas = torch.sigmoid(b.double())
    state = qkv.new_zeros(heads, sizes.key_dim, sizes.value_dim, dtype=torch.float64)
    out, states = torch.empty_like(values), state.new_empty(num_tokens, *state.shape)
    for token in range(num_tokens):
        key, query = keys[token, :, :, None], queries[token, :, :, None]
        state = decays[token, :, None, None] * state
        missing = values[token] - (key * state).sum(dim=1)
        state = state + key * (betas[token, :, None] * missing)[:, None]
        out[token], states[token] = (query * state).sum(dim=1), state
    return TrueRecurrence(out, states)


def _normed(heads: Tensor) -> Tensor:
    return heads / (heads.square().sum(dim=-1, keepdim=True) + _NORM_EPS).sqrt()
