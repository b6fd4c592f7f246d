"""`torch.recurrence.cpu.state_space`: Mamba2's state space by PyTorch, row by row and chunk by chunk.

Tensors have the sizes of a whole chunk, whatever part of it a call computes: a token has the same place in them each
time, so that PyTorch computes it by the same instructions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fused.activation_kind import Activation
from kernels.fused.alike import activated_alike
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.eager_chunk import rounded
from kernels.recurrence.eager_path import write
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.recurrence.state_space.weights import StateSpaceWeights
from kernels.vocabulary.shape import Phase

LEAST_DECAY = -256.0  # its logarithm: e^-256 is 0 in fp32, and differences of sums in fp64 stay exact enough


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
    out.zero_()
    writes = list(zip(rows.write_tokens.tolist(), rows.write_slots.tolist(), strict=True))
    names = ("starts", "stops", "firsts", "folded", "sources", "targets")
    for start, stop, first, folded, source, target in zip(*(getattr(rows, it).tolist() for it in names), strict=True):
        if start == stop:
            continue
        row = _Row(weights, state, first, folded, source)
        row.append(qkv[start:stop], a[start:stop], out[start:stop])
        last = first + stop - start
        fold = first // CHUNK * CHUNK if rows.phase is Phase.VERIFY else last // CHUNK * CHUNK
        own = [(first + token + 1 - start, slot) for token, slot in writes if start <= token < stop]
        for num_tokens, slot in own:
            row.store(slot, num_tokens, num_tokens // CHUNK * CHUNK)
        row.store(target, last, fold)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The tokens of a chunk, fp32, zero where a token is not computed.

    keys    [64, key_heads, key_dim], added [64, value_heads, value_dim], decays [64, value_heads] (logarithms)
    """

    keys: Tensor
    added: Tensor
    decays: Tensor

    @classmethod
    def empty(cls, sizes: RecurrenceSizes, like: Tensor) -> "_Chunk":
        kept = (sizes.num_key_heads, sizes.key_dim), (sizes.num_value_heads, sizes.value_dim), (sizes.num_value_heads,)
        return cls(*(torch.zeros(CHUNK, *it, dtype=torch.float32, device=like.device) for it in kept))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.keys, self.added, self.decays


