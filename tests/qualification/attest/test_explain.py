"""Classes of kernels by their names."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.catalog import ALL_PATHS, PATHS, any_path_named, path_named
from kernels.driver.kernel_names import plain_name
from kernels.experts.kinds import ExpertFormat
from kernels.experts.shape import ExpertsShape
from kernels.fused.activation_kind import Activation
from kernels.system.device import read_fingerprint
from kernels.vocabulary.operators import AnyShape, Operator, operator_of
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask
from qualification.attest.explain import TimeClass, class_of, explain
from qualification.attest.operator_promises import operator_mismatches, operator_promises
from qualification.attest.promise import Promise, kernels_promised
from qualification.decision.decision import Decision, Status
from qualification.evidence.evidence import Evidence
from qualification.evidence.matrix import load_matrix
from qualification.measure.costs.profile import calls_seen
from qualification.measure.inputs.attention_inputs import long_case
from support.qualification_fakes import DECODE, evidence
from support.qualification_fakes import SHAPE as ATTENTION

SHAPE = ExpertsShape(Dtype.FP32, ExpertFormat.PLAIN, 5, 2, 48, 40, Activation.SILU, False, TokenRows.LE_16)
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
    for operator in ("linear", "recurrence"):  # which a CPU's multiplies by too
        assert class_of("aten::bmm", {**proven, operator: {"aten::bmm"}}) is TimeClass.EVIDENCE


def test_a_call_of_attention_is_explained_by_its_evidence_alone() -> None:
    seconds = {"aten::bmm": 3.0, "aten::mm": 2.0, "aten::add": 1.0}
    proven = {"attention": {"aten::bmm", "aten::_softmax"}, "linear": {"aten::mm"}}
    within = {"aten::bmm": 1.0, "aten::mm": 0.5, "aten::add": 0.25}
    assert explain(seconds, proven, in_attention=within).seconds == {
        TimeClass.EVIDENCE: 1.0 + 1.5,  # the rest of aten::bmm is a product's, whose evidence does not name it
        TimeClass.NAMED: 1.0,
        TimeClass.UNPROVEN: 2.0 + 0.5,
        TimeClass.UNEXPLAINED: 0.0,
    }


CPU_SHAPES = [
    (name, replace(base, **changes))
    for base in (ATTENTION, DECODE)
    for name, changes in [
        *[("sdpa.cpu", {"dtype": dtype, "kv_dtype": dtype}) for dtype in Dtype],
        *[("sdpa.math", {"dtype": dtype, "kv_dtype": dtype}) for dtype in Dtype],
        ("sdpa.math", {"window": 17}),
        ("sdpa.math", {"softcap": 30.0}),
        ("sdpa.math", {"sinks": True}),
        ("sdpa.math", {"mask": Mask.SPANS}),
        ("sdpa.math", {"head_dim": 320}),
    ]
]


@pytest.mark.parametrize(("name", "shape"), CPU_SHAPES, ids=str)
def test_a_list_names_every_operator_of_attention_on_a_cpu(name: str, shape: AttentionShape) -> None:
    path, device = path_named(name), torch.device("cpu")
    if path.run is None or path.rejects(shape, read_fingerprint(device)):
        pytest.skip(f"{name} does not take it")
    case, run = long_case(shape, device, seed=0), path.run
    out = torch.empty_like(case.q)
    seen = calls_seen([lambda: run(case.q, case.k, case.v, case.batch, case.flags, out)], device)
    assert len(seen.seconds) > 3
    assert {it for it in seen.seconds if class_of(it, {}) is TimeClass.UNEXPLAINED} == set()
    assert seen.seconds_in_calls == seen.seconds


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


def test_a_path_without_names_has_kernels_with_its_markers() -> None:
    seen = ["hallmark_x_combine", "gemm", "_Z4rest"]
    assert kernels_promised([Promise("x", (), (), ("hallmark_x",))], seen) == {"hallmark_x_combine"}
    assert kernels_promised([Promise("x", ("hallmark_x",))], seen) == {"hallmark_x"}


def test_a_kernel_is_proven_where_all_its_shapes_are() -> None:
    """A record of a step does not say which shape a kernel was launched for."""
    path = any_path_named("torch.experts.cpu")
    small, large = (replace(SHAPE, rows=rows) for rows in (TokenRows.LE_16, TokenRows.LE_128))
    known = {
        (small, path.name): _evidence(small, path, ("aten::mm", "aten::silu")),
        (large, path.name): _evidence(large, path, ("aten::mm", "aten::addmm")),
    }

    def proven(status: Status, digest: str = path.source_digest) -> frozenset[str]:
        decisions = [_decision(small, path.name, Status.PROVEN), _decision(large, path.name, status)]
        entries = {
            key: replace(entry, source_digest=digest) if key[0] is large else entry for key, entry in known.items()
        }
        promises = operator_promises(decisions, entries, ALL_PATHS)
        assert promises.keys() == {Operator.EXPERTS}
        return promises[Operator.EXPERTS].proven(["aten::mm", "aten::bmm", "aten::silu"])

    assert proven(Status.PROVISIONAL) == {"aten::mm", "aten::silu", "aten::addmm"}
    assert proven(Status.STALE) == {"aten::silu"}
    assert proven(Status.UNPROVEN, "older") == frozenset()  # whose names are not known


def _decision(shape: AnyShape, path: str, status: Status) -> Decision[AnyShape]:
    return Decision(shape, path, status, path, (), (), None)


def _evidence(shape: AnyShape, path: AnyPath, kernels: tuple[str, ...]) -> Evidence:
    known = evidence(ATTENTION, path_named("sdpa.cpu"), kernels=kernels)
    return replace(known, shape=shape, path=path.name, source_digest=path.source_digest)


def test_every_kernel_of_ours_is_an_operators_or_in_the_list() -> None:
    names = jitted()
    assert len(names) > 50
    ours = {name for name in names if name.startswith("hallmark_")}
    small = {name for name in names if name.endswith("_kernel")}
    assert len(ours) > 15
    assert len(small) > 10
    known = {"hallmark_experts_route", "hallmark_push_columns", "hallmark_push_values"}
    assert {name for name in ours if class_of(name, {}) is not TimeClass.UNPROVEN} == known
    assert class_of("hallmark_experts_route", {}) is TimeClass.NAMED
    assert {name for name in small if class_of(name, {}) is not TimeClass.NAMED} == set()


def test_every_kernel_of_ours_in_committed_evidence_is_explained_by_its_operator() -> None:
    """A pattern of attention's had taken `hallmark_ordered_matmul`: a product that was proven was called unproven."""
    kernels = {
        (operator_of(it.shape).value, name)
        for file in KERNELS.parent.glob("qualification/matrices/*/*.json")
        for it in load_matrix(file).evidence.values()
        for name in {*(it.kernels or ()), *(it.kernels_sometimes or ())}
        if name.startswith("hallmark_")
    }
    assert ("linear", "hallmark_ordered_matmul") in kernels
    classes = {(operator, name): class_of(name, {operator: {name}}) for operator, name in kernels}
    assert {it for it, found in classes.items() if found not in (TimeClass.EVIDENCE, TimeClass.NAMED)} == set()


