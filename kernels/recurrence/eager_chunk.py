"""A chunk of a recurrence by PyTorch, in blocks of 16 tokens: the order of sums "chunk64".

All tensors are fp32, and of the sizes of a whole block or chunk, whatever part of it a call computes: a token has the
same place in them each time, so that PyTorch computes it by the same instructions. A token's sums read the state at the
chunk's border, then the blocks of the chunk before its own in their order, then the tokens of its block in theirs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fused.activation_kind import Activation
from kernels.fused.alike import activated_alike, sigmoid_alike
from kernels.recurrence.calls import RecurrenceWeights
from kernels.recurrence.sizes import BLOCK, CHUNK, RecurrenceSizes

NORM_EPS = 1e-6
LEAST_DECAY = -1e30  # its logarithm: sums of 64 of them stay finite


@dataclass(frozen=True, slots=True)
class Prepared:
    """A block behind convolution, norms and gates, fp32.

    queries, keys  [16, key_heads, key_dim]: of length 1, rounded to the dtype of the tokens
    values         [16, value_heads, value_dim], rounded likewise
    decays         [16, value_heads]: their logarithms
    betas          [16, value_heads]
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    betas: Tensor


def prepare(
    inputs: Tensor, a: Tensor, b: Tensor, weights: RecurrenceWeights, sizes: RecurrenceSizes, dtype: torch.dtype
) -> Prepared:
    """Compute what comes before the rule itself.

    inputs  [width - 1 + 16, conv_dim] fp32: the block's tokens, and those before it
    a, b    [16, value_heads] fp32
    """
    mixed = convolved(inputs, weights.conv, sizes)
    size = sizes.num_key_heads * sizes.key_dim
    queries, keys, values = mixed[:, :size], mixed[:, size : 2 * size], mixed[:, 2 * size :]
    x = a + weights.dt_bias
    softplus = torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)
    decays = -torch.exp(weights.a_log) * softplus
    return Prepared(
        normed(queries.reshape(BLOCK, sizes.num_key_heads, -1), dtype),
        normed(keys.reshape(BLOCK, sizes.num_key_heads, -1), dtype),
        rounded(values, dtype).view(BLOCK, sizes.num_value_heads, -1),
        decays.clamp(min=LEAST_DECAY),
        sigmoid_alike(b),
    )


def convolved(inputs: Tensor, conv: Tensor, sizes: RecurrenceSizes) -> Tensor:
    """Return the convolution [16, conv_dim] fp32 of a block: of inputs [width - 1 + 16, conv_dim] fp32."""
    taps = conv.float()
    mixed = torch.zeros(BLOCK, sizes.conv_dim, dtype=torch.float32, device=inputs.device)
    for tap in range(sizes.width):
        mixed += inputs[tap : tap + BLOCK] * taps[:, tap]
    return activated_alike(mixed, Activation.SILU)


def normed(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Return heads [..., dims] of length 1, rounded to the dtype of the tokens, fp32."""
    squares = heads.square().sum(dim=-1, keepdim=True)
    return rounded(heads / torch.sqrt(squares + NORM_EPS), dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


class Chunk:
    """The tokens of a sequence from a border on: those that are known, and those that are computed block by block.

    keys    [64, key_heads, key_dim], values [64, value_heads, value_dim], decays [64, value_heads]: of the tokens so
            far, zero for others
    """

    def __init__(self, state: Tensor, sizes: RecurrenceSizes, dtype: torch.dtype) -> None:
        """`state` [value_heads, key_dim, value_dim] fp32: at the border."""
        self._state, self._sizes, self._dtype = state, sizes, dtype

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(CHUNK, *shape, dtype=torch.float32, device=state.device)

        self.keys = zeros(sizes.num_key_heads, sizes.key_dim)
        self.values = zeros(sizes.num_value_heads, sizes.value_dim)
        self.decays = zeros(sizes.num_value_heads)

    def compute(self, block: int, new: range, prepared: Prepared) -> Tensor:
        """Add the new tokens of a block, by their places in it, and return [16, value_heads, value_dim] fp32.

        Other rows of the result mean nothing; those of later tokens are not read.
        """
        rows = slice(block * BLOCK + new.start, block * BLOCK + new.stop)
        self.keys[rows] = prepared.keys[new.start : new.stop]
        self.decays[rows] = prepared.decays[new.start : new.stop]
        keys, queries = self._by_value_head(prepared.keys), self._by_value_head(prepared.queries)
        betas = prepared.betas.t().unsqueeze(-1)  # [value_heads, 16, 1]
        from_border, between = self._decays_of(block)
        missing = prepared.values.transpose(0, 1) - from_border * torch.bmm(keys, self._state)
        missing = betas * missing
        found = from_border * torch.bmm(queries, self._state)
        for before in range(block):
            other = slice(before * BLOCK, (before + 1) * BLOCK)
            theirs, added = self._by_value_head(self.keys[other]), self.values[other].transpose(0, 1).contiguous()
            decay = between[:, :, other]
            missing -= torch.bmm(betas * decay * torch.bmm(keys, theirs.transpose(1, 2).contiguous()), added)
            found += torch.bmm(decay * torch.bmm(queries, theirs.transpose(1, 2).contiguous()), added)
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        theirs = self._by_value_head(self.keys[own]).transpose(1, 2).contiguous()
        decay = between[:, :, own]
        of_keys, of_queries = betas * decay * torch.bmm(keys, theirs), decay * torch.bmm(queries, theirs)
        for place in range(new.stop):
            if place in new:
                self.values[own][place] = rounded(missing[:, place], self._dtype)
            added = self.values[own][place][:, None]
            missing[:, place + 1 :] -= of_keys[:, place + 1 :, place : place + 1] * added
            found[:, place:] += of_queries[:, place:, place : place + 1] * added
        scaled: Tensor = found * self._sizes.key_dim**-0.5
        return scaled.transpose(0, 1)

    def folded(self) -> Tensor:
        """Return the state at the next border, of a chunk whose tokens are all computed."""
        from_border, between = self._decays_of(CHUNK // BLOCK - 1)
        state = from_border[:, -1:] * self._state
        for block in range(CHUNK // BLOCK):
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            keys = self._by_value_head(self.keys[rows]) * between[:, -1, rows, None]
            state += torch.bmm(keys.transpose(1, 2).contiguous(), self.values[rows].transpose(0, 1).contiguous())
        return state

    def _by_value_head(self, heads: Tensor) -> Tensor:
        """[16, key_heads, key_dim] as [value_heads, 16, key_dim]."""
        return heads.transpose(0, 1).repeat_interleave(self._sizes.group, dim=0)

    def _decays_of(self, block: int) -> tuple[Tensor, Tensor]:
        """Decay of the state until each token of a block, [value_heads, 16, 1], and of each token's addition.

        The latter is [value_heads, 16, 64]: until a token of the block, of an earlier token; 1 of no earlier one.
        Its logarithm is the sum of the tokens between, and no difference of two sums: behind a token that forgets all,
        these would be large and nearly equal.
        """
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        places = torch.arange(CHUNK, device=self.decays.device)
        is_behind = (places[:, None] > places)[..., None]
        between = torch.where(is_behind, self.decays[:, None], 0.0).cumsum(dim=0)[rows]
        from_border = self.decays.cumsum(dim=0)[rows]
        return (
            torch.exp(from_border).t().unsqueeze(-1).contiguous(),
            torch.exp(between).permute(2, 0, 1).contiguous(),
        )
