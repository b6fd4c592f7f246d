"""Runs `gluon.prefill.window.hopper` program by program in numpy, its roles as threads.

Triton's interpreter does not know Gluon. What the kernel computes and copies is checked so, and that no role waits for
what never comes; layouts are not, nor what a GPU reorders. Shared memory starts as NaN.
"""

import operator
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.hopper import blocks, pipeline, schedule, softmax, store
from kernels.hopper.tensor_layout import value_dims
from kernels.hopper.variants import Variant
from kernels.hopper.window import kernel
from kernels.hopper.window.variants import MAX_WINDOW, tokens_of
from kernels.tma.launches import scales
from support.emulator import gluon_by_numpy as by_numpy
from support.emulator.gluon_by_numpy import Array, Language, array, kernels_in_numpy

_MODULES = (schedule, pipeline, softmax, store, blocks, kernel)
_STUCK_S = 300.0  # of a role that waits: not a time that a right one could take


class Memory(Array):
    """Shared memory."""

    def slice(self, start: int, length: int, dim: int = 0) -> Any:
        return self[(*[slice(None)] * dim, slice(start, start + length))]

    def store(self, value: Any) -> None:
        self[...] = value


class Pointer(by_numpy.Pointer):
    """Offsets may be a tensor that is indexed."""

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + other)

    def __getitem__(self, at: Any) -> "Pointer":
        return Pointer(self.memory, self.offset[at])


class Map:
    """A tensor map: coordinates outside of its bounds read zeros; addresses are modulo 2**64, elements of 2 bytes."""

    dtype = np.float32

    def __init__(self, memory: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], box: list[int]) -> None:
        self.memory, self.shape, self.strides, self.box = memory.reshape(-1), shape, strides, box

    def read(self, at: list[Any]) -> np.ndarray:
        address = np.zeros((1,) * len(self.box), np.uint64)
        inside = np.ones((1,) * len(self.box), bool)
        for axis, (start, size) in enumerate(zip(at, self.box, strict=True)):
            along = [-1 if other == axis else 1 for other in range(len(self.box))]
            places = np.arange(int(start), int(start) + size).reshape(along)
            inside = inside & (places >= 0) & (places < self.shape[axis])
            stride = np.uint64(2 * self.strides[axis] % 2**64)
            with np.errstate(over="ignore"):
                address = address + places.astype(np.int64).astype(np.uint64) * stride
        element = np.where(inside, address // np.uint64(2), 0).astype(np.int64)
        assert ((element >= 0) & (element < self.memory.size)).all(), "a copy from outside of the tensor"
        return np.where(inside, self.memory[element], 0)


class Barrier:
    """An mbarrier; all of a program share a condition."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed, self.count, self.arrived, self.bytes_left, self.phase = changed, 1, 0, 0, 0

    def arrive(self, num_bytes: int = 0, arrivals: int = 1) -> None:
        with self.changed:
            self.arrived += arrivals
            self.bytes_left += num_bytes
            assert self.arrived <= self.count, "more arrivals than a phase has"
            if self.arrived == self.count and self.bytes_left == 0:
                self.phase, self.arrived = self.phase + 1, 0
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != int(parity), _STUCK_S), "a wait that never ends"


class Barriers(list[Barrier]):
    def index(self, number: Any) -> Barrier:  # type: ignore[override]
        return self[int(number)]


def _hide(s: Array, bound: Array, columns: int, compare: str) -> Array:
    column = np.arange(s.shape[1])
    hidden = getattr(operator, compare)(np.asarray(bound)[:, None], column) & (column < columns)
    return array(np.where(hidden, -np.inf, s))


def _kernels(language: Language, failed: list[BaseException]) -> dict[str, Any]:
    changed = threading.Condition()

    def allocate(dtype: Any, shape: list[int], _layout: Any) -> Any:
        if dtype is np.int64:
            made = Barriers(Barrier(changed) for _ in range(shape[0]))
            return made if len(shape) == 2 else made[0]
        return np.full(shape, np.nan if dtype is np.float32 else 0, dtype).view(Memory)

    def copy(desc: Map, at: list[Any], barrier: Barrier, box: Memory) -> None:
        box[...] = desc.read(at).reshape(box.shape)
        barrier.arrive(-2 * int(np.prod(desc.box)), arrivals=0)

    def init(barrier: Barrier, count: int) -> None:
        barrier.count = count

    def specialize(roles: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        def guarded(role: Callable[..., None], given: tuple[Any, ...]) -> None:
            try:
                with np.errstate(all="ignore"):
                    role(*given)
            except BaseException as error:  # raised again by the thread that waits
                failed.append(error)

        threads = [threading.Thread(target=guarded, args=role, daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not failed:
            for thread in threads:
                thread.join(0.01)

    def product(a: Any, b: Any, acc: Any, *, use_acc: bool = True, is_async: bool) -> Array:  # noqa: ARG001
        return array(np.matmul(a, b) + acc if use_acc else np.matmul(a, b))

    language.calls |= {
        "allocate_shared_memory": allocate,
        "warp_specialize": specialize,
        "zeros": lambda shape, dtype, _layout: array(np.zeros(shape, dtype)),
        "program_id": lambda _: array(language.program[0]),
        "SwizzledSharedLayout": lambda *_: None,
    }
    found = kernels_in_numpy(language, _MODULES)
    waiting = types.SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=init,
        wait=lambda barrier, phase: barrier.wait(phase),
        expect=lambda barrier, num_bytes: barrier.arrive(num_bytes),
        arrive=lambda barrier, count: barrier.arrive(0, count),
    )
    found |= {  # in place: they are the functions' globals
        "mbarrier": waiting,
        "tma": types.SimpleNamespace(async_copy_global_to_shared=copy),
        "warpgroup_mma": product,
        "warpgroup_mma_wait": lambda _, deps: deps if len(deps) > 1 else deps[0],
        "reciprocal": lambda x: 1 / x,
        "hide": _hide,
        "wide": lambda x: array(np.int64(x)),  # numpy adds unsigned numbers to signed ones as floats
    }
    return found


def run_in_numpy(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *,
    variant: Variant, num_programs: int,
) -> None:  # fmt: skip
    """Run a launch, its programs one after the other."""
    tokens, block_d, window = tokens_of(variant), variant.tiling.block_d, flags.window
    assert window is not None
    language, failed = Language(programs=num_programs), []  # type: ignore[var-annotated]
    starts = [Pointer(x.numpy()) for x in (batch.cu_seqlens_q, batch.cu_seqlens_k) if x is not None]
    maps = (
        Map(q.numpy(), q.shape, q.stride(), [tokens, variant.pack, block_d]),
        Map(k.numpy(), k.shape, k.stride(), [tokens, 1, block_d]),
        Map(v.numpy(), *value_dims(v.shape, v.stride()), [1, 1, tokens, 1, block_d]),
    )
    sinks = None if flags.sinks is None else Pointer(flags.sinks.numpy())
    heads, parts = k.shape[1], q.shape[1] // k.shape[1] // variant.pack
    strides = [array(np.int64(stride)) for stride in out.stride()[:2]]
    for program in range(num_programs):
        language.program = (program, 0)
        names = _kernels(language, failed)
        names["hallmark_gluon_window_prefill"](
            *maps, Pointer(out.view(-1).numpy()), *strides, *starts, sinks, batch.num_seqs, heads, parts,
            scales(flags)[0], window, None, variant, window == MAX_WINDOW,
        )  # fmt: skip
        if failed:
            raise failed[0]
    assert torch.isfinite(out).all()
