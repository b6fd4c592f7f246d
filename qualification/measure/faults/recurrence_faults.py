"""Wrong recurrences that must be refused: each computes in fp32 token by token, with one fault of a real kernel."""

from enum import Enum
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights, RunRecurrence
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from kernels.recurrence.fixed_decay.weights import FixedDecayWeights
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.recurrence.state_space.weights import StateSpaceWeights
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase

_EPS = 1e-6


class RecurrenceFault(Enum):
    """A fault of a wrong kernel; the comment says how a real kernel comes by it."""

    NONE = "none"  # the checker must pass this one: refusing everything proves nothing either
    READ_BEFORE_UPDATE = "a result reads the state before its token's update"  # o = q S, then S += k v
    DECAY_AFTER_UPDATE = "the state decays behind the update"  # another paper's form of the rule
    STATE_TRANSPOSED = "states are stored [value_dim, key_dim]"  # the layout of other libraries
    INPUTS_AFTER_CONVOLUTION = "the convolution keeps its results, not its inputs"  # the wrong tensor is copied
    PADDING_IN_STATE = "the state decays by the last chunk's padding"  # gates of rows past the end are not masked
    LAST_BORDER_SKIPPED = "a chunk that ends with the row is not folded"  # `<` for `<=`
    WRONG_KEY_HEAD = "value head h reads key head h modulo their number"  # repeat for repeat_interleave
    LOW_PRECISION_STATE = "the state is rounded to bf16 behind each token"  # accumulated in the dtype of the tokens
    TARGET_READ = "the state is read from the target slot"  # a prefix hit without its state
    STALE_STATE = "a state that begins as zero begins as its slot is left"  # the flag of a first chunk is not read
    NEIGHBOUR_IN_CONVOLUTION = "the convolution reads the rows before in the call"  # of another sequence
    SNAPSHOT_LATE = "a snapshot is the state behind the row's last token"  # copied when the call is done
    SNAPSHOT_OVERWRITTEN = "a snapshot has inputs that its row's last tokens wrote"  # programs of one launch race
    DRAFTS_FOLDED = "tokens that may be taken back are folded"  # verified as any chunk
    BETA_LEFT_OUT = "beta is 1"
    EPSILON_OUTSIDE = "the norms' epsilon is added to the length"  # F.normalize's form
    TAPS_REVERSED = "the convolution's factors are in the other order"  # convolution for correlation
    TF32 = "keys and values are rounded to 10 bits"  # TF32 for fp32
    UNSTABLE = "the order of sums differs from run to run"  # atomics
    STALE_OUTPUT = "the last token's result is not written"  # grid too small
    STRAY_WRITE = "one row past the results is written"  # store without a mask
    SKIP_LEFT_OUT = "x is not added to the result"  # a state space without its D
    CONV_BIAS_LEFT_OUT = "the convolution has no bias"  # read as the gated delta rule's
    STEP_NOT_LIMITED = "steps are not held between their limits"  # softplus alone
    STEP_LEFT_OUT = "x is not multiplied by its step"  # A is discretised, and B is not
    NEIGHBOUR_DECAY = "each channel has the decay of the next one"  # an index of the head's dims is off by one
    NEIGHBOUR_SLOPE = "each head has the decay of the next one"  # slopes of a rank begin at another head
    SILU = "queries, keys and values pass through silu"  # lightning attention read as behind a convolution
    ONE_DECAY = "all channels of a head have their mean decay"  # the gated delta rule in place of Kimi's


