"""The trial of convolutions in a qualification: wrong ones, checks on hostile inputs, the timed call."""

import torch

from kernels.convolution.calls import ConvolutionState, RunConvolution
from kernels.convolution.shape import ConvolutionShape
from qualification.measure.checks.convolution_checks import check_convolution, run_case
from qualification.measure.checks.references import References
from qualification.measure.checks.sequence_checks import Found
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
    drawn_tokens,
    drawn_weights,
)
from qualification.measure.inputs.sequence_inputs import NUM_DRAFTED, Tokens
from qualification.measure.inputs.state_slots import Slots, convolution_slots
from qualification.measure.orders.convolution_order import check_convolution_order
from qualification.measure.trials.sequence_trial import SequenceTrial


def _faults_of(shape: ConvolutionShape) -> list[ConvolutionFault]:
    return [fault for fault in ConvolutionFault if can_show_in(fault, shape)]


def _make_calls(run: RunConvolution, case: ConvolutionCase, references: References) -> Found:
    return run_case(run, case, references.of_convolution(case))


def _drawn(
    shape: ConvolutionShape, lengths: list[int], device: torch.device, *, seed: int
) -> tuple[Slots[ConvolutionState], list[Tokens]]:
    generator = torch.Generator().manual_seed(seed)
    weights = drawn_weights(shape, generator, device)
    slots = convolution_slots(shape, weights, len(lengths), NUM_DRAFTED, device)
    return slots, [drawn_tokens(shape, Content.PLAIN, length, weights, generator) for length in lengths]


CONVOLUTION_TRIAL: SequenceTrial[ConvolutionShape] = SequenceTrial(
    no_fault=ConvolutionFault.NONE,
    trial_shapes=trial_shapes,
    faults_of=_faults_of,
    wrong=wrong_convolution,
    cases=convolution_cases,
    check_cases=check_convolution,
    order_check=check_convolution_order,
    make_calls=_make_calls,
    drawn=_drawn,
    kept=lambda shape: shape.sizes.state_tensors(shape.dtype, NUM_DRAFTED),
)
