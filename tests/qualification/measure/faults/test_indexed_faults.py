"""Attention to chosen keys: wrong choices are refused, right paths are proven."""

import os

import pytest
import torch

from kernels.catalog import path_named
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.faults.indexed_faults import indexed_faults_passed_wrongly, trial_shapes_of_indexers
from qualification.measure.inputs.attention_inputs import cases

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP32])
def test_wrong_choices_of_keys_are_refused(dtype: Dtype) -> None:
    assert indexed_faults_passed_wrongly(frozenset({dtype}), CPU, seed=1) == ()


def test_a_path_that_chooses_keys_is_proven() -> None:
    path = path_named("sdpa.cpu.latent.indexed")
    assert path.run is not None
    # Of bf16 PyTorch's attention on a CPU with AMX packs tiles by code that a smaller instruction set lacks: it raises.
    lacks = "ATEN_CPU_CAPABILITY" in os.environ and torch.cpu._is_amx_tile_supported()  # noqa: SLF001 -- no other asks
    for shape in trial_shapes_of_indexers(Dtype.FP32 if lacks else Dtype.BF16):
        assert [it for it in check_path(path.run, cases(shape, CPU, seed=0)) if not it.is_passed] == []
