"""`hallmark bench steps` as a program, on a tiny model."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.steps.cells import CUDA_PLAN, Kind, StepsBench, cells_of
from bench.steps.floor import step_floor_ms
from bench.steps.row import StepsFile, Sweep, load
from kernels.vocabulary.shape import Dtype
from qualification.measure.costs.ceilings import Ceilings
from server.cli.main import main
from server.model.load.load import load_config
from support.models.tiny_llama import TinyLlama

POLICY = ["--set", "on-unproven=degrade"]  # no start has to prove anything
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what runs is asserted for a CPU")


@pytest.fixture(scope="module")
def folder(tiny_llama: TinyLlama) -> Path:
    return tiny_llama.folder


@pytest.fixture(scope="module")
def argv(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = ["--set", f"cache-dir={tmp_path_factory.mktemp('cache')}"]
    return ["bench", "steps", "--model", str(folder), "--device", "cpu", "--quick", *cache, *POLICY]


@pytest.fixture(scope="module")
def written(argv: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    assert main([*argv, "--peak-tflops", "0.001", "--peak-tbs", "0.001", "--out", str(out), "--name", "tiny"]) == 0
    return out


@pytest.fixture(scope="module")
def file(written: Path) -> StepsFile:
    return load(written / "tiny.json")


def test_prompt_lengths_double_up_to_the_longest(file: StepsFile) -> None:
    assert [row.tokens for row in file.prefill] == [16, 32, 64, 128, 255]
    assert all(row.time.n >= 3 and row.floor_ms is not None for row in file.prefill)
    for row in file.prefill:  # a step's products are counted too
        assert set(row.paths) - {"torch.linear"} in ({"sdpa.cpu"}, {"sdpa.math"})
    assert file.prefill[-1].floor_ms > file.prefill[0].floor_ms


def test_decode_steps_have_their_batch_and_context(file: StepsFile) -> None:
    assert [(row.batch, row.context) for row in file.decodes(Sweep.BATCH)] == [(1, 32), (4, 32), (16, 32)]
    assert [(row.batch, row.context) for row in file.decodes(Sweep.CONTEXT)] == [(1, 64), (1, 128)]
    for row in file.decode:
        assert row.mean_context == pytest.approx(row.context, rel=0.2)
        assert 6 <= row.time.n == row.inside.host.n
        assert row.inside.host.p50 < row.time.p50
        assert 0 < row.inside.busy < 1
        assert row.inside.parts_ms["forward"] > row.inside.parts_ms["wait"]  # a CPU has nothing to wait for


def test_the_load_goes_on_while_requests_end(file: StepsFile) -> None:
    (row,) = file.load
    assert row.time.n == 2 * row.output
    assert row.tokens_per_s > 0


def test_the_file_says_what_was_measured_on_what(file: StepsFile) -> None:
    assert file.command.startswith("hallmark")
    assert file.machine["torch"] == torch.__version__
    assert file.model["weights"] == "auto"
    assert file.model["max_model_len"] == 256
    assert file.ceilings == {"flops_per_second": 1e9, "bytes_per_second": 1e9}
    assert file.skipped == []


def test_charts_lie_beside_it(written: Path) -> None:
    names = {path.name for path in written.glob("*.svg")}
    assert names == {f"tiny-{chart}.svg" for chart in ("prefill", "decode-batch", "decode-context", "parts")}


def test_what_there_is_no_time_or_room_for_is_reported(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--set", "kv-cache-tokens=320", "--time-limit", "0", "--dummy"]
    assert main([*argv, *small, "--out", str(tmp_path), "--name", "none"]) == 0
    skipped = load(tmp_path / "none.json").skipped
    assert "decode of 16 x 32: the KV cache holds 320 tokens" in skipped
    assert "a prompt of 16: the time limit of 0 s" in skipped
    assert f"not measured: {skipped[0]}" in capsys.readouterr().out
    assert load(tmp_path / "none.json").model["weights"] == "dummy"


def test_cells_go_from_cheap_to_dear_as_far_as_there_is_room() -> None:
    engine, runner = SimpleNamespace(max_len=32768), SimpleNamespace(num_pages=5000)
    limits = SimpleNamespace(max_num_seqs=128, page_size=64)
    built = SimpleNamespace(engine=engine, runner=runner)
    cells, skipped = cells_of(StepsBench(built, None, limits, None, CUDA_PLAN, is_cuda=True))  # type: ignore[arg-type]
    assert [cell.cost for cell in cells] == sorted(cell.cost for cell in cells)
    assert [cell.tokens for cell in cells if cell.kind is Kind.PROMPT] == [*(16 << n for n in range(11)), 32767]
    assert [cell.batch for cell in cells if cell.kind is Kind.BATCH] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert [cell.tokens for cell in cells if cell.kind is Kind.CONTEXT] == [128 << n for n in range(9)]
    assert skipped == ["decode of 256 x 1024: max_num_seqs is 128"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "llama-3"], "--model llama-3: no folder with config.json"),
        (["--set", "port"], "must be NAME=VALUE with a flag of serve, got port"),
        (["--set", "max-num-seqs=0"], "--max-num-seqs"),
    ],
)
def test_what_cannot_run_is_an_error_that_says_why(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "steps", "--device", "cpu", *flags]) == 3
    assert said in capsys.readouterr().err


def test_unwritable_folder_is_refused_before_measuring(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*argv, "--out", str(tmp_path / "file" / "folder")]) == 3
    printed = capsys.readouterr()
    assert printed.err.startswith("hallmark: ")  # no progress before it
    assert str(tmp_path / "file") in printed.err


def test_floor_is_bytes_for_one_token_and_flops_for_many(folder: Path) -> None:
    config = load_config(folder)
    num_weights = 2 * (64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 97 * 64
    by_bytes, by_flops = Ceilings(1e30, 1e3), Ceilings(1e3, 1e30)
    kv_bytes = 2 * 2 * 2 * 16 * 4 * 10  # layers, keys and values, KV heads, head dim, fp32, tokens
    one = [(1, 10)]
    assert step_floor_ms(config, Dtype.FP32, Dtype.FP32, by_bytes, one) == pytest.approx(4 * num_weights + kv_bytes)
    pairs, head = 10 * 11 // 2, 97 * 64
    flops = 2 * ((num_weights - head) * 10 + head) + 2 * 4 * pairs * 16 * 4
    assert step_floor_ms(config, Dtype.FP32, Dtype.FP32, by_flops, [(10, 10)]) == pytest.approx(flops)
