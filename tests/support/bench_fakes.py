"""Cases and rows for the tests of the bench, each a plain value."""

from dataclasses import replace
from typing import Any

from bench.attention.cases import BenchCase, Sweep, cases_of
from bench.attention.row import Row
from kernels.vocabulary.shape import Dtype, Phase
from qualification.evidence.evidence import Timing


def prefill(length: int, *, sequences: int = 1, **changes: Any) -> BenchCase:
    """Packed prompts of one length, 4 over 2 heads of 64."""
    sweep = Sweep(
        Dtype.FP32, (Phase.PREFILL,), (64,), ((4, 2),), (length,), total_tokens=sequences * length, mixes=(), **changes
    )
    return cases_of(sweep)[0]


def decode(context: int, *, batch: int = 1, **changes: Any) -> BenchCase:
    sweep = Sweep(
        Dtype.FP32,
        (Phase.DECODE,),
        (64,),
        ((4, 2),),
        batches=(batch,),
        decode_contexts=(context,),
        mixes=(),
        page_size=16,
        **changes,
    )
    return cases_of(sweep)[0]


def extend(chunk: int, context: int, **changes: Any) -> BenchCase:
    sweep = Sweep(
        Dtype.FP32,
        (Phase.EXTEND,),
        (64,),
        ((4, 2),),
        chunks=(chunk,),
        extend_contexts=(context,),
        page_size=16,
        **changes,
    )
    return cases_of(sweep)[0]


def row(case: BenchCase, contender: str, p50_us: float = 10.0, **changes: Any) -> Row:
    """A right row of a path, with changes."""
    seconds = p50_us * 1e-6
    found = Row(
        case=case,
        contender=contender,
        is_peer=False,
        is_graphed=False,
        kernels=("void a::kernel<(int)1>(float*)",),
        timing=Timing(p50_us, 0.01, 20),
        tflops=case.flops / seconds / 1e12,
        bytes_per_second=case.num_bytes / seconds,
        floor_us=5.0,
        temporary_bytes=2**20,
        max_error=0.5,
        error_share=0.5,
        bias_share=0.1,
        num_nonfinite=0,
        best_peer=None,
        ratio=None,
    )
    return replace(found, **changes)
