"""Kernels compiled before the attention tests of a GPU run, counted; and calls compiled that no GPU has run."""

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90

KERNELS = {
    *(f"hallmark_{name}" for name in ("prefill", "extend", "decode", "decode_combine", "gluon_plan", "gluon_prefill")),
    *(f"hallmark_gluon_{name}" for name in ("window_prefill", "extend", "extend_plan", "extend_split")),
    *(f"hallmark_gluon_{name}" for name in ("extend_combine", "decode", "decode_combine", "decode_cluster")),
    *(f"hallmark_gluon_ordered{name}" for name in ("", "_split", "_combine")),
    *(f"hallmark_ordered{name}" for name in ("", "_combine")),
    *(f"hallmark_gluon_wide_{name}" for name in ("prefill", "extend", "decode")),  # of 512
    *(f"hallmark_gluon_full{name}" for name in ("", "_plan")),
}

# What is compiled for one head dim, or whatever it is.
FEW_HEAD_DIMS = {
    "hallmark_gluon_ordered_split",
    "hallmark_gluon_wide_prefill",
    "hallmark_gluon_full",
    "hallmark_gluon_full_plan",
}


def test_every_kernel_of_attention_is_compiled_ahead() -> None:
    variants = run_outside("compile_gpu_tests.py", "--count")
    assert variants.keys() == KERNELS
    few = {name: count for name, count in variants.items() if count < 6}  # as many as there are head dims
    assert few.keys() <= FEW_HEAD_DIMS, few


def test_calls_of_paths_that_no_gpu_has_run_compile_for_prompts_chunks_and_tokens() -> None:
    found = run_outside("attention_calls_compile.py")
    assert {name: len(kernels) for name, kernels in found.items()} == {
        f"{path} {name} d{head_dim}": num_kernels
        for path, head_dims in (("run_ordered", (64, 128, 256)), ("run_latent", (576,)))
        for head_dim in head_dims
        for name, num_kernels in (("prompt", 1), ("chunk", 1), ("token", 2))
    }
    shared = {name: max(it["shared"] for it in kernels) for name, kernels in found.items()}
    assert max(it for name, it in shared.items() if "ordered" in name) <= 99 << 10, shared  # an sm_89's
