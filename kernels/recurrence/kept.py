"""The tensors that a layer keeps of a sequence, by the form of its recurrence. Imports no torch."""

from kernels.recurrence.channel_delta import kept as of_channels
from kernels.recurrence.fixed_decay import kept as of_fixed
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.recurrence.state_space import kept as of_space
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.shape import Dtype


def kept_tensors(
    form: RecurrenceForm, sizes: RecurrenceSizes, dtype: Dtype, state_dtype: Dtype, num_drafted: int = 0
) -> tuple[tuple[tuple[int, ...], Dtype], ...]:
    """Return shape and dtype of each tensor of `RecurrenceState`, of one sequence; see `RecurrenceSizes`."""
    of_form = {
        RecurrenceForm.GATED_DELTA: RecurrenceSizes.state_tensors,
        RecurrenceForm.STATE_SPACE: of_space.kept_tensors,
        RecurrenceForm.FIXED_DECAY: of_fixed.kept_tensors,
        RecurrenceForm.CHANNEL_DELTA: of_channels.kept_tensors,
    }
    return of_form[form](sizes, dtype, state_dtype, num_drafted)
