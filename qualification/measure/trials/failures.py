"""Failures of a qualification: what a kernel may raise as evidence, and what ends the run or the process."""

from collections.abc import Sequence

import torch

from kernels.calls.launch import TritonError

# What a kernel or a peer's library raises that cannot compute, compile or launch: evidence, or a reason to be absent
# from a benchmark, and no failure of our own.
KERNEL_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, ArithmeticError, TritonError)


class QualificationAborted(RuntimeError):
    """The run can prove nothing: its checker passes a wrong kernel (or refuses a right one)."""


class DeviceLost(RuntimeError):
    """Something broke the device's context: nothing more can run in this process."""

    def __init__(self, message: str, suspects: Sequence[tuple[str, str]] = ()) -> None:
        """`suspects`: (path, str(shape)) pairs, one of which is to blame, as far as that is known."""
        super().__init__(message)
        self.suspects = list(suspects)


def loss_of(device: torch.device) -> RuntimeError | None:
    """Give memory back after a failure, and return the error of a device that works no more."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as loss:
        return loss
    return None
