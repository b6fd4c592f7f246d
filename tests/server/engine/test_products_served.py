"""Products with weights in an engine: decided in its plan, refused with the reason, left to PyTorch where unproven."""

from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.catalog import ALL_PATHS, any_path_named
from kernels.identity.source_digest import SourceDigests
from kernels.linear.epilogue import Epilogue
from kernels.linear.library.cublaslt import CublasLtError
from kernels.linear.library.fallbacks import MatmulFallbacks
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import LinearShape
from kernels.linear.weights import PlainWeight
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Book, Decision, Policy, decide
from qualification.measure.faults.linear_faults import LinearFault, wrong_linear
from server.engine.operators.decisions import NoPathError
from server.engine.operators.linear import LinearTable, MeasuredProducts, with_measured
from server.engine.operators.rows_table import StepSizes
from server.engine.startup.builder import BuiltEngine
from server.model.linear import Linear, WeightName
from server.protocol.messages import FinishReason, SamplingParams, StepOutput, Submit
from support.engine.one_operator import PRODUCTS, proving, serve_by, small_engine
from support.qualification_fakes import evidence

KINDS = ["in24 out48 bias", "in24 out24", "in24 out40 swiglu", "in40 out24", "in24 out97"]
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580", "13.0", "91900", "2.11.0+cu130", "3.6.0")


def build(folder: Path) -> BuiltEngine:
    return small_engine(folder, PRODUCTS, proving, policy=Policy.QUALIFY, max_num_batched_tokens=16)


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
    ran: list[str] = []
    product = table_of(decisions, ran).product(0, WeightName.QKV, linear_of(4096, 4096), Epilogue.NONE)
    for num_rows in (8, 64):
        product(torch.zeros(num_rows, 4096, dtype=torch.bfloat16), None)
    assert ran == ["gluon.linear.skinny", "torch.linear"]


