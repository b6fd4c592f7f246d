"""Shadow checks of operators beside attention, in a real engine: what turns wrong is seen, what is right is not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.catalog import any_path_named
from kernels.convolution.paths import ConvolutionPath
from kernels.experts.paths import ExpertsPath
from kernels.linear.paths import LinearPath
from kernels.recurrence.paths import RecurrencePath
from kernels.vocabulary.operators import Operator
from qualification.decision.decision import Policy
from server.engine.proof.shadow_check import ShadowCheck
from server.protocol.messages import SamplingParams, ShadowReport, Submit
from support.engine.one_operator import (
    CHANNELS,
    CONVOLVING,
    HYBRID,
    LIGHTNING,
    MIXTURE,
    STATE_SPACE,
    proving,
    serve_by,
    small_engine,
)

# By the path that serves one operator of them.
MODELS = {
    "torch.linear": MIXTURE,
    "torch.experts.cpu": MIXTURE,
    "torch.recurrence.cpu": HYBRID,
    "torch.recurrence.cpu.state_space": STATE_SPACE,
    "torch.recurrence.cpu.channel_delta": CHANNELS,
    "torch.recurrence.cpu.fixed_decay": LIGHTNING,
    "torch.convolution.cpu": CONVOLVING,
}
LATER_S = 100.0  # after the interval and after the dense checks that follow a mismatch


@dataclass
class Subject:
    """An engine one of whose operators is computed by a path that does as PyTorch's, `name`, until `spoil` is set."""

    name: str
    folder: Path
    spoil: Callable[..., None] | None = None
    now: float = 0.0
    is_quarantining: bool = True
    _draw: Random = field(default_factory=lambda: Random(0))

    def __post_init__(self) -> None:
        self.built = small_engine(
            self.folder, MODELS[self.name], proving, policy=Policy.QUALIFY, max_num_batched_tokens=64
        )
        self.dispatcher = serve_by(self.built, self.path())
        self.check = self.built.runner.shadow = ShadowCheck(
            self.dispatcher,
            budget=1e9,
            interval_s=0.0,
            is_quarantining=self.is_quarantining,
            clock=lambda: self.now,
            rng=Random(0),
        )
        self.now = 1.0

    @property
    def operator(self) -> Operator:
        return any_path_named(self.name).operator

    def path(self) -> LinearPath | ExpertsPath | RecurrencePath | ConvolutionPath:
        right = any_path_named(self.name)
        assert right.run is not None

        def turning(*given: Any) -> None:
            if self.spoil is None:
                right.run(*given)
            else:
                self.spoil(right.run, *given)

        found = replace(right, name=f"gluon.{self.operator.value}.turning", run=turning)
        assert isinstance(found, LinearPath | ExpertsPath | RecurrencePath | ConvolutionPath)
        return found

    def reports(self, num_reports: int) -> Iterator[ShadowReport]:
        """Return the reports of a check of every step, over requests of random lengths, four at a time."""
        engine = self.built.engine
        while num_reports:
            if not engine.has_work:
                for _ in range(4):
                    prompt = [self._draw.randrange(97) for _ in range(self._draw.randrange(1, 40))]
                    sampling = SamplingParams(max_tokens=self._draw.randrange(1, 9), temperature=0.0, ignore_eos=True)
                    engine.submit(Submit(f"{self._draw.random()}", prompt, sampling, str(self._draw.random()).encode()))
            engine.step()
            self.now += LATER_S
            report = self.check.judge()
            if report is not None:
                num_reports -= 1
                yield report


def scale(run: Callable[..., None], *given: Any) -> None:
    run(*given)
    given[-1].mul_(1 + 1e-2)


def swap_two_experts(run: Callable[..., None], hidden: Tensor, experts: Tensor, *given: Any) -> None:
    swapped = torch.where(experts == 0, 1, torch.where(experts == 1, 0, experts)).to(experts.dtype)
    run(hidden, swapped, *given)


def misread(run: Callable[..., None], qkv: Tensor, a: Tensor, *given: Any) -> None:
    run(qkv, a + 0.01, *given)


def forget_sooner(run: Callable[..., None], qkv: Tensor, a: Tensor, b: Tensor, weights: Any, *given: Any) -> None:
    run(qkv, a, b, replace(weights, a_log=weights.a_log + 0.1), *given)


def test_a_right_path_has_no_mismatch(tmp_path: Path) -> None:
    subject = Subject("torch.linear", tmp_path)
    reports = [it for it in subject.reports(100) if it.phase in ("linear", "experts")]
    assert {it.result for it in reports} == {"match"}
    assert {it.phase for it in reports} == {"linear", "experts"}
    assert max(it.factor or 0.0 for it in reports) < 1
    weights = {(it.layer, it.weight) for it in reports if it.phase == "linear"}
    products = [(layer, name) for layer in range(3) for name in ("qkv", "output")]
    products += [(0, "router"), (1, "gate_up"), (1, "down"), (2, "router"), (None, "head")]
    assert weights <= set(products)
    assert (None, "head") in weights  # which chooses the tokens
    assert len(weights) > len(products) // 2
    assert {it.layer for it in reports if it.phase == "experts"} == {0, 2}


# Of the steps a fifth checks this operator. Two of five experts swapped show in a row that visits one of them: 70%.
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("torch.linear", scale),
        ("torch.experts.cpu", swap_two_experts),
        ("torch.recurrence.cpu", misread),
        ("torch.recurrence.cpu.state_space", misread),
        ("torch.recurrence.cpu.channel_delta", misread),
        ("torch.recurrence.cpu.fixed_decay", forget_sooner),
        ("torch.convolution.cpu", scale),
    ],
)
def test_a_path_that_turns_wrong_after_an_hour_is_replaced(
    name: str, spoil: Callable[..., None], tmp_path: Path
) -> None:
    subject = Subject(name, tmp_path)
    operator = subject.operator
    assert {it.result for it in subject.reports(20)} <= {"match", "skipped"}
    subject.now += 3600
    subject.spoil = spoil
    reports = []
    for report in subject.reports(60):
        reports.append(report)
        if report.quarantined:
            break
    of_operator = [it.result for it in reports if it.phase == operator.value]
    assert (of_operator.count("mismatch"), of_operator[-1]) == (2, "mismatch")
    assert reports[-1].path == f"gluon.{operator.value}.turning"
    assert set(reports[-1].quarantined) == {
        (reports[-1].path, str(it.shape)) for it in subject.dispatcher.all_decisions if it.shape in shapes_of(subject)
    }
    served = [it for it in subject.dispatcher.all_decisions if it.shape in shapes_of(subject)]
    assert {(it.path, *[reason.value for reason in it.fallback_reasons]) for it in served} == {(name, "quarantined")}
    assert {it.result for it in subject.reports(20)} <= {"match", "skipped"}


def shapes_of(subject: Subject) -> set[object]:
    [table] = [it for it in subject.dispatcher.tables if it.operator is subject.operator]
    return set(table.decided.plan)


def test_a_mismatch_of_a_product_says_where_and_by_how_much(tmp_path: Path) -> None:
    subject = Subject("torch.linear", tmp_path, spoil=scale, is_quarantining=False)
    report = next(it for it in subject.reports(100) if it.phase == "linear")
    assert (report.result, report.quarantined) == ("mismatch", [])
    of = report.weight if report.layer is None else f"{report.weight} of layer {report.layer}"
    assert (report.detail or "").startswith(f"gluon.linear.turning, {of}, row {report.position} of the step, column ")
    assert "at most" in (report.detail or "")
