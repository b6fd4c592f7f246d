"""The Triton convolution: hostile inputs, and PyTorch's bits however sequences are cut, decoded or verified."""

import pytest
import torch

from kernels.convolution.eager_path import run_convolution_eager
from kernels.convolution.launch import run_convolution
from kernels.convolution.shape import ConvolutionShape
from kernels.convolution.sizes import ConvolutionSizes
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.measure.checks.convolution_checks import check_convolution, run_case
from qualification.measure.checks.references import References
from qualification.measure.inputs.convolution_inputs import convolution_cases

SIZES = ConvolutionSizes(130, 3, has_bias=True)  # channels of two programs, width of LFM2


# bf16 is silent garbage in Triton's interpreter; fp16 takes the same way through the kernels.
@pytest.mark.parametrize(
    ("phase", "rows", "name"),
    [
        (Phase.EXTEND, TokenRows.LE_128, "borders"),
        (Phase.EXTEND, TokenRows.LE_16, "short"),
        (Phase.DECODE, TokenRows.LE_16, "hostile"),
        (Phase.VERIFY, TokenRows.LE_16, "short"),
    ],
)
def test_a_convolution_is_right_and_has_the_bits_of_pytorch(
    device: torch.device, phase: Phase, rows: TokenRows, name: str
) -> None:
    shape, references = ConvolutionShape.of(SIZES, phase, Dtype.FP16, rows), References()
    [case] = [it for it in convolution_cases(shape, device, seed=3) if it.name == name]
    checks = check_convolution(run_convolution, [case], references)
    assert [check for check in checks if not check.is_passed] == []
    both = [run_case(run, case, references.of_convolution(case)) for run in (run_convolution, run_convolution_eager)]
    assert torch.equal(both[0].out, both[1].out)
