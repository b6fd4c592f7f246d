"""Checks and layouts shared by the launches of prefill and extend."""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from kernels.calls.batch import AttentionFlags
from kernels.hopper.pipeline import HALF
from kernels.hopper.variants import ROWS

_ANY_ROW = 0x7FFF0000  # bound of a dim that the hardware need not check
_HALF = HALF.value


def has_work(q: Tensor, k: Tensor, flags: AttentionFlags, out: Tensor) -> bool:
    """Return whether there are queries and keys; without a key zero `out`. Raises ValueError for a full mask."""
    if not flags.causal:
        raise ValueError("causal: expected True, found False")
    if q.shape[0] and not k.shape[0]:
        out.zero_()  # TMA takes no empty tensor
    return q.shape[0] > 0 and k.shape[0] > 0


def value_dims(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the tensor map of values [keys, kv_heads, head_dim], in elements.

    The leading two dims have strides 2**34 - s and s, s being the row stride. At index (HALF, r + n, HALF - n) they
    cancel modulo 2**64 bytes to row r, while the third dim's bound HALF is n rows away: rows from r + n on are zeros.
    """
    (_, num_heads, head_dim), (stride_row, stride_head, _) = shape, strides
    bounds = (_ANY_ROW, _ANY_ROW, _HALF, num_heads, head_dim)
    return bounds, (2**34 - stride_row, stride_row, stride_row, stride_head, 1)


def store_layout(block_d: int) -> gl.DistributedLinearLayout:
    """Rows as in a wgmma accumulator; four lanes side by side with 8 columns (16 bytes) each."""
    columns = [[0, 1 << i] for i in range(5, block_d.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *columns]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [ROWS, block_d])


@lru_cache(maxsize=256)
def is_addressable(strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether TMA can address rows of these strides from an address of whole 16 bytes on."""
    stride_row, stride_head, stride_dim = strides
    in_bytes = (stride_row | stride_head) * itemsize
    return stride_dim == 1 and stride_row > 0 and stride_head > 0 and in_bytes % 16 == 0


def aligned(x: Tensor) -> Tensor:
    """`x` itself where TMA can address it; a copy elsewhere."""
    if is_addressable(x.stride(), x.itemsize) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
