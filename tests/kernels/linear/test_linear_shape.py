"""The linear shape as text, its buckets of rows, and what the limits of paths say of it."""

from dataclasses import replace
from itertools import product

import pytest

from kernels.linear.epilogue import Epilogue
from kernels.linear.hopper.tilings import tiling_for
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import LinearShape, parse_linear_shape
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import Reject
from kernels.vocabulary.row_buckets import LinearRows, TokenRows
from kernels.vocabulary.shape import Dtype

H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580", "13.0", "91900", "2.11.0+cu130", "3.6.0")
SHAPE = LinearShape(Dtype.BF16, 4096, 6144, LinearRows.LE_8)
PROCESSORS = 132


def able(shape: LinearShape, machine: Fingerprint = H200) -> list[str]:
    """Return the paths that are there for other reasons than their order of sums."""
    return [path.name for path in LINEAR_PATHS if path.order is None and not path.rejects(shape, machine)]


def test_each_shape_has_one_line_and_is_read_back() -> None:
    shapes = [
        LinearShape(dtype, 96, 40, rows, has_bias, epilogue)
        for dtype, rows, has_bias, epilogue in product(Dtype, LinearRows, (False, True), Epilogue)
        if not (has_bias and epilogue is Epilogue.SWIGLU) and not (dtype is Dtype.FP32 and epilogue is Epilogue.FP32)
    ]
    assert len({str(shape) for shape in shapes}) == len(shapes)
    assert [parse_linear_shape(str(shape)) for shape in shapes] == shapes
    assert str(replace(SHAPE, epilogue=Epilogue.SWIGLU)) == "linear bf16 plain in4096 out6144 swiglu r-le_8"


@pytest.mark.parametrize("text", ["", "linear bf16 plain in8 out08 r-le_8", "linear bf16 plain in8 out8 r-le_9"])
def test_text_of_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"le_9|is no linear shape"):
        parse_linear_shape(text)


def test_every_number_of_rows_is_in_one_bucket() -> None:
    for buckets in (LinearRows, TokenRows):
        assert all(sum(bucket.holds(rows) for bucket in buckets) == 1 for rows in range(1, 10_000))
    assert LinearRows.of(1) is LinearRows.LE_1
    assert LinearRows.up_to(17)[-1] is LinearRows.LE_32


def test_no_bucket_holds_two_variants_of_a_kernel() -> None:
    """A proof of a bucket would not hold for the other variant."""
    sizes = product((1024, 4096, 28672, 128256), (1024, 4096, 14336), (1, 2))
    buckets = LinearRows.up_to(200)
    assert (buckets[0].lo, buckets[-1].holds(200)) == (0, True)
    for (size_out, size_in, parts), bucket in product(sizes, buckets):
        rows = range(bucket.lo + 1, (bucket.hi or 0) + 1)
        variants = {tiling_for(count, size_out, size_in, PROCESSORS, parts=parts) for count in rows}
        assert len(variants) == 1, f"{bucket}: {variants}"


@pytest.mark.parametrize(
    ("shape", "paths"),
    [
        (SHAPE, ["gluon.linear.skinny", "torch.linear"]),
        (replace(SHAPE, rows=LinearRows.LE_64), ["gluon.linear.wide", "torch.linear"]),
        (replace(SHAPE, rows=LinearRows.LE_128), ["cublaslt.linear", "torch.linear"]),  # spread well by the library
        (
            replace(SHAPE, rows=LinearRows.LE_128, size_out=2048),
            ["gluon.linear.wide", "cublaslt.linear", "torch.linear"],
        ),
        (replace(SHAPE, rows=LinearRows.LE_8K), ["cublaslt.linear", "torch.linear"]),
        (replace(SHAPE, rows=LinearRows.LE_8K, has_bias=True), ["torch.linear"]),
        (replace(SHAPE, rows=LinearRows.GT_8K), ["torch.linear"]),
        (replace(SHAPE, size_in=4100), ["torch.linear"]),
        (replace(SHAPE, dtype=Dtype.FP32), ["torch.linear"]),
    ],
)
def test_limits_say_which_paths_compute_a_shape(shape: LinearShape, paths: list[str]) -> None:
    assert able(shape) == paths


def test_other_gpus_and_cpus_are_left_to_the_library() -> None:
    assert able(SHAPE, replace(H200, sm=100)) == ["torch.linear"]
    assert able(SHAPE, replace(H200, device=Device.CPU, sm=None)) == ["torch.linear"]
    refused = LINEAR_PATHS[0].rejects(replace(SHAPE, size_in=4100, dtype=Dtype.FP32), replace(H200, sm=80))
    assert [it.code for it in refused] == [Reject.ARCH, Reject.DTYPE, Reject.LAYOUT]
