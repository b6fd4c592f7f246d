"""`torch.recurrence.cpu.channel_delta`: the delta rule of channels by PyTorch, row by row and block by block.

A block of 16 tokens reads the state before it, then its tokens are added in their order; the state behind it is one
product. Decays between two tokens of a block are exponentials of differences of exact sums, which are 0 at most: none
overflows. Tensors have the sizes of a whole block, whatever part of it a call computes: a token has the same place in
them each time, so that PyTorch computes it by the same instructions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fused.alike import sigmoid_alike
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from kernels.recurrence.eager_chunk import convolved, normed, rounded
from kernels.recurrence.eager_path import write
from kernels.recurrence.sizes import BLOCK, CHUNK, RecurrenceSizes
from kernels.vocabulary.shape import Phase

LEAST_DECAY = -256.0  # its logarithm: e^-256 is 0 in fp32, and differences of sums in fp64 stay exact enough


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
    out.zero_()
    writes = list(zip(rows.write_tokens.tolist(), rows.write_slots.tolist(), strict=True))
    names = ("starts", "stops", "firsts", "folded", "sources", "targets")
    for start, stop, first, folded, source, target in zip(*(getattr(rows, it).tolist() for it in names), strict=True):
        if start == stop:
            continue
        row = _Row(weights, state, first, folded, source)
        own = slice(start, stop)
        row.append(qkv[own], a[own], b[own], out[own])
        last = first + stop - start
        fold = first // CHUNK * CHUNK if rows.phase is Phase.VERIFY else last // CHUNK * CHUNK
        for token, slot in writes:
            if start <= token < stop:
                num_tokens = first + token + 1 - start
                row.store(slot, num_tokens, num_tokens // CHUNK * CHUNK)
        row.store(target, last, fold)


@dataclass(frozen=True, slots=True)
class _Block:
    """The tokens of a block, fp32, zero where a token is not computed.

    keys    [16, key_heads, key_dim], added [16, value_heads, value_dim], decays [16, value_heads, key_dim] (logarithms)
    """

    keys: Tensor
    added: Tensor
    decays: Tensor

    @classmethod
    def empty(cls, sizes: RecurrenceSizes, like: Tensor) -> "_Block":
        values = sizes.num_value_heads
        kept = (sizes.num_key_heads, sizes.key_dim), (values, sizes.value_dim), (values, sizes.key_dim)
        return cls(*(torch.zeros(BLOCK, *it, dtype=torch.float32, device=like.device) for it in kept))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.keys, self.added, self.decays


class _Row:
    """The tokens of one sequence in a call, and what its slot has of those before them."""

    def __init__(
        self, weights: ChannelDeltaWeights, state: RecurrenceState, first: int, folded: int, source: int
    ) -> None:
        self._weights, self._state, self._sizes = weights, state, state.sizes(weights)
        self._first, self._folded, self._source = first, folded, source
        begun = state.states[source].float()
        self._states = {folded: begun if first else torch.zeros_like(begun)}  # by border
        self._blocks: dict[int, _Block] = {}  # by the position of their first token
        for begin in range(folded, first, BLOCK):
            block = self._blocks.setdefault(begin, _Block.empty(self._sizes, begun))
            positions = range(begin, min(first, begin + BLOCK))
            for mine, ring in zip(block.tensors, (state.keys, state.values, state.decays), strict=True):
                mine[: len(positions)] = ring[source, [it % ring.shape[1] for it in positions]].float()
        self._inputs_first = max(0, first - self._sizes.width + 1)
        places = [it % state.inputs.shape[1] for it in range(self._inputs_first, first)]
        self._inputs = state.inputs[source, places].float()

    def append(self, given: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Compute the row's tokens: given [n, conv_dim], a [n, value_heads * key_dim], b [n, value_heads]."""
        first, last = self._first, self._first + given.shape[0]
        self._inputs = torch.cat([self._inputs, given.float()])
        state = self._states[self._folded]
        for begin in range(self._folded, last, BLOCK):
            new = range(max(first, begin), min(last, begin + BLOCK))
            block = self._blocks.setdefault(begin, _Block.empty(self._sizes, self._inputs))
            if len(new) > 0:
                of_call = slice(new.start - first, new.stop - first)
                found = self._computed(block, begin, new, (a[of_call], b[of_call]), state, given.dtype)
                out[of_call] = found[new.start - begin : new.stop - begin].to(out.dtype)
            if last >= begin + BLOCK:
                state = self._behind(block, state)
                if (begin + BLOCK) % CHUNK == 0:
                    state = state.to(self._state.states.dtype).float()
                    self._states[begin + BLOCK] = state

    def store(self, slot: int, num_tokens: int, border: int) -> None:
        """Write the state behind so many tokens of the sequence to a slot, folded up to the border."""
        state, is_own = self._state, slot == self._source
        if not (is_own and border == self._folded and self._first):
            state.states[slot] = self._states[border].to(state.states.dtype)
        for begin in range(border, num_tokens, BLOCK):
            positions = range(max(begin, self._first) if is_own else begin, min(num_tokens, begin + BLOCK))
            for ring, tokens in zip((state.keys, state.values, state.decays), self._blocks[begin].tensors, strict=True):
                write(ring[slot], tokens, begin, positions)
        latest = range(max(self._inputs_first, num_tokens - state.inputs.shape[1]), num_tokens)
        write(state.inputs[slot], self._inputs, self._inputs_first, latest)

    def _computed(
        self, block: _Block, begin: int, new: range, gates: tuple[Tensor, Tensor], state: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Add new tokens to a block, and return results [16, value_heads, value_dim] fp32; others mean nothing.

        gates  a and b of the new tokens; state [value_heads, key_dim, value_dim]: before the block's first token
        """
        sizes, own = self._sizes, slice(new.start - begin, new.stop - begin)
        mixed = convolved(self._window(begin, new.stop), self._weights.conv, sizes)
        size = sizes.num_key_heads * sizes.key_dim
        of_queries, of_keys = (
            normed(mixed[:, part].reshape(BLOCK, sizes.num_key_heads, -1), dtype)
            for part in (slice(size), slice(size, 2 * size))
        )
        values = rounded(mixed[:, 2 * size :], dtype).view(BLOCK, sizes.num_value_heads, -1)
        block.keys[own] = of_keys[own]
        block.decays[own] = self._decays(gates[0], own)
        beta = mixed.new_zeros(BLOCK, sizes.num_value_heads)
        beta[own] = gates[1].float()
        betas = sigmoid_alike(beta).t().unsqueeze(-1)  # [value_heads, 16, 1]
        queries, keys = self._by_value_head(of_queries), self._by_value_head(block.keys)
        sums = block.decays.double().cumsum(dim=0).transpose(0, 1).contiguous()  # [value_heads, 16, key_dim]
        until = sums.float().exp()
        missing = betas * (values.transpose(0, 1) - torch.bmm(keys * until, state))
        found = torch.bmm(queries * until, state)
        for place in range(own.stop):
            if place >= own.start:
                block.added[place] = rounded(missing[:, place], dtype)
            added = block.added[place][:, None]
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

    def _window(self, begin: int, stop: int) -> Tensor:
        """Return inputs [width - 1 + 16, conv_dim] of a block and those before it; zero where none is given."""
        wide = self._sizes.width - 1
        window = self._inputs.new_zeros(wide + BLOCK, self._inputs.shape[1])
        lo = max(self._inputs_first, begin - wide)
        given = self._inputs[lo - self._inputs_first : stop - self._inputs_first]
        window[lo - begin + wide : stop - begin + wide] = given
        return window

    def _behind(self, block: _Block, state: Tensor) -> Tensor:
        """Return the state behind a block whose tokens are all computed."""
        sums = block.decays.double().cumsum(dim=0).transpose(0, 1)
        left = (sums[:, -1:] - sums).float().exp()
        turned = (self._by_value_head(block.keys) * left).transpose(1, 2).contiguous()
        return sums[:, -1].float().exp()[..., None] * state + torch.bmm(
            turned, block.added.transpose(0, 1).contiguous()
        )

    def _by_value_head(self, heads: Tensor) -> Tensor:
        """[16, key_heads, key_dim] as [value_heads, 16, key_dim]."""
        return heads.transpose(0, 1).repeat_interleave(self._sizes.group, dim=0).contiguous()
