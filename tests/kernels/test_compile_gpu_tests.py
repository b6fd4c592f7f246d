"""Kernels compiled before the attention tests of a GPU run, counted; and what each Triton path launches, compiled."""

import pytest

from kernels.catalog import ALL_PATHS
from kernels.vocabulary.operators import Operator
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


def test_what_each_triton_path_launches_compiles() -> None:
    """No offset of theirs passes 2^31 - 1 in 32 bits, under the most that a server computes; one that does is seen."""
    found = run_outside("paths_compile.py")
    launched, planted = found["launched"], found["narrow"].pop("planted")
    assert planted == ["out_ptr <- %at = arith.muli %page, %stride_page : i32"]
    assert {name: offsets for name, offsets in found["narrow"].items() if offsets} == {}
    assert len(found["narrow"]) > 20
    served = [it for it in ALL_PATHS if it.name.startswith("triton.") and it.operator is not Operator.COLLECTIVE]
    assert [*launched] == [path.name for path in served]
    for path in served:
        assert launched[path.name], path.name
        others = [it for it in launched[path.name] if not any(name in it for name in path.kernel_names)]
        assert not others, (path.name, others)
