"""Counting HBM bytes: what is asked of ncu, how its rows are read, and what is said where it cannot count."""

from dataclasses import replace
from pathlib import Path

import pytest

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import Phase
from qualification.evidence.matrix import load_matrix, save_matrix
from qualification.measure.costs.hbm_counters import (
    BEGUN,
    COUNTED,
    STARTED,
    CounterError,
    bytes_by_call,
    count_bytes,
    count_into,
    sample_of,
)
from support.qualification_fakes import DECODE, MACHINE, SHAPE, evidence, path

FAST, SLOW = path("triton.fast"), path("triton.slow")
HEAD = '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"'
UNITS = '"","","byte","byte"'
MARK = '"0","spin_kernel(long)","64","0"'


def rows(*lines: str) -> str:
    return "\n".join(("==PROF== Connected to process 7", HEAD, UNITS, *lines)) + "\n"


def fake_ncu(folder: Path, text: str, said: str = "", code: int = 0) -> str:
    """A program that prints `said` and, when it ends, has written `text` to the file behind --log-file."""
    (folder / "answer.csv").write_text(text)
    program = folder / "ncu"
    find_log = 'while [ "$1" != --log-file ]; do shift; done'
    program.write_text(f'#!/bin/sh\n{find_log}\n{said}\ncp {folder / "answer.csv"} "$2"\nexit {code}\n')
    program.chmod(0o755)
    return str(program)


def telling(*lines: str) -> str:
    return "\n".join(f"echo '{line}'" for line in lines)


def test_the_kernels_of_a_call_are_those_between_two_markers() -> None:
    text = rows(MARK, '"1","attend","1,000","24"', '"2","combine","500.0","8"', MARK, '"3","attend","7","1"', MARK)
    assert bytes_by_call(text) == [1532, 8, 0]
    assert bytes_by_call("==ERROR== nothing was profiled\n") == []


def test_serving_paths_and_longest_chunks_are_counted() -> None:
    extend = replace(SHAPE, phase=Phase.EXTEND, page_size=16, context_bucket=Bucket.LE_512)
    longer = replace(extend, query_bucket=Bucket.LE_512)
    shapes = (SHAPE, DECODE, extend, longer)
    entries = [evidence(shape, kernel, p50) for shape in shapes for kernel, p50 in ((FAST, 5.0), (SLOW, 9.0))]
    assert {(it.shape, it.path) for it in sample_of(entries)} == {(it, FAST.name) for it in (SHAPE, DECODE, longer)}


def test_counted_bytes_are_written_beside_the_evidence(tmp_path: Path) -> None:
    file, said = tmp_path / "model.json", []
    stale = evidence(SHAPE, SLOW, 1.0, source_digest="another")
    save_matrix(file, [evidence(SHAPE, FAST), evidence(DECODE, FAST), stale])
    text = rows(MARK, '"1","a","100","10"', MARK, '"2","b","200","20"')
    ncu = fake_ncu(tmp_path, text, telling(f"{STARTED}7", f"{BEGUN}1 of 2", COUNTED, f"{BEGUN}2 of 2", COUNTED))
    assert count_into(file, (FAST, SLOW), MACHINE, say=said.append, ncu=ncu) == (2, 2)
    counted = {(it.shape, it.path): it.measured_bytes for it in load_matrix(file).evidence.values()}
    assert sorted(counted.values(), key=str) == [110, 220, None]
    assert counted[SHAPE, SLOW.name] is None
    assert said == ["counting HBM bytes: 1 of 2", "counting HBM bytes: 2 of 2"]


def test_counting_continues_where_it_stopped(tmp_path: Path) -> None:
    """The time was up after the first of two calls."""
    file, quiet = tmp_path / "model.json", {"say": lambda _: None}
    save_matrix(file, [evidence(SHAPE, FAST), evidence(DECODE, FAST)])
    for number, num_bytes in ((1, 110), (2, 220)):
        text = rows(MARK, f'"1","a","{num_bytes}","0"')
        ncu = fake_ncu(tmp_path, text, telling(BEGUN, COUNTED))
        assert count_into(file, (FAST,), MACHINE, ncu=ncu, **quiet) == (number, 2)
    assert sorted(it.measured_bytes or 0 for it in load_matrix(file).evidence.values()) == [110, 220]
    assert count_into(file, (FAST,), MACHINE, ncu="/no/such/program", **quiet) == (2, 2)


def test_endless_call_is_ended_and_earlier_ones_count(tmp_path: Path) -> None:
    """ncu writes down what it has when the program under it is gone."""
    said = f"sleep 60 & echo {STARTED}$!\n{telling(BEGUN, COUNTED, BEGUN)}\nwait"
    ncu = fake_ncu(tmp_path, rows(MARK, '"1","a","100","10"', MARK), said, code=9)
    pairs = [(SHAPE, FAST.name), (DECODE, FAST.name)]
    assert count_bytes(pairs, say=lambda _: None, ncu=ncu, silence_s=0.3) == {pairs[0]: 110}


@pytest.mark.parametrize(
    ("text", "said", "code", "reason"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "", 1, "ncu ended with 1: ERR_NVGPUCTRPERM - no permission"),
        (rows(MARK), telling(COUNTED, COUNTED), 0, "ncu ended with 0"),  # of two calls
        ("", telling("Error: out of memory"), 1, "ncu ended with 1: Error: out of memory"),
        ("", "", 9, "ncu ended with 9: it said nothing"),
    ],
)
def test_where_nothing_can_be_counted_the_reason_is_given(
    tmp_path: Path, text: str, said: str, code: int, reason: str
) -> None:
    pairs = [(SHAPE, FAST.name), (DECODE, FAST.name)]
    with pytest.raises(CounterError, match=reason):
        count_bytes(pairs, ncu=fake_ncu(tmp_path, text, said, code))
