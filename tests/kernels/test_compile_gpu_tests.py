"""Kernels compiled before the attention tests of a GPU run, counted without a GPU."""

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90

KERNELS = {
    *(f"hallmark_{name}" for name in ("prefill", "extend", "decode", "decode_combine", "gluon_plan", "gluon_prefill")),
    *(f"hallmark_gluon_{name}" for name in ("window_prefill", "extend", "extend_plan", "extend_split")),
    *(f"hallmark_gluon_{name}" for name in ("extend_combine", "decode", "decode_combine", "decode_cluster")),
}


def test_every_kernel_of_attention_is_compiled_ahead() -> None:
    variants = run_outside("compile_gpu_tests.py", "--count")
    assert variants.keys() == KERNELS
    assert all(count >= 6 for count in variants.values()), variants  # as many as there are head dims
