"""Products of 8 and 4 bits, and experts, in Triton: right in the interpreter, and their machine code for sm_90.

bf16 is silent garbage in the interpreter; fp16 takes the same way through the kernels.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.experts.formats import FewBitFormat
from kernels.experts.paths import EXPERTS_PATHS
from kernels.experts.shape import ExpertsShape
from kernels.fused.activation_kind import Activation
from kernels.fused.norm import add_rms_norm, rms_norm
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import (
    E4M3,
    LARGEST,
    Fp8StaticWeight,
    Fp8Weight,
    scales_of_rows,
    scales_of_runs,
    spread,
)
from kernels.linear.formats.int4_formats import INT4_32, INT4_128
from kernels.linear.hopper.fp8_rounding import padded_codes, padded_rows
from kernels.linear.hopper.fp8_swapped_tilings import PADS
from kernels.linear.hopper.fp8_wide import launch_fp8_wide
from kernels.linear.hopper.fp8_wide_path import RunFp8Wide, scales_of
from kernels.linear.hopper.fp8_wide_tilings import WideScales, fp8_wide_tiling, fp8_wide_tilings
from kernels.linear.paths import LINEAR_PATHS, LinearPath
from kernels.linear.portable.fp8_inputs import rounded_inputs
from kernels.linear.portable.tiles import MOST_FEW
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, LinearShape, WeightFormat
from kernels.linear.weights import class_of
from kernels.vocabulary.row_buckets import LinearRows, TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.experts_checks import check_experts
from qualification.measure.checks.linear_checks import check_linear
from qualification.measure.checks.norm_checks import factors_of, numbers_of
from qualification.measure.inputs.experts_inputs import experts_cases
from qualification.measure.inputs.linear_inputs import linear_cases, operands_of
from support.compiled.compile_outside import run_outside

SHARED_BYTES = 232_448  # that one program may have on an H100 or H200
SHAPES = [
    LinearShape(Dtype.FP16, 72, 24, LinearRows.LE_8, True, weight_format=FP8_ROWS),
    LinearShape(Dtype.FP16, 72, 24, LinearRows.LE_8, epilogue=Epilogue.FP32, weight_format=FP8_STATIC),
    LinearShape(Dtype.FP16, 200, 136, LinearRows.LE_1, epilogue=Epilogue.SWIGLU, weight_format=FP8_BLOCKS),
    LinearShape(Dtype.FP32, 72, 24, LinearRows.LE_8, epilogue=Epilogue.SWIGLU, weight_format=INT4_32),
    LinearShape(Dtype.FP16, 200, 24, LinearRows.LE_8, True, weight_format=INT4_128),
    LinearShape(Dtype.FP16, 200, 150, LinearRows.LE_112, weight_format=FP8_BLOCKS),
    LinearShape(Dtype.FP16, 72, 24, LinearRows.LE_112, weight_format=INT4_32),
]  # fmt: skip


def paths_of(shape: LinearShape) -> list[LinearPath]:
    return [it for it in LINEAR_PATHS if it.name.startswith("triton.") and not it.limits.rejections(shape)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_triton_product_is_within_the_limits_of_16_bits(shape: LinearShape, device: torch.device) -> None:
    paths = paths_of(shape)
    assert paths
    first = shape.rows.lo + 1
    cases = list(linear_cases(shape, operands_of(shape, device, seed=0), seed=0, row_counts=(first,)))
    chosen = [replace(it, repeats=False) for it in cases if it.name in ("counts", "outlier", "strided")]
    for path in paths:
        assert path.run is not None
        for check in check_linear(path.run, chosen[:1] if first > MOST_FEW else chosen):
            assert check.is_passed, (path.name, check)


def test_inputs_are_rounded_to_the_nearest_code(device: torch.device) -> None:
    """Every finite number of fp16, times 2^-3: ties, subnormal codes and what is beyond 448 among them."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(torch.float16)
    x = numbers[torch.isfinite(numbers)].float().mul(0.125).view(-1, 2048)
    one = torch.ones(1, 1, device=device)
    weight = Fp8StaticWeight(torch.zeros(1, 2048, dtype=E4M3, device=device), one, torch.float32, one)
    codes, _, launch = rounded_inputs(x, weight)
    launch.run()
    assert torch.equal(codes.float(), x.clamp(-LARGEST, LARGEST).to(E4M3).float())


EXPERTS = [
    ExpertsShape(Dtype.FP16, kind, 4, 2, *sizes, Activation.SILU, False, TokenRows.LE_16)
    for kind, sizes in (
        (FewBitFormat.FP8_ROWS, (72, 40)), (FewBitFormat.FP8_BLOCKS, (128, 128)), (FewBitFormat.INT4_32, (72, 40))
    )
]  # fmt: skip