def test_marked_kernels_of_every_path_are_an_operators() -> None:
    markers = {name for path in PATHS for name in path.kernel_names if name.startswith("hallmark_")}
    assert markers
    assert {name for name in markers if class_of(name, {}) is not TimeClass.UNPROVEN} == set()


@pytest.mark.parametrize(
    ("served", "seen", "blamed"),
    [
        ("gluon.linear.skinny", {"hallmark_skinny_matmul", "hallmark_experts_route", "nvjet_sm90_tst"}, []),
        ("gluon.linear.skinny", {"nvjet_sm90_tst"}, ["gluon.linear.skinny"]),  # silently PyTorch's
        ("gluon.linear.skinny", {"hallmark_skinny_matmul", "hallmark_wide_matmul"}, ["gluon.linear.skinny"]),
        ("torch.linear", {"some_gemm", "another_gemm"}, []),  # a library may choose another kernel for other rows
        ("torch.linear", {"some_gemm", "hallmark_wide_matmul"}, [None]),
    ],
)
def test_kernels_of_our_own_must_be_those_that_serve(served: str, seen: set[str], blamed: list[str | None]) -> None:
    kernels = ("hallmark_skinny_matmul",) if served.startswith("gluon") else ("some_gemm",)
    found = operator_mismatches([(any_path_named(served), Promise(served, kernels))], seen)
    assert [(it.path, it.operator) for it in found] == [(path, Operator.LINEAR) for path in blamed]
