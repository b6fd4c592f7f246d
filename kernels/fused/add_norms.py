"""The sum of a residual stream and what a sublayer adds, with the norms on the way there and those of the sum.

Each step is computed in fp32 and rounded once, as `kernels/fused/norm.py` and PyTorch's sums do one after the other.
"""

from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_

import torch
from torch import Tensor

from kernels.fused.backend import Aligned, Loaded, jit, next_power_of_2, overlap, prepare, runs_on_triton, tl
from kernels.fused.norm import add_rms_norm, rms_norm

_MOST_NORMS = 3  # of a sum
_Kinds = tuple[int, bool, bool, int]  # numbers of parts and norms, and whether there is a norm behind and a scale


@dataclass(frozen=True, slots=True)
class Addend:
    """A sum of one or two norms, which may be normed again: what is still to be added to the residual.

    parts     rows [T, H], last dim contiguous, and the weight [H] of their norm; the rows may be written over
    eps       of the norms of the parts
    after     [H], weight of the norm of their sum, or None; eps_after: of that norm
    scale     [1], what the residual is multiplied by behind the sum with all this, or None
    """

    parts: tuple[tuple[Tensor, Tensor], ...]
    eps: float
    after: Tensor | None = None
    eps_after: float = 0.0
    scale: Tensor | None = None


def add_norms(addend: Addend, residual: Tensor, weights: tuple[Tensor, ...] = (), eps: float = 0.0) -> list[Tensor]:
    """residual = (residual + addend) * scale, in place, then the norms of that with each of `weights`.

    residual [T, H], of the parts' dtype and apart from them in memory; weights: up to three [H] of any float dtype.
    Returns [T, H] each; they may lie where the parts lay. The bits are those of `add_norms_one_by_one`.
    """
    if runs_on_triton(residual) and _is_fused(addend, residual):
        return _launch(addend, residual, weights, eps)
    return add_norms_one_by_one(addend, residual, weights, eps)


def add_norms_one_by_one(addend: Addend, residual: Tensor, weights: tuple[Tensor, ...], eps: float) -> list[Tensor]:
    """Do what `add_norms` does, by a launch for each step."""
    total, *others = (rms_norm(x, weight, addend.eps) for x, weight in addend.parts)
    for other in others:
        total.add_(other)
    if addend.after is not None:
        total = rms_norm(total, addend.after, addend.eps_after)
    if addend.scale is None and weights:
        first, _ = add_rms_norm(total, residual, weights[0], eps)
        return [first, *(rms_norm(residual, weight, eps) for weight in weights[1:])]
    residual.add_(total)
    if addend.scale is not None:
        residual.mul_(addend.scale)
    return [rms_norm(residual, weight, eps) for weight in weights]


def _is_fused(addend: Addend, residual: Tensor) -> bool:
    """Return whether a kernel norms such rows in the order of `_rms_norm_kernel`, which the layout of a row decides.

    Of 32 bits a compiler would join a norm's last product with the sum behind it; wider rows leave the registers.
    """
    size = residual.shape[1]
    if residual.dtype.itemsize != 2 or size % 16 or size > 8192 or not residual.is_contiguous():
        return False
    return addend.parts[0][0].is_contiguous() and addend.parts[-1][0].is_contiguous()


def _launch(addend: Addend, residual: Tensor, weights: tuple[Tensor, ...], eps: float) -> list[Tensor]:
    num_tokens, size = residual.shape
    num_parts, num_norms = len(addend.parts), len(weights)
    (x, x_weight), (y, y_weight) = addend.parts[0], addend.parts[-1]
    after, scale = addend.after, addend.scale
    # A program holds its whole row: normed ones may lie where the parts do, as of `add_rms_norm`.
    outs = [x, y][: min(num_parts, num_norms)]
    for _ in range(num_norms - num_parts):
        outs.append(residual.new_empty(num_tokens, size))
    kinds = num_parts, after is not None, scale is not None, num_norms
    absent = _MOST_NORMS - num_norms
    rows = x, y, residual, *outs, *(x,) * absent
    factors = [x_weight, y_weight, x_weight if after is None else after, x_weight if scale is None else scale]
    factors += weights + (x_weight,) * absent
    epsilons = addend.eps, addend.eps_after, eps
    if not residual.is_cuda:
        _add_norms_kernel[(num_tokens,)](*rows, *factors, *epsilons, **_options(residual.device, size, kinds))
        return outs
    addresses = [it.data_ptr() for it in (*rows, *factors)]
    if reduce(or_, addresses) % 16:  # which nothing is that torch allocates
        return add_norms_one_by_one(addend, residual, weights, eps)
    kernel = _prepared(residual.device, residual.dtype, tuple([it.dtype for it in factors]), size, kinds)
    kernel((num_tokens, 1, 1), (*addresses, *epsilons))
    return outs


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def _prepared(
    device: torch.device, rows: torch.dtype, factors: tuple[torch.dtype, ...], size: int, kinds: _Kinds
) -> Loaded:
    """The kernel for aligned tensors of these dtypes."""
    tensors = [Aligned(it) for it in (*(rows,) * (3 + _MOST_NORMS), *factors)]
    return prepare(_add_norms_kernel, device, *tensors, 0.0, 0.0, 0.0, **_options(device, size, kinds))


