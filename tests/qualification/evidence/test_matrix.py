import hashlib
import json
import os
import re
import resource
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.vocabulary.path import Reject
from kernels.vocabulary.shape import Phase
from qualification.evidence.evidence import SUITE, Invariance, summarize
from qualification.evidence.full_model import Attention, FullModel, ModelTiming
from qualification.evidence.gpu_folder import gpu_folder
from qualification.evidence.matrix import MATRICES, SCHEMA, Matrix, MatrixError, load_matrices, load_matrix, save_matrix
from qualification.evidence.summary import summary
from qualification.evidence.verdicts import Side, differences
from support.qualification_fakes import DECODE, MACHINE, SHAPE, checks, evidence, path

A, B = path("a"), path("b")
ORDERED = Invariance("keys512", 640, 3, (("97 tokens", "0123456789abcdef"), ("long", "fedcba")), "row 4 of 9 tokens")
EVIDENCE = [
    evidence(SHAPE, A),
    evidence(SHAPE, B, failure="RuntimeError: no", timing=None),
    evidence(DECODE, A, invariance=ORDERED),
]
FILE = "h4-2-d64.json"
TIMING = ModelTiming(Phase.PREFILL, 128, 1, Attention.PLAN, ("a",), 1.5, 0.01, 20, 0.5)
MODEL = FullModel("demo", "2026-11-21T00:00:00+00:00", 8, (TIMING,))


def signed(text: str) -> str:
    """The text with its own digest: what only a mistaken or malicious writer makes."""
    blank = text.replace(text[13:77], "0" * 64)
    return text.replace(text[13:77], hashlib.sha256(blank.encode()).hexdigest())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    target = tmp_path / gpu_folder(MACHINE.gpu) / FILE
    save_matrix(target, EVIDENCE)
    return target


def test_a_file_does_not_depend_on_the_order_of_its_evidence(tmp_path: Path, file: Path) -> None:
    other = tmp_path / "other.json"
    save_matrix(other, reversed(EVIDENCE))
    assert other.read_bytes() == file.read_bytes()


def test_a_new_proof_changes_its_own_line_and_the_digest_only(tmp_path: Path, file: Path) -> None:
    other = tmp_path / "other.json"
    save_matrix(other, [*EVIDENCE[:2], evidence(DECODE, A, p50_us=11.0)])
    lines = zip(file.read_text().splitlines(), other.read_text().splitlines(), strict=True)
    changed = [ours for ours, theirs in lines if ours != theirs]
    assert len(changed) == 2
    assert changed[0].startswith('"digest"')
    assert changed[1].startswith('{"shape":"decode fp32')


