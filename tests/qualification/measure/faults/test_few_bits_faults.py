"""Products with weights of 8 and 4 bits: the path of a CPU is proven, and sums that end early are right."""

import pytest
import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import BLOCK, Fp8RowsWeight, Fp8Weight
from kernels.linear.formats.int4_formats import INT4_FORMATS
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import LinearShape
from qualification.measure.checks.linear_checks import check_linear
from qualification.measure.faults import fp8_faults, int4_faults
from qualification.measure.inputs.linear_inputs import linear_cases, operands_of
from qualification.model.forward.bounded import Bounded, Precision, chunks_of, product

CPU = torch.device("cpu")
SHAPES = [*fp8_faults.trial_shapes(), *int4_faults.trial_shapes()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_path_of_a_cpu_is_proven(shape: LinearShape) -> None:
    kind = "int4" if shape.weight_format in INT4_FORMATS else "fp8"
    run = next(path.run for path in LINEAR_PATHS if path.name == f"torch.linear.{kind}")
    assert run is not None
    cases = linear_cases(shape, operands_of(shape, CPU, seed=0), seed=0)
    assert all(check.is_passed for check in check_linear(run, cases))


def test_sums_of_8_bits_that_end_after_128_columns_are_right() -> None:
    """The checks of paths, and those of layers."""
    shape = fp8_faults.trial_shapes()[-1]

    def run(x: Tensor, weight: Fp8Weight, _bias: Tensor | None, _epilogue: Epilogue, out: Tensor) -> None:
        out.copy_(fp8_faults.summed_by_units(x, weight, BLOCK))

    cases = list(linear_cases(shape, operands_of(shape, CPU, seed=0), seed=0))
    for check in check_linear(run, cases):
        assert check.is_passed, check
    case = next(it for it in cases if it.name == "positive")
    weight = case.operands.weight
    assert isinstance(weight, Fp8RowsWeight)
    exact = Bounded.exact(weight.as_multiplied(case.x))
    bounded = product(exact, chunks_of(weight.dequantized()), None, Precision(torch.bfloat16), of_8_bits=True)
    off = (fp8_faults.summed_by_units(case.x, weight, BLOCK) - bounded.truth).abs() / bounded.limit
    wrong = (fp8_faults.summed_by_units(case.x, weight, case.x.shape[1]) - bounded.truth).abs() / bounded.limit
    assert off.max() < 1 < wrong.max()
