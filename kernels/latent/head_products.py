"""Products of each head's numbers with a matrix of its own, in one order of sums: what latent attention absorbs.

A library's batched product changes its algorithm with the number of rows; here a row's bits depend on that row alone.
"""

from torch import Tensor

from kernels.fused.backend import jit, next_power_of_2, runs_on_triton, tl
from kernels.linear.ordered.tile_products import multiply_tiles

_ROWS = 64  # of a tile, of however many: of fewer another instruction multiplies, which sums otherwise
_COLUMNS, _STEP = 128, 64  # of a tile, and of the inner dim at a time
_ROWS_FP32, _COLUMNS_FP32, _STEP_FP32 = 32, 64, 32  # FMAs
_LEAST = 16  # numbers that a tensor core multiplies at once


def multiply_heads(x: Tensor, weights: Tensor, out: Tensor) -> None:
    """Fill out [T, heads, N] with x [T, heads, K] @ weights [heads, K, N], summed in fp32 and rounded once.

    All of one dtype, in any strides. On a CPU 16 rows are multiplied in every call of the library, zeros where there
    are fewer.
    """
    if not runs_on_triton(x):
        for head in range(x.shape[1]):
            out[:, head] = multiply_tiles(x[:, head], weights[head].t())
        return
    num_tokens, num_heads, size_in = x.shape
    size_out = weights.shape[2]
    is_wide = x.element_size() == 4
    rows = _ROWS_FP32 if is_wide else _ROWS
    columns = max(_LEAST, min(_COLUMNS_FP32 if is_wide else _COLUMNS, next_power_of_2(size_out)))
    step = max(_LEAST, min(_STEP_FP32 if is_wide else _STEP, next_power_of_2(size_in)))
    _head_products_kernel[(-(-num_tokens // rows), -(-size_out // columns), num_heads)](
        x, weights, out, num_tokens, x.stride(0), x.stride(1), x.stride(2), weights.stride(0), weights.stride(1),
        weights.stride(2), out.stride(0), out.stride(1), out.stride(2),
        SIZE_IN=size_in, SIZE_OUT=size_out, ROWS=rows, COLUMNS=columns, STEP=step,
        num_warps=4, num_stages=1 if is_wide else 3,
    )  # fmt: skip


@jit(do_not_specialize=["num_tokens"])
def _head_products_kernel(
    x_ptr, weights_ptr, out_ptr, num_tokens, stride_xt, stride_xh, stride_xk, stride_wh, stride_wk, stride_wn,
    stride_ot, stride_oh, stride_on,
    SIZE_IN: tl.constexpr, SIZE_OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program: some rows and columns of one head."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(2).to(tl.int64)
    is_token, is_column = tokens < num_tokens, columns < SIZE_OUT
    inner = tl.arange(0, STEP)
    x_rows = x_ptr + head * stride_xh + tokens.to(tl.int64)[:, None] * stride_xt
    weights_ptr += head * stride_wh
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SIZE_IN, STEP):
        places = start + inner
        is_place = places < SIZE_IN
        x = tl.load(x_rows + places[None, :] * stride_xk, mask=is_token[:, None] & is_place[None, :], other=0.0)
        at = places[:, None] * stride_wk + columns[None, :] * stride_wn
        weights = tl.load(weights_ptr + at, mask=is_place[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(x, weights, total, input_precision="ieee")
    rows = out_ptr + head * stride_oh + tokens.to(tl.int64)[:, None] * stride_ot
    mask = is_token[:, None] & is_column[None, :]
    tl.store(rows + columns[None, :] * stride_on, total.to(out_ptr.dtype.element_ty), mask=mask)
