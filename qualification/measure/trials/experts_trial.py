"""The trial of a mixture's products in a qualification: wrong experts, checks on hostile inputs, the timed call."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.experts.paths import RunExperts
from kernels.experts.shape import ExpertsShape
from kernels.vocabulary.shape import Dtype
from qualification.evidence.evidence import Check, Invariance
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.experts_checks import check_experts
from qualification.measure.checks.references import References
from qualification.measure.faults.experts_faults import ExpertsFault, can_show_in, trial_shapes, wrong_experts
from qualification.measure.inputs.experts_inputs import ExpertsCase, even_case, experts_cases, tested_rows
from qualification.measure.orders.experts_order import check_experts_order

Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ExpertsPassedWrongly:
    """A fault that no check refused, or right experts that one did."""

    fault: ExpertsFault
    shape: ExpertsShape


class ExpertsTrial:
    """The trial of experts."""

    def passed_wrongly(
        self, dtypes: frozenset[Dtype], device: torch.device, *, seed: int
    ) -> tuple[ExpertsPassedWrongly, ...]:
        found = []
        with one_thread():
            for shape in (shape for dtype in Dtype if dtype in dtypes for shape in trial_shapes(dtype)):
                inputs, references = list(experts_cases(shape, device, seed=seed)), References()
                for fault in (fault for fault in ExpertsFault if can_show_in(fault, shape)):
                    run = wrong_experts(fault)
                    # The first case that refuses a fault decides.
                    passes = all(check.is_passed for case in inputs for check in check_experts(run, [case], references))
                    if passes is not (fault is ExpertsFault.NONE):
                        found.append(ExpertsPassedWrongly(fault, shape))
        return tuple(found)

    def tested(self, shape: ExpertsShape, *, is_cpu: bool) -> tuple[int, int]:
        num_rows = tested_rows(shape, is_cpu=is_cpu)
        return num_rows, num_rows

    def check(
        self,
        shape: ExpertsShape,
        run: RunExperts,
        device: torch.device,
        *,
        seed: int,
        references: References,
    ) -> tuple[Check, ...]:
        return check_experts(run, experts_cases(shape, device, seed=seed), references)

    def check_order(
        self, shape: ExpertsShape, run: RunExperts, device: torch.device, *, seed: int, order: str
    ) -> Invariance:
        return check_experts_order(run, shape, device, seed=seed, order=order)

    def timed_call(self, shape: ExpertsShape, run: RunExperts, device: torch.device, *, seed: int) -> tuple[Call, int]:
        """Experts are visited evenly, as many as the rows can visit: what is read follows from the shape."""
        return _call(run, even_case(shape, device, seed=seed)), 1

    def profiled_calls(self, shape: ExpertsShape, run: RunExperts, device: torch.device, *, seed: int) -> list[Call]:
        """Return calls on the fewest tokens and on both sides of each number at which other kernels may be launched."""
        cases = experts_cases(shape, device, seed=seed)
        return [_call(run, case) for case in cases if case.name.startswith(("fewest", "border"))]

    def calls(self, shape: ExpertsShape, run: RunExperts, device: torch.device, *, seed: int) -> Iterator[Call]:
        for case in experts_cases(shape, device, seed=seed):
            yield _call(run, case)


def _call(run: RunExperts, case: ExpertsCase) -> Call:
    out = torch.empty_like(case.hidden)
    return lambda: run(case.hidden, case.experts, case.weights, case.expert_weights, case.activation, out)
