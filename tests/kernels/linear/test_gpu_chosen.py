"""Products by cuBLASLt on a GPU: as exact as PyTorch's, always the same, alone and in graphs."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.autotune import Chooser
from kernels.linear.cublaslt import Algorithm, CublasLt, Product, load_library
from kernels.linear.matmul import linear, linear_fp32, linear_swiglu
from kernels.linear.tuned import ChosenProduct

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="cuBLASLt needs a GPU")]

GPU = torch.device("cuda")
ROWS = (65, 72, 100, 128, 200, 256, 300, 777, 1000, 1024)
SHAPES = [(6144, 4096), (4096, 14336), (1024, 3072), (1000, 1000), (328, 520)]


@pytest.fixture(scope="module")
def library() -> CublasLt:
    return CublasLt(load_library(), GPU)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU).to(dtype)


def with_algorithm(
    library: CublasLt, shape: tuple[int, int], index: int, dtype: torch.dtype, dtype_out: torch.dtype
) -> ChosenProduct:
    """The product by one algorithm of each size, fast or not."""

    def algorithm(size: int) -> Algorithm:
        found = library.algorithms(Product(size, *shape, dtype, dtype_out))
        return found[min(index, len(found) - 1)]

    sizes = [*ROWS, 1152, 2048, 2304, 8192]
    return ChosenProduct(library, shape, (dtype, dtype_out), {size: algorithm(size) for size in sizes})


def assert_no_worse(actual: Tensor, by_torch: Tensor, exact: Tensor) -> None:
    """Errors at most those of PyTorch, but for ties of rounding."""
    error, torch_error = (actual.double() - exact).abs(), (by_torch.double() - exact).abs()
    assert error.isfinite().all()
    assert error.max() <= 1.5 * torch_error.max() + 1e-9
    assert error.mean() <= 1.05 * torch_error.mean() + 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_algorithm_is_as_exact_as_pytorchs(library: CublasLt, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = randn(*shape, dtype=dtype)
    products = [with_algorithm(library, shape, index, dtype, dtype) for index in range(8)]
    for num_rows in (65, 128, 300, 1100):
        x = randn(num_rows, shape[1], dtype=dtype, seed=num_rows)
        exact, by_torch = x.double() @ weight.double().T, F.linear(x, weight)
        for product in products:
            if product.takes(x, weight):
                out = torch.full((num_rows, shape[0]), torch.nan, dtype=dtype, device=GPU)
                assert_no_worse(product.product(x, weight, out), by_torch, exact)


def test_an_algorithm_takes_the_rows_that_it_stands_for(library: CublasLt) -> None:
    weight = randn(4096, 4096)
    product = with_algorithm(library, (4096, 4096), 0, torch.bfloat16, torch.bfloat16)
    assert all(product.takes(randn(rows, 4096), weight) for rows in (65, 1024, 1025, 1151, 2047, 2200, 8191, 8192))


def test_repeated_products_are_equal_bit_by_bit(library: CublasLt) -> None:
    weight = randn(4096, 14336)
    for index in range(8):
        product = with_algorithm(library, (4096, 14336), index, torch.bfloat16, torch.bfloat16)
        for num_rows in (72, 256, 1024):
            x = randn(num_rows, 14336, seed=1)
            assert product.takes(x, weight)
            first = product.product(x, weight)
            assert all(torch.equal(product.product(x, weight), first) for _ in range(5))


def test_logits_are_not_rounded_to_16_bits(library: CublasLt) -> None:
    weight, x = randn(5000, 1024), randn(200, 1024, seed=1)
    product = with_algorithm(library, (5000, 1024), 0, torch.bfloat16, torch.float32)
    out = torch.full((200, 5000), torch.nan, device=GPU)
    assert product.takes(x, weight)
    assert linear_fp32(x, weight, out, chosen=product) is out
    exact = x.double() @ weight.double().T
    assert (out - exact).abs().max() < 1e-3


@pytest.mark.parametrize("num_rows", [100, 200, 1000])
def test_a_graph_computes_what_is_computed_without(library: CublasLt, num_rows: int) -> None:
    """On two streams at once, each of which needs its own memory for sums."""
    shape = (4096, 4096)
    product = with_algorithm(library, shape, 0, torch.bfloat16, torch.bfloat16)
    weights, x = [randn(*shape, seed=seed) for seed in range(4)], randn(num_rows, 4096, seed=9)
    expected = [linear(x, weight, chosen=product) for weight in weights]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [linear(x, weight, chosen=product) for weight in weights]
    for out in found:
        out.fill_(torch.nan)
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        graph.replay()
    again = [linear(x, weight, chosen=product) for weight in weights]
    torch.cuda.synchronize()
    for one, two, right in zip(found, again, expected, strict=True):
        assert torch.equal(one, right)
        assert torch.equal(two, right)


def test_what_is_chosen_is_right_and_the_same_from_the_file(library: CublasLt, tmp_path: Path) -> None:
    weight, file = randn(4096, 2048), tmp_path / "products.json"
    sizes = [72, 136, 256, 1024, 1152]
    product = Chooser(library, file).product([weight], torch.bfloat16, sizes)
    again = Chooser(library, file).product([weight], torch.bfloat16, sizes)
    for num_rows in (*sizes, 1100):
        x = randn(num_rows, 2048, seed=num_rows)
        first = linear(x, weight, chosen=product)
        assert again.takes(x, weight) is product.takes(x, weight)
        assert torch.equal(linear(x, weight, chosen=again), first)
        assert_no_worse(first, F.linear(x, weight), x.double() @ weight.double().T)


def test_swiglu_of_many_rows_is_pytorchs(library: CublasLt) -> None:
    weight, x = randn(2048, 1024) * 1024**-0.5, randn(300, 1024, seed=1)
    product = with_algorithm(library, (2048, 1024), 0, torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(linear_swiglu(x, weight, chosen=product), linear_swiglu(x, weight))