@pytest.mark.parametrize("name", ["triton.experts.few_bits", "triton.experts.few_bits.ordered"])
@pytest.mark.parametrize("shape", EXPERTS, ids=str)
def test_triton_experts_of_few_bits_are_within_their_limits(
    shape: ExpertsShape, name: str, device: torch.device
) -> None:
    [path] = (it for it in EXPERTS_PATHS if it.name == name)
    assert path.run is not None
    assert not path.limits.rejections(shape)
    cases = [it for it in experts_cases(shape, device, seed=0) if it.name == "unequal"]
    assert all(check.is_passed for check in check_experts(path.run, cases))


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, dict[str, int]]]:
    """Facts of the compiled kernels, of products and of experts, by case."""
    found: dict[str, dict[str, dict[str, int]]] = run_outside("few_bits_compile.py")
    return found


@pytest.mark.sm90
def test_hardly_a_product_spills_and_all_fit_a_multiprocessor(compiled: dict[str, dict[str, dict[str, int]]]) -> None:
    """Gate and up of many rows, with scales of blocks, keep two sums, and a few numbers in memory."""
    both = compiled["products"] | {f"experts, {name}": case for name, case in compiled["experts"].items()}
    spilling = {name: case["spills"] for name, case in both.items() if case["spills"]}
    assert spilling.keys() <= {"experts, many rows, blocks"}, spilling
    assert all(count <= 8 for count in spilling.values()), spilling
    assert all(case["shared_bytes"] <= SHARED_BYTES for case in both.values())
    assert {name for name, case in compiled["experts"].items() if case["of_8_bits"]} == {
        "many rows", "many rows, blocks"
    }  # fmt: skip


@pytest.mark.sm90
def test_experts_in_gluon_multiply_codes_that_tma_brings(compiled: dict[str, dict[str, dict[str, int]]]) -> None:
    """The kernel of many rows in blocks keeps two addresses in memory between its sums and their store."""
    gluon = compiled["gluon"]
    assert {name: case["spills"] for name, case in gluon.items() if case["spills"]} in ({}, {"many, gate up": 2})
    assert all(case["shared_bytes"] <= SHARED_BYTES and case["tma_loads"] for case in gluon.values())
    in_8_bits = {name for name, case in gluon.items() if case["of_8_bits"] and not case["of_16_bits"]}
    assert in_8_bits == {name for name in gluon if not name.startswith("4 bits")}


@pytest.mark.sm90
def test_many_rows_of_8_bits_end_their_sums_in_fp32(compiled: dict[str, dict[str, dict[str, int]]]) -> None:
    """A matrix unit's sums of 128 columns, 64 or 128 a thread, are added to others one by one."""
    products = compiled["products"]
    by_codes = {name: case for name, case in products.items() if case["of_8_bits"]}
    assert len(by_codes) == 4
    assert all(case["sums"] >= 64 and case["is_many"] for case in by_codes.values())
    assert all(case["of_16_bits"] for name, case in products.items() if name not in by_codes)


@pytest.mark.sm90
def test_no_product_of_many_rows_spills_and_each_sum_ends(compiled: dict[str, dict[str, dict[str, int]]]) -> None:
    """A number of a result is added to in fp32 once a box at least."""
    for name, case in compiled["wide"].items():
        assert case["spills"] == 0, name
        assert case["shared_bytes"] <= SHARED_BYTES, name
        assert case["of_8_bits"] > 0, name
        assert case["sums"] >= case["numbers"], name
        assert case["waits"] >= case["roles"], name  # each reads what the kernel before it wrote


@pytest.mark.sm90
def test_products_of_4_bits_share_a_multiprocessor(compiled: dict[str, dict[str, dict[str, int]]]) -> None:
    """With their rings; and no register that a wgmma reads codes from is written while it is in flight."""
    for name, case in compiled["swapped"].items():
        assert case["spills"] == case["hazards"] == 0, name
        assert case["shared_bytes"] <= SHARED_BYTES, name
        assert case["of_16_bits"] > 0, name
        assert case["waits"] > 0, name  # reads what the kernel before it wrote


@pytest.mark.sm90
def test_a_norm_that_rounds_sums_in_the_order_of_the_norm(compiled: dict[str, dict[str, dict[str, int]]]) -> None:
    """So that its numbers are the norm's, to the bit."""
    for name, case in compiled["norms"].items():
        assert case["spills"] <= (2 if name.startswith("16384") else 0), name
        assert case["summed_in"] == case["norm_summed_in"], name


