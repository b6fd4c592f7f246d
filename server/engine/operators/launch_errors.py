"""Classification of exceptions: a kernel that could not be launched, or a lost device and the path that lost it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kernels.calls.launch import CompilationError, OutOfResources, PTXASError, TritonError
from kernels.linear.library.cublaslt import CublasLtError
from kernels.system.device_lost import DeviceLost
from kernels.vocabulary.path import Reject

LAUNCH_ERRORS: tuple[type[Exception], ...] = (RuntimeError, TritonError, CublasLtError)

# What the driver says of a kernel that this GPU has no room for, a slice of one for example: nothing has run.
_NO_ROOM = ("cluster misconfiguration", "too many resources requested for launch", "[CUDA]: out of memory")


def launch_failure(error: Exception) -> Reject | None:
    """Why a kernel was not launched, its context being intact; None for an error after which no path can serve."""
    if isinstance(error, OutOfResources | torch.OutOfMemoryError):
        return Reject.OUT_OF_RESOURCES
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_ROOM):
        return Reject.OUT_OF_RESOURCES
    if isinstance(error, CompilationError | PTXASError):
        return Reject.COMPILE_ERROR
    if isinstance(error, RuntimeError) and "Failed to find C compiler" in str(error):  # Triton wants one for a launcher
        return Reject.COMPILE_ERROR
    if isinstance(error, RuntimeError) and "No available kernel" in str(error):  # a pinned SDPA backend refuses
        return Reject.DISABLED
    if isinstance(error, CublasLtError):  # it refuses what it proposed
        return Reject.DISABLED
    return None


def not_launched(error: Exception) -> Reject | None:
    """Return `launch_failure` of a product; None without memory, which PyTorch asks for in the products of any path."""
    return None if isinstance(error, torch.OutOfMemoryError) else launch_failure(error)


def is_device_lost(error: BaseException) -> bool:
    """Return whether nothing more can run in this process: an illegal access, a fault of the driver, a broken step.

    Triton's driver raises a plain RuntimeError that begins "Triton Error [CUDA]"; torch raises AcceleratorError. Where
    one of several ranks leaves a step, it raises DeviceLost itself.
    """
    if isinstance(error, DeviceLost):
        return True
    if isinstance(error, Exception) and launch_failure(error) is not None:
        return False
    return isinstance(error, torch.AcceleratorError) or "Error [CUDA]" in str(error)


@contextmanager
def blaming(suspects: Callable[[], list[tuple[str, str]]]) -> Iterator[None]:
    """A device that is lost inside ends as DeviceLost, with the (path, shape) pairs that ran then.

    A DeviceLost from inside passes: it names its own suspects.
    """
    try:
        yield
    except DeviceLost:
        raise
    except Exception as error:
        if is_device_lost(error):
            raise DeviceLost(str(error).partition("\n")[0], suspects()) from error
        raise
