"""Chooses cuBLASLt's algorithms by measuring them with the model's own weights, before the engine is ready.

PyTorch asks the library for one algorithm, which that picks by a rule. Here each algorithm that it proposes runs for
each number of rows, PyTorch's beside them, in turn. The choice is stored in a file: two algorithms that take the
same time may round differently, and the next start must not compute other tokens.
"""

import json
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.linear.library.cublaslt import Algorithm, CublasLt, Product
from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.linear.library.fallbacks import MatmulFallbacks
from kernels.linear.library.library_path import Choices, Sizes
from kernels.system.whole_file import write_whole

logger = logging.getLogger(__name__)

_MIN_GAIN = 0.02  # over PyTorch's own, else that stays: medians of two runs differ by 1% (one H200)
_NUM_FINALISTS, _NUM_ROUNDS = 2, 4
_WARM_ROWS = 128  # enough to load a kernel
_SAMPLE_FLOP = 1e11  # of one sample: the GPU computes as many in 150 us
HEAD_START_BYTES = 256 * 2**20  # written in 65 us, while the host launches what is timed; no weight stays in the L2
_MAX_ERROR = 2**-6  # of the largest number: 16 bits round by 2^-8, and sums differ in their order

Call = Callable[[Tensor, Tensor, Tensor], None]
Measured = dict[int, Algorithm | MatmulFallback | None]
Measure = Callable[[CublasLt, Sequence[Tensor], torch.dtype, Sequence[int]], Measured]


class Autotuner:
    """The algorithms of one stack, whose file name must be unique, and one version of the library."""

    def __init__(
        self, library: CublasLt, file: Path, fallbacks: MatmulFallbacks, *, measure: Measure | None = None
    ) -> None:
        """Reads the file, if there is one. One that cannot be read is logged, and replaced. `measure`: for tests."""
        self._fallbacks = fallbacks
        self._library = library
        self._file = file
        self._measure = measure or _choose
        self._stored: dict[str, dict[int, Algorithm | None]] = _read(file, library.version)

    def choices(
        self, weights: Sequence[Tensor], dtype_out: torch.dtype, num_rows: Sequence[int]
    ) -> tuple[Sizes, Choices]:
        """Return the algorithms of products with weights of one shape on one GPU; a few suffice.

        num_rows: those to choose for. What no start has measured is measured now.
        """
        size_out, size_in = weights[0].shape
        dtype = weights[0].dtype
        stored = self._stored.setdefault(f"{size_out} x {size_in} {dtype} {dtype_out}", {})
        missing = [size for size in num_rows if size not in stored]
        if missing:
            measured = self._chosen(self._measure(self._library, weights, dtype_out, missing), (size_out, size_in))
            self._read_again()
            stored |= {size: choice for size, choice in measured.items() if size not in stored}
            self._write()
        return (size_out, size_in, dtype, dtype_out), {size: stored.get(size) for size in num_rows}

    def _chosen(self, measured: Measured, shape: tuple[int, int]) -> dict[int, Algorithm | None]:
        """Return the algorithms to store. Sizes left to PyTorch are not: every start measures and logs them."""
        chosen: dict[int, Algorithm | None] = {}
        for size, choice in measured.items():
            if isinstance(choice, MatmulFallback):
                self._fallbacks.note(choice, f"{size} rows by a weight of {shape[0]} x {shape[1]}", "as measured")
            else:
                chosen[size] = choice
        return chosen

    def _read_again(self) -> None:
        """Merge the algorithms that another server has stored meanwhile: the next start uses them."""
        for name, choices in _read(self._file, self._library.version).items():
            self._stored.setdefault(name, {}).update(choices)

    def _write(self) -> None:
        """Write the file whole or not at all. A write error is logged: the next start measures again."""
        stored = {
            name: {str(size): None if it is None else list(it.words) for size, it in choices.items()}
            for name, choices in self._stored.items()
        }
        try:
            write_whole(self._file, json.dumps({"version": self._library.version, "algorithms": stored}).encode())
        except OSError as error:
            logger.error("the algorithms of matmuls cannot be stored for the next start: %s", error)


