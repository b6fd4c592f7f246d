"""The trial of a sum over ranks in a qualification: wrong ranks, checks on hostile inputs, the timed call."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.collective.shape import CollectiveShape
from kernels.vocabulary.shape import Dtype
from qualification.evidence.evidence import Check, Invariance
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.collective_checks import RunOnRanks, check_collective, copied
from qualification.measure.faults.collective_faults import CollectiveFault, WrongRanks, can_show_in, trial_shapes
from qualification.measure.inputs.collective_inputs import (
    CollectiveCase,
    collective_case,
    collective_cases,
    tested_rows,
)
from qualification.measure.orders.collective_order import check_collective_order

Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class CollectivePassedWrongly:
    """A fault that no check refused, or right ranks that one did."""

    fault: CollectiveFault
    shape: CollectiveShape


class CollectiveTrial:
    """The trial of sums over ranks: `run` is a `RunOnRanks`, which `rank_group.py` makes of a path."""

    def passed_wrongly(
        self, dtypes: frozenset[Dtype], device: torch.device, *, seed: int
    ) -> tuple[CollectivePassedWrongly, ...]:
        found = []
        with one_thread():
            for shape in (shape for dtype in Dtype if dtype in dtypes for shape in trial_shapes(dtype)):
                for fault in (fault for fault in CollectiveFault if can_show_in(fault, shape)):
                    checks = check_collective(WrongRanks(fault), collective_cases(shape, device, seed=seed))
                    if all(check.is_passed for check in checks) is not (fault is CollectiveFault.NONE):
                        found.append(CollectivePassedWrongly(fault, shape))
        return tuple(found)

    def tested(self, shape: CollectiveShape, *, is_cpu: bool) -> tuple[int, int]:
        num_rows = tested_rows(shape, is_cpu=is_cpu)
        return num_rows, num_rows

    def check(
        self,
        shape: CollectiveShape,
        run: Any,
        device: torch.device,
        *,
        seed: int,
        references: object,  # noqa: ARG002
    ) -> tuple[Check, ...]:
        """`references` are not kept: fp64 of a sum takes about as long as its inputs."""
        return check_collective(run, collective_cases(shape, device, seed=seed))

    def check_order(
        self, shape: CollectiveShape, run: Any, device: torch.device, *, seed: int, order: str
    ) -> Invariance:
        return check_collective_order(run, shape, device, seed=seed, order=order)

    def timed_call(self, shape: CollectiveShape, run: Any, device: torch.device, *, seed: int) -> tuple[Call, int]:
        """Time the most rows. What is written is read again: of sums that grow only the time is of interest."""
        return _call(run, collective_case(shape, "most", device, seed=seed)), 1

    def profiled_calls(self, shape: CollectiveShape, run: Any, device: torch.device, *, seed: int) -> list[Call]:
        """Profile a call on the fewest rows."""
        return [_call(run, collective_case(shape, "fewest", device, seed=seed))]

    def calls(self, shape: CollectiveShape, run: Any, device: torch.device, *, seed: int) -> Iterator[Call]:
        for case in collective_cases(shape, device, seed=seed):
            yield _call(run, case)


def _call(run: RunOnRanks, case: CollectiveCase) -> Call:
    part, out, follows = case.parts[0].clone(), torch.empty_like(case.parts[0]), copied(case.follows)
    return lambda: run(case, part, follows, out)
