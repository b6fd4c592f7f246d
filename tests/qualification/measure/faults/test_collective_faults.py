"""The checker of sums over ranks passes right ranks, of other shapes than its trial has."""

from dataclasses import replace

import torch

from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.collective_checks import check_collective
from qualification.measure.faults.collective_faults import CollectiveFault, WrongRanks, trial_shapes
from qualification.measure.inputs.collective_inputs import collective_cases

CPU = torch.device("cpu")


def test_right_ranks_pass_on_other_shapes_and_seeds() -> None:
    for seed in range(3):
        for shape in trial_shapes(Dtype.BF16):
            other = replace(shape, columns=40, world=2, rows=TokenRows.LE_512)
            checks = check_collective(WrongRanks(CollectiveFault.NONE), collective_cases(other, CPU, seed=seed))
            assert {check.name: check.where for check in checks if not check.is_passed} == {}
