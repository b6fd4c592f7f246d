"""Recurrences as an operator: their path of a CPU is proven, with one order in all phases, and a wrong one refused."""

from dataclasses import replace

import torch

from kernels.recurrence.paths import RECURRENCE_PATHS
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.system.device import read_fingerprint
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.evidence.anchors import class_of
from qualification.evidence.shape_text import parse_shape
from qualification.measure.faults.recurrence_faults import RecurrenceFault, wrong_recurrence
from qualification.measure.qualify import Bench, qualify_path

CPU = torch.device("cpu")
EAGER = {path.limits.form: path for path in RECURRENCE_PATHS if Device.CPU in path.limits.devices}
DECODE = RecurrenceShape.of(
    RecurrenceSizes(1, 2, 8, 16, 4), Phase.DECODE, Dtype.FP32, Dtype.FP32, TokenRows.LE_16
)  # fmt: skip
PROMPT = replace(DECODE, phase=Phase.EXTEND)


def test_a_recurrence_is_proven_with_one_order_in_all_phases() -> None:
    bench = Bench(read_fingerprint(CPU), CPU, timing_budget_s=0.01, may_profile=False)
    path = EAGER[RecurrenceForm.GATED_DELTA]
    found = [qualify_path(shape, path, bench) for shape in (PROMPT, DECODE)]
    assert [entry.failure for entry in found] == [None, None]
    assert [entry.is_proven for entry in found] == [True, True]
    orders = [entry.invariance for entry in found]
    assert all(seen is not None and seen.is_passed for seen in orders)
    assert len({seen.digests for seen in orders if seen is not None}) == 1
    assert class_of(PROMPT) == class_of(DECODE)
    wrong = replace(path, run=wrong_recurrence(RecurrenceFault.READ_BEFORE_UPDATE), order=None)
    assert not qualify_path(DECODE, wrong, bench).is_proven


def test_a_recurrence_is_named_by_one_line() -> None:
    assert str(DECODE) == "recurrence decode fp32/state-fp32 h1:2 d8:16 conv4 r-le_16"
    assert parse_shape(str(DECODE)) == DECODE
    space = replace(DECODE, form=RecurrenceForm.STATE_SPACE)
    assert str(space) == "recurrence decode fp32/state-fp32 h1:2 d8:16 conv4 state-space r-le_16"
    assert parse_shape(str(space)) == space
    assert [it.code.value for it in EAGER[RecurrenceForm.GATED_DELTA].limits.rejections(space)] == ["layout"]
