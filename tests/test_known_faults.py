"""The page of known faults: every row names a planted fault that a test of this repository switches on."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from kernels.vocabulary.operators import Operator
from kernels.vocabulary.shape import Dtype
from qualification.measure.faults.attention_faults import Fault
from qualification.measure.faults.collective_faults import CollectiveFault
from qualification.measure.faults.experts_faults import ExpertsFault
from qualification.measure.faults.fp8_faults import Fp8Fault
from qualification.measure.faults.int4_faults import Int4Fault
from qualification.measure.faults.linear_faults import LinearFault
from qualification.measure.faults.order_faults import OrderFault

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "known-faults.md"
ENUMS: tuple[type[Enum], ...] = (
    CollectiveFault, Dtype, ExpertsFault, Fp8Fault, Int4Fault, LinearFault, Operator, OrderFault
)  # fmt: skip
MEMBERS = {f"{kind.__name__}.{it.name}" for kind in ENUMS for it in kind} | {it.name for it in Fault}
PLACE = re.compile(r"lanted\s+in\s+`(tests/[\w/]+\.py)`(?:,\s+`(test_\w+)`)?")
THREAD = re.compile(r"\[[^\]]+\]\(https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+\)")
LEAST_ROWS = 20  # of which none is only alike


@dataclass(frozen=True)
class Row:
    """A row of the page: links to threads, and the planted fault by its codes, in the file of its section."""

    threads: tuple[str, ...]
    cells: tuple[str, ...]
    codes: tuple[str, ...]
    file: str
    function: str | None

    @property
    def is_alike(self) -> bool:
        return self.cells[-1].startswith("alike: ")


def rows_of(page: str) -> Iterator[Row]:
    file, function = "", None
    for block in page.split("\n\n"):
        place = PLACE.search(block)
        if place is not None:
            file, function = place[1], place[2]
        for line in block.splitlines():
            if line.startswith("| ["):
                cells = tuple(cell.strip() for cell in line.strip("|").split(" | "))
                codes = tuple(re.findall(r"`([^`]+)`", cells[-1]))
                yield Row(tuple(THREAD.findall(cells[0])), cells, codes, file, function)


@cache
def names_in(file: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the test functions of a file, and all words that its parameters may be made of."""
    nodes = [*ast.walk(ast.parse((ROOT / file).read_text()))]
    functions = {it.name for it in nodes if isinstance(it, ast.FunctionDef) and it.name.startswith("test_")}
    words = {it.value for it in nodes if isinstance(it, ast.Constant) and isinstance(it.value, str)}
    return frozenset(functions), frozenset(words | {it.attr for it in nodes if isinstance(it, ast.Attribute)})


def is_planted(row: Row) -> bool:
    """Return whether the row's function is in its file, and each parameter is one that it can have."""
    functions, words = names_in(row.file)
    for code in row.codes:
        called, bracket, parameter = code.partition("[")
        if called.startswith("test_"):
            is_known = called in functions and (not bracket or is_parameter(parameter.removesuffix("]"), words))
        else:
            is_known = row.function in functions and is_parameter(code, words)
        if not is_known:
            return False
    return bool(row.codes)


def is_parameter(text: str, words: frozenset[str]) -> bool:
    known = words | MEMBERS
    return text in known or all(part in known for part in text.split("-"))


ROWS = [*rows_of(PAGE.read_text())]


def test_at_least_twenty_published_faults_are_planted() -> None:
    exact = [row for row in ROWS if not row.is_alike]
    assert len({row.threads for row in exact}) >= LEAST_ROWS
    assert len({(row.file, row.codes) for row in exact}) >= LEAST_ROWS


def test_every_row_names_a_fault_that_a_test_plants() -> None:
    assert [row.cells for row in ROWS if not is_planted(row)] == []


def test_every_row_has_threads_a_fault_and_a_check() -> None:
    assert [row.cells for row in ROWS if len(row.cells) != 4 or not all(row.cells) or not row.threads] == []


def test_a_row_of_a_fault_that_is_not_planted_is_noticed() -> None:
    row = "| [a](https://github.com/b/c/issues/1) | what | seen | {} |"
    file = "tests/server/engine/proof/test_layer_check.py"
    page = f"Planted in `{file}`,\n`test_a_planted_fault_is_seen_and_named`.\n\n{row}"
    named = {
        "`norm skipped`": True,
        "alike: `norm skipped`": True,
        "`test_a_wrong_choice_of_keys_is_seen_and_named`": True,
        "`test_a_wrong_window_chunk_or_scale_of_scores_is_seen[window]`": True,
        "`norm that is not there`": False,
        "`test_a_wrong_window_chunk_or_scale_of_scores_is_seen[not_there]`": False,
        "`test_that_is_not_there`": False,
        "`LinearFault.NOT_THERE`": False,
        "": False,
    }
    assert {code: is_planted(*rows_of(page.format(code))) for code in named} == named
