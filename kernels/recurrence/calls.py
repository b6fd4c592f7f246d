"""The inputs of a recurrence besides its tokens: weights, the rows of a step, and the states in their slots."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.recurrence.sizes import RecurrenceSizes
from kernels.vocabulary.shape import Phase


@dataclass(frozen=True, slots=True)
class RecurrenceWeights:
    """conv     [conv_dim, width] in the dtype of the tokens: of each channel the factors, that of the newest token last
    a_log    [value_heads] fp32: logarithm of the factor of each head's decay
    dt_bias  [value_heads] fp32: added to `a`
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, slots=True)
class RecurrenceState:
    """The states of one layer, each [slots, ...]: `RecurrenceSizes.state_tensors` has shapes and dtypes.

    states  [slots, value_heads, key_dim, value_dim]: behind the last border, a multiple of 64 tokens
    inputs  [slots, ring, conv_dim]: the latest tokens before their convolution
    keys    [slots, ring, key_heads, key_dim]: of the tokens behind the border, normed
    values  [slots, ring, value_heads, value_dim]: what they add to the state, beta * (v - what the state has of it)
    decays  [slots, ring, value_heads] fp32: logarithms of their decays
    betas   [slots, ring, value_heads] fp32
    misses  [slots, ring of 16, value_heads, value_dim] fp32: of the tokens of a block that is not full, beta *
            (v - what the state has of it without that block); only of paths whose order of sums needs it

    The token of position p stands at p % ring. Of a state space keys are B, which is not normed, and values what each
    token adds, step * x; betas and misses have no places.
    """

    states: Tensor
    inputs: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    betas: Tensor
    misses: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, in the order of `RecurrenceSizes.state_tensors`."""
        return self.states, self.inputs, self.keys, self.values, self.decays, self.betas, self.misses

    def sizes(self, weights: RecurrenceWeights) -> RecurrenceSizes:
        """Return the sizes of the layer whose states and weights these are."""
        _, num_value_heads, key_dim, value_dim = self.states.shape
        return RecurrenceSizes(self.keys.shape[2], num_value_heads, key_dim, value_dim, weights.conv.shape[1])


@dataclass(frozen=True, slots=True)
class RecurrenceRows:
    """The rows of a call, each of one sequence, and the slots of their states. Tensors on the device of the tokens.

    starts, stops  [R] int32: the row's tokens are [start, stop) of the call's; a padding row may have none
    firsts         [R] int32: tokens of the sequence before the row's first one
    folded         [R] int32: tokens that the state in the source slot is folded up to, a multiple of 64:
                   firsts // 64 * 64, or 64 less behind a step of `VERIFY`
    sources        [R] int64: the slot that a row's state is read from; no other row writes to it
    targets        [R] int64: the slot that its state behind its last token is written to
    write_tokens   [W] int64: tokens of the call behind which the state of their row is written; not of `VERIFY`
    write_slots    [W] int64: to these slots too
    longest        host bound: tokens of the longest row
    phase          DECODE: one token a row. VERIFY: a few, of which the last ones may be taken back: the state is not
                   folded beyond the row's first token. EXTEND: any number, of prompts or not

    Before a sequence's first token its state is zero, whatever the source slot holds.
    """

    starts: Tensor
    stops: Tensor
    firsts: Tensor
    folded: Tensor
    sources: Tensor
    targets: Tensor
    write_tokens: Tensor
    write_slots: Tensor
    longest: int
    phase: Phase


# Fills out [T, value_heads, value_dim], its last argument, and the rows' states; zero where a token has no row.
# qkv [T, conv_dim]: queries, keys and values before their convolution, whose rows may be further apart than they are
# long. a, b [T, value_heads]: of the decays and of the betas. All in one dtype.
RunRecurrence = Callable[
    [Tensor, Tensor, Tensor, RecurrenceWeights, RecurrenceRows, RecurrenceState, Tensor],
    None,
]
