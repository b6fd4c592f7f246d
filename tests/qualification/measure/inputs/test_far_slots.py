"""Slots past number 2**32 of a state: every path of recurrences and convolutions that a CPU can run, and a wrong one.

A state takes 17 GB of addresses and some MB of memory. On a GPU, where it takes memory, a qualification tries them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.catalog import ALL_PATHS
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.recurrence_operator import CONVOLUTION, RECURRENCE
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.references import References
from qualification.measure.faults import convolution_faults, recurrence_faults
from qualification.measure.inputs.far_memory import FAR
from qualification.measure.trials.trial import TRIALS

CPU = torch.device("cpu")
SHAPES = {
    RECURRENCE: recurrence_faults.trial_shapes(Dtype.FP16),
    CONVOLUTION: convolution_faults.trial_shapes(Dtype.FP16),
}
ON_A_CPU = [
    (path, shape)
    for path in ALL_PATHS
    if path.operator in SHAPES and path.limits.devices & {Device.CPU, Device.INTERPRETER}
    for shape in SHAPES[path.operator]
    if path.serves(shape) and not path.limits.rejections(shape)
]


def in_32_bits(run: Callable[..., None]) -> Callable[..., None]:
    """Return a path whose slots are those that their offsets in the largest tensor of a state name in 32 bits."""

    def wrong(*arguments: Any) -> None:
        *before, rows, state, out = arguments
        stride = max(getattr(state, name).stride(0) for name in state.__dataclass_fields__)
        wrapped = {
            name: ((getattr(rows, name) * stride + 2**31) % FAR - 2**31) // stride
            for name in ("sources", "targets", "write_slots")
        }
        run(*before, replace(rows, **wrapped), state, out)

    return wrong


@pytest.mark.parametrize(("path", "shape"), ON_A_CPU, ids=lambda it: getattr(it, "name", str(it)))
def test_a_path_on_a_cpu_reads_and_writes_far_slots(path: AnyPath, shape: Any) -> None:
    """The same path is refused where slots are taken for those that 32 bits name."""
    trial: Any = TRIALS[path.operator]
    [case] = trial.far_cases(shape, CPU, seed=3)
    for run, is_right in ((path.run, True), (in_32_bits(path.run), False)):  # type: ignore[arg-type]
        checks = trial.check_cases(run, [case], References())
        assert all(it.is_passed for it in checks) is is_right, [it for it in checks if not it.is_passed]
