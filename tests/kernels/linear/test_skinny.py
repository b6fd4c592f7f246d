"""The tilings of the skinny and the wide matmul, their machine code for sm_90, and what serves where it does not."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from kernels.fused.activation import swiglu_torch
from kernels.linear.epilogue import Epilogue
from kernels.linear.first_path import multiply
from kernels.linear.hopper.few_bits_tilings import COLUMNS, Fp8Scales
from kernels.linear.hopper.fp8_swapped_tilings import fp8_swapped_tiling
from kernels.linear.hopper.tilings import BOX, MAX_ROWS, WIDE_ROW_COUNTS, skinny_tiling, tiling_for, wide_tiling
from kernels.linear.weights import PlainWeight
from support.compiled.compile_outside import run_outside

SHARED_BYTES = 232_448  # that one program may have on an H100 or H200
H200_PROCESSORS = 132


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, object]]:
    """Facts of the compiled variants, by case."""
    found: dict[str, dict[str, object]] = run_outside("matmul_compile.py")
    return found


@pytest.mark.sm90
def test_no_variant_spills_and_all_fit_a_multiprocessor(compiled: dict[str, dict[str, object]]) -> None:
    assert {name: case["spills"] for name, case in compiled.items()} == dict.fromkeys(compiled, 0)
    assert all(int(str(case["shared_bytes"])) <= SHARED_BYTES for case in compiled.values())


@pytest.mark.sm90
def test_every_variant_multiplies_by_wgmma_what_comes_by_tma(compiled: dict[str, dict[str, object]]) -> None:
    assert all(int(str(case["wgmma"])) >= 4 and int(str(case["tma_loads"])) >= 8 for case in compiled.values())


@pytest.mark.sm90
def test_only_weights_are_read_before_the_wait(compiled: dict[str, dict[str, object]]) -> None:
    for case in compiled.values():
        assert case["loads_before_wait"] == case["weight_loads_of_ring"]
        assert (case["stores_before_wait"], case["stores_after_wait"]) == (0, 1)


@pytest.mark.sm90
def test_shared_tiles_exchange_sums_in_memory_of_their_own(
    compiled: dict[str, dict[str, object]],
) -> None:
    """Sums go to the first bytes of each other's shared memory, whatever Triton has put there."""
    shared = {name: case for name, case in compiled.items() if int(str(case["splits"])) > 1}
    assert shared
    for case in shared.values():
        assert int(str(case["sends_to_cluster"])) > 0
        offsets = case["barrier_offsets"]
        assert isinstance(offsets, list)
        assert min(offsets) >= int(str(case["ring_bytes"]))


def test_a_tiling_covers_a_box_and_fits_the_ring() -> None:
    cases = product((1, 8, 9, 32), (1, 333, 4096, 28672, 128256), (64, 520, 1000, 4096, 14336), (1, 2))
    for num_rows, size_out, size_in, parts in cases:
        tiling = skinny_tiling(num_rows, size_out, size_in, H200_PROCESSORS, parts=parts)
        case = f"{num_rows} rows, {size_in} to {size_out}, {parts} parts: {tiling}"
        assert tiling is not None, case
        assert tiling.rows * tiling.folds * tiling.parts == BOX, case
        assert tiling.parts == parts, case
        assert tiling.pad >= num_rows, case
        assert size_in % (8 * tiling.folds) == 0, case  # segments start on 16 bytes, as TMA demands
        assert tiling.stages >= 3, case
        ring_bytes = tiling.stages * tiling.boxes * (BOX + tiling.folds * tiling.pad) * 2 * BOX
        assert ring_bytes < SHARED_BYTES - 16_384, case


