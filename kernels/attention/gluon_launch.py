"""What the launches of prefill and extend share: how a call begins, and tensor maps."""

# mypy: allow-untyped-defs

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention import gluon_pipeline
from kernels.attention.batch import AttentionFlags
from kernels.attention.gluon_softmax import LOG2E
from kernels.attention.gluon_variants import ROWS, AnyTensor

_ANY_ROW = 0x7FFF0000  # bound of a dim that the hardware need not check
_HALF = gluon_pipeline.HALF.value
_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def has_work(q: Tensor, k: Tensor, flags: AttentionFlags, out: Tensor) -> bool:
    """Whether there are queries and keys; without a key `out` is zeros. Raises ValueError for a full mask."""
    if not flags.causal:
        raise ValueError("causal: expected True, found False")
    if q.shape[0] and not k.shape[0]:
        out.zero_()  # TMA takes no empty tensor
    return q.shape[0] > 0 and k.shape[0] > 0


def any_map(dtype: torch.dtype, box: list[int]) -> TensorDescriptor:
    """Stands for every tensor map of this dtype and box: what Triton compiles in of one."""
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[dtype])
    return TensorDescriptor(AnyTensor(dtype, 0), [1] * len(box), [8] * (len(box) - 1) + [1], box, layout)


def value_dims(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the tensor map of values [keys, kv_heads, head_dim], in elements.

    The leading two dims have strides 2**34 - s and s, s being the row stride. At index (HALF, r + n, HALF - n) they
    cancel modulo 2**64 bytes to row r, while the third dim's bound HALF is n rows away: rows from r + n on are zeros.
    """
    (_, num_heads, head_dim), (stride_row, stride_head, _) = shape, strides
    bounds = (_ANY_ROW, _ANY_ROW, _HALF, num_heads, head_dim)
    return bounds, (2**34 - stride_row, stride_row, stride_row, stride_head, 1)


class TensorMap(NamedTuple):
    """A tensor map but for its address: the other arguments of `encode`, and the kernel's beside the map."""

    layout: tuple[Any, ...]
    numbers: tuple[int, ...]


def tensor_map(box: tuple[Any, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
    return TensorMap((*box, shape, strides, 0), (*shape, *strides))


def store_layout(block_d: int) -> gl.DistributedLinearLayout:
    """Rows as in a wgmma accumulator; four lanes side by side with 8 columns (16 bytes) each."""
    columns = [[0, 1 << i] for i in range(5, block_d.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *columns]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [ROWS, block_d])


def is_addressable(strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether TMA can address rows of such strides, from an address of whole 16 bytes on."""
    stride_row, stride_head, stride_dim = strides
    in_bytes = (stride_row | stride_head) * itemsize
    return stride_dim == 1 and stride_row > 0 and stride_head > 0 and in_bytes % 16 == 0


def aligned(x: Tensor) -> Tensor:
    """`x` itself where TMA can address it; a copy elsewhere."""
    if is_addressable(x.stride(), x.itemsize) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def scales(flags: AttentionFlags) -> tuple[float, float]:
    """What scores (with a softcap: their tanh) are multiplied by for exp2, and what scores are before tanh."""
    if flags.softcap is None:
        return flags.scale * LOG2E, 1.0
    return flags.softcap * LOG2E, flags.scale / flags.softcap