@pytest.mark.parametrize("weight_format", [FP8_ROWS, FP8_STATIC, FP8_BLOCKS], ids=str)
def test_a_norm_that_rounds_is_the_norm_and_the_rounding(weight_format: WeightFormat, device: torch.device) -> None:
    """Triton's interpreter converts no numbers to codes as a GPU does, and warns of NaN: there scales are compared."""
    weight = class_of(weight_format).of(torch.randn(16, 200, dtype=torch.float16, device=device))
    x, residual = (torch.randn(5, 200, dtype=torch.float16, device=device) for _ in range(2))
    x[1], x[2] = torch.nan if device.type == "cuda" else 0, x[2] * 50
    norm = factors_of(x)
    for before in (None, residual):
        given, own = x.clone(), None if before is None else before.clone()
        if before is None:
            normed, total = rms_norm(x, norm, 1e-5), given
        else:
            normed, total = add_rms_norm(x.clone(), before.clone(), norm, 1e-5)
        rounded, summed = RunFp8Wide().normed(given, own, norm, 1e-5, weight)
        assert torch.equal(summed.nan_to_num(), total.nan_to_num())
        assert torch.equal(rounded.plain().nan_to_num(), normed.nan_to_num())
        if isinstance(weight, Fp8StaticWeight):
            wanted = weight.input_scales[0]
        else:
            wanted = (scales_of_runs if weight_format == FP8_BLOCKS else scales_of_rows)(normed).T
        scales = rounded.scales[:, :5] if rounded.scales.dim() == 2 else rounded.scales
        assert torch.equal(scales.nan_to_num(), wanted.nan_to_num())
        if device.type == "cuda":
            numbers, wanted = numbers_of(rounded, weight), weight.as_multiplied(normed)
            assert torch.equal(numbers.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("num_rows", [1, 8, 63, 64, 65, 72, 128, 129, 200, 8191])
def test_codes_have_whole_boxes_of_every_tensor_map(num_rows: int) -> None:
    """A box with rows that its map does not have takes longer."""
    padded = padded_rows(num_rows)
    assert padded >= num_rows
    if num_rows <= PADS[-1]:
        assert padded >= next(pad for pad in PADS if pad >= num_rows)
    if num_rows > 64:
        tilings = [it for kind in WideScales for it in fp8_wide_tilings(parts=1, has_bias=False, scales=kind)]
        assert {padded % it.consumer_rows for it in tilings} == {0}


@pytest.mark.parametrize(("num_rows", "size_out", "parts", "tile"), [
    (8192, 14336, 2, (192, 128)), (4096, 4096, 1, (256, 128)), (512, 4096, 1, (128, 128)), (128, 4096, 1, (128, 32)),
])  # fmt: skip
def test_a_tile_leaves_few_multiprocessors_idle(
    num_rows: int, size_out: int, parts: int, tile: tuple[int, int]
) -> None:
    """The fastest that was measured, of an 8B on one H200."""
    found = fp8_wide_tiling(num_rows, size_out, 132, parts=parts, has_bias=False, scales=WideScales.ROWS)
    assert (found.rows, found.columns) == tile
    assert found in fp8_wide_tilings(parts=parts, has_bias=False, scales=WideScales.ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", [FP8_ROWS, FP8_STATIC, FP8_BLOCKS], ids=str)
def test_inputs_of_many_rows_are_rounded_as_the_format_says(weight_format: WeightFormat, device: torch.device) -> None:
    """The machine's own conversion, and no divisions: every finite bf16, and rows of common sizes."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16)
    every = numbers[torch.isfinite(numbers)][: 30 * 2112].view(30, 2112)
    weight = class_of(weight_format).of(torch.randn(128, 2112, dtype=torch.bfloat16, device=device))
    for x in (every, every.flip(0).T.reshape(30, 2112), torch.randn(30, 2112, dtype=torch.bfloat16, device=device)):
        codes, scales = padded_codes(x, weight)
        columns = codes[:30, :2112].double()
        if weight_format == FP8_BLOCKS:
            found = columns * spread(scales[:, :30].T, 2112, 1).double()
        else:
            found = columns * (scales if weight_format == FP8_STATIC else scales.T).double()
        assert torch.equal(found, weight.as_multiplied(x))
        assert not codes[:30, 2112:].float().any()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [
    LinearShape(Dtype.BF16, 2112, 272, LinearRows.LE_512, True, weight_format=FP8_ROWS),
    LinearShape(Dtype.FP16, 2112, 256, LinearRows.LE_256, epilogue=Epilogue.SWIGLU, weight_format=FP8_STATIC),
    LinearShape(Dtype.BF16, 2112, 256, LinearRows.LE_256, epilogue=Epilogue.SWIGLU, weight_format=FP8_BLOCKS),
    LinearShape(Dtype.BF16, 2112, 272, LinearRows.LE_112, epilogue=Epilogue.FP32, weight_format=FP8_BLOCKS),
], ids=str)  # fmt: skip
def test_every_tiling_of_many_rows_is_within_the_limits(shape: LinearShape, device: torch.device) -> None:
    def run(x: Tensor, weight: Fp8Weight, bias: Tensor | None, _epilogue: Epilogue, out: Tensor) -> None:
        codes, scales = padded_codes(x, weight)
        launch_fp8_wide(codes, scales, weight.codes, weight.scales, bias, out, tiling)

    operands = operands_of(shape, device, seed=0)
    kind = scales_of(operands.weight)
    cases = list(linear_cases(shape, operands, seed=0, row_counts=(shape.rows.lo + 1, shape.rows.hi or 0)))
    for tiling in fp8_wide_tilings(parts=shape.epilogue.parts, has_bias=shape.has_bias, scales=kind):
        for check in check_linear(run, cases):
            assert check.is_passed, (tiling, check)