_OF_DELTA = frozenset({RecurrenceFault.BETA_LEFT_OUT, RecurrenceFault.EPSILON_OUTSIDE})
_OF_STATE_SPACE = frozenset(
    {
        RecurrenceFault.SKIP_LEFT_OUT,
        RecurrenceFault.CONV_BIAS_LEFT_OUT,
        RecurrenceFault.STEP_NOT_LIMITED,
        RecurrenceFault.STEP_LEFT_OUT,
    }
)
_OF_CHANNELS = frozenset({RecurrenceFault.NEIGHBOUR_DECAY, RecurrenceFault.ONE_DECAY})
_OF_FIXED = frozenset({RecurrenceFault.NEIGHBOUR_SLOPE, RecurrenceFault.SILU})
_OF_CONVOLUTION = frozenset(
    {
        RecurrenceFault.INPUTS_AFTER_CONVOLUTION,
        RecurrenceFault.NEIGHBOUR_IN_CONVOLUTION,
        RecurrenceFault.SNAPSHOT_OVERWRITTEN,
        RecurrenceFault.TAPS_REVERSED,
    }
)
_NOT_OF_FORM = {
    RecurrenceForm.GATED_DELTA: _OF_STATE_SPACE | _OF_CHANNELS | _OF_FIXED,
    RecurrenceForm.STATE_SPACE: _OF_DELTA | _OF_CHANNELS | _OF_FIXED,
    RecurrenceForm.CHANNEL_DELTA: _OF_STATE_SPACE | _OF_FIXED,
    RecurrenceForm.FIXED_DECAY: _OF_DELTA | _OF_STATE_SPACE | _OF_CHANNELS | _OF_CONVOLUTION,
}


def trial_shapes(dtype: Dtype, form: RecurrenceForm | None = None) -> tuple[RecurrenceShape, ...]:
    """Recurrences on which every fault can show, as small as that allows; `form` None: of every form."""
    return tuple(
        RecurrenceShape.of(
            RecurrenceSizes(2, 4, 8, 8, 1 if one is RecurrenceForm.FIXED_DECAY else 4),
            phase,
            dtype,
            Dtype.FP32,
            rows,
            one,
        )
        for one in ([*RecurrenceForm] if form is None else [form])
        for phase, rows in (
            (Phase.EXTEND, TokenRows.LE_128),
            (Phase.DECODE, TokenRows.LE_16),
            (Phase.VERIFY, TokenRows.LE_128),
        )
    )


def can_show_in(fault: RecurrenceFault, shape: RecurrenceShape) -> bool:
    """True when a recurrence with this fault computes the shape wrongly, and so much that its dtype shows it."""
    if fault in _NOT_OF_FORM[shape.form]:
        return False
    is_prompt, is_verified = shape.phase is Phase.EXTEND, shape.phase is Phase.VERIFY
    needs = {
        # A row of one token has no chunk of its own that is padded; in `VERIFY` nothing is folded at the end.
        RecurrenceFault.PADDING_IN_STATE: is_prompt,
        RecurrenceFault.LAST_BORDER_SKIPPED: not is_verified,
        RecurrenceFault.SNAPSHOT_LATE: is_prompt,
        RecurrenceFault.SNAPSHOT_OVERWRITTEN: is_prompt,
        RecurrenceFault.DRAFTS_FOLDED: is_verified,
        RecurrenceFault.TF32: shape.dtype is Dtype.FP32,
    }
    return needs.get(fault, True)


