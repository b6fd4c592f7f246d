"""An operator plugs in by its shapes, its paths and a table: counted, quarantined and taken out as all others are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import AnyPath, OperatorPath, Reject, Tier
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Decision, Pairs, Status
from server.engine.operators.decisions import NoPathError
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.rows_table import RowsTable, StepSizes

SIZES = StepSizes(num_tokens=20, num_sampled=2, num_sequences=2)


@dataclass(frozen=True, slots=True)
class DoublingShape:
    """A toy: rows times two."""

    rows: TokenRows
    dtype: Dtype = Dtype.FP32

    @property
    def operator(self) -> Operator:
        return Operator.COLLECTIVE  # of which one rank has none

    @property
    def kind(self) -> str:
        return "doubling"

    def __str__(self) -> str:
        return f"doubling r-{self.rows.label}"

    def flops(self, num_rows: int) -> int:
        return num_rows

    def hbm_bytes(self, num_rows: int) -> int:
        return 8 * num_rows


SHAPES = [DoublingShape(rows) for rows in TokenRows.up_to(600)]


def path(name: str, run: Callable[..., None]) -> AnyPath:
    return OperatorPath(name, Tier.FIRST, None, "digest", (), run, is_capturable=True)


def double(numbers: list[int]) -> None:
    numbers[:] = [2 * number for number in numbers]


def break_(_: list[int]) -> None:
    raise RuntimeError("too many resources requested for launch")


class Doubling:
    """An engine's tables with the toy alone: "first" is wanted, "second" follows."""

    def __init__(self, first: Callable[..., None] = double) -> None:
        paths = [path("first", first), path("second", double)]
        decisions = {shape: self.redecide(shape, frozenset(), frozenset()) for shape in SHAPES}
        self.table: RowsTable[Any, Any] = RowsTable(Operator.COLLECTIVE, decisions, paths, redecide=self.redecide)
        self.calls = self.table.add(SHAPES, num_launches=3)
        self.dispatcher = Dispatcher({}, (), (), redecide=lambda *_: pytest.fail("no attention"), tables=[self.table])

    @staticmethod
    def redecide(shape: Any, broken: Pairs, taken_out: Pairs) -> Decision[Any]:
        left = [name for name in ("first", "second") if (name, str(shape)) not in broken | taken_out]
        against = () if left[:1] == ["first"] else (Reject.QUARANTINED if broken else Reject.OPERATOR_OVERRIDE,)
        return Decision(shape, left[0] if left else None, Status.PROVEN, "first", against, (), None)

    def doubled(self, num_rows: int) -> list[int]:
        numbers = [1] * num_rows
        self.table.launch(self.calls, num_rows, numbers)
        return numbers


def test_a_call_runs_what_is_decided_for_its_rows_and_is_counted() -> None:
    it = Doubling()
    assert it.doubled(20) == [2] * 20
    [count] = it.dispatcher.other_counts(SIZES)
    assert (count.path, count.bucket, count.num_launches, count.num_sequences) == ("first", "le_128", 3, 2)
    assert it.dispatcher.other_uses(SIZES) == []  # the proven first choice
    assert it.dispatcher.other_pairs(SIZES) == [("first", "doubling r-le_128")]
    assert [str(decision.shape) for decision in it.dispatcher.all_decisions] == [str(shape) for shape in SHAPES]


def test_a_launch_that_fails_is_replaced_in_the_same_call() -> None:
    it = Doubling(break_)
    assert it.doubled(20) == [2] * 20
    assert it.dispatcher.take_quarantined() == [("first", "doubling r-le_128")]
    [use] = it.dispatcher.other_uses(SIZES)
    assert (use.path, use.fallback_reasons) == ("second", ["quarantined"])
    assert it.dispatcher.revision == 1


def test_an_order_takes_a_path_out_and_puts_it_back() -> None:
    it, pairs = Doubling(), frozenset(("first", str(shape)) for shape in SHAPES)
    assert it.dispatcher.override(pairs) == []
    assert {choice.use.path for choice in it.calls.choices if choice} == {"second"}
    assert it.dispatcher.override(pairs | {("second", str(SHAPES[0]))}) == [SHAPES[0]]  # refused whole
    assert it.dispatcher.override(frozenset()) == []
    assert {choice.use.path for choice in it.calls.choices if choice} == {"first"}


def test_rows_without_a_path_end_before_the_step() -> None:
    it = Doubling()
    for name in ("first", "second"):
        it.dispatcher.quarantine(name, Operator.COLLECTIVE)
    with pytest.raises(NoPathError, match="no path is left for doubling r-le_128"):
        it.dispatcher.check_others(SIZES)
    assert not it.table.is_capturable
