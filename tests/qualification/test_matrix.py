import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from qualification_fakes import DECODE, MACHINE, SHAPE, checks, evidence, path

from kernels.path import Reject
from kernels.shape import Phase
from qualification.full_model import Attention, FullModel, ModelTiming
from qualification.matrix import (
    MATRICES,
    SCHEMA,
    Matrix,
    MatrixError,
    gpu_folder,
    load_matrices,
    load_matrix,
    save_matrix,
)

A, B = path("a"), path("b")
EVIDENCE = [evidence(SHAPE, A), evidence(SHAPE, B, failure="RuntimeError: no", timing=None), evidence(DECODE, A)]
FILE = "h4-2-d64.json"


def signed(text: str) -> str:
    """The text with its own digest: what only a mistaken or malicious writer makes."""
    blank = text.replace(text[13:77], "0" * 64)
    return text.replace(text[13:77], hashlib.sha256(blank.encode()).hexdigest())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    target = tmp_path / gpu_folder(MACHINE.gpu) / FILE
    save_matrix(target, EVIDENCE)
    return target


def test_what_is_written_is_read_back(file: Path) -> None:
    assert dict(load_matrix(file).evidence) == {(entry.shape, entry.path): entry for entry in EVIDENCE}


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


def test_every_flipped_byte_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for position in range(len(content)):
        file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(MatrixError):
            load_matrix(file)


def test_a_truncated_file_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 2):
        file.write_bytes(content[:length])
        with pytest.raises(MatrixError) as caught:
            load_matrix(file)
        assert caught.value.rejection.code is Reject.MATRIX_INVALID


@pytest.mark.parametrize("schema", [1, SCHEMA + 1])
def test_another_schema_is_refused_by_its_number(file: Path, schema: int) -> None:
    body = json.loads(file.read_text()) | {"schema": schema, "unheard": "of"}
    file.write_text(json.dumps(body))
    with pytest.raises(MatrixError, match=f"has schema {schema}, this version reads {SCHEMA}: qualify again"):
        load_matrix(file)


def test_a_failed_check_keeps_its_place(tmp_path: Path) -> None:
    failed = tuple(replace(it, measured=9.0, where="row 3") if it.name == "bias" else it for it in checks())
    save_matrix(tmp_path / "m.json", [evidence(SHAPE, A, checks=failed)])
    (entry,) = load_matrix(tmp_path / "m.json").evidence.values()
    assert {check.name: check.where for check in entry.checks if check.where} == {"bias": "row 3"}


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"schema": 2, "model": ' + b"[" * 100_000, b"[]", b"\0"])
def test_a_file_that_is_no_json_of_ours_is_refused_in_one_line(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(MatrixError, match=r"^h4-2-d64\.json cannot be read, perhaps it is truncated: [^\n]+$"):
        load_matrix(file)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ('"p50_us":10.0', '"p50_us":0.0'),
        ('"p50_us":10.0', '"p50_us":-1.0'),
        ('"n":20', '"n":0'),
        ('"n":20', '"n":20,"sequences":0'),
        ('"n":20', '"n":20,"floor_us":0.0'),
        ('"tokens":[1,1]', '"tokens":[1,0]'),
        ("h4:2 d64", "h4:0 d64"),
        ("h4:2 d64", "h4:2 d0"),
    ],
)
def test_a_number_that_no_run_writes_is_refused_whatever_the_digest(file: Path, was: str, now: str) -> None:
    assert was in file.read_text()
    file.write_text(signed(file.read_text().replace(was, now, 1)))
    with pytest.raises(MatrixError, match="was measured in no time or on nothing"):
        load_matrix(file)


def test_a_row_that_stands_twice_is_refused_whatever_the_digest(file: Path) -> None:
    row = next(line for line in file.read_text().splitlines() if line.startswith('{"shape"'))
    file.write_text(signed(file.read_text().replace(row, f"{row}\n{row}", 1)))
    with pytest.raises(MatrixError, match="says of one shape and path two things"):
        load_matrix(file)


def test_a_folder_or_a_broken_link_in_the_place_of_a_file_is_a_problem_and_no_crash(file: Path) -> None:
    file.with_name("a.json").mkdir()
    file.with_name("b.json").symlink_to("nowhere")
    matrix = load_matrices(file.parent.parent, MACHINE)
    assert len(matrix.evidence) == len(EVIDENCE)
    assert [problem.detail for problem in matrix.problems] == [
        "a.json cannot be read: Is a directory",
        "b.json cannot be read: No such file or directory",
    ]


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


