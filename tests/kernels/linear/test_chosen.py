"""Products of an engine by cuBLASLt: the algorithm measured for a number of rows, and what is left to PyTorch."""

import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.activation import swiglu
from kernels.linear.epilogue import Epilogue
from kernels.linear.library.cublaslt import Algorithm, CublasLt, CublasLtError, Prepared, Product, load_library
from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.linear.library.fallbacks import MatmulFallbacks
from kernels.linear.library.library_path import RunMeasured
from kernels.linear.library.measured_rows import MOST_ROWS, measured_rows, sizes_up_to
from kernels.linear.weights import PlainWeight

BF16, FP32 = torch.bfloat16, torch.float32
SHAPE = (24, 16)


class OnPaper(CublasLt):
    """Multiplies by torch. An algorithm's waves are the most rows that it takes."""

    alignment_bytes = 16  # of memory of a CPU

    def __init__(self, *, fails: str = "") -> None:
        self.fails = fails  # what does
        self.asked: list[Product] = []
        self.launched: list[float] = []  # the waves of algorithms

    def prepared(self, product: Product, algorithm: Algorithm) -> Prepared | None:
        self.asked.append(product)
        if self.fails == "layout":
            raise CublasLtError("cublasLtMatrixLayoutCreate returned 7")
        return Prepared(0, 0, 0, algorithm) if product.num_rows <= algorithm.waves else None

    def launch(self, prepared: Prepared, x: Tensor, weight: Tensor, y: Tensor) -> None:
        self.launched.append(prepared.algorithm.waves)
        if self.fails == "launch":
            y.fill_(torch.nan)
            raise CublasLtError("cublasLtMatmul returned 14")
        y.copy_(x @ weight.t())


class Engine:
    """The products of an engine, which has measured these numbers of rows."""

    def __init__(
        self, *sizes: int, fails: str = "", waves: float = 1e9, algorithms: dict[int, Algorithm | None] | None = None
    ) -> None:
        self.library, self.fallbacks = OnPaper(fails=fails), MatmulFallbacks()
        self.run = RunMeasured(self.fallbacks.note)
        choices = algorithms or {size: Algorithm(waves=waves) for size in sizes}
        self.run.choose(self.library, {(*SHAPE, BF16, dtype): choices for dtype in (BF16, FP32)})

    def multiply(self, x: Tensor, bias: Tensor | None = None, epilogue: Epilogue = Epilogue.NONE) -> Tensor:
        """Return the product, which must be right whoever multiplied."""
        weight = PlainWeight(randn(*SHAPE, seed=1).to(x.dtype))
        sums = F.linear(x, weight.values, bias)
        expected = swiglu(sums) if epilogue is Epilogue.SWIGLU else sums
        out = torch.full(expected.shape, torch.nan, dtype=x.dtype)
        self.run(x, weight, bias, epilogue, out)
        torch.testing.assert_close(out, expected)
        return out

    def by_library(self, num_rows: int) -> bool:
        """Return whether the library multiplied so many rows."""
        before = len(self.library.launched)
        self.multiply(rows_of(num_rows))
        return len(self.library.launched) > before


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows_of(num_rows: int) -> Tensor:
    return randn(num_rows, SHAPE[1], seed=0).to(BF16)


def test_a_product_is_served_by_the_algorithm_of_its_rows() -> None:
    engine = Engine(algorithms={1024: Algorithm(waves=1024), 1152: Algorithm(waves=1152), 1280: None})
    engine.multiply(rows_of(1100))
    assert engine.library.asked == [Product(1100, *SHAPE, BF16, BF16)]
    assert engine.library.launched == [1152]


@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.SWIGLU])
def test_an_algorithm_is_asked_once_for_each_number_of_rows(epilogue: Epilogue) -> None:
    engine = Engine(70, 71)
    for num_rows in (70, 71, 70, 70):
        engine.multiply(rows_of(num_rows), epilogue=epilogue)
    assert [asked.num_rows for asked in engine.library.asked] == [70, 71]
    assert len(engine.library.launched) == 4


def test_logits_have_an_algorithm_of_their_own() -> None:
    engine = Engine(70)
    x, weight = rows_of(70), PlainWeight(randn(*SHAPE, seed=1).to(BF16))
    out = torch.full((71, SHAPE[0]), torch.nan)
    engine.run(x, weight, None, Epilogue.FP32, out[:70])
    assert engine.library.asked == [Product(70, *SHAPE, BF16, FP32)]
    assert out[:70].isfinite().all()
    assert out[70:].isnan().all()


