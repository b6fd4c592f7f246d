"""Results of a recurrence's heads, normed and multiplied by gates. Computed in fp32, rounded once.

A head's bits depend on its own numbers alone.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.fused.activation_kind import Activation
from kernels.fused.alike import activated_alike, sigmoid_alike
from kernels.fused.backend import Aligned, Loaded, jit, next_power_of_2, overlap, prepare, runs_on_triton, tl

_MAX_TILE, _MAX_WARPS = 1024, 8  # elements of the heads that one program holds: 4 a thread
_WARP_BYTES = 512  # of one load by a warp; a head of more has a program of its own


def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, is_sigmoid: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate), or the sigmoid of the gate, each head by itself.

    x       [T, H, D] contiguous; a head may stand for a group of them
    gate    [T, H * D] of x's dtype, last dim contiguous
    weight  [D], or one of each head [H * D], of any float dtype
    Returns [T, H * D] of x's dtype, contiguous. Source: Yang et al. 2024 (Gated Delta Networks), section 3.4.
    """
    num_tokens, num_heads, size = x.shape
    if not runs_on_triton(x):
        precise = x.float()
        scale = torch.rsqrt(precise.square().mean(dim=-1, keepdim=True) + eps)
        gates = sigmoid_alike(gate.float()) if is_sigmoid else activated_alike(gate.float(), Activation.SILU)
        return (
            (precise * scale * weight.float().view(-1, size) * gates.view(num_tokens, num_heads, size))
            .to(x.dtype)
            .flatten(1)
        )
    out = x.new_empty(num_tokens, num_heads * size)
    call = _Call(x.dtype, weight.dtype, num_heads, size, gate.stride()[0], is_sigmoid, weight.shape[0] != size)
    x_at, gate_at, weight_at = x.data_ptr(), gate.data_ptr(), weight.data_ptr()
    if x.is_cuda and (x_at | gate_at | weight_at) % 16 == 0:
        kernel, num_blocks = _prepared(x.device, call)
        kernel((num_tokens, num_blocks, 1), (x_at, gate_at, weight_at, out.data_ptr(), call.stride, eps))
    else:
        options, num_blocks = _options(x.device, call)
        _norm_and_gate_kernel[(num_tokens, num_blocks)](x, gate, weight, out, call.stride, eps, **options)
    return out


class _Call(NamedTuple):
    """Key of a compiled kernel; stride: of the gate's rows, is_whole: each head has weights of its own."""

    dtype: torch.dtype
    weight: torch.dtype
    num_heads: int
    size: int
    stride: int
    is_sigmoid: bool
    is_whole: bool


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=64)
def _prepared(device: torch.device, call: _Call) -> tuple[Loaded, int]:
    """The kernel for aligned tensors, and its programs of a token."""
    options, num_blocks = _options(device, call)
    x = Aligned(call.dtype)
    return prepare(
        _norm_and_gate_kernel, device, x, x, Aligned(call.weight), x, call.stride, 0.0, **options
    ), num_blocks


def _options(device: torch.device, call: _Call) -> tuple[dict[str, int], int]:
    """The kernel's constants and options, and its programs of a token."""
    block = next_power_of_2(call.size)
    if block * call.dtype.itemsize <= _WARP_BYTES:
        block_heads = min(next_power_of_2(call.num_heads), _MAX_TILE // block)
        num_warps = min(block_heads, _MAX_WARPS)
    else:
        block_heads, num_warps = 1, 1 if block <= 256 else 4
    options = {
        "HEADS": call.num_heads,
        "SIZE": call.size,
        "BLOCK_HEADS": block_heads,
        "BLOCK": block,
        "IS_SIGMOID": call.is_sigmoid,
        "WEIGHT_STRIDE": call.size if call.is_whole else 0,
        "num_warps": num_warps,
    }
    return {**options, **overlap(device)}, -(-call.num_heads // block_heads)


@jit
def _norm_and_gate_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    stride_gt,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SIGMOID: tl.constexpr = False,
    WEIGHT_STRIDE: tl.constexpr = 0,
    OVERLAPS: tl.constexpr = False,
):
    """One program a token and block of heads."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    # So few neighbours go to one thread that a warp shares out each head alike, and sums it in one order in any tile.
    cols = tl.max_contiguous(tl.arange(0, BLOCK), max(BLOCK // 32, 1))[None, :]
    mask = (heads < HEADS) & (cols < SIZE)
    place = heads * SIZE + cols
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_ptr + heads * WEIGHT_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * (HEADS * SIZE) + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gt + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
    gated = x * scale * weight * (1.0 if IS_SIGMOID else gate) / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * (HEADS * SIZE) + place, gated.to(out_ptr.dtype.element_ty), mask=mask)
