"""Counting HBM bytes: what is asked of ncu, how its rows are read, and what is said where it cannot count."""

from dataclasses import replace
from pathlib import Path

import pytest
from qualification_fakes import DECODE, MACHINE, SHAPE, evidence, path

from kernels.buckets import Bucket
from kernels.shape import Phase
from qualification.counted import CounterError, bytes_by_call, count_bytes, count_into, sample_of
from qualification.matrix import load_matrix, save_matrix

FAST, SLOW = path("triton.fast"), path("triton.slow")
HEAD = '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"'
UNITS = '"","","byte","byte"'
MARK = '"0","spin_kernel(long)","64","0"'


def rows(*lines: str) -> str:
    return "\n".join(("==PROF== Connected to process 7", HEAD, UNITS, *lines)) + "\n"


def fake_ncu(folder: Path, text: str, code: int = 0) -> str:
    """A program that writes `text` to the file behind --log-file."""
    (folder / "answer.csv").write_text(text)
    program = folder / "ncu"
    program.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --log-file ]; do shift; done\ncp {folder / "answer.csv"} "$2"\nexit {code}\n'
    )
    program.chmod(0o755)
    return str(program)


def test_the_kernels_of_a_call_are_those_between_two_markers() -> None:
    text = rows(MARK, '"1","attend","1,000","24"', '"2","combine","500.0","8"', MARK, '"3","attend","7","1"', MARK)
    assert bytes_by_call(text) == [1532, 8, 0]
    assert bytes_by_call("==ERROR== nothing was profiled\n") == []


def test_what_serves_each_shape_is_counted_and_of_chunks_the_longest() -> None:
    extend = replace(SHAPE, phase=Phase.EXTEND, page_size=16, context_bucket=Bucket.LE_512)
    longer = replace(extend, query_bucket=Bucket.LE_512)
    shapes = (SHAPE, DECODE, extend, longer)
    entries = [evidence(shape, kernel, p50) for shape in shapes for kernel, p50 in ((FAST, 5.0), (SLOW, 9.0))]
    assert {(it.shape, it.path) for it in sample_of(entries)} == {(it, FAST.name) for it in (SHAPE, DECODE, longer)}


def test_counted_bytes_are_written_beside_the_evidence(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    stale = evidence(SHAPE, SLOW, 1.0, source_digest="another")
    save_matrix(file, [evidence(SHAPE, FAST), evidence(DECODE, FAST), stale])
    ncu = fake_ncu(tmp_path, rows(MARK, '"1","a","100","10"', MARK, '"2","b","200","20"'))
    assert count_into(file, (FAST, SLOW), MACHINE, ncu=ncu) == 2
    counted = {(it.shape, it.path): it.measured_bytes for it in load_matrix(file).evidence.values()}
    assert sorted(counted.values(), key=str) == [110, 220, None]
    assert counted[SHAPE, SLOW.name] is None


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", 1, "ncu ended with 1: ERR_NVGPUCTRPERM - no permission"),
        (rows(MARK), 0, "ncu ended with 0"),  # of two calls
        ("", 9, "ncu ended with 9: it said nothing"),
    ],
)
def test_where_nothing_can_be_counted_the_reason_is_given(tmp_path: Path, text: str, code: int, reason: str) -> None:
    pairs = [(SHAPE, FAST.name), (DECODE, FAST.name)]
    with pytest.raises(CounterError, match=reason):
        count_bytes(pairs, ncu=fake_ncu(tmp_path, text, code))
