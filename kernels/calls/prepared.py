"""Prepared calls: what is kept of a form of calls, so that the next call of that form is only launched."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded

# Takes a tensor beside which memory of the call is allocated, then the addresses of q, k, v, cu_seqlens_q,
# cu_seqlens_k or the page table, context_lens, sinks, spans and out. Launches on the stream that is current.
Launch = Callable[[Tensor, int, int, int, int, int, int | None, int | None, int | None, int], None]


class PreparedCall(NamedTuple):
    """The launches of all calls of one form.

    A form is everything that a call is known by but values in memory, addresses and the bound of the contexts: shapes,
    strides, dtypes, the device, max_seqlen_q, flags, which tensors are one, and each address modulo 16. What is kept
    holds kernels, numbers and tensor maps, never a tensor: a call's scratch memory is allocated on the call's stream.

    launch                    see above
    min_context, max_context  bounds of the contexts that have these launches, both included
    """

    launch: Launch
    min_context: int
    max_context: float


class Step(NamedTuple):
    """A kernel's launch but for the stream and the addresses: these stand behind its options.

    rest  the kernel's arguments behind the addresses
    """

    launch: Callable[..., None]
    grid: tuple[int, int, int]
    options: tuple[Any, ...]
    rest: tuple[Any, ...]


def step_of(kernel: Loaded, grid: tuple[int, int, int], numbers: tuple[Any, ...]) -> Step:
    """Return the launch of a kernel. numbers: its arguments behind the addresses."""
    return Step(kernel.launch, grid, launch_options(kernel), (*numbers, *kernel.tail))


def launch_options(kernel: Loaded) -> tuple[Any, ...]:
    """Return the arguments of a launch that stand between its stream and the kernel's own."""
    return kernel.begin((1, 1, 1))[4:]


# Takes what a path's `run` takes. None where nothing is to be prepared: then `run` serves the call, or refuses it.
Prepare = Callable[[Tensor, Tensor, Tensor, AttentionBatch, AttentionFlags, Tensor], PreparedCall | None]


def steady_range(at: int, largest: int, choose: Callable[[int], Hashable]) -> tuple[int, int]:
    """Return the ends of the range around `at`, within 0 to `largest`, in which `choose` gives what it gives there.

    `choose` must not give it again outside of that range.
    """
    chosen = choose(at)

    def end(inside: int, outside: int) -> int:
        if choose(outside) == chosen:
            return outside
        while abs(outside - inside) > 1:
            middle = (inside + outside) // 2
            if choose(middle) == chosen:
                inside = middle
            else:
                outside = middle
        return inside

    return end(at, 0), end(at, max(at, largest))
