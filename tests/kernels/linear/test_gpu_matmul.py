"""The matmuls on a Hopper GPU: as exact as cuBLAS against fp64, at every shape they take, alone and in graphs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.norm import add_rms_norm
from kernels.linear.matmul import linear, linear_fp32, linear_swiglu, tiling_of
from kernels.linear.tilings import WIDE_ROW_COUNTS, WideTiling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for sm_90"
    ),
]

GPU = torch.device("cuda")
# (N, K): of models that people serve, and shapes that no tile divides
WIDE_SHAPES = [(6144, 4096), (4096, 14336), (1024, 3072), (128256, 4096), (1000, 1000), (328, 520), (24, 72)]
SHAPES = [(6144, 4096), (4096, 14336), (1024, 2048), (4096, 1024), (128256, 4096), (1000, 1000), (333, 520), (17, 72)]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU).to(dtype)
    torch.cuda.synchronize()  # a weight must not come from the launch right before
    return made


def assert_no_worse(actual: Tensor, library: Tensor, exact: Tensor) -> None:
    """Errors at most those of the library, but for ties of rounding."""
    error, library_error = (actual.double() - exact).abs(), (library.double() - exact).abs()
    assert error.isfinite().all()
    assert error.max() <= 1.5 * library_error.max() + 1e-9
    assert error.mean() <= 1.05 * library_error.mean() + 1e-9


@pytest.mark.parametrize("num_rows", [1, 3, 8, 9, 16, 31, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_as_exact_as_the_librarys(shape: tuple[int, int], num_rows: int) -> None:
    weight, x = randn(*shape), randn(num_rows, shape[1], seed=1)
    assert tiling_of(x, weight, shape[0]) is not None
    assert_no_worse(linear(x, weight), F.linear(x, weight), x.double() @ weight.double().T)


@pytest.mark.parametrize("num_rows", [33, 48, 64, 65, 100, 128])
@pytest.mark.parametrize("shape", WIDE_SHAPES)
def test_the_product_of_more_rows_is_as_exact_as_the_librarys(shape: tuple[int, int], num_rows: int) -> None:
    weight, x = randn(*shape), randn(num_rows, shape[1], seed=1)
    assert num_rows > 64 or isinstance(tiling_of(x, weight, shape[0]), WideTiling)
    assert_no_worse(linear(x, weight), F.linear(x, weight), x.double() @ weight.double().T)


@pytest.mark.parametrize("num_rows", [5, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_is_added_before_the_rounding(dtype: torch.dtype, num_rows: int) -> None:
    weight, x, bias = (
        randn(1000, 512, dtype=dtype),
        randn(num_rows, 512, dtype=dtype, seed=1),
        randn(1000, dtype=dtype, seed=2),
    )
    exact = x.double() @ weight.double().T + bias.double()
    assert_no_worse(linear(x, weight, bias), F.linear(x, weight, bias), exact)


@pytest.mark.parametrize("num_rows", [1, 12, 32, 40, 100])
def test_fp32_results_are_not_rounded_to_16_bits(num_rows: int) -> None:
    weight, x = randn(5000, 1024), randn(num_rows, 1024, seed=1)
    exact = x.double() @ weight.double().T
    out = torch.full((num_rows, 5000), torch.nan, device=GPU)
    assert linear_fp32(x, weight, out) is out
    assert (out - exact).abs().max() < 1e-3 < (F.linear(x, weight) - exact).abs().max()


@pytest.mark.parametrize("num_rows", [1, 16, 32, 50, 128])
@pytest.mark.parametrize(("size", "size_in"), [(14336, 4096), (3072, 1024), (504, 520)])
def test_swiglu_joins_the_product_of_gate_and_up(size: int, size_in: int, num_rows: int) -> None:
    weight, x = randn(2 * size, size_in) * size_in**-0.5, randn(num_rows, size_in, seed=1)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    library_gate, library_up = F.linear(x, weight).chunk(2, dim=-1)
    library = F.silu(library_gate.float()) * library_up.float()
    assert_no_worse(linear_swiglu(x, weight), library.to(x.dtype), F.silu(gate) * up)


def test_rows_of_a_wider_tensor_are_read_without_nan_beside() -> None:
    weight = randn(512, 264)
    wide = torch.full((6, 400), torch.nan, device=GPU, dtype=torch.bfloat16)
    wide[:5, :264] = randn(5, 264, seed=1)
    x = wide[:5, :264]
    assert torch.equal(linear(x, weight), linear(x.contiguous(), weight))


@pytest.mark.parametrize("num_rows", [9, 40])
def test_a_row_of_nan_spoils_no_other_row(num_rows: int) -> None:
    weight, x = randn(1024, 2048), randn(num_rows, 2048, seed=1)
    clean = linear(x, weight)
    x[4] = torch.nan
    spoilt = linear(x, weight)
    assert spoilt[4].isnan().all()
    assert torch.equal(spoilt[[0, 3, 5, 8]], clean[[0, 3, 5, 8]])


@pytest.mark.parametrize("batches", [(1, 2, 5, 8), (33, 50, 64)])
def test_a_row_has_equal_bits_in_each_batch_of_its_padded_size(batches: tuple[int, ...]) -> None:
    weight, x = randn(4096, 4096), randn(batches[-1], 4096, seed=1)
    together = linear(x, weight)
    for rows in batches[:-1]:
        assert torch.equal(linear(x[:rows], weight), together[:rows])


@pytest.mark.parametrize("num_rows", [16, 64])
def test_repeated_products_are_equal_bit_by_bit(num_rows: int) -> None:
    weight, x = randn(4096, 14336), randn(num_rows, 14336, seed=1)
    first = linear(x, weight)
    assert all(torch.equal(linear(x, weight), first) for _ in range(10))


@pytest.mark.parametrize("num_rows", [4, 64])
def test_a_chain_in_a_graph_equals_separate_launches(num_rows: int) -> None:
    """Each launch may start before the one that makes its input has ended: it must wait for it."""
    weights = [randn(2048, 2048, seed=n) * 2048**-0.5 for n in range(12)]
    norm = torch.ones(2048, device=GPU, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    x = randn(num_rows, 2048, seed=50)

    def chain(wait: bool) -> Tensor:
        hidden, residual = x, x.clone()
        for weight in weights:
            hidden, residual = add_rms_norm(linear(hidden, weight), residual, norm, 1e-6)
            if wait:
                torch.cuda.synchronize()
        return hidden

    expected = chain(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(wait=False)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(WIDE_ROW_COUNTS[-1] + 1, torch.bfloat16), (0, torch.bfloat16), (4, torch.float32)]
)
def test_what_the_kernel_does_not_take_is_the_librarys(num_rows: int, dtype: torch.dtype) -> None:
    weight, x = randn(96, 64, dtype=dtype), randn(num_rows, 64, dtype=dtype, seed=1)
    assert tiling_of(x, weight, 96) is None
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_unaligned_rows_are_left_to_the_library() -> None:
    weight, wide = randn(96, 64), randn(4, 65, seed=1)
    x = wide[:, 1:]
    assert tiling_of(x, weight, 96) is None
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


def test_rows_that_are_one_and_the_same_are_left_to_the_library() -> None:
    weight, x = randn(96, 64), randn(1, 64, seed=1).expand(4, 64)
    assert tiling_of(x, weight, 96) is None
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
