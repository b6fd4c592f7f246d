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
from qualification.model.shard import vocabulary_rows
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
    except CublasLtError as error:
        return _all(MatmulFallback.LIBRARY_REFUSED, error)
    except torch.OutOfMemoryError as error:
        return _all(MatmulFallback.OUT_OF_MEMORY, error)
    except RuntimeError as error:
        return _all(MatmulFallback.MEASURE_FAILED, error)
    logger.info("algorithms of %d numbers of rows chosen in %.1f s", len(sizes), time.monotonic() - started_at)
    return autotuner.fallbacks


def take_products(
    decoder: Decoder,
    limits: EngineLimits,
    file: Path,
    device: torch.device,
    *,
    load: Callable[[], ctypes.CDLL] = load_library,
) -> None:
    """Multiply by what rank 0 has measured and stored in the file, and measure nothing: PyTorch serves the rest.

    A failure is logged: where it is that of every rank, rank 0 has counted it.
    """
    try:
        autotuner = Autotuner(CublasLt(load(), device), file, measure=_measure_nothing)
        decoder.choose_products(autotuner, _sizes(decoder, limits))
    except CublasLtError as error:
        logger.warning("steps of many rows are multiplied by PyTorch's algorithms on this rank: %s", error)


def note_other_heads(fallbacks: MatmulFallbacks, vocab_size: int, world: int) -> None:
    """Note the ranks whose part of the head has other rows than rank 0's, for which nothing was measured."""
    rows = [len(vocabulary_rows(vocab_size, rank, world)) for rank in range(world)]
    for rank, num_rows in enumerate(rows):
        if num_rows != rows[0]:
            detail = f"it has {num_rows} rows, and products were measured with {rows[0]}"
            fallbacks.note(MatmulFallback.MEASURE_FAILED, f"the head of rank {rank}", detail)


def _measure_nothing(_: CublasLt, __: Sequence[Tensor], ___: torch.dtype, sizes: Sequence[int]) -> Measured:
    return dict.fromkeys(sizes, MatmulFallback.MEASURE_FAILED)


def _sizes(decoder: Decoder, limits: EngineLimits) -> list[int]:
    """Return the numbers of rows to measure: those of CUDA graphs even where there are none."""
    keys = graph_keys(sizes_of_graphs(decoder.config, limits, limits.max_model_len))
    return sizes_up_to(limits.max_num_batched_tokens, (key.num_tokens for key in keys))


def _all(reason: MatmulFallback, error: Exception) -> MatmulFallbacks:
    fallbacks = MatmulFallbacks()
    fallbacks.note(reason, "steps of many rows", error)
    return fallbacks
