"""The kernels that launches ask Triton for, and that are not compiled while it is asked."""

import base64
import hashlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

from kernels.calls.launch import Loaded


class _Metadata(NamedTuple):
    """Metadata of a kernel that is not compiled, as its launcher reads it."""

    tensordesc_meta: tuple[dict[str, Any], ...] | None
    global_scratch_size: int = 0
    profile_scratch_size: int = 0
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    shared: int = 0


class NotCompiled:
    """Stands in for a compiled kernel."""

    function = 1
    packed_metadata = (4, 1, 0)

    def __init__(self, source: Any) -> None:
        box = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64]}
        num_maps = sum(str(it).startswith("tensordesc") for it in source.signature.values())
        self.src, self.metadata = source, _Metadata((box,) * num_maps)
        self.run = driver.active.launcher_cls(source, self.metadata)

    def launch_metadata(self, *_: Any) -> None:
        pass


class WantedKernels(triton.AsyncCompileMode):  # type: ignore[misc]
    """Keeps what compiles each variant of a kernel that Triton is asked for, by its key, and calls none of it.

    Triton's key is a digest of all that the compiled code depends on: two launches with one key share an entry of its
    cache.
    """

    def __init__(self) -> None:
        super().__init__(executor=None)
        self.by_key: dict[str, Callable[[], object]] = {}

    def submit(self, key: str, compile_fn: Callable[[], object], finalize_fn: Callable[[object], None]) -> NotCompiled:
        self.by_key.setdefault(key, compile_fn)
        kernel = NotCompiled(source_of(compile_fn))
        finalize_fn(kernel)  # to be found by the next launch
        return kernel


def compile_launchers(kernel: Any) -> None:
    """Compile the functions in C that launch a compiled kernel, into Triton's cache, as its first launch does.

    For a process that pretends a GPU and launches nothing any more. Raises what Triton does without a C compiler or the
    driver's library.
    """
    driver.active.launcher_cls = CudaLauncher
    Loaded(kernel, torch.device("cuda", 0))


def source_of(compile_fn: Callable[[], object]) -> Any:
    """Return what a kept function compiles."""
    return inspect.getclosurevars(compile_fn).nonlocals["src"]


def entry_of(key: str, compile_fn: Callable[[], object]) -> str:
    """Return the file of Triton's cache, from its folder, that is there when a kernel is compiled whole."""
    folder = base64.b32encode(hashlib.sha256(key.encode()).digest()).decode().rstrip("=")
    return f"{folder}/__grp__{source_of(compile_fn).name[:150]}.json"


def name_of(compile_fn: Callable[[], object]) -> str:
    return str(source_of(compile_fn).fn.__name__)
