"""What is known of kernels by their names."""

import ast
from pathlib import Path

import pytest

from kernels.catalog import PATHS
from qualification.attest.explain import TimeClass, class_of, explain
from qualification.attest.promise import Promise, kernels_promised
from qualification.common.kernel_names import plain_name

KERNELS = Path(__file__).resolve().parents[3] / "kernels"


def jitted() -> set[str]:
    """Return the names of all functions of `kernels` that are jitted."""
    found = set()
    for file in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(it) for it in node.decorator_list):
                found.add(node.name)
    return found


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_ZN2at6native11sort_kernelILi4ENS0_11FillFunctorIfEE", "at::native::sort_kernel"),
        ("_ZN2at6native12_GLOBAL__N_19cunn_SomeIfEEvT_", "at::native::cunn_Some"),
        ("_Z6kernelIfEvT_", "kernel"),
        ("void at::native::(anonymous namespace)::gather<float>(int)", "at::native::gather"),
        ("nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_TNN", "nvjet_sm90_tst"),
        ("hallmark_prefill", "hallmark_prefill"),
    ],
)
def test_plain_names_are_without_templates_and_signatures(name: str, plain: str) -> None:
    assert plain_name(name) == plain


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("hallmark_decode", TimeClass.EVIDENCE),
        ("hallmark_decode_combine", TimeClass.UNPROVEN),
        ("nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_TNN", TimeClass.UNPROVEN),
        ("_ZN7cutlass7Kernel2I4GemmEEvNT_6ParamsE", TimeClass.UNPROVEN),
        ("_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEE", TimeClass.NAMED),
        ("_rms_norm_kernel", TimeClass.NAMED),
        ("Memcpy", TimeClass.NAMED),
        ("aten::mm", TimeClass.UNPROVEN),
        ("aten::transpose", TimeClass.NAMED),
        ("aten::erfinv", TimeClass.UNEXPLAINED),
        ("somebodys_rms_norm_kernel", TimeClass.UNEXPLAINED),
        ("graph node of kind 9", TimeClass.UNEXPLAINED),
    ],
)
def test_a_name_has_one_class(name: str, found: TimeClass) -> None:
    assert class_of(name, {"attention": {"hallmark_decode"}}) is found


def test_a_product_is_not_proven_by_evidence_of_attention() -> None:
    """Attention by plain PyTorch launches products too: which of them is whose the record of a graph does not say."""
    proven = {"attention": {"aten::bmm", "aten::_softmax"}}
    assert class_of("aten::bmm", proven) is TimeClass.UNPROVEN
    assert class_of("aten::_softmax", proven) is TimeClass.EVIDENCE
    assert class_of("aten::bmm", {**proven, "linear": {"aten::bmm"}}) is TimeClass.EVIDENCE


def test_time_is_sorted_by_class_with_the_longest_names() -> None:
    seconds = {"hallmark_decode": 2.0, "Memcpy": 1.0, "nvjet_a": 3.0, **{f"other{n}": n / 100 for n in range(1, 11)}}
    found = explain(seconds, {"attention": {"hallmark_decode"}})
    assert found.seconds == {
        TimeClass.EVIDENCE: 2.0,
        TimeClass.NAMED: 1.0,
        TimeClass.UNPROVEN: 3.0,
        TimeClass.UNEXPLAINED: pytest.approx(0.55),
    }
    assert found.share == pytest.approx(3 / 6.55)
    assert found.unproven == {"nvjet_a": 3.0}
    assert list(found.unexplained) == [f"other{n}" for n in range(10, 2, -1)]


def test_a_path_without_names_of_its_own_has_those_with_its_markers() -> None:
    seen = ["hallmark_x_combine", "gemm", "_Z4rest"]
    assert kernels_promised([Promise("x", (), (), ("hallmark_x",))], seen) == {"hallmark_x_combine"}
    assert kernels_promised([Promise("x", ("hallmark_x",))], seen) == {"hallmark_x"}


def test_every_kernel_of_ours_is_an_operators_or_in_the_list() -> None:
    names = jitted()
    assert len(names) > 50
    ours = {name for name in names if name.startswith("hallmark_")}
    small = {name for name in names if name.endswith("_kernel")}
    assert len(ours) > 15
    assert len(small) > 10
    assert {name for name in ours if class_of(name, {}) is not TimeClass.UNPROVEN} == set()
    assert {name for name in small if class_of(name, {}) is not TimeClass.NAMED} == set()


def test_marked_kernels_of_every_path_are_an_operators() -> None:
    markers = {name for path in PATHS for name in path.kernel_names if name.startswith("hallmark_")}
    assert markers
    assert {name for name in markers if class_of(name, {}) is not TimeClass.UNPROVEN} == set()
