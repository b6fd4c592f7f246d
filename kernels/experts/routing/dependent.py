"""Programmatic dependent launch of the Triton kernels of a mixture: each starts while the one before it ends."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(IS_DEPENDENT: tl.constexpr):
    """Let the kernel behind this one start, and wait for the one before; nothing is read or written earlier."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@lru_cache(maxsize=16)
def launches_ahead(device: torch.device) -> bool:
    """Return whether the device launches ahead: from sm_90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
