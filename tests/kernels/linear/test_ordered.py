"""Products that are summed in one order: their tilings, and which algorithms of the library may multiply."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.activation import swiglu, swiglu_torch
from kernels.linear.epilogue import Epilogue
from kernels.linear.library.cublaslt import Algorithm, CublasLt, CublasLtError, Prepared, Product
from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.linear.library.fallbacks import MatmulFallbacks
from kernels.linear.ordered.library_path import RunMeasuredInOrder, equal_algorithms
from kernels.linear.ordered.tilings import OrderedTiling, num_programs, ordered_tiling
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import LinearShape
from kernels.linear.weights import PlainWeight
from kernels.vocabulary.path_order import is_chosen_by_time, place_of
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype

FP16, FP32 = torch.float16, torch.float32
SHARED_BYTES = 232_448  # that one program may have on an H100 or H200
SIZES = [(128, 2048, 1), (2048, 4096, 1), (4096, 14336, 1), (14336, 4096, 2), (128256, 4096, 1), (24, 8, 2)]
SHAPE = 24, 64  # of a weight


def tiling_of(num_rows: int, size: tuple[int, int, int], processors: int = 132) -> OrderedTiling:
    size_out, size_in, parts = size
    return ordered_tiling(num_rows, size_out, size_in, processors, parts=parts)


@pytest.mark.parametrize("size", SIZES)
def test_a_bucket_of_rows_has_one_tiling(size: tuple[int, int, int]) -> None:
    """A kernel that is compiled for one number of a bucket's rows serves all of them."""
    for rows in LinearRows:
        few, many = rows.lo + 1, rows.hi or 5 * rows.lo
        found = {tiling_of(num_rows, size) for num_rows in {few, (few + many) // 2, many}}
        assert len(found) == 1, rows


def test_a_tiling_fits_and_its_programs_have_every_tile() -> None:
    for num_rows, size, processors in product((1, 8, 9, 32, 33, 65, 129, 600, 8192), SIZES, (114, 132)):
        tiling = tiling_of(num_rows, size, processors)
        ring_bytes = tiling.stages * tiling.boxes * (tiling.height + tiling.pad) * 128
        assert tiling.stages >= 3, (num_rows, size, tiling)
        assert ring_bytes + tiling.slack * tiling.height * 128 < SHARED_BYTES - 2048, (num_rows, size, tiling)
        tiles = -(-size[0] * size[2] // tiling.height)
        programs = num_programs(tiling, num_rows, size[0], processors)
        share = -(-tiles // programs)
        assert (programs - 1) * share < tiles <= programs * share, (num_rows, size)  # none is left without one


def test_paths_of_one_order_are_chosen_for_nothing_else() -> None:
    """Readers without a catalog put them last by their names, and their time chooses nothing."""
    ordered = [path for path in LINEAR_PATHS if path.name.endswith(".ordered")]
    assert all(path.is_for_order for path in ordered)
    assert [path.order for path in ordered] == ["k16x4", "k16", "k16", "k16x2", "k16x2"]
    others = max(place_of(path.name) for path in LINEAR_PATHS if path.order is None)
    for path in ordered:
        assert place_of(path.name) > others
        assert not is_chosen_by_time(path.name)


@pytest.mark.parametrize("size_out", [128, 2048, 2056, 6144, 49159])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_number_of_rows_has_one_path_of_one_order(size_out: int, has_bias: bool) -> None:
    for rows in LinearRows:
        shape = LinearShape(Dtype.BF16, 4096, size_out, rows, has_bias)
        able = [it.order for it in LINEAR_PATHS if it.name.endswith(".ordered") and not it.limits.rejections(shape)]
        assert able == ["k16x4" if size_out <= 2048 else "k16"], shape


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_in_order(x: Tensor, weight: PlainWeight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """One column of the inner dim after the other."""
    sums = torch.zeros(x.shape[0], weight.size[0])
    for column in range(x.shape[1]):
        sums += x[:, column : column + 1].float() * weight.values[:, column].float()
    sums = sums if bias is None else sums + bias.float()
    out.copy_(swiglu(sums.to(x.dtype)) if epilogue is Epilogue.SWIGLU else sums)


class OnPaper(CublasLt):
    """Multiplies by PyTorch as an algorithm's `waves` say: 0 in order, 1 in two halves, 2 in halves below 80 rows."""

    alignment_bytes = 1

    def __init__(self, *kinds: int, fails: bool = False) -> None:
        self.kinds, self.fails = kinds, fails
        self.launched: list[float] = []

    def algorithms(self, product: Product) -> list[Algorithm]:  # noqa: ARG002
        return [Algorithm(waves=kind) for kind in self.kinds]

    def prepared(self, product: Product, algorithm: Algorithm) -> Prepared | None:
        return Prepared(product.num_rows, 0, 0, algorithm)

    def launch(self, prepared: Prepared, x: Tensor, weight: Tensor, y: Tensor) -> None:
        kind = prepared.algorithm.waves
        self.launched.append(kind)
        if self.fails:
            raise CublasLtError("cublasLtMatmul returned 14")
        if kind == 1 or (kind == 2 and x.shape[0] < 80):
            half, sums = x.shape[1] // 2, [torch.empty(x.shape[0], weight.shape[0]) for _ in range(2)]
            for part, columns in zip(sums, (slice(half), slice(half, None)), strict=True):
                run_in_order(x[:, columns], PlainWeight(weight[:, columns]), None, Epilogue.NONE, part)
            y.copy_(sums[0] + sums[1])
        else:
            run_in_order(x, PlainWeight(weight), None, Epilogue.NONE, y)


def test_algorithms_of_another_order_are_refused() -> None:
    """One that splits the inner dim, and one that splits it of few rows only."""
    library, x, weight = OnPaper(0, 1, 2), randn(128, SHAPE[1], seed=0).to(FP16), randn(*SHAPE, seed=1).to(FP16)
    of_128 = Product(128, *SHAPE, FP16, FP32)
    found = equal_algorithms(library, of_128, x, weight, 65, run_in_order)
    assert [algorithm.waves for algorithm, _ in found] == [0]
    found = equal_algorithms(library, of_128, x, weight, 97, run_in_order)
    assert [algorithm.waves for algorithm, _ in found] == [0, 2]


class Engine:
    """The products of an engine, which has measured these numbers of rows; None: its own kernel is the fastest."""

    def __init__(self, choices: dict[int, Algorithm | None], *, fails: bool = False) -> None:
        self.library, self.fallbacks = OnPaper(fails=fails), MatmulFallbacks()
        self.run = RunMeasuredInOrder(self.fallbacks.note, run_in_order)
        self.run.choose(self.library, {(*SHAPE, FP16, dtype): choices for dtype in (FP16, FP32)})

    def multiply(self, num_rows: int, epilogue: Epilogue = Epilogue.NONE, bias: Tensor | None = None) -> int:
        """Return how often the library multiplied; the result must be that of the order."""
        x, weight = randn(num_rows, SHAPE[1], seed=0).to(FP16), PlainWeight(randn(*SHAPE, seed=1).to(FP16))
        dtype = FP32 if epilogue is Epilogue.FP32 else FP16
        out, expected = (torch.full((num_rows, SHAPE[0] // epilogue.parts), torch.nan, dtype=dtype) for _ in range(2))
        before = len(self.library.launched)
        self.run(x, weight, bias, epilogue, out)
        run_in_order(x, weight, bias, epilogue, expected)
        assert torch.equal(out, expected)
        torch.testing.assert_close(out.float(), truth(x, weight.values, bias, epilogue), rtol=0.02, atol=0.02)
        return len(self.library.launched) - before


def truth(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
    sums = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return swiglu_torch(sums) if epilogue is Epilogue.SWIGLU else sums


@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.SWIGLU])  # FP32's follows with a bias
def test_rows_between_those_measured_are_the_next_larger_ones(epilogue: Epilogue) -> None:
    engine = Engine({80: Algorithm(waves=0), 96: None, 128: Algorithm(waves=0)})
    multiplied = {num_rows: engine.multiply(num_rows, epilogue) for num_rows in (70, 80, 90, 100, 128, 129)}
    assert multiplied == {70: 1, 80: 1, 90: 0, 100: 1, 128: 1, 129: 0}


@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.FP32])
def test_a_bias_is_added_before_the_only_rounding(epilogue: Epilogue) -> None:
    engine = Engine({80: Algorithm(waves=0)})
    assert engine.multiply(80, epilogue, randn(SHAPE[0], seed=2).to(FP16)) == 1


def test_a_library_that_fails_is_reported_once_and_left() -> None:
    engine = Engine({80: Algorithm(waves=0)}, fails=True)
    assert [engine.multiply(80) for _ in range(3)] == [1, 0, 0]
    assert engine.fallbacks.take() == {MatmulFallback.LAUNCH_FAILED: 1}
