"""`torch.recurrence.cpu.fixed_decay`: lightning attention by PyTorch, row by row and chunk by chunk."""

from functools import partial

import torch
from torch import Tensor

from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.eager_rows import LEAST_DECAY, Part, compute_rows
from kernels.recurrence.fixed_decay.weights import FixedDecayWeights
from kernels.recurrence.sizes import CHUNK
from kernels.recurrence.state_space.eager import ChunkRow


def run_fixed_decay_eager(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
) -> None:
    """Fill `out`, and the states of the rows: see `RunRecurrence`.

    qkv  queries, keys and values as the rule takes them: there is no convolution; a, b are not read
    """
    del a, b
    assert isinstance(weights, FixedDecayWeights), "a shape of the form fixed-decay has such weights"
    compute_rows(partial(_Row, weights, state), qkv, (), rows, out)


class _Row(ChunkRow):
    """A row whose tokens have no gates."""

    def __init__(
        self, weights: FixedDecayWeights, state: RecurrenceState, first: int, folded: int, source: int
    ) -> None:
        super().__init__(state.sizes(weights), state, CHUNK, first, folded, source)
        self._weights = weights

    def computed(
        self, part: Part, begin: int, new: range, gates: tuple[Tensor, ...], state: Tensor, dtype: torch.dtype
    ) -> Tensor:
        del gates, dtype  # there are no gates, and nothing is rounded
        sizes, own = self._sizes, slice(new.start - begin, new.stop - begin)
        given = self.window(begin, new.stop)
        size = sizes.num_key_heads * sizes.key_dim
        queries, keys = (
            given[:, columns].view(CHUNK, sizes.num_key_heads, -1) for columns in (slice(size), slice(size, 2 * size))
        )
        values = given[:, 2 * size :].view(CHUNK, sizes.num_value_heads, -1)
        part.keys[own], part.added[own] = keys[own], values[own]
        part.decays[own] = (-torch.exp(self._weights.a_log)).clamp(min=LEAST_DECAY)
        return self.read(part, queries, state)
