"""Convolutions as an operator: their path of a CPU is proven with one order, and every wrong one refused."""

from dataclasses import replace

import pytest
import torch

from kernels.convolution.paths import CONVOLUTION_PATHS
from kernels.convolution.shape import ConvolutionShape
from kernels.convolution.sizes import ConvolutionSizes
from kernels.system.device import read_fingerprint
from kernels.vocabulary.recurrence_operator import CONVOLUTION
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.evidence.anchors import class_of
from qualification.evidence.shape_text import parse_shape
from qualification.measure.faults.convolution_faults import ConvolutionFault, wrong_convolution
from qualification.measure.faults.order_faults import orders_passed_wrongly
from qualification.measure.qualify import Bench, qualify_path
from qualification.measure.trials.convolution_trial import CONVOLUTION_TRIAL

CPU = torch.device("cpu")
[EAGER] = [path for path in CONVOLUTION_PATHS if path.name == "torch.convolution.cpu"]
DECODE = ConvolutionShape.of(ConvolutionSizes(24, 3), Phase.DECODE, Dtype.BF16, TokenRows.LE_16)
PROMPT = replace(DECODE, phase=Phase.EXTEND)


def test_a_convolution_is_proven_with_one_order_in_all_phases() -> None:
    bench = Bench(read_fingerprint(CPU), CPU, timing_budget_s=0.01, may_profile=False)
    found = [qualify_path(replace(PROMPT, phase=phase), EAGER, bench) for phase in (Phase.EXTEND, Phase.DECODE)]
    assert [(entry.failure, entry.is_proven) for entry in found] == [(None, True)] * 2
    assert len({seen.digests for entry in found if (seen := entry.invariance) is not None}) == 1
    assert class_of(PROMPT) == class_of(DECODE)
    wrong = replace(EAGER, run=wrong_convolution(ConvolutionFault.STATE_BEFORE), order=None)
    assert not qualify_path(DECODE, wrong, bench).is_proven


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
def test_no_planted_convolution_passes(dtype: Dtype) -> None:
    assert CONVOLUTION_TRIAL.passed_wrongly(frozenset({dtype}), CPU, seed=0) == ()
    assert orders_passed_wrongly(CONVOLUTION, frozenset({dtype}), CPU, seed=0) == ()


def test_a_convolution_is_named_by_one_line() -> None:
    assert str(DECODE) == "convolution decode bf16 c24 width3 r-le_16"
    biased = replace(DECODE, has_bias=True)
    assert [parse_shape(str(it)) for it in (DECODE, biased)] == [DECODE, biased]
