"""`torch.recurrence.cpu.state_space`: Mamba2's state space by PyTorch, row by row and chunk by chunk.

Tensors have the sizes of a whole chunk, whatever part of it a call computes: a token has the same place in them each
time, so that PyTorch computes it by the same instructions.
"""

from functools import partial

import torch
from torch import Tensor

from kernels.fused.activation_kind import Activation
from kernels.fused.alike import activated_alike
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.eager_chunk import rounded
from kernels.recurrence.eager_rows import LEAST_DECAY, Part, PartRow, compute_rows
from kernels.recurrence.sizes import CHUNK
from kernels.recurrence.state_space.weights import StateSpaceWeights


def run_state_space_eager(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
) -> None:
    """Fill `out`, and the states of the rows: see `RunRecurrence`.

    qkv  C, B and x before their convolution; a  steps before their bias; b is not read
    """
    del b
    assert isinstance(weights, StateSpaceWeights), "a shape of the form state-space has such weights"
    compute_rows(partial(_Row, weights, state), qkv, (a,), rows, out)


class ChunkRow(PartRow):
    """A row by chunks of 64 tokens, whose states are sums of keys times what tokens add, decayed: nothing else."""

    def read(self, part: Part, queries: Tensor, state: Tensor) -> Tensor:
        """Return what queries [64, key_heads, key_dim] read of a chunk's tokens, and of the state before it."""
        sums = part.decays.double().cumsum(dim=0)
        places = torch.arange(CHUNK, device=state.device)
        is_there = (places[:, None] >= places)[..., None]
        between = torch.where(is_there, sums[:, None] - sums, -torch.inf).float().exp().permute(2, 0, 1)
        by_head = self.by_value_head(queries)
        found = sums.float().exp().t()[..., None] * torch.bmm(by_head, state)
        products = torch.bmm(by_head, self.by_value_head(part.keys).transpose(1, 2).contiguous())
        found = found + torch.bmm((between * products).contiguous(), part.added.transpose(0, 1).contiguous())
        return found.transpose(0, 1)

    def behind(self, part: Part, state: Tensor) -> Tensor:
        sums = part.decays.double().cumsum(dim=0)
        left = (sums[-1] - sums).float().exp()
        turned = (part.added * left[..., None]).transpose(0, 1).contiguous()
        keys = self.by_value_head(part.keys).transpose(1, 2).contiguous()
        return sums[-1].float().exp()[:, None, None] * state + torch.bmm(keys, turned)


class _Row(ChunkRow):
    """A row whose gates are steps before their bias, [n, value_heads]."""

    def __init__(
        self, weights: StateSpaceWeights, state: RecurrenceState, first: int, folded: int, source: int
    ) -> None:
        super().__init__(state.sizes(weights), state, CHUNK, first, folded, source)
        self._weights = weights

    def computed(
        self, part: Part, begin: int, new: range, gates: tuple[Tensor, ...], state: Tensor, dtype: torch.dtype
    ) -> Tensor:
        sizes, own, (steps,) = self._sizes, slice(new.start - begin, new.stop - begin), gates
        mixed = self._mixed(begin, new.stop)
        size = sizes.num_key_heads * sizes.key_dim
        queries, keys = (
            rounded(mixed[:, columns], dtype).view(CHUNK, sizes.num_key_heads, -1)
            for columns in (slice(size), slice(size, 2 * size))
        )
        values = rounded(mixed[:, 2 * size :], dtype).view(CHUNK, sizes.num_value_heads, -1)
        biased = mixed.new_zeros(CHUNK, sizes.num_value_heads)
        biased[own] = steps.float()
        biased += self._weights.dt_bias
        step = torch.log1p(torch.exp(-biased.abs())) + biased.clamp(min=0)
        step = step.clamp(self._weights.least_step, self._weights.most_step)
        decays = (-torch.exp(self._weights.a_log) * step).clamp(min=LEAST_DECAY)
        part.keys[own], part.decays[own] = keys[own], decays[own]
        part.added[own] = rounded(step[..., None] * values, dtype)[own]
        return self.read(part, queries, state) + self._weights.skip[:, None] * values

    def _mixed(self, begin: int, stop: int) -> Tensor:
        """Return the convolution [64, conv_dim] of a chunk; that of tokens which are not given means nothing."""
        window = self.window(begin, stop)
        taps, mixed = self._weights.conv.float(), torch.zeros_like(window[:CHUNK])
        for tap in range(self._sizes.width):
            mixed += window[tap : tap + CHUNK] * taps[:, tap]
        return activated_alike(mixed + self._weights.conv_bias.float(), Activation.SILU)
