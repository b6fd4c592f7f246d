"""Failures of a qualification: what a kernel may raise as evidence, and what ends the run."""

from kernels.calls.launch import TritonError

# What a kernel or a peer's library raises that cannot compute, compile or launch: evidence, or a reason to be absent
# from a benchmark, and no failure of our own.
KERNEL_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, ArithmeticError, TritonError)


class QualificationAborted(RuntimeError):
    """The run can prove nothing: its checker passes a wrong kernel (or refuses a right one)."""
