"""Choice of how steps of many rows are multiplied, made when the weights are there, before memory is shared out."""

import ctypes
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.linear.autotune import Chooser
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
    keys = graph_keys(sizes_of_graphs(decoder.config, limits, limits.max_model_len))
    sizes = sizes_up_to(limits.max_num_batched_tokens, (key.num_tokens for key in keys))
    started_at = time.monotonic()
    try:
        library = load()
    except CublasLtError as error:
        return _all(MatmulFallback.LIBRARY_MISSING, error)
    try:
        chooser = Chooser(CublasLt(library, device), file)
        decoder.choose_products(chooser, sizes)
    except CublasLtError as error:
        return _all(MatmulFallback.LIBRARY_REFUSED, error)
    except torch.OutOfMemoryError as error:
        return _all(MatmulFallback.OUT_OF_MEMORY, error)
    except RuntimeError as error:
        return _all(MatmulFallback.MEASURE_FAILED, error)
    logger.info("algorithms of %d numbers of rows chosen in %.1f s", len(sizes), time.monotonic() - started_at)
    return chooser.fallbacks


def _all(reason: MatmulFallback, error: Exception) -> MatmulFallbacks:
    fallbacks = MatmulFallbacks()
    fallbacks.note(reason, "steps of many rows", error)
    return fallbacks
