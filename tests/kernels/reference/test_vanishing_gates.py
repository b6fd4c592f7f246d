"""Right products pass where gate and up both all but vanish, and all of what is left is one error times another."""

import pytest
import torch
from torch import Tensor

from kernels.experts.kinds import ClampedSwiglu, ExpertActivation
from kernels.experts.portable.eager import experts_eager
from kernels.experts.weights import ExpertWeights
from kernels.fused.activation_kind import Activation
from kernels.linear.epilogue import Epilogue
from kernels.linear.torch_path import run_torch
from kernels.linear.weights import PlainWeight
from kernels.reference.compare import errors_of
from kernels.reference.experts import experts_reference
from kernels.reference.linear import linear_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZE_IN = 256
_SMALL = (2.0**-4, 2.0**-9, 2.0**-14)  # columns whose weights take back what the sum of the others comes to


def vanishing(num_sums: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x [1, 256], weight [num_sums, 256]): every sum is below 1e-4, but its partial sums are up to 1.

    By chance one of 25 million products of random numbers that cancel has a gate and an up below 2e-7.
    """
    torch.manual_seed(0)
    half = SIZE_IN // 2
    x, weight = torch.randn(1, SIZE_IN), torch.randn(num_sums, SIZE_IN) * SIZE_IN**-0.5
    weight[:, half:] = weight[:, :half]
    x[:, half:] = 0.02 * torch.randn(1, half) - x[:, :half]
    x, weight = x.to(dtype), weight.to(dtype)
    first = SIZE_IN - len(_SMALL)
    weight[:, first:] = 0
    for column, size in enumerate(_SMALL, first):
        x[:, column] = size
        weight[:, column] = (weight.double() @ x[0].double() / -size).to(dtype)
    return x, weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_swiglu_passes_where_gate_and_up_vanish(dtype: torch.dtype) -> None:
    x, weight = vanishing(8192, dtype)
    out = torch.empty(1, 4096, dtype=dtype)
    run_torch(x, PlainWeight(weight), None, Epilogue.SWIGLU, out)
    reference = linear_reference(x, weight, None, Epilogue.SWIGLU)
    assert float(reference.truth.abs().max()) < 1e-9
    assert errors_of(out[:, None], reference).worst <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_beyond_both_errors_is_refused(dtype: torch.dtype) -> None:
    """Two sums may err by some 1e-5 each: 1e-7 is no product of two errors, nor half of fp16's smallest number."""
    x, weight = vanishing(64, dtype)
    reference = linear_reference(x, weight, None, Epilogue.SWIGLU)
    assert errors_of(reference.truth + 1e-7, reference).worst > 1


@pytest.mark.parametrize(
    ("activation", "dtype"), list(zip([*Activation, ClampedSwiglu()], [*DTYPES, *DTYPES], strict=False))
)
def test_right_experts_pass_where_gate_and_up_vanish(activation: ExpertActivation, dtype: torch.dtype) -> None:
    num_experts, hidden_size = 64, SIZE_IN
    x, gate_up = vanishing(2 * num_experts, dtype)
    bias = torch.zeros(num_experts, 2, dtype=dtype)
    if isinstance(activation, ClampedSwiglu):
        bias[:, 1] = -1  # it multiplies by up + 1
    weights = ExpertWeights(
        gate_up.view(num_experts, 2, SIZE_IN), torch.ones(num_experts, hidden_size, 1, dtype=dtype), bias
    )
    hidden = x.expand(num_experts, -1).contiguous()
    experts, shares = torch.arange(num_experts)[:, None], torch.ones(num_experts, 1)
    out = experts_eager(hidden, experts, shares, weights, activation)
    reference = experts_reference(hidden, experts, shares, weights, activation)
    assert errors_of(out[:, None], reference).worst <= 1
