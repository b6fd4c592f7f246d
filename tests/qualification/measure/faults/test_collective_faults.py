"""The checker of sums over ranks: it refuses every planted fault, and passes right ranks in every dtype."""

from dataclasses import replace

import pytest
import torch

from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.collective_checks import check_collective
from qualification.measure.faults.collective_faults import CollectiveFault, WrongRanks, can_show_in, trial_shapes
from qualification.measure.inputs.collective_inputs import collective_cases
from qualification.measure.trials.collective_trial import CollectiveTrial

CPU = torch.device("cpu")


@pytest.mark.parametrize("fault", CollectiveFault)
def test_every_fault_is_refused_and_none_passes(fault: CollectiveFault) -> None:
    for shape in (shape for shape in trial_shapes(Dtype.BF16) if can_show_in(fault, shape)):
        checks = check_collective(WrongRanks(fault), collective_cases(shape, CPU, seed=0))
        assert all(check.is_passed for check in checks) is (fault is CollectiveFault.NONE), f"{shape}: {checks}"


def test_every_fault_can_show_in_some_shape() -> None:
    assert all(any(can_show_in(fault, shape) for shape in trial_shapes(Dtype.BF16)) for fault in CollectiveFault)


def test_right_ranks_pass_on_other_shapes_and_seeds() -> None:
    for seed in range(3):
        for shape in trial_shapes(Dtype.BF16):
            other = replace(shape, columns=40, world=2, rows=TokenRows.LE_512)
            checks = check_collective(WrongRanks(CollectiveFault.NONE), collective_cases(other, CPU, seed=seed))
            assert {check.name: check.where for check in checks if not check.is_passed} == {}


def test_the_trial_finds_nothing_passed_wrongly() -> None:
    assert CollectiveTrial().passed_wrongly(frozenset(Dtype), CPU, seed=1) == ()
