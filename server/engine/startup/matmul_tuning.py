"""Choice of how steps of many rows are multiplied, made when the weights are there, before memory is shared out."""

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.linear.library.autotune import Autotuner, Measure, Measured
from kernels.linear.library.cublaslt import CublasLt, CublasLtError, load_library
from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.linear.library.fallbacks import MatmulFallbacks
from kernels.linear.library.library_path import Choices, RunMeasured, Sizes
from kernels.linear.library.measured_rows import sizes_up_to
from kernels.linear.ordered.autotune import measure_in_order
from kernels.linear.ordered.library_path import RunMeasuredInOrder
from kernels.linear.weights import PlainWeight
from qualification.model.config import ModelConfig
from server.engine.execution.graph_keys import graph_keys
from server.engine.startup.limits import EngineLimits, sizes_of_graphs
from server.model.layers import Weights
from server.model.linear import Linear, WeightName

logger = logging.getLogger(__name__)

_NUM_MEASURED = 8  # layers whose weights algorithms are measured with
_LEAST_CHOSEN = 2**20  # numbers of a weight: smaller products take the host longer than the GPU
_MOST_SAMPLED = 512  # rows of the head
_ALL = "steps of many rows"


def choose_products(
    weights: Weights,
    config: ModelConfig,
    limits: EngineLimits,
    file: Path,
    device: torch.device,
    measured: RunMeasured | RunMeasuredInOrder,
    fallbacks: MatmulFallbacks,
    *,
    measure: Measure | None = None,
    load: Callable[[], ctypes.CDLL] = load_library,
) -> None:
    """Measure what the file does not know yet: 5.5 s for an 8B (one H200). Where that fails PyTorch stays.

    `measured` multiplies by the choice from then on; `fallbacks` get what is, or in service will be, left to PyTorch.
    The numbers of rows are those of CUDA graphs even where there are none, so that both compute the same.

    `measure`: `measure_nothing` on other ranks than the first, which take what that one has measured and stored.
    """
    keys = graph_keys(sizes_of_graphs(config, limits, limits.max_model_len))
    num_rows = sizes_up_to(limits.max_num_batched_tokens, (key.num_tokens for key in keys))
    started_at = time.monotonic()
    try:
        loaded = load()
    except CublasLtError as error:
        fallbacks.note(MatmulFallback.LIBRARY_MISSING, _ALL, error)
        return
    try:
        library = CublasLt(loaded, device)
        in_order = isinstance(measured, RunMeasuredInOrder)
        if in_order and measure is None:
            measure = measure_in_order
        autotuner = Autotuner(library, file, fallbacks, measure=measure)
        measured.choose(library, choices_of(weights, autotuner, num_rows, in_order=in_order))
    except (CublasLtError, RuntimeError) as error:
        fallbacks.note(_reason_of(error), _ALL, error)
        return
    logger.info("algorithms of %d numbers of rows chosen in %.1f s", len(num_rows), time.monotonic() - started_at)


def choices_of(
    weights: Weights, autotuner: Autotuner, num_rows: Sequence[int], *, in_order: bool = False
) -> dict[Sizes, Choices]:
    """Return the algorithms for all products of many rows that have no bias. Raises CublasLtError.

    in_order  whether products are summed in one order: then those with a bias have algorithms too, whose sums are fp32
    """
    found: dict[Sizes, Choices] = {}
    layers = [layer.linears for layer in weights.layers]
    if weights.per_layer is not None:
        layers.append({WeightName.PER_LAYER: weights.per_layer.product})
    for name in dict.fromkeys(name for layer in layers for name in layer if name is not WeightName.ROUTER):
        for has_bias in (False, True) if in_order else (False,):
            tuned = [it for layer in layers if (it := _tuned_values(layer.get(name), has_bias=has_bias)) is not None]
            for size in dict.fromkeys(it.shape for it in tuned):  # layers may differ in heads, or in width
                values = [it for it in tuned if it.shape == size]
                dtype_out = torch.float32 if has_bias else values[0].dtype
                sizes, choices = autotuner.choices(values[:_NUM_MEASURED], dtype_out, num_rows)
                found[sizes] = choices
    head, sampled = _tuned_values(weights.head, has_bias=False), [size for size in num_rows if size <= _MOST_SAMPLED]
    if head is not None and sampled:
        sizes, choices = autotuner.choices([head], torch.float32, sampled)
        found[sizes] = choices
    return found


def _tuned_values(linear: Linear | None, *, has_bias: bool) -> Tensor | None:
    """Return the numbers of a weight whose products are measured; None for others."""
    if linear is None or (linear.bias is not None) is not has_bias or not isinstance(linear.weight, PlainWeight):
        return None
    values = linear.weight.values
    is_large = values.dtype in (torch.float16, torch.bfloat16) and values.numel() >= _LEAST_CHOSEN
    return values if is_large else None


def measure_nothing(_: CublasLt, __: Sequence[Tensor], ___: torch.dtype, sizes: Sequence[int]) -> Measured:
    return dict.fromkeys(sizes, MatmulFallback.MEASURE_FAILED)


def _reason_of(error: CublasLtError | RuntimeError) -> MatmulFallback:
    if isinstance(error, CublasLtError):
        return MatmulFallback.LIBRARY_REFUSED
    is_memory = isinstance(error, torch.OutOfMemoryError)
    return MatmulFallback.OUT_OF_MEMORY if is_memory else MatmulFallback.MEASURE_FAILED