def wrong_recurrence(fault: RecurrenceFault) -> RunRecurrence:
    """A recurrence with this fault. Not for service: it waits for the device."""
    calls = count()

    def run(
        qkv: Tensor, a: Tensor, b: Tensor, weights: RecurrenceWeights, rows: RecurrenceRows, state: RecurrenceState,
        out: Tensor,
    ) -> None:  # fmt: skip
        call = next(calls)
        out.zero_()
        names = ("starts", "stops", "firsts", "folded", "sources", "targets")
        columns = [getattr(rows, name).tolist() for name in names]
        writes = list(zip(rows.write_tokens.tolist(), rows.write_slots.tolist(), strict=True))
        for start, stop, first, folded, source, target in zip(*columns, strict=True):
            if start == stop:
                continue
            row = _Row(fault, weights, state, first, folded, target if fault is RecurrenceFault.TARGET_READ else source)
            before = qkv[max(0, start - weights.conv.shape[1] + 1) : start]
            out[start:stop] = row.append(qkv[start:stop], a[start:stop], b[start:stop], before).to(out.dtype)
            is_late = fault is RecurrenceFault.SNAPSHOT_LATE
            is_verified = rows.phase is Phase.VERIFY and fault is not RecurrenceFault.DRAFTS_FOLDED
            if fault is RecurrenceFault.SNAPSHOT_OVERWRITTEN:
                row.store(target, first + stop - start, is_last=True)
                row.read_inputs(source)
            for token, slot in [it for it in writes if start <= it[0] < stop]:
                row.store(slot, first + (stop if is_late else token + 1) - start)
            if fault is not RecurrenceFault.SNAPSHOT_OVERWRITTEN:
                row.store(target, first + stop - start, first if is_verified else None, is_last=True)
        if fault is RecurrenceFault.UNSTABLE:
            out *= 1 + call // 2 % 2 * 2 * torch.finfo(out.dtype).eps
        if fault is RecurrenceFault.STALE_OUTPUT:
            out[int(rows.stops.max()) - 2] = torch.nan
        if fault is RecurrenceFault.STRAY_WRITE:
            out.as_strided((out.stride(0),), (1,), out.storage_offset() + out.numel()).zero_()

    return run


