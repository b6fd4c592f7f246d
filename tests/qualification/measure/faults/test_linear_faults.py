"""The checker of products: it passes torch's products in every dtype, and refuses one wrong algorithm among many."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.library.library_path import RunProposed
from kernels.linear.shape import LinearShape
from kernels.linear.torch_path import run_torch
from kernels.linear.weights import PlainWeight
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.linear_checks import check_linear
from qualification.measure.faults.linear_faults import LinearFault, wrong_linear
from qualification.measure.inputs.linear_inputs import linear_cases, operands_of, rows_to_test

CPU = torch.device("cpu")
SHAPES = (
    LinearShape(Dtype.FP32, 72, 40, LinearRows.LE_8, has_bias=True),
    LinearShape(Dtype.FP32, 129, 33, LinearRows.LE_64, epilogue=Epilogue.SWIGLU),
    LinearShape(Dtype.FP32, 640, 100, LinearRows.LE_1),  # a decode step's one row
    LinearShape(Dtype.FP32, 1500, 17, LinearRows.LE_256),
)


def stored_in_fp32(x: Tensor, weight: PlainWeight, _bias: Tensor | None, _epilogue: Epilogue, out: Tensor) -> None:
    out.copy_(x.float() @ weight.values.float().T)


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_torchs_products_pass_on_hostile_inputs(index: int, dtype: Dtype) -> None:
    shape = replace(SHAPES[index], dtype=dtype)
    checks = check_linear(run_torch, linear_cases(shape, operands_of(shape, CPU, seed=1), seed=1))
    failed = {check.name: check.where for check in checks if not check.is_passed}
    # oneDNN's products for AMX read behind the end of a row that does not fill tiles of 32: NaN of the row behind it.
    leaks = dtype is Dtype.BF16 and shape.size_in % 32 != 0 and torch.cpu._is_amx_tile_supported()  # noqa: SLF001 -- no other asks
    assert failed.keys() <= ({"every_row", "nonfinite"} if leaks else set()), failed


def test_a_16_bit_product_stored_in_fp32_may_not_be_rounded() -> None:
    shape = LinearShape(Dtype.BF16, 200, 50, LinearRows.LE_16, epilogue=Epilogue.FP32)
    operands = operands_of(shape, CPU, seed=0)
    assert all(check.is_passed for check in check_linear(stored_in_fp32, linear_cases(shape, operands, seed=0)))
    checks = check_linear(wrong_linear(LinearFault.ROUNDED_OUTPUT, shape), linear_cases(shape, operands, seed=0))
    assert [check.name for check in checks if not check.is_passed] == ["every_row"]


def test_on_a_gpu_each_number_of_few_rows_is_tested() -> None:
    assert rows_to_test(LinearRows.LE_112, is_cpu=False) == tuple(range(65, 113))


def test_large_buckets_are_tested_at_edges_and_served_sizes() -> None:
    assert rows_to_test(LinearRows.LE_512, (384, 128, 640), is_cpu=True) == (257, 384, 512)
    assert rows_to_test(LinearRows.GT_8K, is_cpu=False)[0] == 8193


def test_a_wrong_one_among_many_algorithms_is_refused() -> None:
    shape = LinearShape(Dtype.BF16, 64, 40, LinearRows.LE_128)
    runs = [run_torch] * 3 + [wrong_linear(LinearFault.SPLIT_DROPPED, shape)]
    checks = check_linear(runs, linear_cases(shape, operands_of(shape, CPU, seed=0), seed=0))
    assert [check.name for check in checks if not check.is_passed] == ["every_row"]


def test_without_the_library_its_algorithms_fail_by_name() -> None:
    x, weight = torch.ones(2, 8, dtype=torch.bfloat16), PlainWeight(torch.ones(8, 8, dtype=torch.bfloat16))
    out = torch.empty(2, 8, dtype=torch.bfloat16)
    RunProposed(None)(x, weight, None, Epilogue.NONE, out)  # PyTorch's choice
    assert torch.equal(out, torch.full_like(out, 8.0))
    if torch.version.cuda is None:
        with pytest.raises(RuntimeError, match="torch is built without CUDA"):
            RunProposed(0)(x, weight, None, Epilogue.NONE, out)
