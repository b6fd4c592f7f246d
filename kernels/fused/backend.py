"""Triton for the fused ops, which exists for Linux only. Without it every op is its torch reference."""

from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels.calls.launch import Loaded, is_interpreted

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    triton = None
    tl = SimpleNamespace(constexpr=int)  # what a kernel's signature names; its body is never run

    def jit(kernel: Any = None, **_options: Any) -> Any:
        return kernel if kernel is not None else jit


def runs_on_triton(x: Tensor) -> bool:
    """Return whether an op on x is a Triton kernel: on a GPU, or anywhere under Triton's interpreter."""
    return triton is not None if x.is_cuda else is_interpreted()


def overlap(device: torch.device) -> dict[str, bool]:
    """Options that let a kernel start while the one before it drains: programmatic dependent launch, from sm_90 on.

    The kernel takes them as the constexpr OVERLAPS, and must wait for that other kernel before it reads what may come
    from there, and before it writes anything.
    """
    return {"OVERLAPS": True, "launch_pdl": True} if device.type == "cuda" and _can_overlap(device) else {}


@lru_cache(maxsize=16)
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@dataclass(frozen=True, slots=True)
class Aligned:
    """A stand-in, for Triton's compiler, of every tensor of one dtype at a multiple of 16 bytes."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


def prepare(kernel: Any, device: torch.device, *arguments: Any, **options: Any) -> Loaded:
    """`kernel` for arguments like these, tensors as `Aligned`. options: its constexprs, and Triton's options."""
    return Loaded(kernel.warmup(*arguments, grid=(1,), **options), device)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1: the width of a Triton tile over n elements."""
    return 1 << (n - 1).bit_length()


__all__ = ["Aligned", "Loaded", "jit", "next_power_of_2", "overlap", "prepare", "runs_on_triton", "tl"]