def test_a_flipped_byte_or_a_cut_is_refused_wherever_it_is(file: Path) -> None:
    content = file.read_bytes()
    flipped = (content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in range(0, len(content), 5))
    for changed in (*flipped, *(content[:length] for length in (0, 1, len(content) // 2, len(content) - 2))):
        file.write_bytes(changed)
        with pytest.raises(MatrixError) as caught:
            load_matrix(file)
        assert caught.value.rejection.code is Reject.MATRIX_INVALID


@pytest.mark.parametrize("schema", [1, SCHEMA + 1])
def test_another_schema_is_refused_by_its_number(file: Path, schema: int) -> None:
    body = json.loads(file.read_text()) | {"schema": schema, "unheard": "of"}
    file.write_text(json.dumps(body))
    with pytest.raises(MatrixError, match=f"has schema {schema}, this version reads {SCHEMA}: qualify again"):
        load_matrix(file)


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"schema": 2, "model": ' + b"[" * 100_000, b"[]", b"\0"])
def test_a_file_that_is_no_json_of_ours_is_refused_in_one_line(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(MatrixError, match=r"^h4-2-d64\.json cannot be read, perhaps it is truncated: [^\n]+$"):
        load_matrix(file)


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ('"p50_us":10.0', '"p50_us":0.0', "p50_us is 0, expected 0.001 to 1e+09"),
        ('"p50_us":10.0', '"p50_us":1e300', "p50_us is 1e+300, expected 0.001 to 1e+09"),
        ('"spread":0.01', '"spread":-0.01', "spread is -0.01, expected 0 to 1e+06"),
        ('"n":20', '"n":0', "samples n is 0, expected 1 to 1e+09"),
        ('"n":20', f'"n":{10**400}', "samples n is a number of 1329 bits, expected 1 to 1e+09"),
        ('"n":20', '"n":20,"sequences":2000000', "timed sequences is 2000000, expected 1 to 1e+06"),
        ('"n":20', '"n":20,"floor_us":0.0', "floor_us is 0, expected 0.001 to 1e+09"),
        ('"tokens":[1,1]', '"tokens":[1,0]', "context tokens is 0, expected 1 to 1e+08"),
        ("h4:2 d64", "h4:0 d64", "KV heads is 0, expected 1 to 10000"),
        ("h4:2 d64", "h4:3 d64", "3 KV heads do not divide 4 heads"),
        ("h4:2 d64", "h4:2 d0", "head dim is 0, expected 1 to 10000"),
        ("[0.5,1.0,", "[-0.5,1.0,", "bias's value is -0.5, expected 0 to inf"),
        ("[0.5,1.0,", "[0.5,-1.0,", "bias's limit is -1, expected 0 to inf"),
        ('[0.5,1.0,"limit"', '[0.5,1.0,"feet"', "bias is in 'feet', expected one of abs, limit, rel, values"),
        (
            '"guard_writes":[0.0,0.0',
            '"guard_writes":[0.0,9.0',
            f"guard_writes's limit is 9 values, suite {SUITE} has 0 values",
        ),
        ('"bias":[0.5,1.0', '"bias":[0.5,2.0', f"bias's limit is 2 limit, suite {SUITE} has 1 limit"),
        ('"bias":', '"wish":', f"wish is no check of suite {SUITE}, which has drawn_rows, every_row, bias,"),
        ('"guard_writes":[0.0,0.0', '"guard_writes":[0.5,0.0', "guard_writes's value is 0.5, a count is whole"),
        ('"ragged",0]', '"",0]', "a check has no name or no case: 'bias' on ''"),
        ('"ragged",0]', f'"ragged",{10**30}]', "bias's seed is 1" + "0" * 30),
        ('{"bias":', '{"every_row":[0,1,"limit","x",0],"bias":', "'every_row' stands twice"),
        ('"path":"a"', '"path":"a","kernels":[""]', "a kernel has an empty name"),
        ('"at":"2026-11-20T12:00:00+00:00"', '"at":"yesterday"', "it was measured at 'yesterday', expected a date"),
        ('"at":"2026-11-20T12:00:00+00:00"', '"at":"2026-11-20T12:00:00"', "expected a date of ISO 8601 with its time"),
        ('"at":"2026-11-20T12:00:00+00:00"', '"at":"2026-11-22T13:00:00+00:00"', "which is in the future"),
        ('"suite":', '"suite":-', "suite is -"),
        ('"a":"digest of a"', '"a":""', "the digest of its source is empty"),
        ('"changed":3', '"changed":641', "values changed is 641, expected 0 to 640"),
        ('"compared":640', '"compared":-1', "values compared is -1, expected 0 to 1.15292e+18"),
        ('"order":"keys512"', '"order":""', "an order, or one of its inputs or digests, has no name"),
        ('"long":"fedcba"', '"":"fedcba"', "an order, or one of its inputs or digests, has no name"),
        ('"gpu":"Test CPU"', '"gpu":""', "its machine or its torch has no name"),
    ],
)
def test_what_no_run_writes_is_refused_by_row_and_value(file: Path, was: str, now: str, why: str) -> None:
    assert was in file.read_text()
    file.write_text(signed(file.read_text().replace(was, now, 1)))
    with pytest.raises(MatrixError) as caught:
        load_matrix(file, now=datetime(2026, 11, 21, 12, 30, tzinfo=UTC))
    assert why in str(caught.value)
    assert re.match(
        r"h4-2-d64\.json holds no evidence: a of (decode|prefill) fp32 h4:\d d\d+ q-le_128", str(caught.value)
    )


def test_a_clock_that_is_a_day_late_refuses_nothing(file: Path) -> None:
    assert load_matrix(file, now=datetime(2026, 11, 19, 12, 30, tzinfo=UTC)).evidence
    with pytest.raises(MatrixError, match="in the future: the clock here says 2026-11-19T11:30:00"):
        load_matrix(file, now=datetime(2026, 11, 19, 11, 30, tzinfo=UTC))


def test_impossible_times_of_a_whole_model_are_refused(tmp_path: Path) -> None:
    save_matrix(tmp_path / "a.json", EVIDENCE, replace(MODEL, timings=(replace(TIMING, p50_ms=-1.5),)))
    with pytest.raises(MatrixError, match=r"the whole model demo: prefill of 128 tokens: p50_ms is -1\.5, expected"):
        load_matrix(tmp_path / "a.json")


SCALARS = re.compile(r'(?<=[:\[,])(?:"[^"]*"|-?[\d.]+(?:e-?\d+)?|null|true|false)(?=[,\]}])')
LITERALS = (
    *("0", "-0.0", "-1", "0.5", "1e308", "-1e308", "1e999", "5e-324", "NaN", "Infinity", "null", "true", "[]", "{}"),
    *('""', '"\\ud800"', '"\\u0000"', '"inf"', '"1e9"', "9" * 400, "9" * 5000, "-" + "9" * 25, "[" * 3000),
    *('"prefill fp32 h4:2 d64 q-le_128 c-le_128 causal softcap1e-320"', '"decode fp32 h4:2 d64 q-gt_128k c-gt_128k'),
    *('"9999-12-31T23:59:59-23:59"', '"0001-01-01T00:00:00+23:59"', '"a","a":"b"', "1,2", '"x":1'),
)


def read_or_refused(file: Path, content: bytes) -> bool:
    """Return whether a file of this content, signed again, is read; one that is can be compared and written."""
    blank = content[:13] + b"0" * 64 + content[77:]
    file.write_bytes(content[:13] + hashlib.sha256(blank).hexdigest().encode() + content[77:])
    try:
        matrix = load_matrix(file)
    except MatrixError:
        return False
    for entry in matrix.evidence.values():
        summarize(entry)
    summary(matrix.evidence.values())
    differences(Side(matrix.evidence), Side({(entry.shape, entry.path): entry for entry in EVIDENCE}))
    if matrix.evidence:
        save_matrix(file, matrix.evidence.values(), matrix.model)
    return True


def test_any_value_in_any_place_is_read_or_refused(tmp_path: Path) -> None:
    few = tuple(check for check in checks() if check.name in {"nonfinite", "row_error"})
    save_matrix(tmp_path / FILE, [evidence(SHAPE, A, checks=few, floor_us=5.0)], MODEL)
    text = (tmp_path / FILE).read_text()
    places = [found.span() for found in SCALARS.finditer(text)]
    read = [
        read_or_refused(tmp_path / FILE, (text[:start] + literal + text[end:]).encode())
        for start, end in places
        for literal in LITERALS
    ]
    assert len(places) > 30
    assert {True, False} == set(read)


@given(st.lists(st.tuples(st.integers(90, 2000), st.integers(0, 20), st.binary(max_size=20)), min_size=1, max_size=3))
@settings(deadline=None)
def test_any_change_of_bytes_is_read_or_refused(changes: list[tuple[int, int, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_matrix(Path(folder) / FILE, EVIDENCE)
        content = (Path(folder) / FILE).read_bytes()
        for start, length, new in changes:
            content = content[:start] + new + content[start + length :]
        read_or_refused(Path(folder) / FILE, content)


def test_a_row_that_stands_twice_is_refused_whatever_the_digest(file: Path) -> None:
    row = next(line for line in file.read_text().splitlines() if line.startswith('{"shape"'))
    file.write_text(signed(file.read_text().replace(row, f"{row}\n{row}", 1)))
    with pytest.raises(MatrixError, match="says of one shape and path two things"):
        load_matrix(file)


def test_what_cannot_be_used_is_named_and_the_other_files_count(file: Path) -> None:
    file.with_name("a.json").mkdir()
    file.with_name("b.json").symlink_to("nowhere")
    file.with_name("c.json").write_bytes(file.read_bytes().replace(b'"ragged"', b'"smooth"', 1))
    save_matrix(file.with_name("d.json"), [evidence(SHAPE, A, fingerprint=replace(MACHINE, gpu="Other CPU"))])
    os.mkfifo(file.with_name("e.json"))
    matrix = load_matrices(file.parent.parent, MACHINE)
    assert matrix.evidence == load_matrix(file).evidence
    assert {problem.code for problem in matrix.problems} == {Reject.MATRIX_INVALID}
    for problem, why in zip(matrix.problems, (
        "a.json cannot be read: Is a directory", "b.json cannot be read: No such file or directory",
        "c.json does not match its digest", "d.json was measured on Other CPU, this is Test CPU",
        "e.json cannot be read: not a regular file",
    ), strict=True):  # fmt: skip
        assert why in problem.detail


def test_a_file_holds_one_machine_only(tmp_path: Path) -> None:
    mixed = [evidence(SHAPE, A), evidence(DECODE, A, fingerprint=replace(MACHINE, torch="2.14.0"))]
    with pytest.raises(ValueError, match="one machine, got 2"):
        save_matrix(tmp_path / "mixed.json", mixed)


def test_a_failed_write_leaves_the_old_file_and_no_litter(file: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(ValueError, match="got 0"):
        save_matrix(file, [])
    assert file.read_bytes() == before
    assert [entry.name for entry in file.parent.iterdir()] == [FILE]


def test_a_write_that_the_disk_refuses_names_the_file(file: Path) -> None:
    before, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))  # as a full disk refuses
    try:
        with pytest.raises(OSError, match=re.escape(str(file))):
            save_matrix(file, [evidence(SHAPE, A)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before


def test_a_folder_without_files_for_this_gpu_is_an_empty_matrix(tmp_path: Path) -> None:
    assert load_matrices(tmp_path, MACHINE) == Matrix()


def test_the_digest_of_a_folder_changes_with_any_file(file: Path) -> None:
    before = load_matrices(file.parent.parent, MACHINE).digest
    save_matrix(file.with_name("other.json"), [evidence(DECODE, B)])
    assert before is not None
    assert load_matrices(file.parent.parent, MACHINE).digest != before


@pytest.mark.parametrize("first", ["a.json", "z.json"])
def test_of_two_files_the_failure_and_this_stack_count(file: Path, first: str) -> None:
    later = "2026-11-21T00:00:00+00:00"
    older = evidence(SHAPE, A, fingerprint=replace(MACHINE, torch="2.12.0"), at=later)
    save_matrix(file.with_name(first), [older])
    assert load_matrices(file.parent.parent, MACHINE).evidence[(SHAPE, "a")].fingerprint == MACHINE
    save_matrix(file.with_name("m.json"), [evidence(SHAPE, A, at=later)])
    save_matrix(file.with_name(first), [evidence(SHAPE, A, checks=checks(2.0))])
    assert not load_matrices(file.parent.parent, MACHINE).evidence[(SHAPE, "a")].is_proven


def test_gpu_names_become_folder_names() -> None:
    assert gpu_folder("NVIDIA H200") == "nvidia-h200"
    assert gpu_folder("../..") == "unnamed"


def test_the_matrices_that_ship_are_whole() -> None:
    shipped = [load_matrix(file) for file in MATRICES.glob("*/*.json")]
    assert len(shipped) > 20
    assert all(matrix.evidence for matrix in shipped)


def test_what_runs_share_is_said_once(tmp_path: Path) -> None:
    save_matrix(tmp_path / "a.json", [*EVIDENCE, evidence(DECODE, B, at="2026-11-21T00:00:00+00:00", suite=1)])
    runs = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert sorted(sorted(run["sources"]) for run in runs.values()) == [["a", "b"], ["b"]]


def test_two_sources_of_a_path_within_one_run_are_separated(tmp_path: Path) -> None:
    mixed = [evidence(SHAPE, A), evidence(DECODE, A, source_digest="another")]
    save_matrix(tmp_path / "a.json", mixed)
    assert sorted(entry.source_digest for entry in load_matrix(tmp_path / "a.json").evidence.values()) == [
        "another",
        A.source_digest,
    ]


def test_everything_that_is_measured_is_read_back(tmp_path: Path) -> None:
    full = evidence(
        SHAPE,
        A,
        timed_sequences=8,
        floor_us=5.0,
        kernels=("hallmark_prefill",),
        kernels_sometimes=("helper",),
        temporary_bytes=4096,
        measured_bytes=123456,
        commit="abc",
        command="hallmark qualify --preset demo",
        checks=tuple(replace(it, measured=9.0, where="row 3") if it.name == "bias" else it for it in checks()),
    )
    save_matrix(tmp_path / "a.json", [full], MODEL)
    matrix = load_matrix(tmp_path / "a.json")
    assert matrix.evidence == {(SHAPE, "a"): full}
    assert matrix.model == MODEL


def test_what_only_a_cpu_has_is_in_no_file_of_a_gpu(tmp_path: Path) -> None:
    cpu = replace(MACHINE, instruction_set="AVX2", libraries="MKL_CBWR=AVX2", threads=2)
    for machine, names in ((MACHINE, []), (cpu, ["instruction_set", "libraries", "threads"])):
        save_matrix(tmp_path / "a.json", [evidence(SHAPE, A, fingerprint=machine)])
        assert list(json.loads((tmp_path / "a.json").read_text())["fingerprint"])[8:] == names
        assert load_matrix(tmp_path / "a.json").evidence[SHAPE, "a"].fingerprint == machine


def test_a_row_that_names_no_run_is_refused(file: Path) -> None:
    name = next(iter(json.loads(file.read_text())["runs"]))
    file.write_text(signed(file.read_text().replace(f'"run":"{name}"', '"run":"ffffffff"', 1)))
    with pytest.raises(MatrixError, match="holds no evidence: 'ffffffff'"):
        load_matrix(file)
