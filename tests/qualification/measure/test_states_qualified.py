"""Recurrences and convolutions as operators: the path of a CPU is proven with one order, and a wrong one refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.catalog import any_path_named
from kernels.convolution.shape import ConvolutionShape
from kernels.convolution.sizes import ConvolutionSizes
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.system.device import read_fingerprint
from kernels.vocabulary.path import Reject
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.evidence.anchors import class_of
from qualification.evidence.shape_text import parse_shape
from qualification.measure.faults.convolution_faults import ConvolutionFault, wrong_convolution
from qualification.measure.faults.recurrence_faults import RecurrenceFault, wrong_recurrence
from qualification.measure.qualify import Bench, qualify_path

CPU, ROWS = torch.device("cpu"), TokenRows.LE_16
RECURRENCE = RecurrenceShape.of(RecurrenceSizes(1, 2, 8, 16, 4), Phase.DECODE, Dtype.FP32, Dtype.FP32, ROWS)
CONVOLUTION = ConvolutionShape.of(ConvolutionSizes(24, 3), Phase.DECODE, Dtype.BF16, ROWS)
OF_RECURRENCE, OF_CONVOLUTION = any_path_named("torch.recurrence.cpu"), any_path_named("torch.convolution.cpu")


@pytest.mark.parametrize(
    ("path", "decode", "wrong"),
    [
        (OF_RECURRENCE, RECURRENCE, wrong_recurrence(RecurrenceFault.READ_BEFORE_UPDATE)),
        (OF_CONVOLUTION, CONVOLUTION, wrong_convolution(ConvolutionFault.STATE_BEFORE)),
    ],
    ids=["recurrence", "convolution"],
)
def test_a_state_is_proven_with_one_order_in_all_phases(path: Any, decode: Any, wrong: Any) -> None:
    bench = Bench(read_fingerprint(CPU), CPU, timing_budget_s=0.01, may_profile=False)
    prompt = replace(decode, phase=Phase.EXTEND)
    found = [qualify_path(shape, path, bench) for shape in (prompt, decode)]
    assert [(entry.failure, entry.is_proven) for entry in found] == [(None, True)] * 2
    orders = [entry.invariance for entry in found]
    assert all(seen is not None and seen.is_passed for seen in orders)
    assert len({seen.digests for seen in orders if seen is not None}) == 1
    assert class_of(prompt) == class_of(decode)
    assert not qualify_path(decode, replace(path, run=wrong, order=None), bench).is_proven


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        (RECURRENCE, "recurrence decode fp32/state-fp32 h1:2 d8:16 conv4 r-le_16"),
        (
            replace(RECURRENCE, form=RecurrenceForm.STATE_SPACE),
            "recurrence decode fp32/state-fp32 h1:2 d8:16 conv4 state-space r-le_16",
        ),
        (CONVOLUTION, "convolution decode bf16 c24 width3 r-le_16"),
        (replace(CONVOLUTION, has_bias=True), "convolution decode bf16 c24 width3 bias r-le_16"),
    ],
    ids=str,
)
def test_a_state_is_named_by_one_line(shape: Any, line: str) -> None:
    assert str(shape) == line
    assert parse_shape(line) == shape


def test_a_recurrence_of_another_form_is_rejected() -> None:
    of_space = replace(RECURRENCE, form=RecurrenceForm.STATE_SPACE)
    assert [it.code for it in OF_RECURRENCE.limits.rejections(of_space)] == [Reject.LAYOUT]  # type: ignore[arg-type]
