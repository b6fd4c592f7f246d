"""Compiles what the calls of every Triton path launch, for sm_90, and runs none of it; prints what it found as JSON.

"launched": the kernels of each path; "narrow": of each kernel the offsets that may not fit into 32 bits.

A program of its own: where Triton's interpreter is on, as in the tests of the kernels, nothing can be compiled.
"""

import json
import sys
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode
from triton import JITFunction
from triton.runtime import driver

from kernels.calls import processors
from kernels.catalog import ALL_PATHS
from kernels.experts.formats import AnyExpertFormat, FewBitFormat
from kernels.experts.kinds import ExpertFormat
from kernels.experts.shape import AnyExpertActivation, ExpertsShape
from kernels.fused.activation_kind import Activation
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.ungated_kind import Ungated
from kernels.portable.launch_config import SHARED_BYTES_HOPPER
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.operators import AnyShape, Operator
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import AttentionShape, Dtype
from kernels.vocabulary.value_shape import values_of
from qualification.measure.faults import (
    attention_faults,
    convolution_faults,
    experts_faults,
    fp8_faults,
    indexed_faults,
    int4_faults,
    latent_faults,
    recurrence_faults,
)
from qualification.measure.trials.trial import trial_of
from support.compiled.offsets import narrow_offsets
from support.compiled.sm90_driver import Hopper

CPU = torch.device("cpu")
HEAD_DIMS = (64, 128, 256, 512)  # one of each tile
OF_HOPPER = {processors.shared_bytes: SHARED_BYTES_HOPPER, processors.num_processors: 132}


def shapes() -> Iterator[AnyShape]:
    """Small shapes of each operator in bf16, as the checker's own trial has them, and with wider heads."""
    for shape in attention_faults.trial_shapes(Dtype.BF16):
        yield from (replace(shape, head_dim=head_dim) for head_dim in HEAD_DIMS)
        yield replace(shape, kv_dtype=FP8)
        yield replace(shape, context_bucket=Bucket.LE_2K)
    yield from latent_faults.trial_shapes_of_latents(Dtype.BF16)
    yield from indexed_faults.trial_shapes_of_indexers(Dtype.BF16)
    yield from attention_faults.narrow_trial_shapes(Dtype.BF16)
    yield from experts_faults.trial_shapes(Dtype.BF16)
    of_experts: tuple[tuple[AnyExpertFormat, AnyExpertActivation], ...] = (
        (FewBitFormat.FP8_ROWS, Activation.SILU),
        (ExpertFormat.PLAIN, CappedSilu(7.0)),
        (FewBitFormat.FP8_STATIC, Ungated.RELU2),
        (FewBitFormat.FP8_ROWS, Ungated.RELU2),
    )
    for kind, activation in of_experts:
        yield ExpertsShape(Dtype.BF16, kind, 5, 2, 96, 72, activation, False, TokenRows.LE_16)
    yield from fp8_faults.trial_shapes()
    yield from int4_faults.trial_shapes()
    yield from recurrence_faults.trial_shapes(Dtype.BF16)
    yield from convolution_faults.trial_shapes(Dtype.BF16)


def kind_of(shape: AnyShape) -> Hashable:
    """Return what is compiled once a path: of attention each phase, width of heads and mask."""
    if isinstance(shape, AttentionShape):
        return (
            shape.phase,
            shape.context_bucket,
            shape.kv_dtype,
            shape.head_dim,
            values_of(shape),
            shape.mask,
            shape.window is None,
        )
    return getattr(shape, "phase", None), getattr(shape, "format", None), getattr(shape, "activation", None)


class Zeroed(TorchFunctionMode):
    """Tensors that no kernel fills hold zeros: PyTorch takes rows by some."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func in (torch.empty, torch.empty_like, torch.Tensor.new_empty) else found


@triton.jit
def planted(page_table_ptr, out_ptr, stride_page):  # type: ignore[no-untyped-def]
    """Have the fault that is looked for, beside what is none."""
    page = tl.load(page_table_ptr + tl.program_id(0))
    tl.store(out_ptr + page.to(tl.int64) * stride_page, 0.0)
    at = page * stride_page
    tl.store(out_ptr + at, 0.0)


def launched(path: AnyPath, shape: AnyShape, narrow: dict[str, list[str]]) -> set[str]:
    """Compile what the calls of a trial launch, of experts the first one; return the kernels' names.

    narrow  is given the offsets of each kernel that may not fit into 32 bits. Those of recurrences are not looked at:
            which token a program is of comes of loops without a bound.
    """
    found: set[str] = set()
    run = JITFunction.run

    def compiled(kernel: Any, *arguments: Any, **options: Any) -> Any:
        found.add(kernel.__name__)
        made = run(kernel, *arguments, **{**options, "warmup": True})
        if not kernel.__name__.startswith("hallmark_recurrence"):
            narrow.setdefault(kernel.__name__, []).extend(narrow_offsets(made.asm["ttir"]))
        return made

    assert path.run is not None
    JITFunction.run = compiled
    try:
        calls = trial_of(shape).calls(shape, path.run, CPU, seed=1)
        with Zeroed():
            for call in calls if not isinstance(shape, ExpertsShape) else islice(calls, 1):
                call()
    finally:
        JITFunction.run = run
    return found


def main() -> None:
    driver.set_active(Hopper())
    for module in [it for name, it in sys.modules.items() if name.startswith(("kernels.", "qualification."))]:
        for name, known in [*vars(module).items()]:
            if isinstance(known, Hashable) and known in OF_HOPPER:
                setattr(module, name, lambda _, value=OF_HOPPER[known]: value)
    report: dict[str, list[str]] = {}
    made: Any = planted.warmup(torch.int32, torch.float32, 64, grid=(1,))
    narrow = {"planted": narrow_offsets(made.asm["ttir"])}
    for path in ALL_PATHS:
        if not path.name.startswith("triton.") or path.operator is Operator.COLLECTIVE:  # whose calls wait for ranks
            continue
        served = {kind_of(it): it for it in shapes() if path.serves(it) and not path.limits.rejections(it)}
        report[path.name] = sorted(set().union(*(launched(path, shape, narrow) for shape in served.values())))
    print(json.dumps({"launched": report, "narrow": {name: sorted({*found}) for name, found in narrow.items()}}))


if __name__ == "__main__":
    main()