def _read(file: Path, version: int) -> dict[str, dict[int, Algorithm | None]]:
    """Return the algorithms of a file; nothing where it is absent, unreadable or of another version."""
    try:
        content = json.loads(file.read_bytes())
        if content["version"] != version:
            return {}
        return {
            name: {int(size): None if words is None else Algorithm.of_words(words) for size, words in choices.items()}
            for name, choices in content["algorithms"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        logger.error("the algorithms of matmuls are measured again, %s cannot be read: %r", file, error)
        return {}


@torch.inference_mode()
def _choose(library: CublasLt, weights: Sequence[Tensor], dtype_out: torch.dtype, sizes: Sequence[int]) -> Measured:
    """Measure for every number of rows."""
    size_out, size_in = weights[0].shape
    dtype, device = weights[0].dtype, weights[0].device
    x = torch.randn(max(sizes), size_in, dtype=dtype, device=device)
    y = torch.empty(max(sizes), size_out, dtype=dtype_out, device=device)
    head_start = torch.empty(HEAD_START_BYTES, dtype=torch.uint8, device=device)
    return {
        size: _fastest(
            library, Product(size, size_out, size_in, dtype, dtype_out), weights, x[:size], y[:size], head_start
        )
        for size in sizes
    }


def _fastest(
    library: CublasLt, product: Product, weights: Sequence[Tensor], x: Tensor, y: Tensor, head_start: Tensor
) -> Algorithm | MatmulFallback | None:
    """Return the fastest algorithm; None for PyTorch's own, a reason where no other can be taken."""
    each = sampled(product, weights)

    def time_of(call: Call) -> float:
        return time_ms(call, each, x, y, head_start)

    calls = _calls(library, product, weights[0], x, y)
    if not calls:
        return MatmulFallback.ROWS_REFUSED
    finalists = sorted(((time_of(call), index) for index, (_, call) in enumerate(calls)))[:_NUM_FINALISTS]
    entered = [(None, multiply_by_torch), *(calls[index] for _, index in finalists)]
    samples = [[time_of(call) for _, call in entered] for _ in range(_NUM_ROUNDS)]
    order = ranking([statistics.median(times) for times in zip(*samples, strict=True)])
    agreeing = (entered[index][0] for index in order if agrees(entered[index][1], x, weights[0], y))
    return next(agreeing, MatmulFallback.DISAGREES if order else None)


def _calls(
    library: CublasLt, product: Product, weight: Tensor, x: Tensor, y: Tensor
) -> list[tuple[Algorithm | None, Call]]:
    """Every algorithm that takes this product, its kernel loaded: that would count when it is timed."""
    calls: list[tuple[Algorithm | None, Call]] = []
    few = min(product.num_rows, _WARM_ROWS)
    for algorithm in library.algorithms(product):
        prepared, warm = (
            library.prepared(replace(product, num_rows=rows), algorithm) for rows in (product.num_rows, few)
        )
        if prepared is not None:
            library.launch(warm or prepared, x, weight, y)
            calls.append((algorithm, partial(library.launch, prepared)))
    return calls


def sampled(product: Product, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights of one sample's calls: more calls of a small product."""
    num_calls = max(1, min(8, int(_SAMPLE_FLOP / (2 * product.num_rows * product.size_out * product.size_in))))
    return [weights[index % len(weights)] for index in range(num_calls)]


def ranking(times: Sequence[float]) -> list[int]:
    """Indices of what is faster than the first of `times`, by more than noise; the fastest first."""
    return sorted((i for i, time in enumerate(times) if time <= times[0] * (1 - _MIN_GAIN)), key=times.__getitem__)


def agrees(call: Call, x: Tensor, weight: Tensor, y: Tensor) -> bool:
    """Return whether the result equals PyTorch's but for rounding; a difference is logged."""
    expected = torch.empty_like(y)
    multiply_by_torch(x, weight, expected)
    y.fill_(torch.nan)
    call(x, weight, y)
    error, largest = float((y - expected).abs().max()), float(expected.abs().max())
    if error <= _MAX_ERROR * largest:
        return True
    logger.warning("a faster algorithm of %d rows differs from PyTorch's by %g of %g", x.shape[0], error, largest)
    return False


def time_ms(call: Call, weights: Sequence[Tensor], x: Tensor, y: Tensor, head_start: Tensor) -> float:
    """One sample: `call` for each weight, after a wait that lets the host launch all of them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    head_start.zero_()
    start.record()
    for weight in weights:
        call(x, weight, y)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def multiply_by_torch(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """y = x @ weight^T, in y's dtype: that of x, or on a GPU fp32."""
    if y.dtype is x.dtype:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.mm(x, weight.t(), out_dtype=y.dtype, out=y)
