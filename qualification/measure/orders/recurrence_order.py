"""The check of a path of recurrences that claims an order: a sequence whole, cut anywhere, decoded, beside others."""

import torch

from kernels.recurrence.calls import RunRecurrence
from kernels.recurrence.shape import RecurrenceShape
from qualification.evidence.evidence import Invariance
from qualification.measure.inputs.recurrence_inputs import Content, drawn_tokens, drawn_weights
from qualification.measure.inputs.sequence_inputs import NUM_DRAFTED
from qualification.measure.inputs.state_slots import recurrence_slots
from qualification.measure.orders.sequence_order import MOST_NEIGHBOURS, Pool, check_sequences

_SEED = 109
_POOL = (Content.PLAIN, Content.KEEPS, Content.FORGETS)
_LENGTH = {"cpu": 72, "cuda": 136}  # tokens of each sequence of the pool: one chunk or two, and a part of the next
_TRIED_BY = "cpu"  # whose sizes show each fault: wrong paths are PyTorch's, of some 150 small launches a row
_CUTS = ((1, 62, 2), (64,), (63, 1, 1), (17, 5, 31, 3), (130, 1))  # tokens of calls, in turn
_NEIGHBOURS = (1, 3, 16, 65)  # tokens of neighbours, in turn


def check_recurrence_order(
    run: RunRecurrence,
    shape: RecurrenceShape,
    device: torch.device,
    *,
    seed: int,
    order: str,
    ends_early: bool = False,
    is_trial: bool = False,
) -> Invariance:
    """Return what was seen of a path. Errors of a call are not caught. `is_trial`: of one that the check is tried on.

    The sequences of the pool are the same for all shapes of a class, and so are the digests.
    """
    sizes = _TRIED_BY if is_trial else device.type
    generator = torch.Generator().manual_seed(seed + _SEED)
    weights = drawn_weights(shape, generator, device)
    pool = Pool(
        {it.value: drawn_tokens(shape, it, _LENGTH[sizes], weights, generator) for it in _POOL},
        [drawn_tokens(shape, it, max(_NEIGHBOURS), weights, generator) for it in Content],
        _NEIGHBOURS,
        MOST_NEIGHBOURS[sizes],
        _CUTS,
    )
    return check_sequences(
        run, pool, shape.phase, lambda count: recurrence_slots(shape, weights, count, NUM_DRAFTED, device),
        order=order, ends_early=ends_early,
    )  # fmt: skip
