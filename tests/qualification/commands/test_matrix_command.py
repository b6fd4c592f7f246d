"""`hallmark matrix`: show, verify and diff, by what they print and their exit codes."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.catalog import PATHS
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import FP8_BLOCKS, LinearShape
from kernels.system.device import num_cores, read_fingerprint
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.path import KernelPath, Tier
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from qualification.commands.matrix import verify
from qualification.common.exit_code import ExitCode
from qualification.evidence.choice import choice_of
from qualification.evidence.evidence import SUITE, Evidence, Timing
from qualification.evidence.gpu_folder import gpu_folder
from qualification.evidence.matrix import load_matrix, save_matrix
from qualification.evidence.summary import summary
from qualification.evidence.verdicts import Difference, Harm, Side, differences, exit_code_of
from qualification.measure.start_plan import own_file
from server.cli.main import main
from support.qualification_fakes import DECODE, MACHINE, SHAPE, checks, evidence, path

FIRST, OTHER, FALLBACK = path("triton.x"), path("gluon.x"), path("sdpa.x", Tier.FALLBACK)
CATALOG = (FIRST, OTHER, FALLBACK)
RAISED = {"checks": (), "timing": None, "failure": "OutOfMemoryError: full"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_matrix(
        tmp_path / gpu_folder(MACHINE.gpu) / "demo.json", [evidence(SHAPE, FIRST), evidence(DECODE, FALLBACK, **RAISED)]
    )
    return tmp_path


def products(name: str, p50_us: float) -> Evidence:
    """Proof of a path of products of 113 to 128 rows with a weight of 6144 x 4096, with a known floor."""
    [kernel] = (it for it in LINEAR_PATHS if it.name == name)
    shape = LinearShape(Dtype.BF16, 4096, 6144, LinearRows.LE_128)
    return evidence(shape, kernel, p50_us, floor_us=12.6)


def one_file(folder: Path) -> Path:
    [file] = folder.rglob("*.json")
    return file


def test_show_prints_each_files_digest_machine_and_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "show", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "demo.json: 2 shapes, 2 measured: 1 proven, 1 failed" in out
    assert "gpu=Test CPU" in out
    assert "* triton.x  proven  10 us" in out
    assert "OutOfMemoryError: full" in out


def test_show_begins_with_a_summary_of_all_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "show", str(folder), "--summary"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 shapes in 1 file: 1 by a wanted path, 0 by a fallback only, 1 by nothing."
    assert lines[-1].split() == ["demo", "Test", "CPU", "1", "0", "1", "2"]


def test_show_calls_evidence_of_an_older_suite_stale(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_matrix(one_file(folder), [replace(evidence(SHAPE, FIRST), suite=SUITE - 1), evidence(DECODE, FALLBACK)])
    assert main(["matrix", "show", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "2 measured: 1 proven, 1 of an older suite" in out
    assert "  triton.x  stale (suite)" in out


def test_show_names_a_refused_file_and_shows_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = one_file(folder)
    file.with_name("a.json").write_bytes(file.read_bytes().replace(b'"triton.x"', b'"triton.y"'))
    assert main(["matrix", "show", str(folder)]) == 3
    out = capsys.readouterr().out
    assert "a.json: REFUSED: a.json does not match its digest" in out
    assert "demo.json: 2 shapes" in out
    assert main(["matrix", "verify", "--files-only", str(folder)]) == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        *[
            (["diff", ".", ".", "--speed-tolerance", share], f"must be a share such as 0.05, got {share}")
            for share in ("nan", "-1", "inf", "x")
        ],
        (["diff", ".", "./none"], "hallmark: ./none holds no evidence\n"),
        (["show", "/no/such"], "hallmark: /no/such does not exist\n"),
    ],
)
def test_what_cannot_be_shown_or_compared_is_one_line(
    folder: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dot is the folder."""
    (folder / "none").mkdir()
    assert main(["matrix", *(f"{folder}{it[1:]}" if it[0] == "." else it for it in argv)]) == 3
    err = capsys.readouterr().err
    assert said.replace("./", f"{folder}/") in err
    assert err.count("\n") == 1


LATER = "2026-11-21T12:00:00+00:00"


