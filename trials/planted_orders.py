"""Paths of each operator whose bits depend on the batch, that the check of orders must refuse."""

from collections.abc import Callable, Iterator
from functools import partial

from planted_kernels import Found, Place

from kernels.vocabulary.operators import Operator
from kernels.vocabulary.recurrence_operator import EVERY_OPERATOR
from qualification.measure.checks.checked import one_thread
from qualification.measure.faults.order_faults import OrderFault, can_show_in, seen_of, trial_shapes


def changing_orders(place: Place) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Yield each fault of each operator, in every dtype; and right paths, to pass."""
    for operator in EVERY_OPERATOR:
        for fault in (fault for fault in OrderFault if can_show_in(fault, operator)):
            yield f"order of {operator.value}: {fault.value}", partial(_changing, fault, operator, place)


def _changing(fault: OrderFault, operator: Operator, place: Place) -> Found:
    shapes = [shape for dtype in place.dtypes for shape in trial_shapes(operator, dtype)]
    num_refused, where = 0, ""
    with one_thread():
        for shape in shapes:
            right = seen_of(OrderFault.NONE, shape, place.device, seed=0)
            seen = right if fault is OrderFault.NONE else seen_of(fault, shape, place.device, seed=0)
            num_refused += not seen.is_passed or seen.digests != right.digests
            where = where or seen.where
    is_caught = num_refused == (0 if fault is OrderFault.NONE else len(shapes))
    return is_caught, {"shapes": len(shapes), "refused": num_refused, "where": where}