class _Row:
    """One sequence: its state behind each token of the call, and what its tokens add."""

    def __init__(
        self, fault: RecurrenceFault, weights: RecurrenceWeights, state: RecurrenceState, first: int, folded: int,
        source: int,
    ) -> None:  # fmt: skip
        self._fault, self._weights, self._state, self._first = fault, weights, state, first
        self._sizes = state.sizes(weights)
        begun = state.states[source].float()
        if fault is RecurrenceFault.STATE_TRANSPOSED:
            begun = begun.transpose(1, 2)
        if not first and fault is not RecurrenceFault.STALE_STATE:
            begun = torch.zeros_like(begun)
        if fault is RecurrenceFault.STALE_STATE and not first:
            begun = begun + 1
        self._states = {folded: begun}  # by number of tokens
        places = [position % state.keys.shape[1] for position in range(folded, first)]
        keys, added, decays = (it[source, places].float() for it in (state.keys, state.values, state.decays))
        # Key, added and decay by position.
        self._kept = dict(enumerate(zip(keys.unbind(), added.unbind(), decays.unbind(), strict=True), folded))
        if fault in (RecurrenceFault.DECAY_AFTER_UPDATE, RecurrenceFault.LOW_PRECISION_STATE):
            for position, kept in self._kept.items():
                self._states[position + 1] = self._updated(self._states[position], *kept)
        elif first > folded:
            for border in {*range(folded + CHUNK, first + 1, CHUNK), first}:
                own = slice(0, border - folded)
                self._states[border] = self._behind(begun, keys[own], added[own], decays[own])
        self._inputs: dict[int, Tensor] = {}
        self.read_inputs(source)

    def read_inputs(self, slot: int) -> None:
        """Read the inputs that the first tokens' convolution needs from the ring of a slot."""
        ring, first = self._state.inputs[slot], self._first
        for position in range(max(0, first - self._sizes.width + 1), first):
            self._inputs[position] = ring[position % len(ring)].float()

    def append(self, qkv: Tensor, a: Tensor, b: Tensor, before: Tensor) -> Tensor:
        """Compute tokens, and return their results; `before`: the rows before them in the call."""
        fault, sizes, weights, dtype = self._fault, self._sizes, self._weights, qkv.dtype
        wide, num_tokens = sizes.width - 1, qkv.shape[0]
        padded = qkv.new_zeros(wide + num_tokens, qkv.shape[1], dtype=torch.float32)
        padded[wide:] = qkv
        for position, kept in self._inputs.items():
            padded[wide + position - self._first] = kept
        if fault is RecurrenceFault.NEIGHBOUR_IN_CONVOLUTION and len(before):
            padded[wide - len(before) : wide] = before
        taps = weights.conv.float()
        taps = taps.flip(1) if fault is RecurrenceFault.TAPS_REVERSED else taps
        mixed = (padded.unfold(0, sizes.width, 1) * taps).sum(dim=-1)
        if isinstance(weights, StateSpaceWeights) and fault is not RecurrenceFault.CONV_BIAS_LEFT_OUT:
            mixed = mixed + weights.conv_bias.float()
        is_fixed = isinstance(weights, FixedDecayWeights)
        mixed = F.silu(mixed) if not is_fixed or fault is RecurrenceFault.SILU else mixed
        for token in range(num_tokens):
            is_late = fault is RecurrenceFault.INPUTS_AFTER_CONVOLUTION
            self._inputs[self._first + token] = mixed[token] if is_late else qkv[token].float()
        size = sizes.num_key_heads * sizes.key_dim
        queries, keys = (self._normed(mixed[:, start : start + size], dtype) for start in (0, size))
        values = self._rounded(mixed[:, 2 * size :], dtype).reshape(num_tokens, sizes.num_value_heads, -1)
        if isinstance(weights, StateSpaceWeights):
            steps = F.softplus(a.float() + weights.dt_bias, threshold=1e9)
            if fault is not RecurrenceFault.STEP_NOT_LIMITED:
                steps = steps.clamp(weights.least_step, weights.most_step)
            decays = -weights.a_log.exp() * steps
            steps = torch.ones_like(steps) if fault is RecurrenceFault.STEP_LEFT_OUT else steps
            outs = [self._token(*each) for each in zip(queries, keys, values, decays, steps, strict=True)]
            skip = 0 if fault is RecurrenceFault.SKIP_LEFT_OUT else weights.skip[:, None]
            return torch.stack(outs) + skip * values
        if is_fixed:
            decays = self._decays(a)
            outs = [
                self._token(*each) for each in zip(queries, keys, values, decays, torch.ones_like(decays), strict=True)
            ]
            return torch.stack(outs)
        decays = self._decays(a)
        betas = torch.sigmoid(b.float())
        betas = torch.ones_like(betas) if fault is RecurrenceFault.BETA_LEFT_OUT else betas
        outs = [self._token(*each) for each in zip(queries, keys, values, decays, betas, strict=True)]
        scaled: Tensor = sizes.key_dim**-0.5 * torch.stack(outs)
        return scaled

    def _decays(self, a: Tensor) -> Tensor:
        """Return logarithms [n, value_heads], of channels [n, value_heads, key_dim]."""
        x, factor = F.softplus(a.float() + self._weights.dt_bias), self._weights.a_log.exp()
        if isinstance(self._weights, FixedDecayWeights):
            factor = factor.roll(-1) if self._fault is RecurrenceFault.NEIGHBOUR_SLOPE else factor
            return -factor.expand(len(a), -1)
        if not isinstance(self._weights, ChannelDeltaWeights):
            return -factor * x
        decays = -factor[:, None] * x.view(-1, self._sizes.num_value_heads, self._sizes.key_dim)
        if self._fault is RecurrenceFault.ONE_DECAY:
            return decays.mean(dim=-1, keepdim=True).expand_as(decays)
        return decays.roll(-1, dims=-1) if self._fault is RecurrenceFault.NEIGHBOUR_DECAY else decays

    def store(self, slot: int, num_tokens: int, folded: int | None = None, *, is_last: bool = False) -> None:
        """Write the state behind so many tokens, by default folded up to the last border."""
        state, fault = self._state, self._fault
        border = (num_tokens if folded is None else folded) // CHUNK * CHUNK
        is_skipped = fault is RecurrenceFault.LAST_BORDER_SKIPPED and is_last and num_tokens == border > self._first
        kept = self._states[max(border - CHUNK, min(self._states)) if is_skipped else border]
        if fault is RecurrenceFault.PADDING_IN_STATE and is_last and num_tokens % CHUNK:
            padding = -self._decays(torch.zeros_like(self._weights.dt_bias)[None])[0]
            kept = kept * _factors(-padding * (CHUNK - num_tokens % CHUNK))
            if border == 0:  # the state at the border is zero; what the tokens add decays instead
                last = self._kept[num_tokens - 1]
                self._kept[num_tokens - 1] = last[0], last[1], last[2] - padding
        kept = kept.transpose(1, 2) if fault is RecurrenceFault.STATE_TRANSPOSED else kept
        state.states[slot] = kept.to(state.states.dtype)
        positions = range(border, num_tokens)
        if positions:
            columns = zip(*(self._kept[position] for position in positions), strict=True)
            for ring, numbers in zip((state.keys, state.values, state.decays), columns, strict=True):
                ring[slot, [position % ring.shape[1] for position in positions]] = torch.stack(numbers).to(ring.dtype)
        latest = range(max(0, num_tokens - state.inputs.shape[1]), num_tokens)
        for position in latest:
            if position in self._inputs:
                state.inputs[slot, position % state.inputs.shape[1]] = self._inputs[position].to(state.inputs.dtype)

    def _token(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        number = max(self._states)
        before = self._states[number]
        is_late = self._fault is RecurrenceFault.DECAY_AFTER_UPDATE
        decayed = before if is_late else _factors(decay) * before
        adds_values = isinstance(self._weights, StateSpaceWeights | FixedDecayWeights)
        missing = value if adds_values else value - (self._by_value_head(key)[:, :, None] * decayed).sum(dim=1)
        added = self._rounded(beta[:, None] * missing, self._state.values.dtype)
        self._kept[number] = key, added, decay
        self._states[number + 1] = after = self._updated(before, key, added, decay)
        read = before if self._fault is RecurrenceFault.READ_BEFORE_UPDATE else after
        return (self._by_value_head(query)[:, :, None] * read).sum(dim=1)

    def _updated(self, state: Tensor, key: Tensor, added: Tensor, decay: Tensor) -> Tensor:
        update, factor = self._by_value_head(key)[:, :, None] * added[:, None], _factors(decay)
        is_late = self._fault is RecurrenceFault.DECAY_AFTER_UPDATE
        after = factor * (state + update) if is_late else factor * state + update
        return after.bfloat16().float() if self._fault is RecurrenceFault.LOW_PRECISION_STATE else after

    def _behind(self, state: Tensor, keys: Tensor, added: Tensor, decays: Tensor) -> Tensor:
        """Return the state behind tokens, [T, ...]: what `_updated` makes of them one by one."""
        behind = torch.cat([decays[1:], torch.zeros_like(decays[:1])])
        left = behind.flip(0).cumsum(dim=0).flip(0).exp()
        turned = left.reshape(*left.shape[:2], -1) * torch.stack([self._by_value_head(it) for it in keys])
        return _factors(decays.sum(dim=0)) * state + torch.einsum("thk,thv->hkv", turned, added)

    def _by_value_head(self, heads: Tensor) -> Tensor:
        if self._fault is RecurrenceFault.WRONG_KEY_HEAD:
            return heads.repeat(self._sizes.group, 1)
        return heads.repeat_interleave(self._sizes.group, dim=0)

    def _normed(self, heads: Tensor, dtype: torch.dtype) -> Tensor:
        heads = heads.reshape(len(heads), self._sizes.num_key_heads, -1)
        if isinstance(self._weights, StateSpaceWeights | FixedDecayWeights):
            return self._rounded(heads, dtype)
        squares = heads.square().sum(dim=-1, keepdim=True)
        if self._fault is RecurrenceFault.EPSILON_OUTSIDE:
            return self._rounded(heads / (squares.sqrt() + _EPS), dtype)
        return self._rounded(heads / (squares + _EPS).sqrt(), dtype)

    def _rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self._fault is RecurrenceFault.TF32:
            return ((x.contiguous().view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)
        return x.to(dtype).float()


def _factors(decays: Tensor) -> Tensor:
    """Return what a state [value_heads, key_dim, value_dim] is multiplied by, of logarithms of each head or channel."""
    return decays.exp().reshape(decays.shape[0], -1, 1)