@pytest.mark.parametrize("num_rows", [64, 79, 81, 2050, 9000])
def test_rows_without_an_algorithm_are_pytorchs(num_rows: int) -> None:
    engine = Engine(80, 2048, 2304, 8192)
    assert not engine.by_library(num_rows)
    assert engine.library.asked == []


def test_rows_an_algorithm_refuses_are_left_to_pytorch() -> None:
    engine = Engine(1152, waves=1100)
    assert engine.by_library(1100)
    assert engine.fallbacks.take() == {}
    assert not any(engine.by_library(num_rows) for num_rows in (1101, 1102, 1101))
    assert engine.fallbacks.take() == {MatmulFallback.ROWS_REFUSED: 2}


def test_rows_the_library_cannot_describe_are_left_to_pytorch() -> None:
    engine = Engine(70, fails="layout")
    assert not engine.by_library(70)
    assert engine.fallbacks.take() == {MatmulFallback.ROWS_REFUSED: 1}


def test_rows_that_pytorch_multiplies_no_slower_are_no_fallback() -> None:
    engine = Engine(algorithms={70: None})
    assert not engine.by_library(70)
    assert engine.fallbacks.take() == {}


def test_a_failed_launch_is_left_to_pytorch_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(70, 71, fails="launch")
    engine.multiply(rows_of(70))
    assert "70 rows by a weight of 24 x 16: multiplied by PyTorch's algorithms (launch_failed): " in caplog.text
    engine.multiply(rows_of(70))
    assert engine.fallbacks.take() == {MatmulFallback.LAUNCH_FAILED: 1}
    assert len(engine.library.launched) == 1
    engine.multiply(rows_of(71))  # the other algorithm has not failed yet
    assert len(engine.library.launched) == 2


@pytest.mark.parametrize(
    ("num_rows", "measured"),
    [(65, 65), (1000, 1000), (1024, 1024), (1025, 1152), (1152, 1152), (1153, 1280), (2049, 2176), (8192, 8192)],
)
def test_many_rows_use_the_algorithm_of_as_many_tiles(num_rows: int, measured: int) -> None:
    assert measured_rows(num_rows) == measured


def test_rows_are_measured_up_to_1024_and_tiles_beyond() -> None:
    sizes = sizes_up_to(8192, [1, 64, 256, 72, 256, 1024, 1056])
    assert sizes[:3] == [72, 256, 1024]
    assert [*sizes[3:12]] == [1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048, 2304]
    assert sizes[-2:] == [7936, 8192]
    assert all(measured_rows(size) == size for size in sizes)


@pytest.mark.parametrize(("most", "sizes"), [(64, []), (100, [72]), (2000, [72, 256, *range(1152, 1921, 128)])])
def test_nothing_is_measured_that_no_step_has(most: int, sizes: list[int]) -> None:
    assert sizes_up_to(most, [8, 72, 256]) == sizes


def test_more_rows_than_are_measured_at_all_are_pytorchs() -> None:
    assert max(sizes_up_to(100_000, [])) == MOST_ROWS


class Answering(ctypes.CDLL):
    """Every function answers that all is well."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


def test_a_handle_launches_nothing_on_another_device() -> None:
    library = CublasLt(Answering(), torch.device("cpu", 1), current_device=lambda: 0)
    x, weight = rows_of(70), torch.zeros(SHAPE, dtype=BF16)
    with pytest.raises(CublasLtError, match="the handle is of device 1, the current one is 0"):
        library.launch(Prepared(0, 0, 0, Algorithm()), x, weight, torch.empty(70, 24, dtype=BF16))


def test_inputs_that_it_was_not_measured_for_are_pytorchs() -> None:
    engine = Engine(70)
    x = rows_of(70)
    unaligned = torch.empty(70 * SHAPE[1] + 1, dtype=BF16)[1:].view(70, SHAPE[1]).copy_(x)
    for other in (x.t().contiguous().t(), unaligned):
        engine.multiply(other)
    assert engine.library.launched == []
    assert engine.fallbacks.take() == {MatmulFallback.UNSUITABLE_INPUT: 1}
    assert engine.by_library(70)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch ships the library")
def test_a_torch_without_cuda_has_no_library() -> None:
    with pytest.raises(CublasLtError, match="without CUDA"):
        load_library()


def test_a_product_with_a_bias_is_pytorchs() -> None:
    engine = Engine(70)
    engine.multiply(rows_of(70), torch.ones(SHAPE[0], dtype=BF16))
    assert engine.library.launched == []


def test_before_anything_is_measured_pytorch_multiplies() -> None:
    engine = Engine(70)
    engine.run = RunMeasured(engine.fallbacks.note)
    assert not engine.by_library(70)
    assert engine.fallbacks.take() == {}
