"""Chooses, among cuBLASLt's algorithms of equal bits and the kernel of `ordered.py`, the fastest for each product.

The choice changes no bit, as every candidate was found to sum in one order. So it is measured less often than that of
`autotune.py`, and what no start has measured is served by the kernel of our own.
"""

import statistics
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.library.autotune import HEAD_START_BYTES, Call, Measured, sampled, time_ms
from kernels.linear.library.cublaslt import Algorithm, CublasLt, Product
from kernels.linear.ordered.library_path import equal_algorithms, run_own
from kernels.linear.weights import PlainWeight

_MIN_GAIN = 0.02  # over our own kernel, else that serves
_NUM_FINALISTS, _NUM_ROUNDS = 2, 3


@torch.inference_mode()
def measure_in_order(
    library: CublasLt, weights: Sequence[Tensor], dtype_out: torch.dtype, sizes: Sequence[int]
) -> Measured:
    """Return, for each number of rows, the fastest algorithm of equal bits; None where our own kernel is no slower."""
    size_out, size_in = weights[0].shape
    dtype, device = weights[0].dtype, weights[0].device
    x = torch.randn(max(sizes), size_in, dtype=dtype, device=device)
    y = torch.empty(max(sizes), size_out, dtype=dtype_out, device=device)
    head_start = torch.empty(HEAD_START_BYTES, dtype=torch.uint8, device=device)
    found: Measured = {}
    for before, size in zip((0, *sizes), sizes, strict=False):
        product = Product(size, size_out, size_in, dtype, dtype_out)
        found[size] = _fastest(library, product, weights, x[:size], y[:size], head_start, before + 1)
    return found


def _fastest(
    library: CublasLt,
    product: Product,
    weights: Sequence[Tensor],
    x: Tensor,
    y: Tensor,
    head_start: Tensor,
    fewest: int,
) -> Algorithm | None:
    """fewest: rows that the choice serves, too, by the next larger number that was measured."""
    each = sampled(product, weights)
    epilogue = Epilogue.FP32 if product.dtype_out is torch.float32 else Epilogue.NONE

    def own(x: Tensor, weight: Tensor, y: Tensor) -> None:
        run_own(x, PlainWeight(weight), None, epilogue, y)

    def time_of(call: Call) -> float:
        return time_ms(call, each, x, y, head_start)

    entered: list[tuple[Algorithm | None, Call]] = [
        (algorithm, partial(library.launch, prepared))
        for algorithm, prepared in equal_algorithms(library, product, x, weights[0], fewest)
    ]
    finalists = sorted((time_of(call), index) for index, (_, call) in enumerate(entered))[:_NUM_FINALISTS]
    entered = [(None, own), *(entered[index] for _, index in finalists)]
    samples = [[time_of(call) for _, call in entered] for _ in range(_NUM_ROUNDS)]
    times = [statistics.median(of_call) for of_call in zip(*samples, strict=True)]
    best = min(range(len(times)), key=times.__getitem__)
    return entered[best][0] if times[best] <= times[0] * (1 - _MIN_GAIN) else None
