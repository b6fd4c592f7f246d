"""Runs the kernels of `gluon.decode.hopper` program by program in numpy: Triton's interpreter does not know Gluon.

What a kernel computes is checked so, that it reads nothing it must not read, and that it waits for nothing that never
comes; layouts are not, nor what runs at the same time on a GPU. Shared memory, scratch and the output start as NaN.
"""

import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.hopper.decode import kernel as gluon_decode
from kernels.hopper.decode import stream as gluon_decode_stream
from kernels.hopper.decode.variants import DecodeVariant
from kernels.tma.launches import scales

_MODULES = (gluon_decode_stream, gluon_decode)


class Array(np.ndarray):
    """A tensor; scalars are tensors too, and nothing is changed in place."""

    def __array_wrap__(self, array: Any, _context: Any = None, _return_scalar: bool = False) -> "Array":
        return np.asarray(array).view(Array)

    def __iadd__(self, other: Any) -> "Array":
        return self + other

    def to(self, dtype: Any) -> "Array":
        return self.astype(dtype)

    def permute(self, order: list[int]) -> "Array":
        return self.transpose(order)

    def load(self, _layout: Any) -> "Array":
        return self.copy()

    def index(self, number: Any) -> "Array":
        return self[int(number)]

    def slice(self, start: int, length: int) -> "Array":
        return self[start : start + length]

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


def array(value: Any) -> Array:
    return np.asarray(value).view(Array)


@dataclass
class Pointer:
    """Elements of a tensor, at offsets from its first one."""

    memory: np.ndarray
    offset: Any = 0

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + other)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)


@dataclass
class Barrier:
    """An mbarrier of one arrival; `phase` counts how often it opened."""

    phase: int = 0
    arrived: bool = False
    bytes_left: int = 0

    def arrive(self, num_bytes: int) -> None:
        assert not self.arrived, "a second arrival in one phase"
        self.arrived = True
        self.bytes_left += num_bytes
        self.open_if_complete()

    def open_if_complete(self) -> None:
        if self.arrived and self.bytes_left == 0:
            self.phase += 1
            self.arrived = False


@dataclass
class Map:
    """A tensor map: what is outside arrives as zeros; nobody may ask for a page that does not exist."""

    tensor: np.ndarray
    box: list[int]
    dtype: Any = np.float32

    @property
    def block_type(self) -> Any:
        return types.SimpleNamespace(nbytes=2 * int(np.prod(self.box)))

    def read(self, at: list[int]) -> np.ndarray:
        assert 0 <= at[0] < self.tensor.shape[0], f"the first dim has {self.tensor.shape[0]}, asked for {at[0]}"
        found = np.zeros(self.box, self.tensor.dtype)
        part = self.tensor[tuple(slice(start, start + size) for start, size in zip(at, self.box, strict=True))]
        found[tuple(slice(0, size) for size in part.shape)] = part
        return found


class Barriers(list[Barrier]):
    def index(self, number: Any) -> Barrier:  # type: ignore[override]
        return self[int(number)]


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Array:
    offset, mask = np.broadcast_arrays(np.asarray(pointer.offset), np.asarray(mask))
    inside = np.where(mask, offset, 0)
    assert ((inside >= 0) & (inside < pointer.memory.size)).all(), "a load outside of its tensor"
    return array(np.where(mask, pointer.memory[inside], other))


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    offset, value, mask = np.broadcast_arrays(np.asarray(pointer.offset), np.asarray(value), np.asarray(mask))
    pointer.memory[offset[mask]] = value[mask]


def _copy(desc: Map, at: list[Any], barrier: Barrier, box: Array, pred: Any = True) -> None:
    if pred:
        box[...] = desc.read([int(start) for start in at]).reshape(box.shape)
        barrier.bytes_left -= desc.block_type.nbytes
        barrier.open_if_complete()


def _wait(barrier: Barrier, phase: Any) -> None:
    assert barrier.phase & 1 != int(phase), "a wait that would never end"


def _expect(barrier: Barrier, num_bytes: int, pred: Any = True) -> None:
    if pred:
        barrier.arrive(num_bytes)


def _arrive(barrier: Barrier, count: int, pred: Any = True) -> None:  # noqa: ARG001 -- Gluon's name
    if pred:
        barrier.arrive(0)


def _allocate(dtype: Any, shape: list[int], _layout: Any) -> Any:
    return Barriers(Barrier() for _ in range(shape[0])) if dtype is np.int64 else array(np.full(shape, np.nan, dtype))


