"""Calls of a recurrence: a sequence computed in parts, with states in slots, beside others and padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights, RunRecurrence
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.system.device import torch_dtype
from kernels.vocabulary.shape import Dtype, Phase

NUM_DRAFTED = 4
_SLOTS = 12  # of which the last two are the zero slot and the padding slot
_OTHER, _SNAPSHOT, _FIRST_NEIGHBOUR = 1, 2, 3
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
    sizes: RecurrenceSizes, num_tokens: int, dtype: Dtype, *, seed: int, device: torch.device = CPU
) -> Drawn:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(device)

    kind, heads = torch_dtype(dtype), sizes.num_value_heads
    weights = RecurrenceWeights(
        drawn(sizes.conv_dim, sizes.width, scale=0.5).to(kind), drawn(heads), drawn(heads, scale=2.0)
    )
    tokens = (drawn(num_tokens, columns).to(kind) for columns in (sizes.conv_dim, heads, heads))
    qkv, a, b = tokens
    return Drawn(sizes, dtype, Dtype.FP32, qkv, a, b, weights)


def empty_state(drawn: Drawn, fill: float) -> RecurrenceState:
    tensors = []
    for shape, dtype in drawn.sizes.state_tensors(drawn.dtype, drawn.state_dtype, NUM_DRAFTED):
        tensors.append(torch.full((_SLOTS, *shape), fill, dtype=torch_dtype(dtype), device=drawn.qkv.device))
        tensors[-1][_SLOTS - 2] = 0
    return RecurrenceState(*tensors)


def state_of(computed: Computed, slot: int | None = None) -> RecurrenceState:
    """Return the state in a slot, by default the sequence's."""
    place, state = computed.slot if slot is None else slot, computed.state
    return RecurrenceState(*(it[place] for it in state.tensors))


def call_in_parts(
    run: RunRecurrence,
    drawn: Drawn,
    cuts: Sequence[Cut],
    *,
    snapshot: int | None = None,
    begun: Computed | None = None,
    neighbours: Sequence[int] = (),
    padding: int = 0,
    fill: float = 7.0,
) -> Computed:
    """Compute a sequence by a call for each cut, beside neighbours of so many tokens that begin with each call."""
    device, seed = drawn.qkv.device, 100
    state = empty_state(drawn, fill) if begun is None else begun.state
    out = torch.full((drawn.qkv.shape[0], drawn.sizes.num_value_heads, drawn.sizes.value_dim), torch.nan, device=device)
    out = out.to(drawn.qkv.dtype)
    first, folded, source, target = 0, 0, _SLOTS - 2, 0
    if begun is not None:
        assert begun.snapshot is not None
        first, folded, source = begun.snapshot, begun.snapshot // CHUNK * CHUNK, _SNAPSHOT
    for cut in cuts:
        target = (_OTHER if target == 0 else 0) if cut.moves else target
        others = [
            random_sequence(drawn.sizes, length, drawn.dtype, seed=seed + i, device=device)
            for i, length in enumerate(neighbours)
        ]
        end = first + cut.num_tokens
        own = slice(first, end)
        kept = cut.num_tokens - cut.taken_back
        qkv, a, b = drawn.qkv[own].clone(), drawn.a[own].clone(), drawn.b[own].clone()
        for tokens in (qkv, a, b):
            tokens[kept:] = -tokens[kept:] + 0.5
        edges = [0]
        for tokens in (*(it.qkv for it in others), qkv):
            edges.append(edges[-1] + tokens.shape[0])
        rows = [(edges[i], edges[i + 1], 0, 0, _SLOTS - 2, _FIRST_NEIGHBOUR + i) for i in range(len(others))]
        rows += [
            (edges[-2], edges[-1], first, folded, source, target),
            *[(0, 0, 0, 0, _SLOTS - 2, _SLOTS - 1)] * padding,
        ]
        columns = [torch.tensor(column, device=device) for column in zip(*rows, strict=True)]
        is_written = snapshot is not None and first < snapshot <= end
        written = [edges[-2] + (snapshot or 0) - first - 1] if is_written else []
        slots = [_SNAPSHOT] if is_written else []
        given = RecurrenceRows(
            columns[0].int(), columns[1].int(), columns[2].int(), columns[3].int(), columns[4], columns[5],
            torch.tensor(written, dtype=torch.int64, device=device),
            torch.tensor(slots, dtype=torch.int64, device=device),
            longest=max(stop - start for start, stop, *_ in rows), phase=cut.phase,
        )  # fmt: skip
        behind = torch.full((padding + 1, qkv.shape[1]), torch.nan, device=device, dtype=qkv.dtype)
        gate_behind = behind[:, : a.shape[1]]
        packed = torch.cat([*(it.qkv for it in others), qkv, behind])
        found = torch.full((packed.shape[0], *out.shape[1:]), torch.nan, device=device, dtype=out.dtype)
        run(
            packed,
            torch.cat([*(it.a for it in others), a, gate_behind]),
            torch.cat([*(it.b for it in others), b, gate_behind]),
            drawn.weights,
            given,
            state,
            found,
        )
        out[first : first + kept] = found[edges[-2] : edges[-2] + kept]
        folded = first // CHUNK * CHUNK if cut.phase is Phase.VERIFY else end // CHUNK * CHUNK
        first, source = first + kept, target
    return Computed(out, state, target, snapshot)
