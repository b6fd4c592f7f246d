"""Attention over a cache of 8 bits: wrong scales are refused, right paths are proven."""

from dataclasses import replace

import pytest
import torch

from kernels.catalog import path_named
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.shape import Dtype, Phase
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.faults.attention_faults import trial_shapes
from qualification.measure.faults.cache_faults import cache_faults_passed_wrongly
from qualification.measure.inputs.attention_inputs import cases

CPU = torch.device("cpu")


def test_wrong_scales_and_numbers_are_refused() -> None:
    assert cache_faults_passed_wrongly(frozenset({Dtype.BF16}), CPU, seed=1) == ()


@pytest.mark.parametrize("name", ["sdpa.cpu.fp8", "sdpa.math.fp8"])
def test_a_path_of_a_cpu_is_proven(name: str) -> None:
    path = path_named(name)
    shapes = [
        replace(shape, kv_dtype=FP8, context_bucket=Bucket.LE_128)
        for shape in trial_shapes(Dtype.FP16)
        if shape.phase in path.limits.phases and shape.phase is not Phase.PREFILL
    ]
    if name == "sdpa.cpu.fp8":
        shapes = [replace(shape, softcap=None, sinks=False) for shape in shapes]
    assert shapes
    assert path.run is not None
    for shape in shapes:
        assert [it for it in check_path(path.run, cases(shape, CPU, seed=0)) if not it.is_passed] == []
