"""The tensors that a state space keeps of a sequence: those of the gated delta rule, less betas and misses.

Imports no torch.
"""

from kernels.recurrence.sizes import RecurrenceSizes
from kernels.vocabulary.shape import Dtype


def kept_tensors(
    sizes: RecurrenceSizes, dtype: Dtype, state_dtype: Dtype, num_drafted: int = 0
) -> tuple[tuple[tuple[int, ...], Dtype], ...]:
    """Return shape and dtype of each tensor of `RecurrenceState`, of one sequence: betas and misses are empty."""
    *kept, betas, misses = sizes.state_tensors(dtype, state_dtype, num_drafted)
    return *kept, ((0, *betas[0][1:]), betas[1]), ((0, *misses[0][1:]), misses[1])
