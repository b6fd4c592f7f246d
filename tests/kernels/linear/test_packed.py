"""Weights packed into 16 bits for a CPU: the same values, and nothing is packed that would not have them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.matmul import linear, linear_fp32, linear_swiglu
from kernels.linear.packed import MAX_MULTIPLY_ADDS, MIN_ROWS, PackedWeight, packed

needs_fbgemm = pytest.mark.skipif(packed(torch.ones(16, 16)) is None, reason="this CPU or torch has no FBGEMM")


def in_16_bits(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers that are bf16, in fp32."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])) * scale
    return x.bfloat16().float()


def pack(weight: Tensor) -> PackedWeight:
    found = packed(weight)
    assert found is not None
    return found


def assert_as_exact_as_fp32(actual: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within what rounding may do to a sum of products in fp32."""
    exact = x.double() @ weight.double().t()
    bound = x.double().abs() @ weight.double().abs().t() * 2.0**-24 * x.shape[1] ** 0.5
    assert ((actual.double() - exact).abs() <= 4 * bound).all()


@needs_fbgemm
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e5, 1e12])
@pytest.mark.parametrize(("num_rows", "size_out", "size_in"), [(1, 512, 256), (8, 256, 640), (13, 100, 33), (3, 1, 1)])
def test_a_product_is_that_of_the_weight_in_fp32(num_rows: int, size_out: int, size_in: int, scale: float) -> None:
    weight, x = in_16_bits(size_out, size_in, scale=scale), torch.randn(num_rows, size_in)
    assert_as_exact_as_fp32(pack(weight).product(x), x, weight)


@needs_fbgemm
def test_a_small_weight_beside_a_large_one_keeps_every_bit() -> None:
    weight = torch.zeros(16, 16)
    weight[0, 0], weight[1, 1] = 1.9921875, 1.9921875 * 2.0**-31
    assert torch.equal(pack(weight).product(torch.eye(16)), weight.t())


@pytest.mark.parametrize(
    "weight",
    [
        torch.full((16, 16), 1 + 2.0**-11),  # 12 significant bits
        torch.tensor([[1.0, 2.0**-50]]),  # no shift holds both
        torch.zeros(16, 16),
        torch.full((16, 16), torch.nan),
        torch.full((16, 16), torch.inf),
        torch.ones(16, 16, dtype=torch.bfloat16),
        torch.ones(MAX_MULTIPLY_ADDS // MIN_ROWS // 1024 + 1, 1024),  # better shared among cores
        torch.empty(0, 16),
    ],
)
def test_what_would_lose_a_bit_or_time_is_not_packed(weight: Tensor) -> None:
    assert packed(weight) is None


@needs_fbgemm
def test_linears_use_it_for_few_rows_only() -> None:
    weight, bias = in_16_bits(1024, 256), torch.randn(1024)
    other = pack(2 * weight)  # shows which of the two has answered
    for num_rows, factor in ((1, 2), (128, 2), (129, 1)):
        x = torch.randn(num_rows, 256)
        y = F.linear(x, factor * weight)
        torch.testing.assert_close(linear(x, weight, None, other), y, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(linear(x, weight, bias, other), y + bias, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(linear_fp32(x, weight, None, other), y, rtol=1e-4, atol=1e-4)
        gate, up = y.chunk(2, dim=1)
        torch.testing.assert_close(linear_swiglu(x, weight, None, other), F.silu(gate) * up, rtol=1e-4, atol=1e-3)
    assert linear(torch.empty(0, 256), weight, None, other).shape == (0, 1024)
