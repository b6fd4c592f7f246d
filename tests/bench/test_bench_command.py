"""`hallmark bench attention` as a program."""

import argparse
from pathlib import Path

import msgspec
import pytest
import torch

from bench.attention.cases import Sweep, cases_of, quick_sweep
from bench.attention.command import add_arguments, parts_of, run
from bench.attention.fa3 import find_fa3
from kernels.catalog import PATHS
from kernels.vocabulary.shape import Dtype, Phase
from server.cli.main import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what runs is asserted for a CPU")


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


def test_a_quick_run_prints_a_table_and_writes_rows_and_charts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "attention", "--quick", "--paths", "sdpa.*", "--measure-ceilings", "--out-dir", str(tmp_path)]
    assert main([*argv, "--phases", "prefill", "decode", "--budget", "0.002", "--name", "quick"]) == 0
    printed = capsys.readouterr().out
    assert "x best peer" in printed
    assert "sdpa.cudnn: not in" in printed
    assert "flex: not here: needs a CUDA GPU" in printed
    file = tmp_path / "quick.json"
    content = msgspec.json.decode(file.read_bytes())
    assert {row["contender"] for row in content["rows"]} == {"sdpa.cpu", "sdpa.math", "cpu-flash"}
    assert all(row["is_right"] and row["p50_us"] > 0 and row["floor_fraction"] > 0 for row in content["rows"])
    assert content["machine"]["torch"] == torch.__version__
    assert content["unmeasured_cases"] == []
    groups = {chart.stem.removeprefix(f"{file.stem}-") for chart in tmp_path.glob("*.svg")}
    assert groups == {"prefill-fp32-d64-h4x2", "decode-fp32-d64-h4x2-batch2"}


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--paths", "trito"], 3, f"'trito' matches none of {', '.join(path.name for path in PATHS)}"),
        (["--qick"], 3, "--qick"),
        (["--time-limit", "1e-9", "--peers"], 0, "7 cases were not measured: the time limit"),
    ],
)
def test_a_run_that_measures_nothing_says_why(
    tmp_path: Path, argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "attention", "--quick", *argv, "--out-dir", str(tmp_path)]) == code
    out, err = capsys.readouterr()
    assert said in (err if code else out)


def test_flags_change_only_what_they_name() -> None:
    (part,) = parts_of(parsed("--head-dims", "128", "--mixes", "--windows", "none", "1024", "--heads", "8:8"), "cuda")
    assert part.peers is None
    assert part.sweep == Sweep(
        Dtype.BF16, head_dims=(128,), heads=((8, 8),), mixes=(), windows=(None, 1024), seed=part.sweep.seed
    )
    sweep = parts_of(parsed("--quick", "--phases", "decode", "--dtype", "fp16"), "cpu")[0].sweep
    assert (sweep.phases, sweep.dtype, sweep.batches) == ((Phase.DECODE,), Dtype.FP16, quick_sweep(Dtype.FP16).batches)


def test_full_suite_takes_phases_head_dims_and_pages_only() -> None:
    parts = parts_of(parsed("--full", "--phases", "decode", "--head-dims", "64", "--page-size", "16"), "cuda")
    cases = [case for part in parts for case in cases_of(part.sweep)]
    assert {(case.shape.phase, case.shape.head_dim, case.shape.page_size) for case in cases} == {(Phase.DECODE, 64, 16)}
    for flags, why in (
        (["--lengths", "64"], "--full goes with"),
        (["--head-dims", "72"], "no case of these phases and head dims"),
        (["--fa3-page-sizes", "64"], "its own --fa3-page-sizes"),
    ):
        with pytest.raises(ValueError, match=why):
            parts_of(parsed("--full", *flags), "cuda")


def test_an_fa3_that_is_none_or_missing_is_a_reason(tmp_path: Path) -> None:
    library = tmp_path / "fa3.so"
    library.write_bytes(b"not a library")
    for place, names in ((library, [str(library)]), (None, ["flash_attn_interface", "vllm"])):
        found = find_fa3(place)
        assert isinstance(found, str)
        assert all(name in found for name in names)


def test_unwritable_folder_is_refused_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(parsed("--quick", "--out-dir", str(tmp_path / "file" / "folder"))) == 3
    printed = capsys.readouterr()
    assert str(tmp_path / "file") in printed.err
    assert printed.out == ""
