"""The trial of operators that keep a state of each sequence: wrong ones, checks on hostile inputs, the timed call."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, islice
from typing import Any, Generic

import torch

from kernels.vocabulary.shape import Dtype, Phase
from qualification.evidence.evidence import Check, Invariance
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.references import References
from qualification.measure.inputs.sequence_inputs import NUM_DRAFTED, Shape, StateShape, Tokens, tested_rows
from qualification.measure.inputs.state_slots import Part, Run, Slots, has_far_room

Call = Callable[[], None]
_BEFORE = 96  # tokens of a sequence before the timed one of decode: half of a recurrence's chunk is behind the border


@dataclass(frozen=True, slots=True)
class PassedWrongly:
    """A fault that no check refused, or a right path that one did."""

    fault: Enum
    shape: StateShape


@dataclass(frozen=True, slots=True)
class SequenceTrial(Generic[Shape]):
    """The trial of one of these operators.

    no_fault      the fault of a path that is right
    trial_shapes  those that planted faults are tried on
    faults_of     the faults that show in a shape, `no_fault` among them
    wrong         the path with a fault
    cases         (shape, device, seed=): every hostile input
    tried         names of those on which every fault shows; None: all
    check_cases   (run, cases, references): the worst result of each check
    order_check   (run, shape, device, seed=, order=): whether bits depend on the batch
    make_calls    (run, case, references): makes the calls of a case
    drawn         (shape, lengths, device, seed=): a slot for each of these sequences, and their tokens
    kept          shape and dtype of each tensor of a sequence's state, where drafted tokens are taken back
    """

    no_fault: Enum
    trial_shapes: Callable[[Dtype], Sequence[Shape]]
    faults_of: Callable[[Shape], Sequence[Enum]]
    wrong: Callable[[Any], Run]
    cases: Callable[..., Iterator[Any]]
    check_cases: Callable[..., tuple[Check, ...]]
    order_check: Callable[..., Invariance]
    make_calls: Callable[[Run, Any, References], object]
    drawn: Callable[..., tuple[Slots[Any], list[Tokens]]]
    kept: Callable[[Shape], Sequence[tuple[tuple[int, ...], Dtype]]]
    tried: frozenset[str] | None = None

    def passed_wrongly(self, dtypes: frozenset[Dtype], device: torch.device, *, seed: int) -> tuple[PassedWrongly, ...]:
        found = []
        with one_thread():
            for shape in (shape for dtype in Dtype if dtype in dtypes for shape in self.trial_shapes(dtype)):
                every, references = self.cases(shape, device, seed=seed), References()
                inputs = [case for case in every if self.tried is None or case.name in self.tried]
                for fault in self.faults_of(shape):
                    run = self.wrong(fault)
                    # The first case that refuses a fault decides.
                    passes = all(
                        check.is_passed for case in inputs for check in self.check_cases(run, [case], references)
                    )
                    if passes is not (fault is self.no_fault):
                        found.append(PassedWrongly(fault, shape))
        return tuple(found)

    def tested(self, shape: Shape, *, is_cpu: bool) -> tuple[int, int]:
        num_rows = tested_rows(shape, is_cpu=is_cpu)
        return num_rows, num_rows

    def check(
        self, shape: Shape, run: Run, device: torch.device, *, seed: int, references: References
    ) -> tuple[Check, ...]:
        every = chain(self.cases(shape, device, seed=seed), self.far_cases(shape, device, seed=seed))
        return self.check_cases(run, every, references)

    def far_cases(self, shape: Shape, device: torch.device, *, seed: int) -> Iterator[Any]:
        """Yield the first input again, by slots past number 2**32 of a state; nothing where there is no room."""
        if has_far_room(self.kept(shape), device):
            for case in islice(self.cases(shape, device, seed=seed), 1):
                yield replace(case, name="far_slots", is_far=True)

    def check_order(self, shape: Shape, run: Run, device: torch.device, *, seed: int, order: str) -> Invariance:
        return self.order_check(run, shape, device, seed=seed, order=order)

    def timed_call(self, shape: Shape, run: Run, device: torch.device, *, seed: int) -> tuple[Call, int]:
        """One prompt of the most tokens, or as many sequences as decode has rows."""
        most = tested_rows(shape, is_cpu=device.type == "cpu")
        own = 1 + NUM_DRAFTED if shape.phase is Phase.VERIFY else 1
        lengths = [most] if shape.phase is Phase.EXTEND else [own] * max(1, most // own)
        return self._call(shape, run, lengths, device, seed=seed), 1  # the shape counts rows

    def profiled_calls(self, shape: Shape, run: Run, device: torch.device, *, seed: int) -> list[Call]:
        """Return a call on as few tokens as the bucket has."""
        lengths = [shape.rows.lo + 1 if shape.phase is Phase.EXTEND else 1]
        return [self._call(shape, run, lengths, device, seed=seed)]

    def calls(self, shape: Shape, run: Run, device: torch.device, *, seed: int) -> Iterator[Call]:
        references = References()
        for case in self.cases(shape, device, seed=seed):
            yield lambda case=case: self._make(run, case, references)  # type: ignore[misc]

    def _make(self, run: Run, case: object, references: References) -> None:
        self.make_calls(run, case, references)

    def _call(self, shape: Shape, run: Run, lengths: list[int], device: torch.device, *, seed: int) -> Call:
        """Return a call that may be repeated: it leaves what it reads as it is."""
        slots, tokens = self.drawn(shape, lengths, device, seed=seed)
        before = 0 if shape.phase is Phase.EXTEND else _BEFORE
        if before:
            for tensor in slots.tensors:
                tensor.zero_()
        parts = [Part(own, before, slot if before else slots.zero, slot) for slot, own in enumerate(tokens)]
        return slots.repeatable(run, parts)
