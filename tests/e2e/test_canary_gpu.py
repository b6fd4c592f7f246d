"""The canary on a GPU, once a release: itself passes, a planted 1.3x of prefill and a window off by one are caught.

The attention is that of an 8B (32 query heads, 8 of keys and values, head dim 128) in 8 layers with dummy weights.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from holding_proxy import holding
from running_server import DEMO, Server, StartServer
from test_canary_run import canary

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.timeout(900)]
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 9000,
}


def copied(folder: Path, **changes: object) -> Path:
    """The demo's folder with another config.json."""
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def big(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = copied(tmp_path_factory.mktemp("models") / "big", **SHAPE)
    less = ("--max-num-seqs", "32", "--gpu-memory-utilization", "0.4")
    with start_server("--model", str(folder), "--device", "cuda", "--load-format", "dummy", *less) as server:
        server.wait_ready()
        yield server


def outcomes(folder: Path, stage: str) -> dict[str, str]:
    """Outcome by bucket."""
    verdicts = json.loads((folder / "canary.json").read_text())["verdicts"]
    return {it["bucket"]: it["outcome"] for it in verdicts if it["stage"] == stage}


@pytest.mark.parametrize(("slowdown", "code"), [(1.0, 0), (1.3, 2)])
def test_a_prefill_that_takes_a_third_longer_fails_in_its_bucket_only(
    big: Server, tmp_path: Path, slowdown: float, code: int
) -> None:
    with ExitStack() as stack:
        baseline = stack.enter_context(holding(big.url))
        candidate = stack.enter_context(holding(big.url, slowdown=slowdown, lengths=range(513, 2049)))
        less = ("--vocab-size", "4000", "--utilization", "0.4")
        done = canary(candidate, "--baseline", baseline, *less, "--out-dir", str(tmp_path))
    assert done.returncode == code, done.stdout + done.stderr
    expected = dict.fromkeys(("le_128", "le_512", "le_2k", "le_8k"), "pass")
    assert outcomes(tmp_path, "performance") == expected | ({"le_2k": "fail"} if code else {})


def test_a_window_that_is_off_by_one_fails_on_numerics_on_a_gpu(start_server: StartServer, tmp_path: Path) -> None:
    """In fp32, where rounding hides nothing; the answers that ship were recorded on a CPU."""
    windowed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 2048}
    flags = ("--served-model-name", "demo", "--device", "cuda", "--dtype", "fp32", "--on-unproven", "degrade")
    for name, changes, code in (("whole", {}, None), ("windowed", windowed, 1)):
        folder = copied(tmp_path / name, **changes)
        with start_server("--model", str(folder), *flags, "--gpu-memory-utilization", "0.4") as server:
            server.wait_ready()
            done = canary(server.url, "--no-performance", "--out-dir", str(tmp_path / f"{name}-out"))
        assert code is None or done.returncode == code, done.stdout + done.stderr
        expected = dict.fromkeys(("le_128", "le_512", "le_2k", "le_8k"), "pass")
        failing = {} if code is None else {"le_8k": "fail"}
        assert outcomes(tmp_path / f"{name}-out", "numerics") == expected | failing
