"""Paths of a CPU over pages of 8 bits, of latents and of chosen keys are proven on the hostile inputs of the trials."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.catalog import path_named
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.path import KernelPath
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.faults.attention_faults import trial_shapes
from qualification.measure.faults.indexed_faults import trial_shapes_of_indexers
from qualification.measure.faults.latent_faults import trial_shapes_of_latents
from qualification.measure.inputs.attention_inputs import cases

CPU = torch.device("cpu")
# Of bf16 PyTorch's attention on a CPU with AMX packs tiles by code that a smaller instruction set lacks: it raises.
LACKS_BF16 = "ATEN_CPU_CAPABILITY" in os.environ and torch.cpu._is_amx_tile_supported()  # noqa: SLF001 -- no other asks


def shapes_of(path: KernelPath) -> Iterator[AttentionShape]:
    if path.name.endswith(".fp8"):
        for shape in (replace(it, kv_dtype=FP8, context_bucket=Bucket.LE_128) for it in trial_shapes(Dtype.FP16)):
            if shape.phase is not Phase.PREFILL:
                yield replace(shape, softcap=None, sinks=False) if path.name == "sdpa.cpu.fp8" else shape
    else:
        of_kind = trial_shapes_of_indexers if path.name.endswith(".indexed") else trial_shapes_of_latents
        yield from of_kind(Dtype.FP32 if LACKS_BF16 else Dtype.BF16)


@pytest.mark.parametrize(
    "name", ["sdpa.cpu.fp8", "sdpa.math.fp8", "sdpa.cpu.latent", "sdpa.math.latent", "sdpa.cpu.latent.indexed"]
)
def test_a_path_of_a_cpu_is_proven(name: str) -> None:
    path = path_named(name)
    assert path.run is not None
    shapes = [it for it in shapes_of(path) if it.phase in path.limits.phases]
    assert shapes
    for shape in shapes:
        assert [it for it in check_path(path.run, cases(shape, CPU, seed=0)) if not it.is_passed] == []