def test_merge_adds_the_rows_of_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"{gpu_folder(MACHINE.gpu)}/demo.json"
    shards = [tmp_path / "one", tmp_path / "two"]
    save_matrix(shards[0] / place, [evidence(SHAPE, OTHER)])
    save_matrix(shards[1] / place, [evidence(DECODE, FIRST)])
    save_matrix((shards[1] / place).with_name("other.json"), [evidence(SHAPE, FIRST)])
    out = tmp_path / "out"
    save_matrix(out / place, [evidence(SHAPE, FIRST)])
    assert main(["matrix", "merge", str(out), *map(str, shards)]) == 0
    assert set(load_matrix(out / place).evidence) == {(SHAPE, "triton.x"), (SHAPE, "gluon.x"), (DECODE, "triton.x")}
    assert set(load_matrix((out / place).with_name("other.json")).evidence) == {(SHAPE, "triton.x")}
    assert "demo.json: 2 shapes, 3 measured: 3 proven" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "theirs", "kept"),
    [
        ({}, {"at": LATER, "timing": None}, "theirs"),
        ({"at": LATER}, {"timing": None}, "ours"),
        ({"checks": checks(2.0)}, {"at": LATER}, "ours"),  # a failure counts
        ({"checks": checks(2.0)}, {"at": LATER, "source_digest": "newer"}, "theirs"),  # of another source
        ({"checks": checks(2.0), "suite": SUITE - 1}, {"at": LATER}, "theirs"),
        ({"source_digest": "newer", "at": LATER}, {"checks": checks(2.0)}, "ours"),
    ],
)
def test_merge_keeps_one_of_two_measurements(
    ours: dict[str, object], theirs: dict[str, object], kept: str, tmp_path: Path
) -> None:
    rows = {"ours": evidence(SHAPE, FIRST, **ours), "theirs": evidence(SHAPE, FIRST, **theirs)}
    for name, row in rows.items():
        save_matrix(tmp_path / name / "gpu" / "demo.json", [row])
    assert main(["matrix", "merge", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    [found] = load_matrix(tmp_path / "ours" / "gpu" / "demo.json").evidence.values()
    assert found == rows[kept]


def test_merge_of_two_stacks_writes_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = one_file(folder)
    before = file.read_bytes()
    other = tmp_path / "other"
    save_matrix(
        other / file.relative_to(folder), [evidence(SHAPE, FIRST, fingerprint=replace(MACHINE, torch="2.12.0"))]
    )
    assert main(["matrix", "merge", str(folder), str(other)]) == 3
    assert file.read_bytes() == before
    assert "demo.json would hold evidence of 2 stacks" in capsys.readouterr().err


def test_show_and_diff_of_files_do_without_torch(folder: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from server.cli.main import main; place = sys.argv[1]; "
    code += "sys.exit(main(['matrix', 'show', place]) or main(['matrix', 'diff', place, place]))"
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False, timeout=60).returncode == 0


NEWER = (replace(MACHINE, torch="2.14.0", driver="600.1"), (replace(FIRST, source_digest="newer"),))


@pytest.mark.parametrize(
    ("place", "suite", "machine", "code", "said"),
    [
        ("test-cpu", SUITE, (MACHINE, CATALOG), ExitCode.PASS, "demo.json: valid\n"),
        ("test-cpu", SUITE, NEWER, ExitCode.ENVIRONMENT,
            "STALE: driver (2 of 2), torch (2 of 2), path (1 of 2), source_digest (1 of 2)"),
        ("test-cpu", SUITE - 1, None, ExitCode.ENVIRONMENT, "STALE: suite (1 of 2)"),
        ("test-cpu", SUITE, None, ExitCode.PASS, "valid"),  # of another machine
        ("nvidia-h200", SUITE, None, ExitCode.ENVIRONMENT,
            "FOREIGN: measured on Test CPU, which belongs in test-cpu/"),
    ],
)  # fmt: skip
def test_verify_names_what_makes_a_file_stale_or_foreign(
    tmp_path: Path,
    place: str,
    suite: int,
    machine: tuple[Fingerprint, Sequence[KernelPath]] | None,
    code: ExitCode,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entries = [evidence(SHAPE, FIRST, suite=suite), evidence(DECODE, FALLBACK, **RAISED)]
    save_matrix(tmp_path / place / "demo.json", entries)
    assert verify(tmp_path, machine=machine) is code
    lines = capsys.readouterr().out.splitlines()
    assert said in lines[0] + "\n"
    kind = said.partition(":")[0]
    advised = [line.partition(":")[0] for line in lines[1:]]  # what to do, once for each kind
    assert advised == ([] if code is ExitCode.PASS else [kind])


def test_verify_is_for_this_machine_unless_files_only_are_asked(folder: Path, tmp_path: Path) -> None:
    assert main(["matrix", "verify", "--files-only", str(folder)]) == 0
    assert main(["matrix", "verify", str(folder)]) == 3
    (tmp_path / "none").mkdir()
    assert main(["matrix", "verify", str(tmp_path / "none")]) == 4


# --- differences ------------------------------------------------------------------------------------------------------


def side(*entries: Evidence) -> Side:
    return Side({(entry.shape, entry.path): entry for entry in entries})


def only(before: Side, after: Side) -> Difference:
    [found] = differences(before, after)
    return found


BASE = side(evidence(SHAPE, FIRST), evidence(SHAPE, FALLBACK))


def test_the_same_evidence_has_no_difference() -> None:
    assert differences(BASE, BASE) == []
    assert exit_code_of([]) is ExitCode.PASS


@pytest.mark.parametrize(
    ("p50_us", "harm", "code"), [(20.0, Harm.PATH, ExitCode.PASS), (80.0, Harm.SLOWER, ExitCode.PERFORMANCE)]
)
def test_shapes_of_8_bits_are_compared_with_those_of_16(p50_us: float, harm: Harm, code: ExitCode) -> None:
    plain = LinearShape(Dtype.BF16, 4096, 6144, LinearRows.LE_128)
    in_blocks = replace(plain, weight_format=FP8_BLOCKS)
    before = side(evidence(plain, FIRST, 40.0), evidence(SHAPE, FIRST))
    after = side(evidence(in_blocks, OTHER, p50_us, checks=checks(0.5)), evidence(SHAPE, FIRST))
    found = only(before, after)
    assert (found.shape, found.harm, found.code) == (in_blocks, harm, code)
    assert found.details[:2] == ("format plain -> fp8_blocks", "path triton.x -> gluon.x")
    assert "-> " in found.details[2]
    assert f"(x{p50_us / 40:.2f})" in found.details[3]
    [lost] = differences(side(evidence(plain, FIRST)), side(evidence(in_blocks, OTHER, **RAISED)))
    assert (lost.harm, lost.code) == (Harm.LOST, ExitCode.ENVIRONMENT)


def proof(kernel: KernelPath, p50_us: float = 10.0, **changes: object) -> Evidence:
    return evidence(SHAPE, kernel, p50_us, **changes)


WRONG = {"checks": checks(2.0)}
SECOND, CPU, MATH = path("sdpa.y", Tier.FALLBACK), path("sdpa.cpu"), path("sdpa.math", Tier.FALLBACK)
BOTH = (proof(FIRST), proof(FALLBACK))
TIED = (proof(FIRST), proof(OTHER, 11.0))
# What it shows: the evidence before and after; the harm, the exit code and the details, where they matter.
CHANGES = {
    "raises": (BOTH, [proof(FIRST, **RAISED), proof(FALLBACK)], Harm.FALLBACK, ExitCode.ENVIRONMENT,
        ("path triton.x -> sdpa.x", "triton.x proven -> failed")),
    "is wrong": (BOTH, [proof(FIRST, **WRONG), proof(FALLBACK)], Harm.FALLBACK, ExitCode.NUMERICS, None),
    "one fallback for another": (
        (proof(FALLBACK), proof(SECOND, 10.1)), [proof(FALLBACK, **RAISED), proof(SECOND, 10.1)],
        Harm.STATUS, ExitCode.PASS, None),
    "an unused first tier is wrong": (TIED, [proof(FIRST, 20.0), proof(OTHER, **WRONG)], Harm.WRONG, ExitCode.NUMERICS,
        ("gluon.x proven -> failed", "10 us -> 20 us (x2.00)")),
    "an unused fallback is wrong": (BOTH, [proof(FIRST), proof(FALLBACK, **WRONG)], Harm.STATUS, ExitCode.PASS, None),
    "an unused path raises": (BOTH, [proof(FIRST), proof(FALLBACK, **RAISED)], Harm.STATUS, ExitCode.PASS,
        ("sdpa.x proven -> failed",)),
    "wrong and raising": (TIED, [proof(FIRST, **RAISED), proof(OTHER, **WRONG), proof(FALLBACK)], Harm.FALLBACK,
        ExitCode.NUMERICS, None),
    "wrong and raising, no fallback": (TIED, [proof(FIRST, **RAISED), proof(OTHER, **WRONG)], Harm.LOST,
        ExitCode.NUMERICS, None),
    "nothing serves": (BOTH, [], Harm.LOST, ExitCode.ENVIRONMENT,
        ("path triton.x -> none", "sdpa.x, triton.x proven -> unproven")),
    "slower": (BOTH, [proof(FIRST, 13.0), proof(FALLBACK)], Harm.SLOWER, ExitCode.PERFORMANCE,
        ("10 us -> 13 us (x1.30)",)),
    "a faster fallback on a CPU": (
        (proof(CPU), proof(MATH, 9.0)), [proof(CPU), proof(MATH, 5.0)], Harm.PATH, ExitCode.PASS, None),
    "a faster fallback beside a wrong path": (
        (proof(CPU), proof(MATH, 9.0)), [proof(CPU, **WRONG), proof(MATH, 5.0)],
        Harm.FALLBACK, ExitCode.NUMERICS, None),
    "a faster first tier": ((proof(FIRST), proof(OTHER, 10.1)), [proof(FIRST), proof(OTHER, 9.9)], Harm.PATH,
        ExitCode.PASS, ("path triton.x -> gluon.x",)),
    # `decide` says so too: a path that computes wrong numbers or raises leaves its shape to a fallback.
    "wrong beside an equal path": (
        TIED, [proof(FIRST, **WRONG), proof(OTHER, 5.0)], Harm.FALLBACK, ExitCode.NUMERICS, None),
    "raises beside an equal path": (
        TIED, [proof(FIRST, **RAISED), proof(OTHER, 50.0)], Harm.FALLBACK, ExitCode.ENVIRONMENT, None),
    "a larger error": ((proof(FIRST),), [proof(FIRST, checks=checks(0.9))], Harm.ERROR, ExitCode.PASS,
        ("bias 0.5 of 1 (ragged) -> bias 0.9 of 1 (ragged)",)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_has_its_harm_exit_code_and_details(change: str) -> None:
    before, after, harm, code, details = CHANGES[change]
    found = only(side(*before), side(*after))
    assert (found.harm, found.code) == (harm, code)
    assert details is None or found.details == details


def test_paths_that_changed_alike_share_a_line() -> None:
    entries = (evidence(SHAPE, FIRST), evidence(SHAPE, OTHER, p50_us=11.0))
    newer = replace(MACHINE, torch="2.14.0")
    after = Side(side(*entries).evidence, lambda entry: entry.fingerprint.differing_fields(newer))
    assert only(side(*entries), after).details == ("path triton.x -> none", "gluon.x, triton.x proven -> stale (torch)")


def test_diff_says_first_what_differs_between_the_stacks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer = replace(MACHINE, torch="2.14.0", driver="600.1")
    other = folder / "other.json"
    known = [evidence(SHAPE, FIRST), evidence(DECODE, FALLBACK, **RAISED)]
    save_matrix(other, [replace(entry, fingerprint=newer) for entry in known])
    assert main(["matrix", "diff", str(folder / "test-cpu"), str(other)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "driver: None -> 600.1",
        "torch: 2.13.0 -> 2.14.0",
        "no difference: every shape has the same path, status, error and speed",
    ]


@pytest.mark.parametrize(("p50_us", "harm"), [(13.0, Harm.SLOWER), (7.0, Harm.BETTER), (10.4, None), (9.6, None)])
def test_speed_counts_beyond_the_tolerance(p50_us: float, harm: Harm | None) -> None:
    found = differences(side(evidence(SHAPE, FIRST)), side(evidence(SHAPE, FIRST, p50_us=p50_us)))
    assert [entry.harm for entry in found] == ([harm] if harm is not None else [])


def test_a_wide_spread_makes_a_difference_of_speed_uncertain() -> None:
    noisy = evidence(SHAPE, FIRST, p50_us=12.0)
    assert noisy.timing is not None
    noisy = replace(noisy, timing=replace(noisy.timing, spread=0.2))
    assert differences(side(evidence(SHAPE, FIRST)), side(noisy)) == []


def test_doubted_time_is_reported_and_not_compared() -> None:
    doubted = evidence(SHAPE, FIRST, timing=Timing(50.0, 0.3, 20))
    found = only(side(evidence(SHAPE, FIRST)), side(doubted))
    assert (found.harm, found.code) == (Harm.STATUS, ExitCode.PASS)
    told = "the time of triton.x is not believed now: spread 30%, at most 20% is believed"
    assert found.details == (told,)
    assert any("50 us not believed (spread 30%" in line for line in summary([doubted]))
    assert differences(side(doubted), side(doubted)) == []


def test_paths_that_no_time_chooses_are_listed_in_the_catalogs_order() -> None:
    wide, plain = products("gluon.linear.wide", 30.0), products("torch.linear", 20.0)
    assert choice_of([plain, wide]) is wide
    lines = [line for line in summary([plain, wide]) if ".linear" in line]
    assert ["* gluon.linear.wide" in lines[0], "torch.linear" in lines[1]] == [True, True]


def test_differences_are_sorted_by_harm_and_then_by_size() -> None:
    shapes = [replace(SHAPE, head_dim=dim) for dim in (64, 96, 128, 256)]
    before = side(*(evidence(shape, FIRST) for shape in shapes))
    times = dict(zip(shapes, (12.0, 15.0, 7.0, None), strict=True))
    after = side(*(evidence(shape, FIRST, p50_us=time) for shape, time in times.items() if time is not None))
    found = differences(before, after)
    assert [(entry.shape.head_dim, entry.harm) for entry in found] == [
        (256, Harm.LOST),
        (96, Harm.SLOWER),
        (64, Harm.SLOWER),
        (128, Harm.BETTER),
    ]
    assert exit_code_of(found) is ExitCode.ENVIRONMENT


def test_diff_of_two_folders_prints_a_line_a_shape(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = folder / "other.json"
    save_matrix(other, [evidence(SHAPE, FIRST, p50_us=20.0), evidence(DECODE, FALLBACK, **RAISED)])
    assert main(["matrix", "diff", str(folder / "test-cpu"), str(other)]) == 2
    out = capsys.readouterr().out
    assert "slower  prefill fp32 h4:2 d64 q-le_128 c-le_128 causal  10 us -> 20 us (x2.00)" in out
    assert "1 slower (exit 2)" in out
    assert main(["matrix", "diff", str(other), str(other)]) == 0


def test_diff_refuses_a_folder_of_several_gpus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_matrix(folder / "x" / "demo.json", [evidence(SHAPE, FIRST, fingerprint=replace(MACHINE, gpu="Other"))])
    assert main(["matrix", "diff", str(folder), str(folder)]) == 3
    assert "holds evidence of 2 GPUs (Other, Test CPU)" in capsys.readouterr().err


def test_diff_with_this_machine_uses_its_own_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = read_fingerprint(torch.device("cpu"), num_threads=num_cores())
    kernel = next(kernel for kernel in PATHS if kernel.name == "sdpa.cpu")
    reviewed = tmp_path / "reviewed.json"
    save_matrix(reviewed, [evidence(SHAPE, kernel, fingerprint=replace(here, torch="2.0.0"))])
    command = ["matrix", "diff", str(reviewed), "--cache-dir", str(tmp_path)]
    assert main(command) == 3
    assert "sdpa.cpu proven -> stale (torch)" in capsys.readouterr().out
    own = own_file(tmp_path, "evidence", here)
    save_matrix(own, [evidence(SHAPE, kernel, fingerprint=here), evidence(DECODE, kernel, fingerprint=here)])
    assert main(command) == 0
    assert "no difference" in capsys.readouterr().out
    save_matrix(reviewed, [evidence(SHAPE, kernel, fingerprint=here)])
    save_matrix(own, [evidence(SHAPE, replace(kernel, source_digest="0" * 64), fingerprint=here)])
    assert main(command) == 0, "what is stale replaces no reviewed evidence"


def test_changed_kernels_are_named() -> None:
    before = side(evidence(SHAPE, FIRST, kernels=("hallmark_x",)))
    after = side(evidence(SHAPE, FIRST, kernels=("hallmark_x",), kernels_sometimes=("helper",)))
    found = only(before, after)
    assert (found.harm, found.details) == (Harm.STATUS, ("kernels hallmark_x -> hallmark_x, helper",))
    assert differences(before, side(evidence(SHAPE, FIRST))) == []  # older evidence names none
