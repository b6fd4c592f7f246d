"""The tensors that lightning attention keeps of a sequence: a state space's, less inputs of a convolution.

Imports no torch.
"""

from kernels.recurrence.sizes import RecurrenceSizes
from kernels.recurrence.state_space import kept as of_space
from kernels.vocabulary.shape import Dtype


def kept_tensors(
    sizes: RecurrenceSizes, dtype: Dtype, state_dtype: Dtype, num_drafted: int = 0
) -> tuple[tuple[tuple[int, ...], Dtype], ...]:
    """Return shape and dtype of each tensor of `RecurrenceState`, of one sequence: inputs, betas, misses are empty."""
    states, inputs, *kept = of_space.kept_tensors(sizes, dtype, state_dtype, num_drafted)
    return states, ((0, *inputs[0][1:]), inputs[1]), *kept
