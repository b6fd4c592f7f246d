"""Products of 8 and 4 bits for sm_90 on a GPU: as exact as the checks ask, on their hostile inputs, at every tiling."""

import pytest
import torch

from kernels.linear.epilogue import Epilogue
from kernels.linear.first_path import first_path
from kernels.linear.formats.int4_formats import INT4_32, INT4_64, INT4_128, INT4_FORMATS
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, LinearShape, WeightFormat
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


@pytest.mark.parametrize("weight_format", [FP8_ROWS, FP8_STATIC, FP8_BLOCKS, INT4_32, INT4_64, INT4_128], ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_few_rows_of_few_bits_are_within_the_limits_of_16_bits(
    sizes: tuple[Dtype, int, int, bool, Epilogue], weight_format: WeightFormat
) -> None:
    dtype, size_in, size_out, has_bias, epilogue = sizes
    buckets = list(LinearRows.up_to(16 if weight_format in INT4_FORMATS else 64))
    if weight_format in INT4_FORMATS and size_out % 8 == 0 and epilogue is not Epilogue.FP32:
        buckets += [LinearRows.LE_128, LinearRows.LE_512]
    for bucket in buckets:
        shape = LinearShape(dtype, size_in, size_out, bucket, has_bias, epilogue, weight_format)
        path = first_path(shape, GPU)
        assert path.name.startswith("gluon."), (path.name, str(shape))
        assert path.run is not None
        counts = sorted({bucket.lo + 1, bucket.hi or 0})
        for check in check_linear(
            path.run, linear_cases(shape, operands_of(shape, GPU, seed=1), seed=1, row_counts=counts)
        ):
            assert check.is_passed, (path.name, str(shape), check)
