"""Paths whose bits depend on the batch are refused, and one whose bits do not is not."""

import pytest
import torch

from kernels.vocabulary.operators import Operator
from kernels.vocabulary.recurrence_operator import EVERY_OPERATOR
from kernels.vocabulary.shape import Dtype
from qualification.measure.faults.order_faults import OrderFault, orders_passed_wrongly, seen_of, trial_shapes

CPU = torch.device("cpu")


# 16 bits hide most of another order: what shows there shows in fp32.
@pytest.mark.parametrize("operator", EVERY_OPERATOR, ids=lambda it: it.value)
def test_every_planted_order_fault_is_refused(operator: Operator) -> None:
    assert orders_passed_wrongly(operator, frozenset({Dtype.BF16}), CPU, seed=0) == ()


def test_a_failure_names_the_batch_and_the_row() -> None:
    [shape] = trial_shapes(Operator.LINEAR, Dtype.FP32)
    seen = seen_of(OrderFault.OTHER_AT_ONE_COUNT, shape, CPU, seed=3)
    assert seen.where.startswith("5 rows, pool: ")
    assert "of the input 'cancelling'" in seen.where
    assert 0 < seen.changed < seen.compared
    assert seen.digests == seen_of(OrderFault.NONE, shape, CPU, seed=3).digests  # of the rows as they came first
