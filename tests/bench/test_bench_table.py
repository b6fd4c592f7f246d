"""Tables, JSON and charts of a bench."""

import math

import msgspec
import pytest

from bench.attention.row import Absence, absences_as_json, rows_as_json
from bench.attention.table import absences_lines, rows_table, summary_table
from support.bench_fakes import decode, prefill, row


def cells(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines]


def test_table_has_a_line_for_each_contender() -> None:
    case = prefill(512)
    lines = rows_table([row(case, "peer", is_peer=True), row(case, "ours", 5.0, ratio=2.0)])
    assert len(lines) == 4
    assert lines[2].startswith("prefill fp32 d64 4:2 1x512  ours")
    assert cells(lines)[3][0] == "peer"
    assert "2.000" in cells(lines)[2]


@pytest.mark.parametrize("wrong", [{"error_share": 2.0}, {"num_nonfinite": 1}, {"bias_share": math.nan}, {}])
def test_a_wrong_row_says_so(wrong: dict[str, float]) -> None:
    assert ("WRONG" in rows_table([row(prefill(512), "ours", **wrong)])[2]) == bool(wrong)


def test_summary_has_geometric_mean_and_worst_case() -> None:
    best = row(prefill(512), "ours", ratio=2.0)
    assert cells(summary_table([best, row(prefill(1024), "ours", ratio=0.5)]))[2][4:] == [
        *("ours", "2", "1.000", "0.500", *str(prefill(1024)).split())
    ]
    # A wrong row is worth nothing, and windows have a line of their own.
    assert cells(summary_table([best, row(prefill(1024), "ours", ratio=2.0, error_share=9.0)]))[2][6:8] == ["0.000"] * 2
    plain, windowed = summary_table([best, row(prefill(512, windows=(64,)), "ours", ratio=1.5)])[2:]
    assert "window 64" in windowed
    assert ("2.000" in plain, "1.500" in windowed) == (True, True)


def test_json_rows_are_sorted_whatever_the_order_of_measuring() -> None:
    rows = [
        row(decode(64), "b"),
        row(prefill(1024), "peer", is_peer=True),
        row(prefill(1024), "z"),
        row(prefill(512), "a"),
    ]
    written = [(found["phase"], found["longest_context"], found["contender"]) for found in rows_as_json(rows)]
    wanted = [("prefill", 512, "a"), ("prefill", 1024, "z"), ("prefill", 1024, "peer"), ("decode", 64, "b")]
    assert written == wanted
    assert rows_as_json(rows[::-1]) == rows_as_json(rows)


def test_an_error_that_is_no_number_is_null_in_json_and_wrong() -> None:
    found = rows_as_json([row(prefill(512), "ours", max_error=math.nan, error_share=math.nan)])[0]
    assert msgspec.json.decode(msgspec.json.encode(found))["max_error"] is None
    assert found["is_right"] is False


def test_a_reason_is_printed_once_with_its_cases() -> None:
    absences = [Absence(prefill(n), "fa3", "not here") for n in (1024, 512)]
    assert absences_lines(absences) == ["fa3: not in 2 cases: not here"]
    cases = [str(prefill(512)), str(prefill(1024))]
    assert absences_as_json(absences) == [{"contender": "fa3", "reason": "not here", "cases": cases}]
