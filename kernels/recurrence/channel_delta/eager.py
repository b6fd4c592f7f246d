"""`torch.recurrence.cpu.channel_delta`: the delta rule of channels by PyTorch, row by row and block by block.

A block of 16 tokens reads the state before it, then its tokens are added in their order; the state behind it is one
product. Decays between two tokens of a block are exponentials of differences of exact sums, which are 0 at most: none
overflows. Tensors have the sizes of a whole block, whatever part of it a call computes: a token has the same place in
them each time, so that PyTorch computes it by the same instructions.
"""

from functools import partial

import torch
from torch import Tensor

from kernels.fused.alike import sigmoid_alike
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from kernels.recurrence.eager_chunk import convolved, normed, rounded
from kernels.recurrence.eager_rows import LEAST_DECAY, Part, PartRow, compute_rows
from kernels.recurrence.sizes import BLOCK


def run_channel_delta_eager(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
) -> None:
    """Fill `out`, and the states of the rows: see `RunRecurrence`. `a` is [T, value_heads * key_dim]."""
    assert isinstance(weights, ChannelDeltaWeights), "a shape of the form channel-delta has such weights"
    compute_rows(partial(_Row, weights, state), qkv, (a, b), rows, out)


class _Row(PartRow):
    """A row by blocks of 16 tokens; its gates are a [n, value_heads * key_dim] and b [n, value_heads]."""

    def __init__(
        self, weights: ChannelDeltaWeights, state: RecurrenceState, first: int, folded: int, source: int
    ) -> None:
        super().__init__(state.sizes(weights), state, BLOCK, first, folded, source)
        self._weights = weights

    def computed(
        self, part: Part, begin: int, new: range, gates: tuple[Tensor, ...], state: Tensor, dtype: torch.dtype
    ) -> Tensor:
        sizes, own = self._sizes, slice(new.start - begin, new.stop - begin)
        mixed = convolved(self.window(begin, new.stop), self._weights.conv, sizes)
        size = sizes.num_key_heads * sizes.key_dim
        of_queries, of_keys = (
            normed(mixed[:, columns].reshape(BLOCK, sizes.num_key_heads, -1), dtype)
            for columns in (slice(size), slice(size, 2 * size))
        )
        values = rounded(mixed[:, 2 * size :], dtype).view(BLOCK, sizes.num_value_heads, -1)
        part.keys[own] = of_keys[own]
        part.decays[own] = self._decays(gates[0], own)
        beta = mixed.new_zeros(BLOCK, sizes.num_value_heads)
        beta[own] = gates[1].float()
        betas = sigmoid_alike(beta).t().unsqueeze(-1)  # [value_heads, 16, 1]
        queries, keys = self.by_value_head(of_queries), self.by_value_head(part.keys)
        sums = part.decays.double().cumsum(dim=0).transpose(0, 1).contiguous()  # [value_heads, 16, key_dim]
        until = sums.float().exp()
        missing = betas * (values.transpose(0, 1) - torch.bmm(keys * until, state))
        found = torch.bmm(queries * until, state)
        for place in range(own.stop):
            if place >= own.start:
                part.added[place] = rounded(missing[:, place], dtype)
            added = part.added[place][:, None]
            # Of tokens before this one the difference would be above 0: they do not read it.
            between = (sums - sums[:, place : place + 1]).clamp(max=0).float().exp() * keys[:, place : place + 1]
            by_keys, by_queries = ((it * between).sum(dim=-1, keepdim=True) for it in (keys, queries))
            missing[:, place + 1 :] -= (betas * by_keys)[:, place + 1 :] * added
            found[:, place:] += by_queries[:, place:] * added
        scaled: Tensor = found * sizes.key_dim**-0.5
        return scaled.transpose(0, 1)

    def _decays(self, a: Tensor, own: slice) -> Tensor:
        """Return the logarithms of new tokens' decays, [n, value_heads, key_dim] fp32."""
        sizes = self._sizes
        given = torch.zeros(BLOCK, sizes.num_value_heads * sizes.key_dim, dtype=torch.float32, device=a.device)
        given[own] = a.float()
        x = (given + self._weights.dt_bias).view(BLOCK, sizes.num_value_heads, sizes.key_dim)
        softplus = torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)
        return (-torch.exp(self._weights.a_log)[:, None] * softplus).clamp(min=LEAST_DECAY)[own]

    def behind(self, part: Part, state: Tensor) -> Tensor:
        sums = part.decays.double().cumsum(dim=0).transpose(0, 1)
        left = (sums[:, -1:] - sums).float().exp()
        turned = (self.by_value_head(part.keys) * left).transpose(1, 2).contiguous()
        return sums[:, -1].float().exp()[..., None] * state + torch.bmm(turned, part.added.transpose(0, 1).contiguous())
