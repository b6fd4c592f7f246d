"""A sample of a served product: a right one passes with its bias and all columns, a wrong one does not."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from kernels.linear.matmul import linear
from kernels.linear.shape import LinearShape
from kernels.system.device import read_fingerprint
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from server.engine.operators.linear import LinearTable, ServedProduct
from server.engine.proof.product_sample import judge_product, take_product

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
    shape = LinearShape(Dtype.FP32, SIZE_IN, SIZE_OUT, LinearRows.LE_1, has_bias=True)
    table = LinearTable({}, (), read_fingerprint(torch.device("cpu")))
    product = ServedProduct(table, 0, "qkv", shape, weight, bias, {})
    y = linear(x, weight, bias)
    if spoil is not None:
        spoil(y, bias)
    rng, columns = Random(0), set()
    for _ in range(12):
        found = judge_product(take_product(product, "a path", x, y, rng), rng)
        assert found.factor is not None
        assert found.is_mismatch is (spoil is not None)
        columns.add((found.detail or "").partition("column ")[2])
    assert spoil is None or len(columns) > 1
