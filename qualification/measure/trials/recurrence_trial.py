"""The trial of recurrences in a qualification: wrong ones, checks on hostile inputs, the timed call."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.recurrence.calls import RunRecurrence
from kernels.recurrence.shape import RecurrenceShape
from kernels.vocabulary.shape import Dtype, Phase
from qualification.evidence.evidence import Check, Invariance
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.recurrence_checks import check_recurrence, run_case
from qualification.measure.checks.references import References
from qualification.measure.faults.recurrence_faults import (
    RecurrenceFault,
    can_show_in,
    trial_shapes,
    wrong_recurrence,
)
from qualification.measure.inputs.recurrence_inputs import (
    NUM_DRAFTED,
    Content,
    drawn_tokens,
    drawn_weights,
    recurrence_cases,
    tested_rows,
)
from qualification.measure.inputs.recurrence_slots import Part, Slots
from qualification.measure.orders.recurrence_order import check_recurrence_order

Call = Callable[[], None]
_TRIED = frozenset({"short", "hostile", "unequal"})  # inputs on which every fault shows
_OF_VERIFY = (RecurrenceFault.NONE, RecurrenceFault.DRAFTS_FOLDED)
_BEFORE = 96  # tokens of a sequence before the timed one of decode: half of a chunk is behind the border


@dataclass(frozen=True, slots=True)
class RecurrencePassedWrongly:
    """A fault that no check refused, or a right recurrence that one did."""

    fault: RecurrenceFault
    shape: RecurrenceShape


class RecurrenceTrial:
    """The trial of recurrences."""

    def passed_wrongly(
        self, dtypes: frozenset[Dtype], device: torch.device, *, seed: int
    ) -> tuple[RecurrencePassedWrongly, ...]:
        found = []
        with one_thread():
            for shape in (shape for dtype in Dtype if dtype in dtypes for shape in trial_shapes(dtype)):
                inputs = [case for case in recurrence_cases(shape, device, seed=seed) if case.name in _TRIED]
                references = References()
                # What is verified differs from other tokens in what is folded.
                tried = _OF_VERIFY if shape.phase is Phase.VERIFY else tuple(RecurrenceFault)
                for fault in (fault for fault in tried if can_show_in(fault, shape)):
                    run = wrong_recurrence(fault)
                    # The first case that refuses a fault decides.
                    passes = all(
                        check.is_passed for case in inputs for check in check_recurrence(run, [case], references)
                    )
                    if passes is not (fault is RecurrenceFault.NONE):
                        found.append(RecurrencePassedWrongly(fault, shape))
        return tuple(found)

    def tested(self, shape: RecurrenceShape, *, is_cpu: bool) -> tuple[int, int]:
        num_rows = tested_rows(shape, is_cpu=is_cpu)
        return num_rows, num_rows

    def check(
        self, shape: RecurrenceShape, run: RunRecurrence, device: torch.device, *, seed: int, references: References
    ) -> tuple[Check, ...]:
        return check_recurrence(run, recurrence_cases(shape, device, seed=seed), references)

    def check_order(
        self, shape: RecurrenceShape, run: RunRecurrence, device: torch.device, *, seed: int, order: str
    ) -> Invariance:
        return check_recurrence_order(run, shape, device, seed=seed, order=order)

    def timed_call(
        self, shape: RecurrenceShape, run: RunRecurrence, device: torch.device, *, seed: int
    ) -> tuple[Call, int]:
        """One prompt of the most tokens, or as many sequences as decode has rows, with half a chunk behind a border."""
        most = tested_rows(shape, is_cpu=device.type == "cpu")
        lengths = (
            [most] if shape.phase is Phase.EXTEND else [_tokens(shape.phase)] * max(1, most // _tokens(shape.phase))
        )
        return _call(shape, run, lengths, device, seed=seed), 1  # the shape counts rows

    def profiled_calls(
        self, shape: RecurrenceShape, run: RunRecurrence, device: torch.device, *, seed: int
    ) -> list[Call]:
        """Return a call on as few tokens as the bucket has."""
        return [_call(shape, run, [shape.rows.lo + 1 if shape.phase is Phase.EXTEND else 1], device, seed=seed)]

    def calls(self, shape: RecurrenceShape, run: RunRecurrence, device: torch.device, *, seed: int) -> Iterator[Call]:
        references = References()
        for case in recurrence_cases(shape, device, seed=seed):
            yield lambda case=case: _run_case(run, case, references)  # type: ignore[misc]


def _tokens(phase: Phase) -> int:
    return 1 + NUM_DRAFTED if phase is Phase.VERIFY else 1


def _run_case(run: RunRecurrence, case: object, references: References) -> None:
    run_case(run, case, references.of_recurrence(case))  # type: ignore[arg-type]


def _call(shape: RecurrenceShape, run: RunRecurrence, lengths: list[int], device: torch.device, *, seed: int) -> Call:
    """Return a call that may be repeated: it leaves what it reads as it is."""
    generator = torch.Generator().manual_seed(seed)
    weights = drawn_weights(shape, generator, device)
    slots = Slots(shape, weights, len(lengths), NUM_DRAFTED, device)
    before = 0 if shape.phase is Phase.EXTEND else _BEFORE
    if before:
        for tensor in slots.state.tensors:
            tensor.zero_()
    parts = []
    for slot, length in enumerate(lengths):
        tokens = drawn_tokens(shape, Content.PLAIN, length, weights, generator)
        parts.append(Part(*tokens, first=before, source=slot if before else slots.zero, target=slot))
    given = slots.given(parts)
    out = given.qkv.new_empty(given.qkv.shape[0], shape.num_value_heads, shape.value_dim)
    return lambda: run(given.qkv, given.a, given.b, weights, given.rows, slots.state, out)
