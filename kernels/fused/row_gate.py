"""Sums of what experts gave and what all tokens of a mixture visit: scaled, or by a gate of each token.

A gate is the sigmoid of a row's product with one vector. A library's product of one column changes its algorithm with
the number of rows; here a row's bits depend on that row alone.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.fused.alike import sigmoid_alike
from kernels.fused.backend import Aligned, Loaded, jit, next_power_of_2, overlap, prepare, runs_on_triton, tl
from kernels.fused.sigmoid import sigmoid


def add_scaled_(out: Tensor, shared: Tensor, scale: float = 1.0) -> Tensor:
    """out += scale * shared, in place, computed in fp32 and rounded once; returns out.

    out, shared [T, H] of one dtype, contiguous, apart in memory
    """
    if not runs_on_triton(out):
        return out.add_(shared, alpha=scale)
    return _launch(out, shared, shared, shared, scale, has_gate=False)


def add_gated_(out: Tensor, shared: Tensor, x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """out += scale * sigmoid(x @ gate) * shared, likewise; x [T, H], gate [H], of the same dtype and contiguous."""
    if not runs_on_triton(out):
        share = sigmoid_alike((x.float() * gate.float()).sum(dim=-1, keepdim=True)).mul_(scale)
        return out.copy_(share.mul(shared.float()).add_(out))
    return _launch(out, shared, x, gate, scale, has_gate=True)


def _launch(out: Tensor, shared: Tensor, x: Tensor, gate: Tensor, scale: float, *, has_gate: bool) -> Tensor:
    num_tokens, size = out.shape
    addresses = out.data_ptr(), shared.data_ptr(), x.data_ptr(), gate.data_ptr()
    if out.is_cuda and all(it % 16 == 0 for it in addresses):  # as what torch allocates is
        kernel = _prepared(out.device, out.dtype, size, has_gate)
        kernel((num_tokens, 1, 1), (*addresses, scale))
    else:
        _add_shared_kernel[(num_tokens,)](out, shared, x, gate, scale, **_options(out.device, size, has_gate))
    return out


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def _prepared(device: torch.device, dtype: torch.dtype, size: int, has_gate: bool) -> Loaded:
    """The kernel for aligned tensors of this dtype."""
    return prepare(_add_shared_kernel, device, *[Aligned(dtype)] * 4, 1.0, **_options(device, size, has_gate))


def _options(device: torch.device, size: int, has_gate: bool) -> dict[str, int]:
    block = next_power_of_2(size)
    num_warps = min(max(block // 512, 1), 16)  # 16 elements of each tensor a thread, up to 8192
    return {"SIZE": size, "BLOCK": block, "HAS_GATE": has_gate, "num_warps": num_warps, **overlap(device)}


@jit
def _add_shared_kernel(
    out_ptr,
    shared_ptr,
    x_ptr,
    gate_ptr,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_GATE: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):
    """One program a token; its whole row is in registers."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_GATE:
        gate = tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    out = tl.load(out_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_GATE:
        x = tl.load(x_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
        scale *= sigmoid(tl.sum(x * gate, axis=0))
    tl.store(out_ptr + row + cols, (out + shared * scale).to(out_ptr.dtype.element_ty), mask=mask)
