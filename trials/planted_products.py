"""Wrong products with weights, wrong products of experts, wrong recurrences, that the checks must refuse."""

from collections.abc import Callable, Iterator
from functools import partial

from planted_kernels import Found, Place

from qualification.evidence.evidence import Check
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.experts_checks import check_experts
from qualification.measure.checks.linear_checks import check_linear
from qualification.measure.checks.recurrence_checks import check_recurrence
from qualification.measure.faults import experts_faults, linear_faults, recurrence_faults
from qualification.measure.faults.experts_faults import ExpertsFault, wrong_experts
from qualification.measure.faults.linear_faults import LinearFault, wrong_linear
from qualification.measure.faults.recurrence_faults import RecurrenceFault, wrong_recurrence
from qualification.measure.inputs.experts_inputs import experts_cases
from qualification.measure.inputs.linear_inputs import linear_cases, operands_of
from qualification.measure.inputs.recurrence_inputs import recurrence_cases

Checks = tuple[Check, ...]


def wrong_products(place: Place) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Yield each fault of the three operators, in every dtype and shape in which it shows; and right ones, to pass."""
    for fault in LinearFault:
        yield f"wrong product: {fault.value}", partial(_product, fault, place)
    for expert_fault in ExpertsFault:
        yield f"wrong experts: {expert_fault.value}", partial(_experts, expert_fault, place)
    for recurrence_fault in RecurrenceFault:
        yield f"wrong recurrence: {recurrence_fault.value}", partial(_recurrence, recurrence_fault, place)


def _product(fault: LinearFault, place: Place) -> Found:
    shapes = (it for dtype in place.dtypes for it in linear_faults.trial_shapes(dtype))
    found: dict[str, Checks] = {}
    with one_thread():
        for shape in (it for it in shapes if linear_faults.can_show_in(fault, it)):
            inputs = linear_cases(shape, operands_of(shape, place.device, seed=0), seed=0)
            found[str(shape)] = check_linear(wrong_linear(fault, shape), inputs)
    return _judged(found, is_right=fault is LinearFault.NONE)


def _experts(fault: ExpertsFault, place: Place) -> Found:
    shapes = (it for dtype in place.dtypes for it in experts_faults.trial_shapes(dtype))
    found: dict[str, Checks] = {}
    with one_thread():
        for shape in (it for it in shapes if experts_faults.can_show_in(fault, it)):
            found[str(shape)] = check_experts(wrong_experts(fault), experts_cases(shape, place.device, seed=0))
    return _judged(found, is_right=fault is ExpertsFault.NONE)


def _recurrence(fault: RecurrenceFault, place: Place) -> Found:
    shapes = (it for dtype in place.dtypes for it in recurrence_faults.trial_shapes(dtype))
    found: dict[str, Checks] = {}
    with one_thread():
        for shape in (it for it in shapes if recurrence_faults.can_show_in(fault, it)):
            found[str(shape)] = check_recurrence(wrong_recurrence(fault), recurrence_cases(shape, place.device, seed=0))
    return _judged(found, is_right=fault is RecurrenceFault.NONE)


def _judged(found: dict[str, Checks], *, is_right: bool) -> Found:
    failed = {shape: sorted(it.name for it in checks if not it.is_passed) for shape, checks in found.items()}
    num_refused = sum(bool(names) for names in failed.values())
    by = sorted({name for names in failed.values() for name in names})
    is_caught = bool(failed) and num_refused == (0 if is_right else len(failed))
    return is_caught, {"shapes": len(failed), "refused": num_refused, "by": by}
