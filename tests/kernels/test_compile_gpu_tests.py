"""Kernels compiled before the attention tests of a GPU run, counted without a GPU."""

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90

KERNELS = {
    *(f"hallmark_{name}" for name in ("prefill", "extend", "decode", "decode_combine", "gluon_plan", "gluon_prefill")),
    *(f"hallmark_gluon_{name}" for name in ("window_prefill", "extend", "extend_plan", "extend_split")),
    *(f"hallmark_gluon_{name}" for name in ("extend_combine", "decode", "decode_combine", "decode_cluster")),
    *(f"hallmark_gluon_ordered{name}" for name in ("", "_split", "_combine")),
    *(f"hallmark_ordered{name}" for name in ("", "_combine")),
}

ANY_HEAD_DIM = {"hallmark_gluon_ordered_split"}  # what is not compiled for each


def test_every_kernel_of_attention_is_compiled_ahead() -> None:
    variants = run_outside("compile_gpu_tests.py", "--count")
    assert variants.keys() == KERNELS
    few = {name: count for name, count in variants.items() if count < 6}  # as many as there are head dims
    assert few.keys() <= ANY_HEAD_DIM, few
