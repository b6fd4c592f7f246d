"""What the Gluon kernels' launches share: kernels loaded to be launched past Triton's binder, and their tensor maps.

The binder costs the host more than a short prompt costs the GPU.
"""

# mypy: allow-untyped-defs

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from kernels.attention import gluon_pipeline
from kernels.attention.batch import AttentionFlags
from kernels.attention.gluon_softmax import LOG2E
from kernels.attention.gluon_variants import ROWS, AnyTensor
from kernels.launch import num_processors

_ANY_ROW = 0x7FFF0000  # bound of a dim that the hardware need not check
_HALF = gluon_pipeline.HALF.value
_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


class ToLaunch(NamedTuple):
    """A loaded kernel. Each tensor map among its arguments comes with its shape and its strides.

    run     takes the grid, the stream, `function`, `metadata`, three times None, and arguments by position
    launch  what `run` wraps, which takes 0.7 us to ask for scratch memory of 0 bytes: takes the grid, the stream,
            `head`, and arguments by position, pointers as integers
    encode  makes a tensor map of an address, a box, a shape, strides and 0 (what is outside arrives as zeros)
    boxes   of the tensor maps: swizzle, element bytes, element type and block
    """

    run: Any
    function: int
    metadata: tuple[int, ...]
    launch: Callable[..., None]
    head: tuple[Any, ...]
    encode: Callable[..., object]
    boxes: tuple[tuple[Any, ...], ...]
    num_processors: int


class ExpandedSource(NamedTuple):
    """What Triton's launcher asks of a kernel's source."""

    fn: Any
    constants: Any
    signature: dict[Any, str]


def loaded(kernel: Any, device: torch.device) -> ToLaunch:
    """A compiled kernel whose first arguments are the tensor maps of q, k and v."""
    kernel.run  # noqa: B018 -- loads it
    signature = []
    for argument in kernel.src.signature.values():
        if argument.startswith("tensordesc"):
            rank = len(argument.split("[")[1].split("]")[0].split(","))
            signature += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
        else:
            signature.append(argument)
    source = ExpandedSource(kernel.src.fn, {}, dict(enumerate(signature)))
    metadata = kernel.metadata
    assert metadata.global_scratch_size == metadata.profile_scratch_size == 0, "no kernel of ours takes scratch memory"
    run = driver.active.launcher_cls(source, metadata._replace(tensordesc_meta=None))
    head = (
        kernel.function, metadata.launch_cooperative_grid, metadata.launch_pdl, None, None, kernel.packed_metadata,
        None, None, None,
    )  # fmt: skip
    boxes = tuple(
        (box["swizzle"], box["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[box["elem_type"]], box["block_size"])
        for box in metadata.tensordesc_meta
    )
    encode = driver.active.utils.fill_tma_descriptor
    return ToLaunch(
        run, kernel.function, kernel.packed_metadata, run.launch, head, encode, boxes, num_processors(device)
    )


def any_map(dtype: torch.dtype, box: list[int]) -> TensorDescriptor:
    """Stands for every tensor map of this dtype and box: what Triton compiles in of one."""
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[dtype])
    return TensorDescriptor(AnyTensor(dtype, 0), [1] * len(box), [8] * (len(box) - 1) + [1], box, layout)


def row_map(x: Tensor, encode: Callable[..., object], box: tuple[Any, ...]) -> tuple[object, ...]:
    """Boxes of some tokens of one head; what is past the tensor or past its head dim arrives as zeros."""
    shape, strides = x.shape, x.stride()
    return encode(x.data_ptr(), *box, shape, strides, 0), *shape, *strides


def value_map(v: Tensor, encode: Callable[..., object], box: tuple[Any, ...]) -> tuple[object, ...]:
    """The same for values, with a bound on rows that every copy chooses for itself."""
    shape, strides = value_dims(v.shape, v.stride())
    return encode(v.data_ptr(), *box, shape, strides, 0), *shape, *strides


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
