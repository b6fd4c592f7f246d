"""The sum of a residual stream and what a sublayer adds, with the norms on the way there and those of the sum.

Each step is computed in fp32 and rounded once, as `kernels/fused/norm.py` and PyTorch's sums do one after the other.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.fused.backend import Aligned, Loaded, jit, next_power_of_2, overlap, prepare, runs_on_triton, tl
from kernels.fused.norm import add_rms_norm, rms_norm

_MOST_PARTS, _MOST_NORMS = 2, 3


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
    assert len(weights) <= _MOST_NORMS, f"{len(weights)} norms of a sum, of at most {_MOST_NORMS}"
    parts, num_parts = [rows for rows, _ in addend.parts], len(addend.parts)
    if not (runs_on_triton(residual) and all(_is_fused(rows) for rows in (residual, *parts))):
        return add_norms_one_by_one(addend, residual, weights, eps)
    num_tokens, size = residual.shape
    # A program holds its whole row: normed ones may lie where the parts do, as of `add_rms_norm`.
    outs = parts[: len(weights)] + [residual.new_empty(num_tokens, size) for _ in weights[num_parts:]]
    no_part, no_norm = (None,) * (_MOST_PARTS - num_parts), (None,) * (_MOST_NORMS - len(weights))
    of_parts = (weight for _, weight in addend.parts)
    tensors = (
        *parts, *no_part, *of_parts, *no_part, addend.after, residual, addend.scale, *weights, *no_norm, *outs, *no_norm
    )  # fmt: skip
    epsilons = addend.eps, addend.eps_after, eps
    if not residual.is_cuda:
        _add_norms_kernel[(num_tokens,)](*tensors, *epsilons, **_options(residual.device, size))
        return outs
    addresses = [None if it is None else it.data_ptr() for it in tensors]
    if any(at is not None and at % 16 for at in addresses):  # which nothing is that torch allocates
        return add_norms_one_by_one(addend, residual, weights, eps)
    kernel = _prepared(residual.device, tuple(None if it is None else it.dtype for it in tensors), size)
    kernel((num_tokens, 1, 1), (*addresses, *epsilons))
    return outs


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


def _is_fused(rows: Tensor) -> bool:
    """Return whether a kernel norms such rows in the order of `_rms_norm_kernel`, which the layout of a row decides.

    Of 32 bits a compiler would join a norm's last product with the sum behind it; wider rows leave the registers.
    """
    size = rows.shape[1]
    return rows.dtype.itemsize == 2 and size % 16 == 0 and size <= 8192 and rows.is_contiguous()


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def _prepared(device: torch.device, dtypes: tuple[torch.dtype | None, ...], size: int) -> Loaded:
    """The kernel for aligned tensors of these dtypes, None where there is none."""
    tensors = (None if it is None else Aligned(it) for it in dtypes)
    return prepare(_add_norms_kernel, device, *tensors, 0.0, 0.0, 0.0, **_options(device, size))


def _options(device: torch.device, size: int) -> dict[str, int]:
    block = next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": max(block // 512, 1), **overlap(device)}  # as `rms_norm`


@jit
def _add_norms_kernel(
    x_ptr, y_ptr, x_weight_ptr, y_weight_ptr, after_ptr, residual_ptr, scale_ptr,
    first_weight_ptr, second_weight_ptr, third_weight_ptr, first_ptr, second_ptr, third_ptr,
    eps, eps_after, eps_out,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """One program a token; its whole row is in registers. Pointers to what is not there are None."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    x_weight = tl.load(x_weight_ptr + cols, mask=mask, other=0.0)
    if y_ptr is not None:
        y_weight = tl.load(y_weight_ptr + cols, mask=mask, other=0.0)
    if after_ptr is not None:
        after = tl.load(after_ptr + cols, mask=mask, other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(tl.float32)
    if first_ptr is not None:
        first_weight = tl.load(first_weight_ptr + cols, mask=mask, other=0.0)
    if second_ptr is not None:
        second_weight = tl.load(second_weight_ptr + cols, mask=mask, other=0.0)
    if third_ptr is not None:
        third_weight = tl.load(third_weight_ptr + cols, mask=mask, other=0.0)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    row = token * SIZE + cols
    x = tl.load(x_ptr + row, mask=mask, other=0.0)
    if y_ptr is not None:
        y = tl.load(y_ptr + row, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row, mask=mask, other=0.0)
    total = _normed(x.to(tl.float32), x_weight, eps, SIZE).to(x.dtype)
    if y_ptr is not None:
        other = _normed(y.to(tl.float32), y_weight, eps, SIZE).to(y.dtype)
        total = (total.to(tl.float32) + other.to(tl.float32)).to(x.dtype)
    if after_ptr is not None:
        total = _normed(total.to(tl.float32), after, eps_after, SIZE).to(x.dtype)
    total = (residual.to(tl.float32) + total.to(tl.float32)).to(residual.dtype)
    if scale_ptr is not None:
        total = (total.to(tl.float32) * scale).to(residual.dtype)
    tl.store(residual_ptr + row, total, mask=mask)
    read = total.to(tl.float32)
    if first_ptr is not None:
        tl.store(first_ptr + row, _normed(read, first_weight, eps_out, SIZE).to(x.dtype), mask=mask)
    if second_ptr is not None:
        tl.store(second_ptr + row, _normed(read, second_weight, eps_out, SIZE).to(x.dtype), mask=mask)
    if third_ptr is not None:
        tl.store(third_ptr + row, _normed(read, third_weight, eps_out, SIZE).to(x.dtype), mask=mask)


@jit
def _normed(x, weight, eps, SIZE: tl.constexpr):
    """The norm of a row in fp32."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight.to(tl.float32)
