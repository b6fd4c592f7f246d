"""Launching Triton kernels: whether there is a Triton, what it runs on, and how many kernels it has compiled."""

from typing import Any

import torch

try:  # where Triton, which exists for Linux only, is found missing
    import triton
    from triton.compiler.errors import CompilationError
    from triton.errors import TritonError
    from triton.runtime.errors import OutOfResources, PTXASError
except ImportError:  # its paths reject, and none of its errors can arise
    triton = None

    class TritonError(Exception):  # type: ignore[no-redef]
        """Never raised."""

    CompilationError = OutOfResources = PTXASError = TritonError

__all__ = [
    "CompilationError",
    "OutOfResources",
    "PTXASError",
    "TritonError",
    "install_compile_counter",
    "is_interpreted",
    "num_compiles",
    "num_processors",
    "shared_bytes",
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
    """None where Triton is not installed."""
    return None if triton is None else str(triton.__version__)


def is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter on the CPU (TRITON_INTERPRET=1)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def install_compile_counter() -> None:
    """Count, from now on, every Triton kernel that this process compiles or loads from Triton's disk cache."""
    if triton is not None and not isinstance(triton.knobs.compilation.listener, _CompileCounter):
        triton.knobs.compilation.listener = _CompileCounter(triton.knobs.compilation.listener)


def num_compiles() -> int:
    """Triton kernels compiled in this process since the counter was installed; 0 without it or without Triton."""
    listener = None if triton is None else triton.knobs.compilation.listener
    return listener.num_compiles if isinstance(listener, _CompileCounter) else 0


def shared_bytes(device: torch.device) -> int | None:
    """Shared memory one program may have on the GPU; None in the interpreter."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def num_processors(device: torch.device) -> int:
    """Multiprocessors of the GPU; in the interpreter a few, so that contexts are split there too."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
