"""Products on a GPU beside PyTorch's, in batches, graphs, by files; test_gpu_products.py holds each to the limits."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.norm import add_rms_norm
from kernels.linear.epilogue import Epilogue
from kernels.linear.first_path import first_path, multiply
from kernels.linear.library.autotune import Autotuner
from kernels.linear.library.cublaslt import Algorithm, CublasLt, Product, load_library
from kernels.linear.library.fallbacks import MatmulFallbacks
from kernels.linear.library.library_path import RunMeasured
from kernels.linear.shape import LinearShape
from kernels.linear.weights import PlainWeight
from kernels.system.device import dtype_of
from kernels.vocabulary.row_buckets import LinearRows

pytestmark = pytest.mark.gpu
HOPPER = pytest.mark.usefixtures("_hopper")  # the matmuls are for sm_90

GPU = torch.device("cuda")
BF16 = torch.bfloat16
# (N, K): of models that people serve, and shapes that no tile divides
WIDE_SHAPES = [(6144, 4096), (4096, 14336), (1024, 3072), (128256, 4096), (1000, 1000), (328, 520), (24, 72)]
SHAPES = [(6144, 4096), (4096, 14336), (1024, 2048), (4096, 1024), (128256, 4096), (1000, 1000), (333, 520), (17, 72)]
CHOSEN_SHAPES = [(6144, 4096), (4096, 14336), (1024, 3072), (1000, 1000), (328, 520)]
ROWS = (65, 72, 100, 128, 200, 256, 300, 777, 1000, 1024)


def randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU).to(dtype)
    torch.cuda.synchronize()  # a weight must not come from the launch right before
    return made


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return multiply(x, PlainWeight(weight))


def path_of(num_rows: int, shape: tuple[int, int], dtype: torch.dtype = BF16) -> str:
    """Return the path that multiplies so many rows with a weight of this shape."""
    size_out, size_in = shape
    return first_path(LinearShape(dtype_of(dtype), size_in, size_out, LinearRows.of(num_rows)), GPU).name


def assert_no_worse(actual: Tensor, library: Tensor, exact: Tensor) -> None:
    """Errors at most those of the library, but for ties of rounding."""
    error, library_error = (actual.double() - exact).abs(), (library.double() - exact).abs()
    assert error.isfinite().all()
    assert error.max() <= 1.5 * library_error.max() + 1e-9
    assert error.mean() <= 1.05 * library_error.mean() + 1e-9


@HOPPER
@pytest.mark.parametrize(
    ("shape", "row_counts"),
    [
        *((shape, (1, 3, 8, 9, 16, 31, 32)) for shape in SHAPES),
        *((shape, (33, 48, 64, 65, 100, 128)) for shape in WIDE_SHAPES),
    ],
)
def test_the_product_is_as_exact_as_the_librarys(shape: tuple[int, int], row_counts: tuple[int, ...]) -> None:
    weight = randn(*shape)
    exact_weight = weight.double().T  # once: of 128,256 x 4,096 it takes 4 GB
    for num_rows in row_counts:
        x = randn(num_rows, shape[1], seed=1)
        assert_no_worse(linear(x, weight), F.linear(x, weight), x.double() @ exact_weight)


@HOPPER
@pytest.mark.parametrize("batches", [(1, 2, 5, 8), (33, 50, 64)])
def test_a_row_has_equal_bits_in_each_batch_of_its_padded_size(batches: tuple[int, ...]) -> None:
    weight, x = randn(4096, 4096), randn(batches[-1], 4096, seed=1)
    together = linear(x, weight)
    for rows in batches[:-1]:
        assert torch.equal(linear(x[:rows], weight), together[:rows])


@HOPPER
@pytest.mark.parametrize("num_rows", [4, 64])
def test_a_chain_in_a_graph_equals_separate_launches(num_rows: int) -> None:
    """Each launch may start before the one that makes its input has ended: it must wait for it."""
    weights = [randn(2048, 2048, seed=n) * 2048**-0.5 for n in range(12)]
    norm = torch.ones(2048, device=GPU, dtype=BF16)
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


@HOPPER
def test_what_the_kernel_does_not_take_is_the_librarys() -> None:
    weight = randn(96, 60)
    for x in (randn(4, 60, seed=1), randn(129, 60, seed=1), randn(4, 60, dtype=torch.float32)):
        like = weight.to(x.dtype)
        assert not path_of(x.shape[0], (96, 60), x.dtype).startswith("gluon.")
        torch.testing.assert_close(linear(x, like), F.linear(x, like))


@pytest.fixture(scope="module")
def library() -> CublasLt:
    if not torch.cuda.is_available():
        pytest.skip("cuBLASLt needs a GPU")
    return CublasLt(load_library(), GPU)


class Measured:
    """The products of an engine with weights of one shape, by one algorithm of each number of rows, fast or not."""

    def __init__(self, library: CublasLt, shape: tuple[int, int], index: int = 0) -> None:
        self.fallbacks = MatmulFallbacks()
        self.run = RunMeasured(self.fallbacks.note)
        sizes = (*ROWS, 1152, 2048, 2304, 8192)
        found = {size: library.algorithms(Product(size, *shape, BF16, BF16)) for size in sizes}
        choices: dict[int, Algorithm | None] = {size: of[min(index, len(of) - 1)] for size, of in found.items()}
        self.run.choose(library, {(*shape, BF16, BF16): choices})

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=BF16, device=GPU)
        self.run(x, PlainWeight(weight), None, Epilogue.NONE, out)
        return out


@pytest.mark.parametrize("shape", CHOSEN_SHAPES)
def test_every_algorithm_is_as_exact_as_pytorchs(library: CublasLt, shape: tuple[int, int]) -> None:
    weight = randn(*shape)
    products = [Measured(library, shape, index) for index in range(8)]
    for num_rows in (65, 128, 300, 1100):
        x = randn(num_rows, shape[1], seed=num_rows)
        exact, by_torch = x.double() @ weight.double().T, F.linear(x, weight)
        for product in products:
            assert_no_worse(product(x, weight), by_torch, exact)


def test_an_algorithm_takes_the_rows_that_it_stands_for(library: CublasLt) -> None:
    weight = randn(4096, 4096)
    product = Measured(library, (4096, 4096))
    for rows in (65, 1024, 1025, 1151, 2047, 2200, 8191, 8192):
        product(randn(rows, 4096), weight)
    assert product.fallbacks.take() == {}


@pytest.mark.parametrize("num_rows", [100, 200, 1000])
def test_a_graph_computes_what_is_computed_without(library: CublasLt, num_rows: int) -> None:
    """Use two streams at once, each of which needs its own memory for sums."""
    shape = (4096, 4096)
    product = Measured(library, shape)
    weights, x = [randn(*shape, seed=seed) for seed in range(4)], randn(num_rows, 4096, seed=9)
    expected = [product(x, weight) for weight in weights]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [product(x, weight) for weight in weights]
    for out in found:
        out.fill_(torch.nan)
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        graph.replay()
    again = [product(x, weight) for weight in weights]
    torch.cuda.synchronize()
    for one, two, right in zip(found, again, expected, strict=True):
        assert torch.equal(one, right)
        assert torch.equal(two, right)


def test_what_is_chosen_is_right_and_the_same_from_the_file(library: CublasLt, tmp_path: Path) -> None:
    weight, file = randn(4096, 2048), tmp_path / "products.json"
    num_rows = [72, 136, 256, 1024, 1152]
    runs = []
    for _ in range(2):
        run = RunMeasured(MatmulFallbacks().note)
        run.choose(library, dict([Autotuner(library, file, MatmulFallbacks()).choices([weight], BF16, num_rows)]))
        runs.append(run)
    for count in (*num_rows, 1100):
        x = randn(count, 2048, seed=count)
        first, again = (torch.full((count, 4096), torch.nan, dtype=BF16, device=GPU) for _ in range(2))
        for run, out in zip(runs, (first, again), strict=True):
            run(x, PlainWeight(weight), None, Epilogue.NONE, out)
        assert torch.equal(again, first)
        assert_no_worse(first, F.linear(x, weight), x.double() @ weight.double().T)
