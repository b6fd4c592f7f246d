"""Calls of a recurrence: a sequence computed in parts, with states in slots."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights, RunRecurrence
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from kernels.recurrence.fixed_decay.weights import FixedDecayWeights
from kernels.recurrence.kept import kept_tensors
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.recurrence.state_space.weights import StateSpaceWeights
from kernels.system.device import torch_dtype
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.shape import Dtype, Phase

NUM_DRAFTED = 4
_SLOTS = 5  # of which the last two are the zero slot and the padding slot
_OTHER, _SNAPSHOT = 1, 2
_MULTIPLE = 8  # of a product's results
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of one sequence, and the weights of a layer."""

    sizes: RecurrenceSizes
    dtype: Dtype
    state_dtype: Dtype
    qkv: Tensor
    a: Tensor
    b: Tensor
    weights: RecurrenceWeights
    form: RecurrenceForm


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens that one call computes.

    taken_back  of them, from the end on: the next call computes others in their places
    moves       the state goes to another slot
    """

    num_tokens: int
    phase: Phase = Phase.EXTEND
    taken_back: int = 0
    moves: bool = False


@dataclass(frozen=True, slots=True)
class Computed:
    """out    [T, value_heads, value_dim]; of tokens before a snapshot that it begun from, NaN
    slot      of the state behind the last token
    snapshot  tokens of the one in its slot
    """

    out: Tensor
    state: RecurrenceState
    slot: int
    snapshot: int | None


def random_sequence(
    sizes: RecurrenceSizes,
    num_tokens: int,
    dtype: Dtype,
    *,
    seed: int,
    device: torch.device = CPU,
    form: RecurrenceForm = RecurrenceForm.GATED_DELTA,
) -> Drawn:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(device)

    kind, heads = torch_dtype(dtype), sizes.num_value_heads
    if form is RecurrenceForm.FIXED_DECAY:
        sizes = replace(sizes, width=1)
    has_channels = form is RecurrenceForm.CHANNEL_DELTA
    num_decays = heads * sizes.key_dim if has_channels else heads
    weights = (ChannelDeltaWeights if has_channels else RecurrenceWeights)(
        drawn(sizes.conv_dim, sizes.width, scale=0.5).to(kind), drawn(heads), drawn(num_decays, scale=2.0)
    )
    tokens = (drawn(num_tokens, columns).to(kind) for columns in (sizes.conv_dim, num_decays, heads))
    qkv, a, b = tokens
    if form is RecurrenceForm.STATE_SPACE:
        own = weights.conv, weights.a_log, weights.dt_bias
        weights = StateSpaceWeights(*own, drawn(sizes.conv_dim, scale=0.5).to(kind), drawn(heads), 0.01, 4.0)
    if form is RecurrenceForm.FIXED_DECAY:
        weights = FixedDecayWeights.of(weights.a_log, sizes.conv_dim)
    return Drawn(sizes, dtype, Dtype.FP32, qkv, a, b, weights, form)


def empty_state(drawn: Drawn) -> RecurrenceState:
    tensors = []
    for shape, dtype in kept_tensors(drawn.form, drawn.sizes, drawn.dtype, drawn.state_dtype, NUM_DRAFTED):
        tensors.append(torch.full((_SLOTS, *shape), 7.0, dtype=torch_dtype(dtype), device=drawn.qkv.device))
        tensors[-1][_SLOTS - 2] = 0
    return RecurrenceState(*tensors)


def state_of(computed: Computed, slot: int | None = None) -> RecurrenceState:
    """Return the state in a slot, by default the sequence's."""
    place, state = computed.slot if slot is None else slot, computed.state
    return RecurrenceState(*(it[place] for it in state.tensors))


def _tokens_of(drawn: Drawn, first: int, end: int, kept: int) -> tuple[Tensor, ...]:
    """Return tokens of a call, of which those behind `kept` are others, and a row of NaN behind them.

    They are columns of one tensor, as one product makes them, with NaN behind the first ones and the last ones.
    """
    parts = [it[first:end] for it in (drawn.qkv, drawn.b, drawn.a)]
    columns = [it.shape[1] for it in parts]
    gap = drawn.sizes.num_value_heads * drawn.sizes.value_dim
    behind = -(gap + sum(columns)) % _MULTIPLE
    nans = (parts[0].new_full((len(parts[0]), size), torch.nan) for size in (gap, behind))
    whole = torch.cat([parts[0], next(nans), *parts[1:], next(nans)], dim=1)
    whole[kept:] = -whole[kept:] + 0.5
    whole = torch.cat([whole, torch.full_like(whole[:1], torch.nan)])
    qkv, _, b, a, _ = whole.split_with_sizes([columns[0], gap, *columns[1:], behind], dim=1)
    return qkv, a, b


def call_in_parts(
    run: RunRecurrence,
    drawn: Drawn,
    cuts: Sequence[Cut],
    *,
    snapshot: int | None = None,
    begun: Computed | None = None,
) -> Computed:
    """Compute a sequence by a call for each cut, a row of NaN behind its tokens."""
    device = drawn.qkv.device
    state = empty_state(drawn) if begun is None else begun.state
    out = torch.full((drawn.qkv.shape[0], drawn.sizes.num_value_heads, drawn.sizes.value_dim), torch.nan, device=device)
    out = out.to(drawn.qkv.dtype)
    first, folded, source, target = 0, 0, _SLOTS - 2, 0
    if begun is not None:
        assert begun.snapshot is not None
        first, folded, source = begun.snapshot, begun.snapshot // CHUNK * CHUNK, _SNAPSHOT
    for cut in cuts:
        target = (_OTHER if target == 0 else 0) if cut.moves else target
        end, kept = first + cut.num_tokens, cut.num_tokens - cut.taken_back
        qkv, a, b = _tokens_of(drawn, first, end, kept)
        written = [snapshot - first - 1] if snapshot is not None and first < snapshot <= end else []
        numbers = (0, cut.num_tokens, first, folded, source, target)
        starts, stops, firsts, folds, sources, targets = (torch.tensor([it], device=device) for it in numbers)
        rows = RecurrenceRows(
            starts.int(), stops.int(), firsts.int(), folds.int(), sources, targets,
            torch.tensor(written, dtype=torch.int64, device=device),
            torch.tensor([_SNAPSHOT] * len(written), dtype=torch.int64, device=device),
            longest=cut.num_tokens, phase=cut.phase,
        )  # fmt: skip
        found = torch.full((cut.num_tokens + 1, *out.shape[1:]), torch.nan, device=device, dtype=out.dtype)
        run(qkv, a, b, drawn.weights, rows, state, found)
        out[first : first + kept] = found[:kept]
        folded = first // CHUNK * CHUNK if cut.phase is Phase.VERIFY else end // CHUNK * CHUNK
        first, source = first + kept, target
    return Computed(out, state, target, snapshot)