def test_a_wide_tiling_takes_all_rows_and_its_sums_fit_the_ring() -> None:
    cases = product((33, 64, 65, 128), (8, 328, 1024, 4096, 14336, 128256), (64, 1000, 4096, 14336), (1, 2))
    for num_rows, size_out, size_in, parts in cases:
        tiling = wide_tiling(num_rows, size_out, size_in, H200_PROCESSORS, parts=parts)
        case = f"{num_rows} rows, {size_in} to {size_out}, {parts} parts: {tiling}"
        if tiling is None:
            assert num_rows > WIDE_ROW_COUNTS[0], case  # fewer are always taken
            continue
        assert tiling.pad >= num_rows, case
        assert tiling.stages >= 3, case
        assert tiling.ring_bytes < SHARED_BYTES - 20_000, case
        tiles = -(-size_out * parts // tiling.rows)
        if tiling.splits > 1:
            assert tiles * tiling.splits <= H200_PROCESSORS, case
            assert size_in // tiling.splits >= BOX * tiling.boxes, case  # none is left without work
            assert tiling.splits * tiling.rows * tiling.pad // tiling.reducers * 4 + 16 <= tiling.ring_bytes, case


def test_a_tiling_of_8_bits_takes_all_rows_and_its_sums_fit_the_ring() -> None:
    rows, sizes_out = (2, 8, 9, 32, 33, 64, 65, 128), (8, 328, 1024, 4096, 14336, 28672)
    cases = product(rows, sizes_out, (64, 1008, 4096, 14336), (1, 2), (Fp8Scales.ROWS, Fp8Scales.BLOCKS))
    for num_rows, size_out, size_in, parts, scales in cases:
        options = {"parts": parts, "has_bias": False, "scales": scales}
        tiling = fp8_swapped_tiling(num_rows, size_out, size_in, H200_PROCESSORS, **options)
        case = f"{num_rows} rows, {size_in} to {size_out}, {parts} parts: {tiling}"
        assert tiling is not None, case
        assert tiling.pad >= num_rows, case
        assert tiling.stages >= 3, case
        assert tiling.ring_bytes < SHARED_BYTES - 20_000, case
        if tiling.splits > 1:
            assert -(-size_out * parts // tiling.rows) * tiling.splits <= H200_PROCESSORS, case
            assert size_in // tiling.splits >= COLUMNS * tiling.boxes, case  # none is left without work
            assert tiling.splits * tiling.rows * tiling.pad // tiling.reducers * 4 + 16 <= tiling.ring_bytes, case
    for num_rows, size_out, size_in in ((0, 64, 64), (129, 64, 64), (8, 63, 64), (8, 64, 72)):
        assert fp8_swapped_tiling(num_rows, size_out, size_in, H200_PROCESSORS, **options) is None


def test_other_shapes_have_no_tiling() -> None:
    for num_rows, size_out, size_in in ((33, 100, 64), (33, 64, 100), (WIDE_ROW_COUNTS[-1] + 1, 64, 64)):
        assert wide_tiling(num_rows, size_out, size_in, H200_PROCESSORS) is None
    assert wide_tiling(MAX_ROWS, 64, 64, H200_PROCESSORS) is None
    for num_rows, size_in in ((0, 64), (MAX_ROWS + 1, 64), (1, 63), (1, 4)):
        assert skinny_tiling(num_rows, 64, size_in, H200_PROCESSORS) is None


def test_rows_decide_which_kernel_serves() -> None:
    tilings = [tiling_for(num_rows, 4096, 4096, H200_PROCESSORS) for num_rows in (1, MAX_ROWS, MAX_ROWS + 1, 64, 513)]
    assert [None if it is None else type(it).__name__ for it in tilings] == [
        "SkinnyTiling", "SkinnyTiling", "WideTiling", "WideTiling", None
    ]  # fmt: skip


def test_small_weights_are_spread_over_more_multiprocessors() -> None:
    tiling = skinny_tiling(1, 1024, 2048, H200_PROCESSORS)
    assert tiling is not None
    assert 1024 // tiling.rows >= 64


def test_on_a_cpu_products_are_pytorchs() -> None:
    x, weight, bias = randn(3, 40, seed=0), randn(10, 40, seed=1), randn(10, seed=2)
    assert torch.equal(multiply(x, PlainWeight(weight), bias), F.linear(x, weight, bias))
    assert torch.equal(multiply(x, PlainWeight(weight)), F.linear(x, weight))
    gated = multiply(x, PlainWeight(weight), epilogue=Epilogue.SWIGLU)
    torch.testing.assert_close(gated, swiglu_torch(F.linear(x, weight)))


def test_a_result_lands_in_the_tensor_that_is_given() -> None:
    x, weight = randn(2, 8, seed=0), randn(5, 8, seed=1)
    out = torch.full((4, 5), torch.nan)
    assert multiply(x, PlainWeight(weight), out=out[:2]).data_ptr() == out.data_ptr()
    assert torch.equal(out[:2], F.linear(x, weight))
    assert out[2:].isnan().all()
