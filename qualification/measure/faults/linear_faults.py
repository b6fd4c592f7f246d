"""Wrong products that must be refused: each computes in fp32, with one fault of a kind that real kernels have had."""

from enum import Enum
from itertools import count

import torch
from torch import Tensor

from kernels.fused.activation_kind import Activation
from kernels.linear.epilogue import Epilogue
from kernels.linear.paths import RunLinear
from kernels.linear.shape import LinearShape
from kernels.linear.weights import LinearWeight
from kernels.reference.experts import activated_fp64
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.inputs.linear_inputs import rows_to_test

_TILE = 32  # rows, columns of the result, and columns of a step
_SPLITS = 4  # programs that share the inner dim of a tile


class LinearFault(Enum):
    """A fault of a wrong kernel; the comment says how a real kernel comes by it."""

    NONE = "none"  # the checker must pass this one: refusing everything proves nothing either
    TF32 = "products are of inputs rounded to 10 bits"  # TF32 for fp32: `allow_tf32`, an algorithm by measure
    LOW_PRECISION_SUM = "sums are kept in 16 bits"  # fp16 accumulators of tensor cores
    LOW_PRECISION_SPLITS = "sums of parts of the inner dim are rounded to 16 bits"  # a reduction in the output's dtype
    ROUNDED_OUTPUT = "an fp32 result is rounded to 16 bits"  # the kernel of the other epilogue
    WRONG_ALGORITHM = "one number of rows is computed by another algorithm"  # that leaves out the last part of the sum
    TAIL_COLUMNS_ZERO = "the inner dim's last step, where not full, is read as zero"  # a loop bound rounded down
    TAIL_ROWS_ZERO = "rows of a tile that is not full are read as zero"  # a mask by whole tiles
    TAIL_OUTPUT_ZERO = "columns of the result's last tile, where not full, are zero"  # a grid rounded down
    SPLIT_DROPPED = "one part of the inner dim is not summed"  # a cluster whose last program is not awaited
    ROWS_SWAPPED = "two rows are swapped"  # a layout that the store reads otherwise than the product wrote it
    NEIGHBOUR_SUMMED = "a row's sum holds 1/1000 of its neighbour's"  # a segment that is multiplied, not selected, away
    BIAS_IGNORED = "the bias is ignored"
    GATE_AND_UP_SWAPPED = "gate and up are swapped"  # the other layout of the checkpoint
    UNSTABLE = "the order of sums differs from run to run"  # atomics
    STALE_OUTPUT = "the last row is not written"  # grid too small
    STRAY_WRITE = "one row past the result is written"  # store without a mask
    TAIL_READ = "rows past the last are read into the sums"  # 0 * NaN


def trial_shapes(dtype: Dtype) -> tuple[LinearShape, ...]:
    """Small shapes, in some of which every fault shows that can show in the dtype."""
    shapes = (
        LinearShape(dtype, 72, 40, LinearRows.LE_8, has_bias=True),
        LinearShape(dtype, 129, 33, LinearRows.LE_8, epilogue=Epilogue.SWIGLU),
    )
    return (*shapes, LinearShape(dtype, 200, 50, LinearRows.LE_1))


def can_show_in(fault: LinearFault, shape: LinearShape) -> bool:
    """True when a product with this fault is wrong for the shape, and by more than its dtype hides."""
    has_16_bits = shape.dtype is not Dtype.FP32
    rounds_to_16_bits = has_16_bits and shape.epilogue is not Epilogue.FP32
    needs = {
        LinearFault.TF32: not has_16_bits,
        LinearFault.LOW_PRECISION_SUM: shape.size_in > 2 * _TILE,
        LinearFault.LOW_PRECISION_SPLITS: shape.size_in > 2 * _TILE,
        LinearFault.ROUNDED_OUTPUT: not rounds_to_16_bits,
        LinearFault.WRONG_ALGORITHM: shape.size_in >= _SPLITS,
        LinearFault.SPLIT_DROPPED: shape.size_in >= _SPLITS,
        LinearFault.TAIL_COLUMNS_ZERO: shape.size_in % _TILE != 0,
        LinearFault.TAIL_OUTPUT_ZERO: shape.size_out % _TILE != 0,
        LinearFault.TAIL_ROWS_ZERO: any(rows % _TILE for rows in rows_to_test(shape.rows, is_cpu=True)),
        LinearFault.ROWS_SWAPPED: shape.rows.hi != 1,
        LinearFault.NEIGHBOUR_SUMMED: shape.rows.hi != 1,
        LinearFault.BIAS_IGNORED: shape.has_bias,
        LinearFault.GATE_AND_UP_SWAPPED: shape.epilogue is Epilogue.SWIGLU,
    }
    return needs.get(fault, True)


