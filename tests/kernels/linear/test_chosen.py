"""Tuned products: the algorithm of cuBLASLt for a number of rows, and what is left to PyTorch."""

import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.activation import swiglu, swiglu_torch
from kernels.linear.cublaslt import Algorithm, CublasLt, CublasLtError, Prepared, Product, load_library
from kernels.linear.epilogue import Epilogue
from kernels.linear.fallbacks import MatmulFallback, MatmulFallbacks
from kernels.linear.kept_proposals import KeptProposals
from kernels.linear.matmul import linear, linear_fp32, linear_swiglu
from kernels.linear.tuned import MOST_ROWS, TunedProduct, measured_rows, sizes_up_to

BF16, FP32 = torch.bfloat16, torch.float32
SHAPE = (24, 16)


class OnPaper(CublasLt):
    """Multiplies by torch. An algorithm's waves are the most rows that it takes."""

    alignment_bytes = 16  # of memory of a CPU

    def __init__(self, *, fails: str = "") -> None:
        self.fails = fails  # what does
        self.searched: list[Product] = []
        self.proposed = [Algorithm(waves=waves) for waves in (1e9, 1e8)]
        self.asked: list[Product] = []
        self.launched: list[float] = []  # the waves of algorithms

    def algorithms(self, product: Product) -> list[Algorithm]:
        self.searched.append(product)
        return self.proposed

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


