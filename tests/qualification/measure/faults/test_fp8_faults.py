"""Products with weights of 8 bits: the right one is proven, and each wrong one refused."""

import pytest
import torch

from kernels.linear.paths import LINEAR_PATHS, RunLinear
from kernels.linear.shape import FP8_FORMATS, LinearShape
from qualification.measure.checks.linear_checks import check_linear
from qualification.measure.faults.fp8_faults import Fp8Fault, can_show_in, trial_shapes
from qualification.measure.inputs.linear_inputs import linear_cases, operands_of
from qualification.measure.trials.linear_trial import passed_wrongly_in_8_bits

CPU = torch.device("cpu")
ON_A_CPU = next(path.run for path in LINEAR_PATHS if path.name == "torch.linear.fp8")


def is_proven(run: RunLinear, shape: LinearShape) -> bool:
    cases = linear_cases(shape, operands_of(shape, CPU, seed=0), seed=0)
    return all(check.is_passed for check in check_linear(run, cases))


def test_wrong_scales_and_roundings_are_refused() -> None:
    assert passed_wrongly_in_8_bits(CPU, seed=1) == ()


@pytest.mark.parametrize("shape", trial_shapes(), ids=str)
def test_the_path_of_a_cpu_is_proven(shape: LinearShape) -> None:
    assert shape.weight_format in FP8_FORMATS
    assert ON_A_CPU is not None
    assert is_proven(ON_A_CPU, shape)


def test_each_fault_shows_in_a_shape() -> None:
    assert all(any(can_show_in(fault, shape) for shape in trial_shapes()) for fault in Fp8Fault)
