"""Choice of how steps of many rows are multiplied, made when the weights are there, before memory is shared out."""

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.linear.autotune import Autotuner, Measured
from kernels.linear.cublaslt import CublasLt, CublasLtError, load_library
from kernels.linear.fallbacks import MatmulFallback, MatmulFallbacks
from kernels.linear.tuned import sizes_up_to
from server.engine.execution.graph_keys import graph_keys
from server.engine.startup.limits import EngineLimits, sizes_of_graphs
from server.model.decoder import Decoder

logger = logging.getLogger(__name__)


def choose_products(
    decoder: Decoder,
    limits: EngineLimits,
    file: Path,
    device: torch.device,
    *,
    load: Callable[[], ctypes.CDLL] = load_library,
) -> MatmulFallbacks:
    """Measure what the file does not know yet: 5.5 s for an 8B (one H200). Where that fails PyTorch stays.

    Returns what is, or in service will be, left to PyTorch. The numbers of rows are those of CUDA graphs even where
    there are none, so that both compute the same.
    """
    sizes = _sizes(decoder, limits)
    started_at = time.monotonic()
    try:
        library = load()
    except CublasLtError as error:
        return _all(MatmulFallback.LIBRARY_MISSING, error)
    try:
        autotuner = Autotuner(CublasLt(library, device), file)
        decoder.choose_products(autotuner, sizes)
    except (CublasLtError, RuntimeError) as error:
        return _all(_reason_of(error), error)
    logger.info("algorithms of %d numbers of rows chosen in %.1f s", len(sizes), time.monotonic() - started_at)
    return autotuner.fallbacks


def take_products(
    decoder: Decoder,
    limits: EngineLimits,
    file: Path,
    device: torch.device,
    *,
    load: Callable[[], ctypes.CDLL] = load_library,
) -> MatmulFallbacks:
    """Multiply by what rank 0 has measured and stored in the file, and measure nothing: PyTorch serves the rest.

    Returns what is, or in service will be, left to PyTorch on this rank: also the products that rank 0 has left to it,
    and a head of other rows than rank 0's.
    """
    try:
        library = load()
    except CublasLtError as error:
        return _all(MatmulFallback.LIBRARY_MISSING, error)
    try:
        autotuner = Autotuner(CublasLt(library, device), file, measure=_measure_nothing)
        decoder.choose_products(autotuner, _sizes(decoder, limits))
    except (CublasLtError, RuntimeError) as error:
        return _all(_reason_of(error), error)
    return autotuner.fallbacks


def _measure_nothing(_: CublasLt, __: Sequence[Tensor], ___: torch.dtype, sizes: Sequence[int]) -> Measured:
    return dict.fromkeys(sizes, MatmulFallback.MEASURE_FAILED)


def _sizes(decoder: Decoder, limits: EngineLimits) -> list[int]:
    """Return the numbers of rows to measure: those of CUDA graphs even where there are none."""
    keys = graph_keys(sizes_of_graphs(decoder.config, limits, limits.max_model_len))
    return sizes_up_to(limits.max_num_batched_tokens, (key.num_tokens for key in keys))


def _reason_of(error: CublasLtError | RuntimeError) -> MatmulFallback:
    if isinstance(error, CublasLtError):
        return MatmulFallback.LIBRARY_REFUSED
    is_memory = isinstance(error, torch.OutOfMemoryError)
    return MatmulFallback.OUT_OF_MEMORY if is_memory else MatmulFallback.MEASURE_FAILED


def _all(reason: MatmulFallback, error: Exception) -> MatmulFallbacks:
    fallbacks = MatmulFallbacks()
    fallbacks.note(reason, "steps of many rows", error)
    return fallbacks