class Thirds:
    """Takes results of 90 rows and more in three pieces."""

    def __init__(self) -> None:
        self.taken: list[torch.Tensor] = []

    def pieces(self, num_rows: int) -> tuple[int, ...]:
        return (num_rows,) if num_rows < 90 else (num_rows // 3, num_rows // 3, num_rows - num_rows // 3 * 2)

    def start(self, rows: torch.Tensor) -> None:
        self.taken.append(rows)


def test_rows_that_are_summed_are_multiplied_and_counted_in_pieces() -> None:
    more = LinearShape(Dtype.BF16, 64, 24, LinearRows.LE_64)
    decisions = {it: decided(it, "torch.linear") for it in (more, replace(more, rows=LinearRows.LE_112))}
    ran: list[str] = []
    table, early, calls = table_of(decisions, ran), Thirds(), []
    linear = Linear(PlainWeight(torch.randn(24, 64).bfloat16()))
    down, other = (table.product(0, it, linear, Epilogue.NONE, early=early) for it in (WeightName.DOWN, WeightName.QKV))
    table.tap = lambda _, call: calls.append(call)
    x = torch.randn(100, 64).bfloat16()
    out = down(x, None)
    assert [len(it) for it in early.taken] == [33, 33, 34]
    assert all(it.data_ptr() == out[at].data_ptr() for it, at in zip(early.taken, (0, 33, 66), strict=True))
    assert torch.equal(out, other(x, None))  # which no sum follows
    assert (len(early.taken), len(ran), [len(it.x) for it in calls]) == (3, 4, [100, 100])
    for num_rows, num_launches, served in ((100, 4, list(decisions)), (89, 2, list(decisions)[1:])):
        sizes = StepSizes(num_rows)
        assert sum(it.num_launches for it in table.counts(sizes)) == num_launches
        assert {it.shape for it in table.served(sizes)} == set(served)
    table.warm_up()
    assert len(early.taken) == 3  # a kernel that is compiled is no sum's


def test_a_path_that_refuses_a_product_is_replaced() -> None:
    shape = LinearShape(Dtype.BF16, 64, 24, LinearRows.LE_128, epilogue=Epilogue.SWIGLU)
    decision = replace(decided(shape, "torch.linear"), path="cublaslt.linear")

    def refuse(*_: object) -> None:
        raise CublasLtError("cublasLtMatmul returned 14")

    right = wrong_linear(LinearFault.NONE, shape)
    paths = [replace(path, run=refuse if path.name == "cublaslt.linear" else right) for path in LINEAR_PATHS]
    table = LinearTable({shape: decision}, paths, redecide=lambda *_: decided(shape, "torch.linear"))
    weight, x = torch.ones(48, 64, dtype=torch.bfloat16), torch.ones(120, 64, dtype=torch.bfloat16)
    product = table.product(0, WeightName.GATE_UP, Linear(PlainWeight(weight)), Epilogue.SWIGLU)
    assert product(x, None).eq(64 * 64).all()
    assert table.decided.take_quarantined() == [("cublaslt.linear", str(shape))]


def test_an_engine_launches_what_was_proven_and_nothing_else(tmp_path: Path) -> None:
    """A digest begins with the module of each call: what is edited elsewhere cannot change a product."""
    built = build(tmp_path)
    runs = [choice.run for table in built.runner.dispatcher.tables for choice in table.choices]
    runs += [choice.run for choice in built.runner.dispatcher.choices]
    measured = MeasuredProducts.of(MatmulFallbacks().note)
    runs += [path.run for path in with_measured(LINEAR_PATHS, measured)] + [path.run for path in ALL_PATHS]
    digests = {path.source_digest for path in ALL_PATHS}
    sources = SourceDigests()
    for run in runs:
        if run is not None:
            of = run if isfunction(run) else type(run)
            assert sources.of(of.__module__) in digests, of


def test_what_torch_alone_computes_is_no_fallback() -> None:
    shape = LinearShape(Dtype.BF16, 4100, 4096, LinearRows.LE_8)
    decision = decided(shape, "torch.linear")
    assert (decision.path, decision.is_fallback) == ("torch.linear", False)
    assert table_of({shape: decision}).uses(StepSizes(8)) == []


def test_rows_whose_last_path_broke_are_not_multiplied() -> None:
    """Logits of scored prompts have numbers of rows that the step was not asked for before it was launched."""
    few = LinearShape(Dtype.BF16, 4096, 4096, LinearRows.LE_8)
    one = replace(few, rows=LinearRows.LE_1)
    decisions = {it: decided(it, "gluon.linear.skinny") for it in (one, few)}
    table = table_of(decisions, redecide=lambda shape, *_: replace(decisions[shape], path=None))
    product = table.product(0, WeightName.QKV, linear_of(4096, 4096), Epilogue.NONE)
    assert table.decided.quarantine(few) is None
    with pytest.raises(NoPathError, match=r"no path is left for linear bf16 plain in4096 out4096 r-le_8"):
        product(torch.zeros(3, 4096, dtype=torch.bfloat16), None)
    assert product(torch.zeros(1, 4096, dtype=torch.bfloat16), None).eq(0).all()  # another bucket is as it was


def linear_of(size_in: int, size_out: int) -> Linear:
    return Linear(PlainWeight(torch.zeros(size_out, size_in, dtype=torch.bfloat16)))


def table_of(
    decisions: dict[LinearShape, Decision[LinearShape]], ran: list[str] | None = None, **given: Any
) -> LinearTable:
    """Return a table whose paths are right, and note in `ran` which of them multiplied."""
    right, noted = wrong_linear(LinearFault.NONE, next(iter(decisions))), [] if ran is None else ran

    def run_of(name: str) -> Callable[..., None]:
        return lambda *inputs: (noted.append(name), right(*inputs))[1]

    return LinearTable(decisions, [replace(path, run=run_of(path.name)) for path in LINEAR_PATHS], **given)


def served(built: BuiltEngine, num_tokens: int, between: Callable[[], object] = int) -> list[StepOutput]:
    """Outputs of the steps of one request; `between` is called after the first."""
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    built.engine.submit(Submit(f"r{built.engine.step_index}", list(range(num_tokens)), sampling))
    outputs = []
    while built.engine.has_work:
        output = built.engine.step()
        assert output is not None
        outputs.append(output)
        between()
        between = int
    return outputs


def linear_counts(outputs: list[StepOutput]) -> list[tuple[str, str, int, tuple[str, ...]]]:
    return [
        (it.bucket, it.path, it.num_launches, tuple(it.fallback_reasons))
        for output in outputs
        for it in output.record.dispatches
        if it.phase == "linear"
    ]


def test_a_product_that_fails_is_replaced_in_the_same_step(tmp_path: Path) -> None:
    built, broken = build(tmp_path), []

    def fail(*_: object) -> None:
        broken.append(1)
        raise RuntimeError("CUDA error: too many resources requested for launch")

    expected = [token for output in served(built, 5) for delta in output.deltas for token in delta.token_ids]
    serve_by(built, replace(any_path_named("torch.linear"), name="gluon.linear.broken", run=fail))
    outputs = served(built, 5)
    assert [token for output in outputs for delta in output.deltas for token in delta.token_ids] == expected
    quarantined = {pair for output in outputs for pair in output.record.quarantined}
    shapes = {f"linear fp32 plain {kind} r-{rows}" for kind in KINDS for rows in ("le_8", "le_1")}
    shapes.remove(f"linear fp32 plain {KINDS[-1]} r-le_8")  # of the prompt the last row has logits
    assert quarantined == {("gluon.linear.broken", shape) for shape in shapes}
    assert len(broken) == len(shapes)
    assert set(linear_counts(outputs)) == {("le_16", "torch.linear", 9, ("quarantined",))}


def test_an_order_takes_a_product_out_and_puts_it_back(tmp_path: Path) -> None:
    built = build(tmp_path)
    one = replace(any_path_named("torch.linear"), name="gluon.linear.one")
    dispatcher = serve_by(built, one)
    pairs = frozenset((one.name, str(it.shape)) for it in dispatcher.all_decisions if it.path == one.name)
    assert dispatcher.override(pairs) == []
    assert {(path, reasons) for _, path, _, reasons in linear_counts(served(built, 3))} == {
        ("torch.linear", ("operator_override",))
    }
    both = pairs | {("torch.linear", shape) for _, shape in pairs}
    assert {str(it) for it in dispatcher.override(both)} == {shape for _, shape in pairs}
    assert dispatcher.override(frozenset()) == []
    assert {path for _, path, *_ in linear_counts(served(built, 3))} == {one.name}


def test_a_product_without_any_path_ends_its_requests(tmp_path: Path) -> None:
    built = build(tmp_path)
    dispatcher = built.runner.dispatcher
    ended = served(built, 3, lambda: dispatcher.quarantine("torch.linear", Operator.LINEAR))
    last = ended[-1].deltas[-1]
    assert (last.finish_reason, last.error_code) == (FinishReason.ERROR, "internal_error")
    assert "no path is left for linear fp32" in str(last.error_message)
    with pytest.raises(NoPathError, match="no path is left for linear fp32"):  # and not in the middle of a step
        dispatcher.check_others(StepSizes(3, num_sampled=1))
    assert dispatcher.linear is not None
    assert not dispatcher.linear.is_capturable
