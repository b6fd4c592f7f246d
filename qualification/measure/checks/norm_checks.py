"""Compares inputs that the norm before a product rounds with those that it norms first, and rounds behind that."""

import math

import torch
from torch import Tensor

from kernels.fused.norm import add_rms_norm, rms_norm
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import Fp8BlocksWeight, spread
from kernels.linear.rounded_input import Input, RoundedInput, TakesRounded
from kernels.linear.weights import LinearWeight
from qualification.measure.inputs.guard import GUARD_MARK, GUARD_ROWS
from qualification.measure.inputs.linear_inputs import LinearCase

EPS = 1e-5


def factors_of(x: Tensor) -> Tensor:
    """Return the factors of a norm [columns], from 1 to 8: of a row's numbers some are then beyond a static scale."""
    return torch.linspace(1, 8, x.shape[1], device=x.device).to(x.dtype)


def numbers_of(x: RoundedInput, weight: LinearWeight) -> Tensor:
    """Return the exact numbers that codes and scales stand for [rows, columns] fp64."""
    rows, columns = x.shape
    if isinstance(weight, Fp8BlocksWeight):
        scales = spread(x.scales[:, :rows].T, columns, 1)
    else:
        scales = x.scales if x.scales.dim() == 1 else x.scales.T
    return x.codes[:rows, :columns].double() * scales.double()


def num_unequal_behind_a_norm(run: TakesRounded, case: LinearCase, num_rows: int) -> int:
    """Return how many values differ, of the first rows of x without a residual and with one: none may.

    Compared are rounded inputs, as numbers, with those of the weight's format of the norm in x's dtype; the residual;
    the input that a rounded one gives back; and the product of both. NaN are equal. Counted besides: what is no zero
    behind the inputs' columns, and what is written beside the residual or into x.
    """
    x, weight = case.x[:num_rows].contiguous(), case.operands.weight
    random = torch.Generator(x.device).manual_seed(case.seed + 2)
    norm, found = factors_of(x), 0
    for has_residual in (False, True):
        values = torch.randn(x.shape, generator=random, device=x.device).to(x.dtype) if has_residual else x
        storage = torch.full((num_rows + 2 * GUARD_ROWS, x.shape[1]), GUARD_MARK, dtype=x.dtype, device=x.device)
        residual = storage[GUARD_ROWS : GUARD_ROWS + num_rows].copy_(values)
        if has_residual:
            normed, total = add_rms_norm(x.clone(), values.clone(), norm, EPS)
            read = x.clone()
            rounded, summed = run.normed(read, residual, norm, EPS, weight)
            found += _num_unequal(read, x)
        else:
            normed, total = rms_norm(x, norm, EPS), x
            rounded, summed = run.normed(residual, None, norm, EPS, weight)
        found += _num_unequal(numbers_of(rounded, weight), weight.as_multiplied(normed))
        is_finite = normed.isfinite().all(1, keepdim=True)  # of others all codes may be NaN
        found += int(((rounded.codes[:num_rows, x.shape[1] :].float() != 0) & is_finite).sum())
        found += _num_unequal(summed, total) + _num_unequal(residual, total) + _num_unequal(rounded.plain(), normed)
        found += sum(int((it != GUARD_MARK).sum()) for it in (storage[:GUARD_ROWS], storage[-GUARD_ROWS:]))
        found += _num_unequal(_product(run, rounded, case), _product(run, normed, case))
    return found


def _product(run: TakesRounded, x: Input, case: LinearCase) -> Tensor:
    operands, epilogue = case.operands, case.epilogue
    dtype = torch.float32 if epilogue is Epilogue.FP32 else case.x.dtype
    out = torch.full(
        (x.shape[0], operands.weight.size[0] // epilogue.parts), math.nan, dtype=dtype, device=case.x.device
    )
    run(x, operands.weight, operands.bias, epilogue, out)
    return out


def _num_unequal(first: Tensor, second: Tensor) -> int:
    return int((~((first == second) | (first.isnan() & second.isnan()))).sum())