class _Row:
    """The tokens of one sequence in a call, and what its slot has of those before them."""

    def __init__(
        self, weights: StateSpaceWeights, state: RecurrenceState, first: int, folded: int, source: int
    ) -> None:
        self._weights, self._state, self._sizes = weights, state, state.sizes(weights)
        self._first, self._folded, self._source = first, folded, source
        begun = state.states[source].float()
        self._states = {folded: begun if first else torch.zeros_like(begun)}  # by border
        self._chunks: dict[int, _Chunk] = {}  # by border
        for border in range(folded, first, CHUNK):
            chunk = self._chunks.setdefault(border, _Chunk.empty(self._sizes, begun))
            positions = range(border, min(first, border + CHUNK))
            for mine, ring in zip(chunk.tensors, (state.keys, state.values, state.decays), strict=True):
                mine[: len(positions)] = ring[source, [it % ring.shape[1] for it in positions]].float()
        self._inputs_first = max(0, first - self._sizes.width + 1)
        places = [it % state.inputs.shape[1] for it in range(self._inputs_first, first)]
        self._inputs = state.inputs[source, places].float()

    def append(self, given: Tensor, steps: Tensor, out: Tensor) -> None:
        """Compute the row's tokens: given [n, conv_dim], steps [n, value_heads], out [n, value_heads, value_dim]."""
        first, last = self._first, self._first + given.shape[0]
        self._inputs = torch.cat([self._inputs, given.float()])
        for border in range(self._folded, last, CHUNK):
            new = range(max(first, border), min(last, border + CHUNK))
            chunk = self._chunks.setdefault(border, _Chunk.empty(self._sizes, self._inputs))
            if len(new) > 0:
                found = self._computed(chunk, border, new, steps[new.start - first : new.stop - first], given.dtype)
                own = slice(new.start - border, new.stop - border)
                out[new.start - first : new.stop - first] = found[own].to(out.dtype)
            if last >= border + CHUNK:
                self._states[border + CHUNK] = self._behind(border).to(self._state.states.dtype).float()

    def store(self, slot: int, num_tokens: int, border: int) -> None:
        """Write the state behind so many tokens of the sequence to a slot, folded up to the border."""
        state, is_own = self._state, slot == self._source
        if not (is_own and border == self._folded and self._first):
            state.states[slot] = self._states[border].to(state.states.dtype)
        for begin in range(border, num_tokens, CHUNK):
            positions = range(max(begin, self._first) if is_own else begin, min(num_tokens, begin + CHUNK))
            for ring, tokens in zip((state.keys, state.values, state.decays), self._chunks[begin].tensors, strict=True):
                write(ring[slot], tokens, begin, positions)
        latest = range(max(self._inputs_first, num_tokens - state.inputs.shape[1]), num_tokens)
        write(state.inputs[slot], self._inputs, self._inputs_first, latest)

    def _computed(self, chunk: _Chunk, border: int, new: range, steps: Tensor, dtype: torch.dtype) -> Tensor:
        """Add new tokens to a chunk, and return results [64, value_heads, value_dim] fp32; others mean nothing."""
        sizes, own = self._sizes, slice(new.start - border, new.stop - border)
        mixed = self._mixed(border, new.stop)
        size = sizes.num_key_heads * sizes.key_dim
        queries, keys = (
            rounded(mixed[:, part], dtype).view(CHUNK, sizes.num_key_heads, -1)
            for part in (slice(size), slice(size, 2 * size))
        )
        values = rounded(mixed[:, 2 * size :], dtype).view(CHUNK, sizes.num_value_heads, -1)
        biased = mixed.new_zeros(CHUNK, sizes.num_value_heads)
        biased[own] = steps.float()
        biased += self._weights.dt_bias
        step = torch.log1p(torch.exp(-biased.abs())) + biased.clamp(min=0)
        step = step.clamp(self._weights.least_step, self._weights.most_step)
        decays = (-torch.exp(self._weights.a_log) * step).clamp(min=LEAST_DECAY)
        chunk.keys[own], chunk.decays[own] = keys[own], decays[own]
        chunk.added[own] = rounded(step[..., None] * values, dtype)[own]
        sums = chunk.decays.double().cumsum(dim=0)
        places = torch.arange(CHUNK, device=mixed.device)
        is_there = (places[:, None] >= places)[..., None]
        between = torch.where(is_there, sums[:, None] - sums, -torch.inf).float().exp().permute(2, 0, 1)
        by_head = self._by_value_head(queries)
        found = sums.float().exp().t()[..., None] * torch.bmm(by_head, self._states[border])
        products = torch.bmm(by_head, self._by_value_head(chunk.keys).transpose(1, 2).contiguous())
        found = found + torch.bmm((between * products).contiguous(), chunk.added.transpose(0, 1).contiguous())
        return found.transpose(0, 1) + self._weights.skip[:, None] * values

    def _mixed(self, border: int, stop: int) -> Tensor:
        """Return the convolution [64, conv_dim] of a chunk; that of tokens which are not given means nothing."""
        wide = self._sizes.width - 1
        window = self._inputs.new_zeros(wide + CHUNK, self._inputs.shape[1])
        lo = max(self._inputs_first, border - wide)
        given = self._inputs[lo - self._inputs_first : stop - self._inputs_first]
        window[lo - border + wide : stop - border + wide] = given
        taps, mixed = self._weights.conv.float(), torch.zeros_like(window[:CHUNK])
        for tap in range(wide + 1):
            mixed += window[tap : tap + CHUNK] * taps[:, tap]
        return activated_alike(mixed + self._weights.conv_bias.float(), Activation.SILU)

    def _behind(self, border: int) -> Tensor:
        """Return the state at the next border, of a chunk whose tokens are all computed."""
        chunk = self._chunks[border]
        sums = chunk.decays.double().cumsum(dim=0)
        left = (sums[-1] - sums).float().exp()
        turned = (chunk.added * left[..., None]).transpose(0, 1).contiguous()
        keys = self._by_value_head(chunk.keys).transpose(1, 2).contiguous()
        return sums[-1].float().exp()[:, None, None] * self._states[border] + torch.bmm(keys, turned)

    def _by_value_head(self, heads: Tensor) -> Tensor:
        """[64, key_heads, key_dim] as [value_heads, 64, key_dim]."""
        return heads.transpose(0, 1).repeat_interleave(self._sizes.group, dim=0).contiguous()
