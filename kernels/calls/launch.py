"""Launching Triton kernels: whether there is a Triton, what it runs on, what it has compiled, and past its binder."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

try:  # where Triton, which exists for Linux only, is found missing
    import triton
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.compiler.errors import CompilationError
    from triton.errors import TritonError
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources, PTXASError
except ImportError:  # its paths reject, and none of its errors can arise
    triton = None

    class TritonError(Exception):  # type: ignore[no-redef]
        """Stands in for Triton's error where Triton is missing; never raised."""

    CompilationError = OutOfResources = PTXASError = TritonError

__all__ = [
    "CompilationError",
    "Loaded",
    "OutOfResources",
    "PTXASError",
    "TritonError",
    "install_compile_counter",
    "is_interpreted",
    "num_compiles",
    "triton_version",
]


class _CompileCounter:
    """Triton's compilation listener: counts, and calls the listener that was there before.

    Not its post-compile hook, which describes a kernel in JSON and raises TypeError for Gluon's layouts (3.6.0).
    """

    def __init__(self, previous: Any) -> None:
        self.num_compiles = 0
        self._previous = previous

    def __call__(self, **compiled: Any) -> None:
        self.num_compiles += 1
        if self._previous is not None:
            self._previous(**compiled)


def triton_version() -> str | None:
    """Return Triton's version; None where it is not installed."""
    return None if triton is None else str(triton.__version__)


def is_interpreted() -> bool:
    """Return whether Triton kernels run in its interpreter on the CPU (TRITON_INTERPRET=1)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def install_compile_counter() -> None:
    """Count, from now on, every Triton kernel that this process compiles or loads from Triton's disk cache."""
    if triton is not None and not isinstance(triton.knobs.compilation.listener, _CompileCounter):
        triton.knobs.compilation.listener = _CompileCounter(triton.knobs.compilation.listener)


def num_compiles() -> int:
    """Triton kernels compiled in this process since the counter was installed; 0 without it or without Triton."""
    listener = None if triton is None else triton.knobs.compilation.listener
    return listener.num_compiles if isinstance(listener, _CompileCounter) else 0


class Loaded:
    """A compiled kernel on one device, to be launched past Triton's binder: to find it again takes that 10 to 20 us.

    launch  Triton's compiled launcher: takes what `begin` gives, the kernel's arguments as of a call, and `tail`
    stream  the device's current one
    boxes   of the tensor maps among the kernel's arguments: swizzle, element bytes, element type and block
    encode  makes a tensor map of an address, a box, a shape, strides and 0 (what is outside arrives as zeros)
    """

    FIRST = 13  # index of the kernel's first argument in a launch: behind the grid, the stream and the launch's options

    __slots__ = ("_head", "boxes", "encode", "launch", "stream", "tail")

    def __init__(self, kernel: Any, device: torch.device, *, cluster: int = 1) -> None:
        """`kernel`, compiled by `warmup`, for a device, the current one. cluster: its programs."""
        run, metadata = kernel.run, kernel.metadata  # the former loads it: before, it has no function
        scratch = (metadata.global_scratch_size, metadata.profile_scratch_size)
        assert scratch == (0, 0), "no kernel of ours takes scratch memory"
        boxes = metadata.tensordesc_meta or ()
        if boxes:  # Triton's own launch takes 5 us more to replace descriptors among the arguments
            source = _ExpandedSource(kernel.src.fn, {}, dict(enumerate(_expanded(kernel.src.signature))))
            run = driver.active.launcher_cls(source, metadata._replace(tensordesc_meta=None))
        num_warps, _, shared = kernel.packed_metadata
        self.launch: Callable[..., None] = run.launch
        self.boxes = tuple(
            (box["swizzle"], box["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[box["elem_type"]], tuple(box["block_size"]))
            for box in boxes
        )
        self.encode: Callable[..., object] = driver.active.utils.fill_tma_descriptor
        self._head = (
            kernel.function, metadata.launch_cooperative_grid, metadata.launch_pdl, None, None,
            (num_warps, cluster, shared), None, None, None,
        )  # fmt: skip
        assert len(self._head) == self.FIRST - 4, "the grid and the stream come before"
        self.tail = (None,) * len(kernel.src.fn.constexprs)
        self.stream: Callable[[], int] = partial(driver.active.get_current_stream, device.index)

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        """Launch it on the device's current stream.

        arguments: the kernel's but constexprs, which are its last; tensors as addresses or None, a tensor map with its
        shape and its strides behind it.
        """
        self.launch(*grid, self.stream(), *self._head, *arguments, *self.tail)

    def begin(self, grid: tuple[int, int, int]) -> tuple[object, ...]:
        """Return the first arguments of a launch on the stream that is current now, and of all that repeat it."""
        return (*grid, self.stream(), *self._head)

    def repeated(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> partial[None]:
        """Return a function that repeats this launch on the stream that is current now."""
        return partial(self.launch, *self.begin(grid), *arguments, *self.tail)


class _ExpandedSource(NamedTuple):
    """The attributes of a kernel's source that Triton's launcher reads."""

    fn: Any
    constants: Any
    signature: dict[Any, str]


def _expanded(signature: dict[Any, str]) -> Iterator[str]:
    """Types of arguments, with those of a tensor map's shape and strides behind it."""
    for argument in signature.values():
        if not argument.startswith("tensordesc"):
            yield argument
            continue
        rank = len(argument.split("[")[1].split("]")[0].split(","))
        yield from ("nvTmaDesc", *["i32"] * rank, *["i64"] * rank)
