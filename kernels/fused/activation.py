"""Gated linear units: activation(gate) * up. Computed in fp32, rounded once. Source: Shazeer 2020."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.activation_kind import Activation
from kernels.fused.backend import Aligned, Loaded, jit, next_power_of_2, overlap, prepare, runs_on_triton, tl

_MAX_BLOCK = 2048  # elements of one program: 16 a thread with 4 warps
_TORCH: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.GELU: F.gelu,
}


def swiglu(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate_up[:, :I]) * gate_up[:, I:], as `gated`."""
    return gated(gate_up, Activation.SILU, out)


def gated(gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
    """activation(gate_up[:, :I]) * gate_up[:, I:].

    gate_up [T, 2 * I], last dim contiguous. Returns [T, I] of its dtype, contiguous: `out`, where it is given.
    """
    if not runs_on_triton(gate_up):
        result = gated_torch(gate_up, activation)
        return result if out is None else out.copy_(result)
    num_tokens, size = gate_up.shape
    size //= 2
    out = gate_up.new_empty(num_tokens, size) if out is None else out
    stride, at = gate_up.stride()[0], gate_up.data_ptr()
    if gate_up.is_cuda and at % 16 == 0:
        kernel, num_blocks = _prepared(gate_up.device, gate_up.dtype, size, stride, activation)
        kernel((num_tokens, num_blocks, 1), (at, out.data_ptr(), stride))
    else:
        block, num_blocks = _blocks(size)
        _gated_kernel[(num_tokens, num_blocks)](
            gate_up, out, stride, SIZE=size, BLOCK=block, ACTIVATION=activation.value, **overlap(gate_up.device)
        )
    return out


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def _prepared(
    device: torch.device, dtype: torch.dtype, size: int, stride: int, activation: Activation
) -> tuple[Loaded, int]:
    """The kernel for aligned tensors, and its programs of a token."""
    x, (block, num_blocks) = Aligned(dtype), _blocks(size)
    options = {"SIZE": size, "BLOCK": block, "ACTIVATION": activation.value, **overlap(device)}
    return prepare(_gated_kernel, device, x, x, stride, **options), num_blocks


def _blocks(size: int) -> tuple[int, int]:
    """Columns of a program, and programs of a token."""
    block = min(next_power_of_2(size), _MAX_BLOCK)
    return block, -(-size // block)


def swiglu_torch(gate_up: Tensor) -> Tensor:
    return gated_torch(gate_up, Activation.SILU)


def gated_torch(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return _TORCH[activation](gate).mul_(up).to(gate_up.dtype)


@jit
def _gated_kernel(
    gate_up_ptr,
    out_ptr,
    stride_t,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr = "silu",
    OVERLAPS: tl.constexpr = False,
):
    """One program a token and block of columns."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    row = gate_up_ptr + token * stride_t + cols
    gate = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + SIZE, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        argument = gate
        if ACTIVATION == "gelu_pytorch_tanh":  # (1 + tanh(x)) / 2 is sigmoid(2 x)
            argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        decay = tl.exp(-tl.abs(argument))  # never overflows
        share = tl.where(argument >= 0, 1.0, decay) / (1.0 + decay)
    out = gate * share * up
    tl.store(out_ptr + token * SIZE + cols, out.to(out_ptr.dtype.element_ty), mask=mask)