@dataclass
class Language:
    """Stands in for `gl`: the program that runs, and what kernels call."""

    program: tuple[int, int] = (0, 0)
    programs: int = 1
    calls: dict[str, Any] = field(
        default_factory=lambda: {
            "arange": lambda start, end, layout: array(np.arange(start, end)),  # noqa: ARG005 -- Gluon's name
            "load": load,
            "store": store,
            "sum": lambda x, axis: array(np.sum(x, axis=axis)),
            "max": lambda x, axis: array(np.max(x, axis=axis)),
            "maximum": lambda a, b: array(np.maximum(a, b)),
            "minimum": lambda a, b: array(np.minimum(a, b)),
            "where": lambda c, a, b: array(np.where(c, a, b)),
            "exp2": lambda x: array(np.exp2(x)),
            "full": lambda shape, value, dtype, layout: array(np.full(shape, value, dtype)),  # noqa: ARG005
            "zeros_like": lambda x: array(np.zeros_like(x)),
            "expand_dims": lambda x, axis: array(np.expand_dims(x, axis)),
            "convert_layout": lambda x, layout: x,  # noqa: ARG005
            "associative_scan": lambda x, axis, add: array(np.cumsum(x, axis=axis)),  # noqa: ARG005
            "allocate_shared_memory": _allocate,
            "static_range": range,
            "num_warps": lambda: 1,
            "float32": np.float32,
            "int32": np.int32,
            "int64": np.int64,
        }
    )

    def __getattr__(self, name: str) -> Any:
        return self.calls[name]

    def program_id(self, axis: int) -> Array:
        return array(self.program[axis])

    def num_programs(self, axis: int) -> Array:
        assert axis == 0
        return array(self.programs)

    def __post_init__(self) -> None:
        layout = types.SimpleNamespace(get_default_for=lambda shape, dtype: None)  # noqa: ARG005
        for name in ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout"):
            self.calls[name] = lambda *_: None
        self.calls["NVMMASharedLayout"] = layout


def kernels_in_numpy(language: Language, modules: tuple[types.ModuleType, ...] = _MODULES) -> dict[str, Any]:
    """The functions of the decode modules, calling each other and `language`."""
    names: dict[str, Any] = {
        "gl": language,
        "mbarrier": types.SimpleNamespace(
            MBarrierLayout=lambda: None, init=lambda *_, **__: None, wait=_wait, expect=_expect, arrive=_arrive
        ),
        "tma": types.SimpleNamespace(async_copy_global_to_shared=_copy),
        "mma_v2": lambda a, b, acc: array(np.matmul(a, b) + acc),
        "min": min,
        "range": range,
    }
    for module in modules:
        for name, value in vars(module).items():
            if hasattr(value, "fn") and value.fn.__module__ == module.__name__:
                names[name] = types.FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
            elif type(value).__name__ == "constexpr":
                names[name] = value.value
    names["tanh"] = lambda x: array(np.tanh(x))
    for name in ("launch_dependents", "wait_for_launch_before", "prefetch_table"):
        names[name] = lambda *_: None
    return names


def run_in_numpy(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *,
    variant: DecodeVariant, num_programs: int, parts: int,
) -> None:  # fmt: skip
    """Run the launches of a call: every program of the first kernel, then every one of the second.

    parts  partial results of a row of many that a program of the second works on at once
    """
    assert batch.page_table is not None
    assert batch.context_lens is not None
    language = Language(programs=num_programs)
    kernels = kernels_in_numpy(language)
    group, heads = variant.group, q.shape[1]
    pages = [x.permute(0, 2, 1, 3).numpy() for x in (k, v)]
    queries = q.view(-1, heads // group, group, q.shape[2]).transpose(0, 1).numpy()
    maps = [Map(queries, [variant.heads, variant.queries, variant.members, variant.chunk_d])]
    maps += [Map(x, [1, variant.heads, variant.block_n, variant.chunk_d]) for x in pages]
    scratch = np.full(2 * num_programs * variant.heads * variant.columns * (variant.block_d + 2), np.nan, np.float32)
    sinks = None if flags.sinks is None else Pointer(flags.sinks.numpy())
    lengths = [Pointer(x.numpy()) for x in (batch.cu_seqlens_q, batch.context_lens)]
    result = (Pointer(out.view(-1).numpy()), Pointer(scratch), sinks, *lengths)
    table = batch.page_table
    sizes = [array(x) for x in (batch.num_seqs, heads // group // variant.heads * variant.parts)]
    window = array(flags.window or 0)
    strides = (out.stride(0), out.stride(1))
    with np.errstate(all="ignore"):
        for program in range(num_programs):
            language.program = (program, 0)
            kernels["hallmark_gluon_decode"](
                *maps, *result, Pointer(table.view(-1).numpy()), *strides, table.stride(0), *sizes, *scales(flags),
                window, variant,
            )  # fmt: skip
        for program in range(num_programs):
            for head in range(variant.heads):
                language.program = (program, head)
                kernels["hallmark_gluon_decode_combine"](*result, *strides, *sizes, window, parts, variant)


def numpy_runner(variant: DecodeVariant, num_programs: int, parts: int) -> Any:
    """A function like the path's."""

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        run_in_numpy(q, k, v, batch, flags, out, variant=variant, num_programs=num_programs, parts=parts)
        assert torch.isfinite(out).all()

    return run
