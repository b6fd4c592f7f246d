"""The tensors that a delta rule of channels keeps of a sequence: decays of each channel, and no betas or misses.

Imports no torch.
"""

from kernels.recurrence.sizes import RecurrenceSizes
from kernels.vocabulary.shape import Dtype


def kept_tensors(
    sizes: RecurrenceSizes, dtype: Dtype, state_dtype: Dtype, num_drafted: int = 0
) -> tuple[tuple[tuple[int, ...], Dtype], ...]:
    """Return shape and dtype of each tensor of `RecurrenceState`, of one sequence: betas and misses are empty.

    Decays are [ring, value_heads, key_dim].
    """
    *kept, decays, betas, misses = sizes.state_tensors(dtype, state_dtype, num_drafted)
    of_channels = ((*decays[0], sizes.key_dim), decays[1])
    return *kept, of_channels, ((0, *betas[0][1:]), betas[1]), ((0, *misses[0][1:]), misses[1])