def _options(device: torch.device, size: int, kinds: _Kinds) -> dict[str, int]:
    block = next_power_of_2(size)
    num_warps = max(block // 512, 1)  # as `_rms_norm_kernel`, whose order of sums this one's is
    flags = dict(zip(("NUM_PARTS", "HAS_AFTER", "HAS_SCALE", "NUM_NORMS"), kinds, strict=True))
    return {"SIZE": size, "BLOCK": block, "num_warps": num_warps, **flags, **overlap(device)}


@jit
def _add_norms_kernel(
    x_ptr, y_ptr, residual_ptr, first_ptr, second_ptr, third_ptr, x_weight_ptr, y_weight_ptr, after_ptr, scale_ptr,
    first_weight_ptr, second_weight_ptr, third_weight_ptr,
    eps, eps_after, eps_out, SIZE: tl.constexpr, BLOCK: tl.constexpr, NUM_PARTS: tl.constexpr,
    HAS_AFTER: tl.constexpr, HAS_SCALE: tl.constexpr, NUM_NORMS: tl.constexpr, OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """One program a token; its whole row is in registers."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    x_weight = tl.load(x_weight_ptr + cols, mask=mask, other=0.0)
    if NUM_PARTS == 2:
        y_weight = tl.load(y_weight_ptr + cols, mask=mask, other=0.0)
    if HAS_AFTER:
        after = tl.load(after_ptr + cols, mask=mask, other=0.0)
    if HAS_SCALE:
        scale = tl.load(scale_ptr).to(tl.float32)
    if NUM_NORMS > 0:
        first_weight = tl.load(first_weight_ptr + cols, mask=mask, other=0.0)
    if NUM_NORMS > 1:
        second_weight = tl.load(second_weight_ptr + cols, mask=mask, other=0.0)
    if NUM_NORMS > 2:
        third_weight = tl.load(third_weight_ptr + cols, mask=mask, other=0.0)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    row = token * SIZE + cols
    x = tl.load(x_ptr + row, mask=mask, other=0.0)
    if NUM_PARTS == 2:
        y = tl.load(y_ptr + row, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row, mask=mask, other=0.0)
    total = _normed(x.to(tl.float32), x_weight, eps, SIZE).to(x.dtype)
    if NUM_PARTS == 2:
        other = _normed(y.to(tl.float32), y_weight, eps, SIZE).to(y.dtype)
        total = (total.to(tl.float32) + other.to(tl.float32)).to(x.dtype)
    if HAS_AFTER:
        total = _normed(total.to(tl.float32), after, eps_after, SIZE).to(x.dtype)
    total = (residual.to(tl.float32) + total.to(tl.float32)).to(residual.dtype)
    if HAS_SCALE:
        total = (total.to(tl.float32) * scale).to(residual.dtype)
    tl.store(residual_ptr + row, total, mask=mask)
    read = total.to(tl.float32)
    if NUM_NORMS > 0:
        tl.store(first_ptr + row, _normed(read, first_weight, eps_out, SIZE).to(x.dtype), mask=mask)
    if NUM_NORMS > 1:
        tl.store(second_ptr + row, _normed(read, second_weight, eps_out, SIZE).to(x.dtype), mask=mask)
    if NUM_NORMS > 2:
        tl.store(third_ptr + row, _normed(read, third_weight, eps_out, SIZE).to(x.dtype), mask=mask)


@jit
def _normed(x, weight, eps, SIZE: tl.constexpr):
    """The norm of a row in fp32."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight.to(tl.float32)
