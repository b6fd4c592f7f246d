"""Experts as an operator: measured into evidence, kept in matrix files, decided under each policy."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.catalog import ALL_PATHS, any_path_named
from kernels.experts.kinds import ClampedSwiglu, ExpertFormat
from kernels.experts.paths import EXPERTS_PATHS, ExpertsPath
from kernels.experts.shape import ExpertsShape
from kernels.fused.activation_kind import Activation
from kernels.system.device import read_fingerprint
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import Reject
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.canary.plan import judge_plan, reviewed_matrix
from qualification.canary.verdict import Outcome
from qualification.decision.decision import Book, Policy, Status, decide
from qualification.decision.defaults import Choices, limits_of
from qualification.decision.model_shapes import experts_shapes_needed
from qualification.decision.presets import preset_named
from qualification.evidence.evidence import Evidence
from qualification.evidence.gpu_folder import gpu_folder
from qualification.evidence.matrix import Matrix, load_matrix, save_matrix
from qualification.evidence.summary import summary
from qualification.measure.faults.experts_faults import ExpertsFault, wrong_experts
from qualification.measure.qualify import Bench, qualify
from qualification.model.families.reader import read_model
from qualification.report.page import render
from qualification.report.sources import gather

CPU = torch.device("cpu")
TORCH = any_path_named("torch.experts.cpu")
WRONG = replace(TORCH, name="wrong.experts", run=wrong_experts(ExpertsFault.EXPERTS_SWAPPED))
SHAPE = ExpertsShape(Dtype.FP32, ExpertFormat.PLAIN, 5, 2, 48, 40, Activation.SILU, False, TokenRows.LE_16)
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580.95.05", "13.0", "91900", "2.11.0", "3.6.0")


def silent(*_: object) -> None:
    pass


def measured(shapes: Sequence[ExpertsShape], *paths: ExpertsPath) -> list[Evidence]:
    found: list[Evidence] = []
    bench = Bench(read_fingerprint(CPU), CPU, timing_budget_s=0.001)
    pairs = [(shape, path) for shape in shapes for path in paths]
    qualify(pairs, bench, progress=silent, on_evidence=found.append, check_checker=lambda *_, **__: ())
    return found


def test_torchs_experts_are_proven_and_swapped_ones_refused(tmp_path: Path) -> None:
    packed = replace(SHAPE, format=ExpertFormat.MXFP4, hidden=64, width=32, activation=ClampedSwiglu(), has_bias=True)
    shapes = [SHAPE, replace(SHAPE, rows=TokenRows.LE_128), packed]
    found = measured(shapes, TORCH, WRONG)
    assert [(entry.path, entry.is_proven) for entry in found] == [(TORCH.name, True), (WRONG.name, False)] * 3
    assert all(entry.kernels and any("mm" in name for name in entry.kernels) for entry in found)
    assert {entry.tested_query_tokens for entry in found} == {16, 128}
    machine, known = read_fingerprint(CPU), {(entry.shape, entry.path): entry for entry in found}
    decision = decide(
        SHAPE, paths=[WRONG, TORCH], fingerprint=machine, book=Book(own=known), quarantined=frozenset(),
        policy=Policy.QUALIFY,
    )  # fmt: skip
    assert (decision.path, decision.status) == (TORCH.name, Status.PROVISIONAL)
    assert (decision.wanted, decision.fallback_reasons) == (WRONG.name, (Reject.FAILED,))
    [candidate] = decision.candidates
    assert "every_row" in candidate.rejections[0].detail
    file = tmp_path / gpu_folder(machine.gpu) / "tiny.json"
    save_matrix(file, found)
    assert load_matrix(file).evidence == known
    table = "\n".join(summary(found))
    assert SHAPE.kind in table
    assert "every_row" in table


def test_the_report_and_the_canary_read_experts(tmp_path: Path) -> None:
    [entry] = measured([SHAPE], TORCH)
    file = tmp_path / gpu_folder(entry.fingerprint.gpu) / "tiny.json"
    save_matrix(file, [entry])
    page = render(gather(file, [], [], None), at=entry.at, command="hallmark report")
    assert f"{SHAPE}" in page
    row = {"shape": str(SHAPE), "path": TORCH.name, "wanted": TORCH.name, "status": "proven", "fallback_reasons": []}
    reviewed = reviewed_matrix(tmp_path, entry.fingerprint.values())
    given = {"must_be_reviewed": True, "reviewed": reviewed, "digest": reviewed.digest}
    assert judge_plan([row], **given).outcome is Outcome.PASS
    verdict = judge_plan([row | {"path": "torch.experts"}], **given)
    assert verdict.outcome is Outcome.FAIL
    assert f"the reviewed matrix chooses {TORCH.name}" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("policy", "reviewed", "path", "status", "reasons"),
    [
        (Policy.REFUSE, False, None, Status.UNPROVEN, (Reject.UNPROVEN,)),
        (Policy.DEGRADE, False, "torch.experts.cpu", Status.UNPROVEN, (Reject.UNPROVEN,)),
        (Policy.REFUSE, True, "torch.experts.cpu", Status.PROVEN, ()),
    ],
)
def test_experts_are_decided_as_attention_is(
    policy: Policy, reviewed: bool, path: str | None, status: Status, reasons: tuple[Reject, ...]
) -> None:
    evidence = {(entry.shape, entry.path): entry for entry in measured([SHAPE], TORCH)} if reviewed else {}
    decision = decide(
        SHAPE, paths=ALL_PATHS, fingerprint=read_fingerprint(CPU), book=Book(Matrix(evidence)),
        quarantined=frozenset(), policy=policy,
    )  # fmt: skip
    assert (decision.path, decision.status, decision.fallback_reasons) == (path, status, reasons)
    others = {it.path for it in decision.candidates} | ({decision.path} if decision.path else set())
    assert others == {path.name for path in EXPERTS_PATHS if not path.is_for_order}


def test_on_a_gpu_our_experts_go_before_torchs() -> None:
    shape = replace(SHAPE, dtype=Dtype.BF16, hidden=64, width=64)
    able = [path.name for path in EXPERTS_PATHS if not path.rejects(shape, H200)]
    assert able == ["gluon.experts.hopper", "triton.experts", "torch.experts", "gluon.experts.ordered"]
    codes = replace(shape, format=ExpertFormat.MXFP4)
    able = [path.name for path in EXPERTS_PATHS if not path.rejects(codes, H200)]
    assert able == [
        "gluon.experts.mxfp4.hopper", "gluon.experts.hopper", "triton.experts", "torch.experts",
        "gluon.experts.mxfp4.ordered",
    ]  # fmt: skip
    interpreter = replace(H200, device=Device.INTERPRETER, sm=None)
    triton = next(path for path in EXPERTS_PATHS if path.name == "triton.experts")
    assert [it.code for it in triton.rejects(shape, interpreter)] == [Reject.DTYPE]
    assert [it.code for it in triton.rejects(shape, replace(H200, sm=75))] == [Reject.ARCH]


def test_mixtures_need_a_shape_for_each_bucket_of_a_step() -> None:
    model = read_model(preset_named("gpt-oss-20b").config)
    shapes = experts_shapes_needed(model, limits_of(model, "cuda", Choices(max_num_batched_tokens=2048)))
    assert [shape.rows for shape in shapes] == list(TokenRows.up_to(2048)) == list(TokenRows)[:4]
    assert str(shapes[0]) == "experts bf16 mxfp4 e32:4 h2880 w2880 clamped1.702:7.0 bias r-le_16"


def test_sizes_that_no_block_divides_are_refused() -> None:
    with pytest.raises(ValueError, match="mxfp4 has blocks of 32 numbers, which must divide hidden size 48"):
        replace(SHAPE, format=ExpertFormat.MXFP4)
