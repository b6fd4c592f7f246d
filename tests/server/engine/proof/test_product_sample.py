"""A sample of a served product: a right one passes with its bias and all columns, a wrong one does not."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import LinearShape
from kernels.linear.weights import PlainWeight
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Decision, Status
from server.engine.operators.linear import LinearTable, ProductCall
from server.engine.proof.product_sample import take_product
from server.model.linear import Linear, WeightName

SIZE_IN, SIZE_OUT = 2**14, 160  # so many that a judgement looks at some columns alone


def spoil_bias(y: Tensor, bias: Tensor) -> None:
    y.sub_(bias)


def shift_columns(y: Tensor, _: Tensor) -> None:
    y.copy_(y.roll(1, 1))


def spoil_last_rows(y: Tensor, _: Tensor) -> None:
    y[-3:] *= 1.01


@pytest.mark.parametrize("spoil", [None, spoil_bias, shift_columns, spoil_last_rows])
def test_a_product_with_a_bias_is_judged_with_it(spoil: Callable[[Tensor, Tensor], None] | None) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(SIZE_OUT, SIZE_IN, generator=random) * SIZE_IN**-0.5
    bias = torch.randn(SIZE_OUT, generator=random)
    x = torch.randn(20, SIZE_IN, generator=random)
    shape = LinearShape(Dtype.FP32, SIZE_IN, SIZE_OUT, LinearRows.LE_32, has_bias=True)
    decision = Decision(shape, "torch.linear", Status.PROVEN, "torch.linear", (), (), None)
    table = LinearTable({shape: decision}, LINEAR_PATHS)
    product = table.product(0, WeightName.QKV, Linear(PlainWeight(weight), bias), Epilogue.NONE)
    y = product(x, None)
    if spoil is not None:
        spoil(y, bias)
    rng, columns = Random(0), set()
    for _ in range(12):
        found = take_product(ProductCall(product, x, y), "a path", rng).judge(rng)
        assert found.factor is not None
        assert found.is_mismatch is (spoil is not None)
        columns.add((found.detail or "").partition("column ")[2])
    assert spoil is None or len(columns) > 1
