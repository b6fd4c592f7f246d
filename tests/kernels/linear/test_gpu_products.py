"""Products for sm_90 on a GPU: as exact as the checks ask, on their hostile inputs, of 16, 8 and 4 bits."""

from collections.abc import Sequence

import pytest
import torch

from kernels.linear.epilogue import Epilogue
from kernels.linear.first_path import first_path
from kernels.linear.formats.int4_formats import INT4_32, INT4_64, INT4_128, INT4_FORMATS
from kernels.linear.library.library_path import RunProposed
from kernels.linear.paths import LINEAR_PATHS, RunLinear
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, LinearShape, WeightFormat
from kernels.linear.torch_path import run_torch
from kernels.system.device import read_fingerprint
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.linear_checks import check_linear
from qualification.measure.inputs.linear_inputs import linear_cases, operands_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_hopper")]

GPU = torch.device("cuda")
# (dtype, K, N, bias, epilogue): of models that people serve, and shapes that no tile divides
SHAPES = [
    (Dtype.BF16, 4096, 4096, False, Epilogue.NONE),
    (Dtype.BF16, 4096, 14336, False, Epilogue.SWIGLU),
    (Dtype.BF16, 14336, 4096, False, Epilogue.NONE),
    (Dtype.BF16, 544, 333, True, Epilogue.NONE),
    (Dtype.FP16, 160, 40, False, Epilogue.FP32),
    (Dtype.FP16, 1184, 200, False, Epilogue.SWIGLU),
]


def assert_within_limits(run: RunLinear, shape: LinearShape) -> None:
    """Assert what a qualification does, of the fewest and the most rows of the shape's bucket."""
    runs: Sequence[RunLinear] = run.variants if isinstance(run, RunProposed) else (run,)
    counts = sorted({shape.rows.lo + 1, shape.rows.hi or 0})
    cases = linear_cases(
        shape, operands_of(shape, GPU, seed=1), seed=1, row_counts=counts, takes_strides=len(runs) == 1
    )
    for check in check_linear(runs, cases):
        assert check.is_passed, (run, str(shape), check)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_every_path_of_16_bits_is_within_the_limits(sizes: tuple[Dtype, int, int, bool, Epilogue]) -> None:
    machine = read_fingerprint(GPU)
    for bucket in (*LinearRows.up_to(128), LinearRows.LE_512, LinearRows.LE_2K):
        shape = LinearShape(*sizes[:3], bucket, *sizes[3:])
        is_few = bucket.lo < (64 if shape.size_out % 8 == 0 else 32)
        assert not is_few or first_path(shape, GPU).name.startswith("gluon."), shape
        # With a bias PyTorch is off by 31 limits at one row and 333 columns on an H200, where its proof refuses it.
        runs = [it.run for it in LINEAR_PATHS if it.run is not None and not it.rejects(shape, machine)]
        for run in runs:
            if not (shape.has_bias and run is run_torch):
                assert_within_limits(run, shape)


@pytest.mark.parametrize("weight_format", [FP8_ROWS, FP8_STATIC, FP8_BLOCKS, INT4_32, INT4_64, INT4_128], ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_few_rows_of_few_bits_are_within_the_limits_of_16_bits(
    sizes: tuple[Dtype, int, int, bool, Epilogue], weight_format: WeightFormat
) -> None:
    _, _, size_out, _, epilogue = sizes
    is_int4, is_whole = weight_format in INT4_FORMATS, size_out % 8 == 0
    buckets = list(LinearRows.up_to(64 if not is_int4 else 128 if is_whole else 16))
    if is_int4 and is_whole and epilogue is not Epilogue.FP32:
        buckets += [LinearRows.LE_256, LinearRows.LE_512]
    for bucket in buckets:
        shape = LinearShape(*sizes[:3], bucket, *sizes[3:], weight_format)
        path = first_path(shape, GPU)
        assert path.name.startswith("gluon."), (path.name, str(shape))
        assert path.run is not None
        assert_within_limits(path.run, shape)
