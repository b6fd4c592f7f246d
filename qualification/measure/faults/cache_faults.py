"""Kernels over a cache of 8 bits that must be refused: each reads scales, or numbers, as a wrong kernel would."""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.fp8_cache.pages import scales_of
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.references import References
from qualification.measure.faults.attention_faults import Fault, trial_shapes, wrong_kernel
from qualification.measure.inputs.attention_inputs import cases


class CacheFault(Enum):
    """A fault of a wrong kernel; the comment says how a real kernel comes by it."""

    NONE = "none"  # must pass
    NEIGHBOUR_TOKEN = "a token has its neighbour's scale"  # off by one
    NEIGHBOUR_HEAD = "a head has its neighbour's scale"  # strides of the numbers, taken for those of the scales
    FIRST_OF_PAGE = "all tokens of a page have the first one's scale"  # stride 0
    OTHER_PAGE = "a page has the scales of another"  # those before it was used again
    KEYS_FOR_VALUES = "values have the keys' scales"
    NO_SCALE = "scales are left out"  # None handed on
    E5M2 = "e4m3 is read as e5m2"


def _same(scales: Tensor) -> Tensor:
    return scales


_CHANGED: dict[CacheFault, Callable[[Tensor], Tensor]] = {  # scales [num_pages, kv_heads, page_size]
    CacheFault.NEIGHBOUR_TOKEN: lambda scales: scales.roll(1, dims=2),
    CacheFault.NEIGHBOUR_HEAD: lambda scales: scales.roll(1, dims=1),
    CacheFault.FIRST_OF_PAGE: lambda scales: scales[:, :, :1].expand_as(scales),
    CacheFault.OTHER_PAGE: lambda scales: scales.roll(1, dims=0),
    CacheFault.NO_SCALE: torch.ones_like,
}


def wrong_cache_kernel(fault: CacheFault) -> RunAttention:
    """Attention over pages of 8 bits with this fault. Not for service."""
    attend = wrong_kernel(Fault.NONE)

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        numbers = (it.view(torch.uint8).view(torch.float8_e5m2) if fault is CacheFault.E5M2 else it for it in (k, v))
        of_values = k if fault is CacheFault.KEYS_FOR_VALUES else v
        change = _CHANGED.get(fault, _same)
        scales = (change(scales_of(it)).transpose(1, 2)[..., None] for it in (k, of_values))
        keys, values = (it.float() * scale for it, scale in zip(numbers, scales, strict=True))
        attend(q, keys, values, batch, flags, out)

    return run


def cache_faults_passed_wrongly(
    dtypes: frozenset[Dtype], device: torch.device, *, seed: int = 0
) -> tuple[tuple[CacheFault, AttentionShape], ...]:
    """Try the checker on every fault, and on none. Empty when it refuses all that is wrong and passes what is right."""
    found = []
    with one_thread():
        for dtype in (dtype for dtype in Dtype if dtype in dtypes):
            for shape in (replace(it, kv_dtype=FP8) for it in trial_shapes(dtype) if it.phase is not Phase.PREFILL):
                inputs, references = list(cases(shape, device, seed=seed)), References()
                for fault in CacheFault:
                    run = wrong_cache_kernel(fault)
                    passes = all(it.is_passed for case in inputs for it in check_path(run, [case], references))
                    if passes is not (fault is CacheFault.NONE):
                        found.append((fault, shape))
    return tuple(found)
