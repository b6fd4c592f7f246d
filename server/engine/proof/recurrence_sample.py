"""Samples of served recurrences: some tokens of one sequence in one value head, and the state that they read.

Rule and limits are those of qualification (kernels/reference/recurrence.py, docs/limits.md). A state that is wrong as a
whole, as of another sequence, is right by this: replays of answers find it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from kernels.recurrence.calls import RecurrenceState, RecurrenceWeights
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from kernels.recurrence.fixed_decay.weights import FixedDecayWeights
from kernels.recurrence.state_space.weights import StateSpaceWeights
from kernels.reference.recurrence import recurrence_reference_from
from kernels.reference.state_space import state_space_reference_from
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.recurrence_operator import RECURRENCE
from server.engine.operators.recurrence import RecurrenceCall
from server.engine.proof.product_sample import judged_rows
from server.engine.proof.shadow_sample import Judgement, digest_of

MOST_TOKENS = 32  # of a row: each takes some thirty small kernels to judge


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row of a step: its place, its first token in the step, their number, and those of the sequence before it."""

    row: int
    start: int
    num_tokens: int
    first: int


@dataclass(frozen=True, slots=True)
class RecurrenceSample:
    """Copies of what a layer's recurrence read and wrote for the first tokens of one row.

    head           of values
    kept           of the row's slot before the step, of this head and its key head, as `RecurrenceState` of no slots
    folded         [1] int32: tokens that the state is folded up to
    qkv [n, 2 * key_dim + value_dim], a, b [n, 1], of channels a [n, key_dim], out [n, 1, value_dim]
    """

    path: str
    layer: int
    head: int
    row: SampledRow
    kept: RecurrenceState
    folded: Tensor
    qkv: Tensor
    a: Tensor
    b: Tensor
    weights: RecurrenceWeights
    out: Tensor

    @property
    def lane(self) -> Operator:
        return RECURRENCE

    @property
    def digest(self) -> str:
        return digest_of(self.qkv)

    @property
    def weight(self) -> None:
        """Return None: a sample is of all weights of a layer."""
        return None

    @torch.inference_mode()
    def judge(self, rng: Random) -> Judgement:  # noqa: ARG002
        """Compute the tokens in fp64 and compare. Waits for the device. Raises torch.OutOfMemoryError."""
        row = self.row
        num_known = row.first - int(self.folded) if row.first else 0
        if isinstance(self.weights, StateSpaceWeights | FixedDecayWeights):
            given = self.qkv, self.a, self.weights, row.first
            reference = state_space_reference_from(self.kept, num_known, *given)
        else:
            behind = self.qkv, self.a, self.b, self.weights, row.first
            reference = recurrence_reference_from(self.kept, num_known, *behind)
        rows = range(row.start, row.start + self.out.shape[0])
        where = f"recurrence of layer {self.layer}, value head {self.head}"
        return judged_rows(self.path, where, rows, self.qkv, self.out, reference)


def before_recurrence(
    call: RecurrenceCall, row: SampledRow, rng: Random
) -> "Callable[[str, int, Tensor], RecurrenceSample]":
    """Copy what a call reads for a row, in a random value head, without waiting for the device; it overwrites some.

    Returns what makes the sample of it, of the path, the layer and the results. Raises torch.OutOfMemoryError.
    """
    sizes = call.state.sizes(call.weights)
    head = rng.randrange(sizes.num_value_heads)
    key_head = head // sizes.group
    keys = slice(key_head * sizes.key_dim, (key_head + 1) * sizes.key_dim)
    num_keys = sizes.num_key_heads * sizes.key_dim
    values = slice(2 * num_keys + head * sizes.value_dim, 2 * num_keys + (head + 1) * sizes.value_dim)

    def channels(x: Tensor, dim: int) -> Tensor:
        parts = ((keys.start, sizes.key_dim), (num_keys + keys.start, sizes.key_dim), (values.start, sizes.value_dim))
        return torch.cat([x.narrow(dim, *part) for part in parts], dim=dim)

    source, state, own = call.rows.sources[row.row : row.row + 1], call.state, slice(head, head + 1)
    of_key = slice(key_head, key_head + 1)

    def of_slot(x: Tensor) -> Tensor:
        return x.index_select(0, source)[0]

    kept = RecurrenceState(
        of_slot(state.states[:, own]), channels(of_slot(state.inputs), 1), of_slot(state.keys[:, :, of_key]),
        of_slot(state.values[:, :, own]), of_slot(state.decays[:, :, own]), of_slot(state.betas[:, :, own]),
        of_slot(state.misses[:, :, own]),
    )  # fmt: skip
    num_tokens = min(row.num_tokens, MOST_TOKENS)
    tokens = slice(row.start, row.start + num_tokens)
    weights = call.weights
    num_decays = weights.dt_bias.shape[0] // sizes.num_value_heads  # of a head
    of_decays = slice(head * num_decays, (head + 1) * num_decays)
    made = ChannelDeltaWeights if isinstance(weights, ChannelDeltaWeights) else RecurrenceWeights
    of_head = made(channels(weights.conv, 0), weights.a_log[own], weights.dt_bias[of_decays])
    if isinstance(weights, FixedDecayWeights):
        of_head = FixedDecayWeights.of(of_head.a_log, of_head.conv.shape[0])
    if isinstance(weights, StateSpaceWeights):
        steps, bias = (weights.least_step, weights.most_step), channels(weights.conv_bias, 0)
        of_head = StateSpaceWeights(of_head.conv, of_head.a_log, of_head.dt_bias, bias, weights.skip[own], *steps)
    qkv, a, b = channels(call.qkv[tokens], 1), call.a[tokens, of_decays].clone(), call.b[tokens, own].clone()
    folded = call.rows.folded[row.row : row.row + 1].clone()

    def sample(path: str, layer: int, out: Tensor) -> RecurrenceSample:
        of_row = SampledRow(row.row, row.start, num_tokens, row.first)
        return RecurrenceSample(path, layer, head, of_row, kept, folded, qkv, a, b, of_head, out[tokens, own].clone())

    return sample
