"""The check of a path of products that claims an order: a row's bits alone, beside others and at every place."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.linear.paths import RunLinear
from kernels.linear.shape import LinearShape
from kernels.system.device import torch_dtype
from qualification.evidence.evidence import Invariance
from qualification.measure.inputs.linear_inputs import LinearOperands, between_nan, operands_of
from qualification.measure.orders.first_bits import FirstBits
from qualification.measure.orders.row_batches import POOL_ROWS, hostile_rows, order_counts, row_batches

_SEED = 101  # beside the one of a qualification
# How much of a sum is left, by columns of the result in turn: nothing but roundings, and sums that 16 bits hold well.
_RESTS = (0.0, 2.0**-11, 2.0**-8, 2.0**-5)


def check_linear_order(
    runs: Sequence[RunLinear],
    shape: LinearShape,
    device: torch.device,
    *,
    seed: int,
    order: str,
    takes_strides: bool,
    ends_early: bool = False,
) -> Invariance:
    """Return what was seen of a path that computes by each of `runs`. Errors of a call are not caught.

    The rows and weights are the same for every number of rows, so digests of all buckets are of one input.
    """
    bits, counts = (
        FirstBits(ends_early=ends_early),
        order_counts(shape.rows.lo, shape.rows.hi, shape.flops(1), is_cpu=device.type == "cpu"),
    )
    names = []
    for name, pool, operands in _inputs(shape, device, seed):
        names.append(name)
        for batch in row_batches(counts, device):
            x = between_nan(pool[batch.source], is_strided=batch.is_strided and takes_strides)
            judged = batch.judged
            for index, run in enumerate(runs):
                out = torch.empty(x.shape[0], shape.size_out, dtype=torch_dtype(shape.dtype_out), device=device)
                run(x, operands.weight, operands.bias, shape.epilogue, out)
                of_run = f", algorithm {index}" if len(runs) > 1 else ""
                bits.meet(name, POOL_ROWS, batch.source[judged], out[judged], batch.name + of_run)
            if bits.is_ended:
                break
    return bits.result(order, {name: torch.arange(POOL_ROWS, device=device) for name in names})


def _inputs(shape: LinearShape, device: torch.device, seed: int) -> Iterator[tuple[str, Tensor, LinearOperands]]:
    """Yield (name, rows of the pool and hostile ones behind them, weight).

    cancelling  what the first half of the inner dim adds the second takes back, but for a rest: another order of the
                sum then changes more bits than the result's dtype hides. Of swiglu that is so of all gates and of every
                second group of four columns of up
    """
    operands, random = operands_of(shape, device, seed=seed), torch.Generator(device).manual_seed(seed + _SEED)
    dtype, half = torch_dtype(shape.dtype), shape.size_in // 2
    pool = torch.randn(POOL_ROWS, shape.size_in, generator=random, device=device)
    hostile = hostile_rows(shape.size_in, dtype, random)
    plain = torch.cat([pool.to(dtype), hostile])
    if not half:
        yield "plain", plain, operands
        return
    pool[:, half : 2 * half] = -pool[:, :half]
    values = operands.weight.dequantized().to(operands.weight.dtype, copy=True)
    row = torch.arange(values.shape[0], device=device)
    rests = torch.tensor(_RESTS, device=device, dtype=values.dtype)[row % len(_RESTS)][:, None]
    cancels = (row < shape.size_out) | (row // len(_RESTS) % 2 == 0)
    taken = values[:, :half] + rests * values[:, half : 2 * half]
    values[:, half : 2 * half] = torch.where(cancels[:, None], taken, values[:, half : 2 * half])
    bias = None if operands.bias is None else torch.zeros_like(operands.bias)
    yield "cancelling", torch.cat([pool.to(dtype), hostile]), LinearOperands(operands.weight.of(values), bias)
    yield "plain", plain, operands