def tensors(num_rows: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    x = torch.randn(num_rows, SHAPE[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x, weight


def chosen(
    library: CublasLt, *sizes: int, waves: float = 1e9, fallbacks: MatmulFallbacks | None = None
) -> TunedProduct:
    return TunedProduct(library, SHAPE, (BF16, BF16), {size: Algorithm(waves=waves) for size in sizes}, fallbacks)


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


def test_a_product_is_served_by_the_algorithm_of_its_rows() -> None:
    library = OnPaper()
    x, weight = tensors(1100)
    algorithms = {1024: Algorithm(waves=1024), 1152: Algorithm(waves=1152), 1280: None}
    product = TunedProduct(library, SHAPE, (BF16, BF16), algorithms)
    assert product.takes(x, weight)
    assert torch.equal(product.product(x, weight), x @ weight.t())
    assert library.asked == [Product(1100, *SHAPE, BF16, BF16)]
    assert library.launched == [1152]


def test_a_product_lands_in_the_tensor_that_is_given() -> None:
    library = OnPaper()
    x, weight = tensors(70)
    product, out = (
        TunedProduct(library, SHAPE, (BF16, FP32), {70: Algorithm(waves=80)}),
        torch.full((71, 24), torch.nan),
    )
    assert product.takes(x, weight)
    assert product.product(x, weight, out[:70]).data_ptr() == out.data_ptr()
    assert out[:70].isfinite().all()
    assert out[70:].isnan().all()


def test_an_algorithm_is_asked_once_for_each_number_of_rows() -> None:
    library = OnPaper()
    product = chosen(library, 70, 71)
    assert all(product.takes(*tensors(num_rows)) for num_rows in (70, 71, 70, 70))
    assert [asked.num_rows for asked in library.asked] == [70, 71]


@pytest.mark.parametrize("num_rows", [64, 79, 81, 2050, 9000])
def test_rows_without_an_algorithm_are_pytorchs(num_rows: int) -> None:
    library = OnPaper()
    assert not chosen(library, 80, 2048, 2304, 8192).takes(*tensors(num_rows))
    assert library.asked == []


def test_rows_an_algorithm_refuses_are_left_to_pytorch() -> None:
    fallbacks = MatmulFallbacks()
    product = chosen(OnPaper(), 1152, waves=1100, fallbacks=fallbacks)
    assert product.takes(*tensors(1100))
    assert fallbacks.take() == {}
    assert not any(product.takes(*tensors(num_rows)) for num_rows in (1101, 1102, 1101))
    assert fallbacks.take() == {MatmulFallback.ROWS_REFUSED: 2}


def test_rows_the_library_cannot_describe_are_left_to_pytorch() -> None:
    fallbacks = MatmulFallbacks()
    product = chosen(OnPaper(fails="layout"), 70, fallbacks=fallbacks)
    assert not product.takes(*tensors(70))
    assert fallbacks.take() == {MatmulFallback.ROWS_REFUSED: 1}


def test_rows_that_pytorch_multiplies_no_slower_are_no_fallback() -> None:
    fallbacks = MatmulFallbacks()
    product = TunedProduct(OnPaper(), SHAPE, (BF16, BF16), {70: None}, fallbacks)
    assert not product.takes(*tensors(70))
    assert fallbacks.take() == {}


def test_a_failed_launch_is_left_to_pytorch_and_not_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    library, fallbacks = OnPaper(fails="launch"), MatmulFallbacks()
    product = chosen(library, 70, 71, fallbacks=fallbacks)
    x, weight = tensors(70)
    assert torch.equal(linear(x, weight, chosen=product), F.linear(x, weight))
    assert "70 rows by a weight of 24 x 16: multiplied by PyTorch's algorithms (launch_failed): " in caplog.text
    assert torch.equal(linear(x, weight, chosen=product), F.linear(x, weight))
    assert fallbacks.take() == {MatmulFallback.LAUNCH_FAILED: 1}
    assert len(library.launched) == 1
    linear(*tensors(71), chosen=product)  # the other algorithm has not failed yet
    assert len(library.launched) == 2


class Answering(ctypes.CDLL):
    """Every function answers that all is well."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


def test_a_handle_launches_nothing_on_another_device() -> None:
    library = CublasLt(Answering(), torch.device("cpu", 1), current_device=lambda: 0)
    x, weight = tensors(70)
    with pytest.raises(CublasLtError, match="the handle is of device 1, the current one is 0"):
        library.launch(Prepared(0, 0, 0, Algorithm()), x, weight, torch.empty(70, 24, dtype=BF16))


def test_inputs_that_it_was_not_measured_for_are_pytorchs() -> None:
    fallbacks = MatmulFallbacks()
    product = chosen(OnPaper(), 70, fallbacks=fallbacks)
    x, weight = tensors(70)
    assert product.takes(x, weight)
    assert not product.takes(x.float(), weight)
    assert not product.takes(x.t().contiguous().t(), weight)  # columns first
    unaligned = torch.empty(70 * SHAPE[1] + 1, dtype=BF16)[1:].view(70, SHAPE[1])
    assert not product.takes(unaligned, weight)
    assert fallbacks.take() == {MatmulFallback.UNSUITABLE_INPUT: 1}
    assert product.takes(x, weight)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch ships the library")
def test_a_torch_without_cuda_has_no_library() -> None:
    with pytest.raises(CublasLtError, match="without CUDA"):
        load_library()


@pytest.mark.parametrize("num_rows", [70, 71])
def test_matmuls_use_the_tuned_algorithm_of_their_rows(num_rows: int) -> None:
    library = OnPaper()
    x, weight = tensors(num_rows)
    expected = F.linear(x, weight)
    assert torch.equal(linear(x, weight, chosen=chosen(library, 70)), expected)
    logits = torch.full(expected.shape, torch.nan)
    assert torch.equal(linear_fp32(x, weight, logits, chosen=chosen(library, 70)), expected.float())
    torch.testing.assert_close(linear_swiglu(x, weight, chosen=chosen(library, 70)), swiglu_torch(expected))
    assert len(library.launched) == (3 if num_rows == 70 else 0)


def test_a_product_with_a_bias_is_pytorchs() -> None:
    library = OnPaper()
    x, weight = tensors(70)
    bias = torch.ones(SHAPE[0], dtype=BF16)
    assert torch.equal(linear(x, weight, bias, chosen=chosen(library, 70)), F.linear(x, weight, bias))
    assert library.launched == []


@pytest.mark.parametrize("epilogue", Epilogue)
def test_a_proposal_is_asked_for_once_for_each_product(epilogue: Epilogue) -> None:
    library = OnPaper()
    run = KeptProposals(lambda _: library)
    for num_rows in (120, 121, 120, 120):
        x, weight = tensors(num_rows)
        y, dtype_out = x @ weight.t(), FP32 if epilogue is Epilogue.FP32 else BF16
        expected = swiglu(y) if epilogue is Epilogue.SWIGLU else y.to(dtype_out)
        out = torch.full(expected.shape, torch.nan, dtype=dtype_out)
        run(x, weight, None, epilogue, out)
        assert torch.equal(out, expected)
    assert library.searched == [Product(num_rows, *SHAPE, BF16, dtype_out) for num_rows in (120, 121)]
    assert library.launched == [1e9] * 4  # the first proposal


@pytest.mark.parametrize("proposed", [[], [Algorithm(waves=100)]])
def test_products_without_a_usable_proposal_are_pytorchs(proposed: list[Algorithm]) -> None:
    library = OnPaper()
    library.proposed = proposed
    run, (x, weight) = KeptProposals(lambda _: library), tensors(120)
    for _ in range(2):
        out = torch.full((120, SHAPE[0]), torch.nan, dtype=BF16)
        run(x, weight, None, Epilogue.NONE, out)
        assert torch.equal(out, F.linear(x, weight))
    assert (len(library.searched), library.launched) == (1, [])


def test_a_proposal_that_fails_is_an_error_of_its_launch() -> None:
    run, (x, weight) = KeptProposals(lambda _: OnPaper(fails="launch")), tensors(120)
    with pytest.raises(CublasLtError, match="cublasLtMatmul returned 14"):
        run(x, weight, None, Epilogue.NONE, torch.empty(120, SHAPE[0], dtype=BF16))
