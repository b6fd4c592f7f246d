"""The norms around an addition to the residual as one launch, beside the launches that they were: equal to the bit."""

import pytest
import torch
from torch import Tensor

from kernels.fused.add_norms import Addend, add_norms, add_norms_one_by_one

DTYPES = [torch.float16, torch.float32]  # the interpreter cuts numbers off to bf16, which PyTorch's sums round


class Sums:
    """A residual and what is added to it, made anew from one seed each time that it is asked for."""

    def __init__(self, tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = (tokens, size), dtype, device

    def randn(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.device, dtype or self.dtype)

    def addend(self, num_parts: int, *, is_normed: bool, is_scaled: bool) -> Addend:
        size = self.shape[1]
        parts = tuple(
            (7 * self.randn(*self.shape, seed=part), self.randn(size, seed=9 + part)) for part in range(num_parts)
        )
        after = self.randn(size, seed=20, dtype=torch.float32) if is_normed else None
        return Addend(parts, 1e-6, after, 1e-3, self.randn(1, seed=21) if is_scaled else None)

    def residual(self) -> Tensor:
        return 3 * self.randn(*self.shape, seed=30)

    def weights(self, count: int) -> tuple[Tensor, ...]:
        """Return the weights of norms of the sum, the first in fp32."""
        dtypes = (torch.float32, self.dtype, self.dtype)
        return tuple(self.randn(self.shape[1], seed=40 + n, dtype=dtypes[n]) for n in range(count))


def assert_equal_one_by_one(sums: Sums, num_parts: int, *, is_normed: bool, is_scaled: bool, count: int) -> None:
    weights, found = sums.weights(count), []
    for op in (add_norms, add_norms_one_by_one):
        residual = sums.residual()
        normed = op(sums.addend(num_parts, is_normed=is_normed, is_scaled=is_scaled), residual, weights, 1e-5)
        assert all(it.is_contiguous() for it in normed)
        found.append([residual, *normed])
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)
        assert expected.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("num_parts", "is_normed", "is_scaled"), [(1, False, False), (1, False, True), (2, True, True)]
)
def test_norms_around_a_sum_equal_those_one_by_one(
    num_parts: int, is_normed: bool, is_scaled: bool, count: int, dtype: torch.dtype, device: torch.device
) -> None:
    for tokens, size in ((5, 208), (1, 1024), (3, 37)):  # of the last one a row is not aligned
        sums = Sums(tokens, size, dtype, device)
        assert_equal_one_by_one(sums, num_parts, is_normed=is_normed, is_scaled=is_scaled, count=count)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [640, 2304, 2816, 5376, 8192, 16384])
def test_norms_around_a_sum_equal_those_one_by_one_at_sizes_served(size: int, device: torch.device) -> None:
    for tokens in (1, 7, 2048):
        for dtype in (torch.bfloat16, *DTYPES):
            sums = Sums(tokens, size, dtype, device)
            assert_equal_one_by_one(sums, 1, is_normed=False, is_scaled=False, count=3)
            assert_equal_one_by_one(sums, 2, is_normed=True, is_scaled=True, count=1)


def test_norms_of_a_sum_lie_where_its_parts_lay(device: torch.device) -> None:
    sums = Sums(3, 64, torch.bfloat16, device)
    addend = sums.addend(2, is_normed=True, is_scaled=False)
    normed = add_norms(addend, sums.residual(), sums.weights(3), 1e-5)
    assert [it.data_ptr() for it in normed[:2]] == [rows.data_ptr() for rows, _ in addend.parts]
    assert normed[2].data_ptr() not in {it.data_ptr() for it in normed[:2]}