def test_a_folder_without_files_for_this_gpu_is_an_empty_matrix(tmp_path: Path) -> None:
    assert load_matrices(tmp_path, MACHINE) == Matrix()


def test_a_file_of_another_gpu_in_this_ones_folder_proves_nothing(file: Path) -> None:
    save_matrix(file, [evidence(SHAPE, A, fingerprint=replace(MACHINE, gpu="Other CPU"))])
    matrix = load_matrices(file.parent.parent, MACHINE)
    assert matrix.evidence == {}
    assert [problem.code for problem in matrix.problems] == [Reject.MATRIX_INVALID]
    assert "measured on Other CPU, this is Test CPU" in matrix.problems[0].detail


def test_a_refused_file_does_not_take_the_others_with_it(file: Path) -> None:
    save_matrix(file.with_name("other.json"), [evidence(DECODE, B)])
    file.write_bytes(file.read_bytes().replace(b'"ragged"', b'"smooth"', 1))
    matrix = load_matrices(file.parent.parent, MACHINE)
    assert set(matrix.evidence) == {(DECODE, "b")}
    assert "h4-2-d64.json does not match its digest" in matrix.problems[0].detail


def test_the_digest_of_a_folder_changes_with_any_file(file: Path) -> None:
    before = load_matrices(file.parent.parent, MACHINE).digest
    save_matrix(file.with_name("other.json"), [evidence(DECODE, B)])
    assert before is not None
    assert load_matrices(file.parent.parent, MACHINE).digest != before


@pytest.mark.parametrize("first", ["a.json", "z.json"])
def test_of_two_files_that_disagree_the_failure_counts(file: Path, first: str) -> None:
    file.unlink()
    save_matrix(file.with_name("m.json"), [evidence(SHAPE, A, at="2026-11-21T00:00:00+00:00")])
    save_matrix(file.with_name(first), [evidence(SHAPE, A, checks=checks(2.0))])
    assert not load_matrices(file.parent.parent, MACHINE).evidence[(SHAPE, "a")].is_proven


def test_of_two_files_the_one_of_this_stack_counts(file: Path) -> None:
    older = replace(MACHINE, torch="2.12.0")
    save_matrix(file.with_name("z.json"), [evidence(SHAPE, A, fingerprint=older, at="2027-01-01T00:00:00+00:00")])
    assert load_matrices(file.parent.parent, MACHINE).evidence[(SHAPE, "a")].fingerprint == MACHINE


def test_gpu_names_become_folder_names() -> None:
    assert gpu_folder("NVIDIA H200") == "nvidia-h200"
    assert gpu_folder("../..") == "unnamed"


def test_the_matrices_that_ship_are_whole() -> None:
    for shipped in MATRICES.glob("*/*.json"):
        load_matrix(shipped)


def test_what_runs_share_is_said_once(tmp_path: Path) -> None:
    save_matrix(tmp_path / "a.json", [*EVIDENCE, evidence(DECODE, B, at="2026-11-21T00:00:00+00:00", suite=1)])
    runs = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert sorted(sorted(run["sources"]) for run in runs.values()) == [["a", "b"], ["b"]]


def test_one_run_that_met_two_sources_of_a_path_is_told_apart(tmp_path: Path) -> None:
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
    )
    timing = ModelTiming(Phase.PREFILL, 128, 1, Attention.PLAN, ("a",), 1.5, 0.01, 20, 0.5)
    model = FullModel("demo", "2026-11-21T00:00:00+00:00", 8, (timing,))
    save_matrix(tmp_path / "a.json", [full], model)
    matrix = load_matrix(tmp_path / "a.json")
    assert matrix.evidence == {(SHAPE, "a"): full}
    assert matrix.model == model


def test_a_row_that_names_no_run_is_refused(file: Path) -> None:
    name = next(iter(json.loads(file.read_text())["runs"]))
    file.write_text(signed(file.read_text().replace(f'"run":"{name}"', '"run":"ffffffff"', 1)))
    with pytest.raises(MatrixError, match="holds no evidence: 'ffffffff'"):
        load_matrix(file)
