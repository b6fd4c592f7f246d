"""The trial of convolutions in a qualification: wrong ones, checks on hostile inputs, the timed call."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.convolution.calls import RunConvolution
from kernels.convolution.shape import ConvolutionShape
from kernels.vocabulary.shape import Dtype, Phase
from qualification.evidence.evidence import Check, Invariance
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.convolution_checks import check_convolution, run_case
from qualification.measure.checks.references import References
from qualification.measure.faults.convolution_faults import (
    ConvolutionFault,
    can_show_in,
    trial_shapes,
    wrong_convolution,
)
from qualification.measure.inputs.convolution_inputs import (
    Content,
    ConvolutionCase,
    convolution_cases,
    drawn_factors,
    drawn_projected,
    tested_rows,
)
from qualification.measure.inputs.convolution_slots import ConvolutionPart, ConvolutionSlots
from qualification.measure.inputs.recurrence_inputs import NUM_DRAFTED
from qualification.measure.orders.convolution_order import check_convolution_order

Call = Callable[[], None]
_BEFORE = 96  # tokens of a sequence before the timed one of decode


@dataclass(frozen=True, slots=True)
class ConvolutionPassedWrongly:
    """A fault that no check refused, or a right convolution that one did."""

    fault: ConvolutionFault
    shape: ConvolutionShape


class ConvolutionTrial:
    """The trial of convolutions."""

    def passed_wrongly(
        self, dtypes: frozenset[Dtype], device: torch.device, *, seed: int
    ) -> tuple[ConvolutionPassedWrongly, ...]:
        found = []
        with one_thread():
            for shape in (shape for dtype in Dtype if dtype in dtypes for shape in trial_shapes(dtype)):
                inputs, references = list(convolution_cases(shape, device, seed=seed)), References()
                for fault in (fault for fault in ConvolutionFault if can_show_in(fault, shape)):
                    run = wrong_convolution(fault)
                    # The first case that refuses a fault decides.
                    passes = all(
                        check.is_passed for case in inputs for check in check_convolution(run, [case], references)
                    )
                    if passes is not (fault is ConvolutionFault.NONE):
                        found.append(ConvolutionPassedWrongly(fault, shape))
        return tuple(found)

    def tested(self, shape: ConvolutionShape, *, is_cpu: bool) -> tuple[int, int]:
        num_rows = tested_rows(shape, is_cpu=is_cpu)
        return num_rows, num_rows

    def check(
        self, shape: ConvolutionShape, run: RunConvolution, device: torch.device, *, seed: int, references: References
    ) -> tuple[Check, ...]:
        return check_convolution(run, convolution_cases(shape, device, seed=seed), references)

    def check_order(
        self, shape: ConvolutionShape, run: RunConvolution, device: torch.device, *, seed: int, order: str
    ) -> Invariance:
        return check_convolution_order(run, shape, device, seed=seed, order=order)

    def timed_call(
        self, shape: ConvolutionShape, run: RunConvolution, device: torch.device, *, seed: int
    ) -> tuple[Call, int]:
        """One prompt of the most tokens, or as many sequences as decode has rows."""
        most, own = tested_rows(shape, is_cpu=device.type == "cpu"), _tokens(shape.phase)
        lengths = [most] if shape.phase is Phase.EXTEND else [own] * max(1, most // own)
        return _call(shape, run, lengths, device, seed=seed), 1  # the shape counts rows

    def profiled_calls(
        self, shape: ConvolutionShape, run: RunConvolution, device: torch.device, *, seed: int
    ) -> list[Call]:
        """Return a call on as few tokens as the bucket has."""
        return [_call(shape, run, [shape.rows.lo + 1 if shape.phase is Phase.EXTEND else 1], device, seed=seed)]

    def calls(self, shape: ConvolutionShape, run: RunConvolution, device: torch.device, *, seed: int) -> Iterator[Call]:
        references = References()
        for case in convolution_cases(shape, device, seed=seed):
            yield lambda case=case: _run_case(run, case, references)  # type: ignore[misc]


def _tokens(phase: Phase) -> int:
    return 1 + NUM_DRAFTED if phase is Phase.VERIFY else 1


def _run_case(run: RunConvolution, case: ConvolutionCase, references: References) -> None:
    run_case(run, case, references.of_convolution(case))


def _call(shape: ConvolutionShape, run: RunConvolution, lengths: list[int], device: torch.device, *, seed: int) -> Call:
    """Return a call that may be repeated: it leaves what it reads as it is."""
    generator = torch.Generator().manual_seed(seed)
    weights = drawn_factors(shape, generator, device)
    slots = ConvolutionSlots(shape, weights, len(lengths), NUM_DRAFTED, device)
    before = 0 if shape.phase is Phase.EXTEND else _BEFORE
    if before:
        slots.state.inputs.zero_()
    parts = [
        ConvolutionPart(
            drawn_projected(shape, Content.PLAIN, length, generator, device),
            before,
            slot if before else slots.zero,
            slot,
        )
        for slot, length in enumerate(lengths)
    ]
    projected, rows = slots.given(parts)
    out = projected.new_empty(projected.shape[0], shape.channels)
    return lambda: run(projected, weights, rows, slots.state, out)