def wrong_linear(fault: LinearFault, shape: LinearShape) -> RunLinear:
    """A product with this fault, for numbers of rows of one bucket. Not for service: it waits for the device."""
    calls = count()
    counts = rows_to_test(shape.rows, is_cpu=True)
    only_count = counts[len(counts) // 2]

    def run(x: Tensor, weight: LinearWeight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
        num_rows = x.shape[0]
        is_wrong = fault is not LinearFault.WRONG_ALGORITHM or num_rows == only_count
        inputs, numbers = weight.as_multiplied(x).float(), weight.dequantized().float()
        sums = _sums(inputs, numbers, out.dtype, fault if is_wrong else LinearFault.NONE)
        if bias is not None and fault is not LinearFault.BIAS_IGNORED:
            sums = sums + bias.float()
        result = _finished(sums, epilogue, fault)
        _spoil_rows(result, fault)
        if fault is LinearFault.TAIL_READ:
            behind = x.as_strided((1,), (1,), x.storage_offset() + num_rows * x.stride(0))
            result[-1] += 0 * behind.float()
        if fault is LinearFault.UNSTABLE:
            result *= 1 + next(calls) % 2 * 2 * torch.finfo(out.dtype).eps
        written = num_rows - (fault is LinearFault.STALE_OUTPUT)
        out[:written] = result[:written].to(out.dtype)
        if fault is LinearFault.STRAY_WRITE:
            out.as_strided((out.stride(0),), (1,), out.storage_offset() + out.numel()).zero_()

    return run


def product_of(inputs: Tensor, numbers: Tensor, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out with epilogue(inputs @ numbers^T + bias), both fp64: a right product of numbers that a fault made."""
    sums = (inputs @ numbers.T).float()
    if bias is not None:
        sums = sums + bias.float()
    out.copy_(_finished(sums, epilogue, LinearFault.NONE))


def _sums(x: Tensor, weight: Tensor, dtype_out: torch.dtype, fault: LinearFault) -> Tensor:
    """[rows, weight rows] fp32 of x and weight in fp32."""
    size_in = x.shape[1]
    if fault is LinearFault.TAIL_COLUMNS_ZERO:
        size_in = size_in // _TILE * _TILE
    if fault in (LinearFault.SPLIT_DROPPED, LinearFault.WRONG_ALGORITHM):
        size_in -= size_in // _SPLITS
    x, weight = x[:, :size_in], weight[:, :size_in]
    if fault is LinearFault.TF32:
        x, weight = _to_10_bits(x), _to_10_bits(weight)
    low = dtype_out if dtype_out.itemsize == 2 else torch.bfloat16
    if fault is LinearFault.LOW_PRECISION_SUM:
        sums = x.new_zeros(x.shape[0], weight.shape[0])
        for start in range(0, size_in, _TILE):
            part = slice(start, start + _TILE)
            sums = (sums + x[:, part] @ weight[:, part].T).to(low).float()
        return sums
    if fault is LinearFault.LOW_PRECISION_SPLITS:
        step = -(-size_in // _SPLITS)
        parts = [slice(start, start + step) for start in range(0, size_in, step)]
        return torch.stack([(x[:, part] @ weight[:, part].T).to(low).float() for part in parts]).sum(0)
    return x @ weight.T


def _finished(sums: Tensor, epilogue: Epilogue, fault: LinearFault) -> Tensor:
    if epilogue is Epilogue.SWIGLU:
        gate, up = sums.chunk(2, dim=-1)
        if fault is LinearFault.GATE_AND_UP_SWAPPED:
            gate, up = up, gate
        sums = activated_fp64(gate, up, Activation.SILU)
    return sums.bfloat16().float() if fault is LinearFault.ROUNDED_OUTPUT else sums


def _spoil_rows(result: Tensor, fault: LinearFault) -> None:
    """Change result [rows, size_out] in place."""
    num_rows, size_out = result.shape
    if fault is LinearFault.TAIL_ROWS_ZERO:
        result[num_rows // _TILE * _TILE :] = 0
    if fault is LinearFault.TAIL_OUTPUT_ZERO:
        result[:, size_out // _TILE * _TILE :] = 0
    if fault is LinearFault.ROWS_SWAPPED and num_rows > 1:
        result[-2:] = result[-2:].flip(0)
    if fault is LinearFault.NEIGHBOUR_SUMMED and num_rows > 1:
        result[-1] += 1e-3 * result[-2]


def _to_10_bits(x: Tensor) -> Tensor:
    """fp32 rounded to TF32's mantissa."""
    return ((x.contiguous().view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)
