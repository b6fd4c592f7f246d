"""Products on a GPU: as exact as PyTorch's against fp64, always the same, alone and in graphs.

First the matmuls for sm_90, at every shape they take, then those by an algorithm of cuBLASLt.
"""

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
BF16, FP16 = torch.bfloat16, torch.float16
# (N, K): of models that people serve, and shapes that no tile divides
WIDE_SHAPES = [(6144, 4096), (4096, 14336), (1024, 3072), (128256, 4096), (1000, 1000), (328, 520), (24, 72)]
SHAPES = [(6144, 4096), (4096, 14336), (1024, 2048), (4096, 1024), (128256, 4096), (1000, 1000), (333, 520), (17, 72)]
CHOSEN_SHAPES = [(6144, 4096), (4096, 14336), (1024, 3072), (1000, 1000), (328, 520)]
ROWS = (65, 72, 100, 128, 200, 256, 300, 777, 1000, 1024)


def randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU).to(dtype)
    torch.cuda.synchronize()  # a weight must not come from the launch right before
    return made


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return multiply(x, PlainWeight(weight), bias)


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
        path = path_of(num_rows, shape)
        assert num_rows > 64 or path.startswith("gluon."), num_rows
        assert not 32 < num_rows <= 64 or path == "gluon.linear.wide", num_rows
        assert_no_worse(linear(x, weight), F.linear(x, weight), x.double() @ exact_weight)


@HOPPER
@pytest.mark.parametrize("num_rows", [5, 50])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_bias_is_added_before_the_rounding(dtype: torch.dtype, num_rows: int) -> None:
    weight, x, bias = (
        randn(1000, 512, dtype=dtype),
        randn(num_rows, 512, dtype=dtype, seed=1),
        randn(1000, dtype=dtype, seed=2),
    )
    exact = x.double() @ weight.double().T + bias.double()
    assert_no_worse(linear(x, weight, bias), F.linear(x, weight, bias), exact)


@HOPPER
@pytest.mark.parametrize("num_rows", [1, 12, 32, 40, 100])
def test_fp32_results_are_not_rounded_to_16_bits(num_rows: int) -> None:
    weight, x = randn(5000, 1024), randn(num_rows, 1024, seed=1)
    exact = x.double() @ weight.double().T
    out = torch.full((num_rows, 5000), torch.nan, device=GPU)
    assert multiply(x, PlainWeight(weight), epilogue=Epilogue.FP32, out=out) is out
    assert (out - exact).abs().max() < 1e-3 < (F.linear(x, weight) - exact).abs().max()


@HOPPER
@pytest.mark.parametrize("num_rows", [1, 16, 32, 50, 128])
@pytest.mark.parametrize(("size", "size_in"), [(14336, 4096), (3072, 1024), (504, 520)])
def test_swiglu_joins_the_product_of_gate_and_up(size: int, size_in: int, num_rows: int) -> None:
    weight, x = randn(2 * size, size_in) * size_in**-0.5, randn(num_rows, size_in, seed=1)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    library_gate, library_up = F.linear(x, weight).chunk(2, dim=-1)
    library = F.silu(library_gate.float()) * library_up.float()
    assert_no_worse(multiply(x, PlainWeight(weight), epilogue=Epilogue.SWIGLU), library.to(x.dtype), F.silu(gate) * up)


@HOPPER
def test_rows_of_a_wider_tensor_are_read_without_nan_beside() -> None:
    weight = randn(512, 264)
    wide = torch.full((6, 400), torch.nan, device=GPU, dtype=BF16)
    wide[:5, :264] = randn(5, 264, seed=1)
    x = wide[:5, :264]
    assert torch.equal(linear(x, weight), linear(x.contiguous(), weight))


@HOPPER
@pytest.mark.parametrize("num_rows", [9, 40])
def test_a_row_of_nan_spoils_no_other_row(num_rows: int) -> None:
    weight, x = randn(1024, 2048), randn(num_rows, 2048, seed=1)
    clean = linear(x, weight)
    x[4] = torch.nan
    spoilt = linear(x, weight)
    assert spoilt[4].isnan().all()
    assert torch.equal(spoilt[[0, 3, 5, 8]], clean[[0, 3, 5, 8]])


