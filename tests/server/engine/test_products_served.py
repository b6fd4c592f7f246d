"""Products with weights in an engine: decided in its plan, refused with the reason, left to PyTorch where unproven."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_operator import measuring, small_engine
from qualification_fakes import evidence

from kernels.catalog import any_path_named
from kernels.fingerprint import Device, Fingerprint
from kernels.fused.activation_kind import Activation
from kernels.linear.epilogue import Epilogue
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import LinearShape
from kernels.row_buckets import LinearRows
from kernels.shape import Dtype
from qualification.decision.decision import Book, Decision, Policy, decide
from qualification.measure.linear_faults import LinearFault, wrong_linear
from qualification.measure.qualify import Bench, Pair
from server.engine.products.linear import LinearTable
from server.engine.startup.attention_plan import Unservable
from server.engine.startup.builder import BuiltEngine
from server.model.linear import Dense, Limited

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
KINDS = ["in24 out48 bias", "in24 out24", "in24 out40 swiglu", "in40 out24", "in24 out97"]
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580", "13.0", "91900", "2.11.0+cu130", "3.6.0")


measure = measuring(LinearShape)


def build(folder: Path, run_qualification: Callable[..., None]) -> BuiltEngine:
    return small_engine(folder, CONFIG, run_qualification, policy=Policy.QUALIFY, max_num_batched_tokens=16)


def test_every_product_is_proven_before_ready_and_not_again(tmp_path: Path) -> None:
    built = build(tmp_path, measure)
    rows = [row for row in built.ready.plan if row.phase == "linear"]
    shapes = [f"linear fp32 plain {kind} r-{bucket}" for kind in KINDS for bucket in ("le_1", "le_8", "le_16")]
    assert [(row.shape, row.path, row.status) for row in rows] == [
        (shape, "torch.linear", "provisional") for shape in shapes
    ]
    assert all(row.evidence is not None and row.evidence["is_proven"] for row in rows)
    again = build(tmp_path, lambda pairs, *_, **__: pytest.fail(f"measured {pairs}") if pairs else None)
    assert sum(row.phase == "linear" for row in again.ready.plan) == len(rows)


def test_one_wrong_number_of_rows_keeps_the_server_from_serving(tmp_path: Path) -> None:
    def measure_wrong(pairs: list[Pair], bench: Bench, **named: Any) -> None:
        spoilt = [
            (shape, replace(path, run=wrong_linear(LinearFault.WRONG_ALGORITHM, shape)))
            if isinstance(shape, LinearShape) and shape.rows is LinearRows.LE_8
            else (shape, path)
            for shape, path in pairs
        ]
        measure(spoilt, bench, **named)

    with pytest.raises(Unservable, match=r"serve linear fp32 .* r-le_8 .*it computes wrong numbers here: every_row"):
        build(tmp_path, measure_wrong)


def decided(shape: LinearShape, *proven: str) -> Decision[LinearShape]:
    paths = [any_path_named(name) for name in proven]
    own = {(shape, path.name): evidence(shape, path, fingerprint=H200) for path in paths}
    # Gluon's modules may not be importable here.
    here = [replace(path, run=path.run or wrong_linear(LinearFault.NONE, shape)) for path in LINEAR_PATHS]
    return decide(
        shape, paths=here, fingerprint=H200, book=Book(own=own), quarantined=frozenset(), policy=Policy.QUALIFY
    )


def test_rows_whose_kernel_is_not_proven_are_left_to_torch() -> None:
    few = LinearShape(Dtype.BF16, 4096, 4096, LinearRows.LE_8)
    more = replace(few, rows=LinearRows.LE_64)
    decisions = {
        few: decided(few, "gluon.linear.skinny", "torch.linear"),
        more: decided(more, "torch.linear"),
    }
    assert [(it.path, it.wanted, it.is_fallback) for it in decisions.values()] == [
        ("gluon.linear.skinny", "gluon.linear.skinny", False),
        ("torch.linear", "gluon.linear.wide", True),
    ]
    table = LinearTable(decisions, LINEAR_PATHS, H200)
    assert table.fallbacks == [decisions[more]]
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16)
    assert table.by_torch(weight, False, Epilogue.NONE) == {LinearRows.LE_64}
    assert table.by_torch(weight, True, Epilogue.NONE) == frozenset()


def test_what_torch_alone_computes_is_no_fallback() -> None:
    shape = LinearShape(Dtype.BF16, 4100, 4096, LinearRows.LE_8)
    decision = decided(shape, "torch.linear")
    assert (decision.path, decision.is_fallback) == ("torch.linear", False)
    assert LinearTable({shape: decision}, LINEAR_PATHS, H200).fallbacks == []


def test_a_limited_weight_gives_torchs_product_for_its_rows_alone() -> None:
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(12, 8, generator=random), torch.randn(20, 8, generator=random)
    others = Dense(torch.full_like(weight, torch.nan))
    limited = Limited(weight, None, others, frozenset({LinearRows.LE_8}))
    gated, expected = limited.gated_by(Activation.SILU), Dense(weight).gated_by(Activation.SILU)
    for num_rows, is_torchs in ((1, False), (2, True), (8, True), (9, False)):
        rows = x[:num_rows]
        assert torch.equal(limited(rows), rows @ weight.T) is is_torchs
        assert torch.equal(gated(rows), expected(rows)) is is_torchs