@HOPPER
@pytest.mark.parametrize("batches", [(1, 2, 5, 8), (33, 50, 64)])
def test_a_row_has_equal_bits_in_each_batch_of_its_padded_size(batches: tuple[int, ...]) -> None:
    weight, x = randn(4096, 4096), randn(batches[-1], 4096, seed=1)
    together = linear(x, weight)
    for rows in batches[:-1]:
        assert torch.equal(linear(x[:rows], weight), together[:rows])


@HOPPER
@pytest.mark.parametrize("num_rows", [16, 64])
def test_repeated_products_are_equal_bit_by_bit(num_rows: int) -> None:
    weight, x = randn(4096, 14336), randn(num_rows, 14336, seed=1)
    first = linear(x, weight)
    assert all(torch.equal(linear(x, weight), first) for _ in range(10))


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

    def __init__(
        self, library: CublasLt, shape: tuple[int, int], index: int, dtype: torch.dtype = BF16,
        dtype_out: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        dtype_out = dtype_out or dtype

        def algorithm(size: int) -> Algorithm:
            found = library.algorithms(Product(size, *shape, dtype, dtype_out))
            return found[min(index, len(found) - 1)]

        self.fallbacks = MatmulFallbacks()
        self.run = RunMeasured(self.fallbacks.note)
        choices = {size: algorithm(size) for size in (*ROWS, 1152, 2048, 2304, 8192)}
        self.run.choose(library, {(*shape, dtype, dtype_out): choices})

    def __call__(self, x: Tensor, weight: Tensor, epilogue: Epilogue = Epilogue.NONE) -> Tensor:
        dtype = torch.float32 if epilogue is Epilogue.FP32 else x.dtype
        out = torch.full((x.shape[0], weight.shape[0] // epilogue.parts), torch.nan, dtype=dtype, device=GPU)
        self.run(x, PlainWeight(weight), None, epilogue, out)
        return out


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", CHOSEN_SHAPES)
def test_every_algorithm_is_as_exact_as_pytorchs(library: CublasLt, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = randn(*shape, dtype=dtype)
    products = [Measured(library, shape, index, dtype) for index in range(8)]
    for num_rows in (65, 128, 300, 1100):
        x = randn(num_rows, shape[1], dtype=dtype, seed=num_rows)
        exact, by_torch = x.double() @ weight.double().T, F.linear(x, weight)
        for product in products:
            assert_no_worse(product(x, weight), by_torch, exact)


def test_an_algorithm_takes_the_rows_that_it_stands_for(library: CublasLt) -> None:
    weight = randn(4096, 4096)
    product = Measured(library, (4096, 4096), 0)
    for rows in (65, 1024, 1025, 1151, 2047, 2200, 8191, 8192):
        product(randn(rows, 4096), weight)
    assert product.fallbacks.take() == {}


def test_an_algorithm_gives_equal_bits_each_time(library: CublasLt) -> None:
    weight = randn(4096, 14336)
    for index in range(8):
        product = Measured(library, (4096, 14336), index)
        for num_rows in (72, 256, 1024):
            x = randn(num_rows, 14336, seed=1)
            first = product(x, weight)
            assert all(torch.equal(product(x, weight), first) for _ in range(5))


def test_logits_are_not_rounded_to_16_bits(library: CublasLt) -> None:
    weight, x = randn(5000, 1024), randn(200, 1024, seed=1)
    out = Measured(library, (5000, 1024), 0, BF16, torch.float32)(x, weight, Epilogue.FP32)
    exact = x.double() @ weight.double().T
    assert (out - exact).abs().max() < 1e-3


@pytest.mark.parametrize("num_rows", [100, 200, 1000])
def test_a_graph_computes_what_is_computed_without(library: CublasLt, num_rows: int) -> None:
    """Use two streams at once, each of which needs its own memory for sums."""
    shape = (4096, 4096)
    product = Measured(library, shape, 0)
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


def test_swiglu_of_many_rows_is_pytorchs(library: CublasLt) -> None:
    weight, x = randn(2048, 1024) * 1024**-0.5, randn(300, 1024, seed=1)
    found = Measured(library, (2048, 1024), 0)(x, weight, Epilogue.SWIGLU)
    torch.testing.assert_close(found, multiply(x, PlainWeight(weight), epilogue=Epilogue.SWIGLU))
