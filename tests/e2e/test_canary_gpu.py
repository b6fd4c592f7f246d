"""The canary on a GPU, once a release: itself passes, a planted 1.3x of prefill and a window off by one are caught.

The model is eight of an 8B's layers (32 query heads, 8 of keys and values, head dim 128) with the demo's vocabulary
and random weights of a real model's size: dummy ones, a thousandth each, give every token the same probability whatever
attention computes. All 32 layers take four times as long and show no more. Both servers are there all the time: 3.5 GB
of weights and 2 of cache each.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from canary_rows import model_folder
from running_server import DEMO, Server, StartServer
from safetensors.torch import save_file

from kernels.linear.paths import LINEAR_PATHS
from kernels.vocabulary.shape import PLANNED_PHASES
from support.e2e.canary import canary
from support.e2e.holding_proxy import holding

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.timed, pytest.mark.timeout(900)]
WINDOW = 2048  # the recorded prompts of 2,049 and 3,500 tokens see its edge, and no shorter one does
NUM_LAYERS, HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 4096, 14336, 32, 8, 128
CONFIG = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 8192,
}  # fmt: skip

PATHS = ("gluon.prefill.hopper", "gluon.extend.hopper", "gluon.decode.hopper", *(path.name for path in LINEAR_PATHS))
BUCKETS = ("le_128", "le_512", "le_2k", "le_8k")
REFUSAL = "refuses to serve"
# So that each bucket is decided: of 32 layers, by simulation with the times of one H200, 97 of 100 are with 20 samples.
TRACE = ("--vocab-size", "4000", "--lengths", "96", "384", "1536", "--samples", "30", "--looks", "2", "--noise-ms", "1")
TIMED = BUCKETS[:3]


def write_weights(folder: Path) -> None:
    """A file a layer, in bf16: norms of one, matrices that keep a row's size; attention's own part is made larger."""
    sizes = {
        "self_attn.q_proj": (NUM_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, NUM_HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        files[f"layer{layer}.safetensors"] = {f"{prefix}{name}.weight": size for name, size in sizes.items()} | {
            f"{prefix}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")
        }
    vocab = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    files["rest.safetensors"] = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}

    def write(seed: int, name: str) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        tensors = {}
        for tensor, size in files[name].items():
            empty = torch.empty(size, dtype=torch.bfloat16, device="cuda")
            scale = 1.28 * size[-1] ** -0.5 * (5 if "o_proj" in tensor else 1)
            filled = empty.fill_(1.0) if len(size) == 1 else empty.normal_(0.0, scale, generator=generator)
            tensors[tensor] = filled.cpu()
        save_file(tensors, folder / name)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(len(files)), files))
    where = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def qualifying(folder: Path, matrices: Path, *phases: str) -> subprocess.Popen[str]:
    """One path a shape, so that two servers choose the same kernels."""
    program = [sys.executable, "-m", "server.cli", "qualify", "--model", str(folder), "--quick"]
    flags = ["--out-dir", str(matrices), "--paths", *PATHS, *(["--phases", *phases] if phases else [])]
    return subprocess.Popen([*program, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def servers(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """(window as it should be, one key short), under `refuse`, both ready.

    The second starts when the first is ready, and takes its algorithms of matmuls from the cache: measured apart, they
    may differ, and with them bits.
    """
    place = tmp_path_factory.mktemp("canary")
    windows = (WINDOW, WINDOW - 1)
    folders = [model_folder(place / f"window{it}", CONFIG | {"sliding_window": it}) for it in windows]
    matrices, attention = place / "matrices", [phase.value for phase in PLANNED_PHASES]
    runs = [qualifying(folders[0], matrices), qualifying(folders[1], matrices, *attention)]  # products are the same
    write_weights(folders[0])
    for file in folders[0].glob("*.safetensors*"):
        (folders[1] / file.name).symlink_to(file)
    for run in runs:
        said, _ = run.communicate()
        assert run.returncode == 0, said
    torch.cuda.empty_cache()
    flags = ["--device", "cuda", "--served-model-name", "dummy-8b", "--matrix", str(matrices)]
    flags += ["--on-unproven", "refuse", "--max-num-seqs", "16", "--kv-cache-tokens", "65536"]
    with ExitStack() as stack:
        both = []
        for folder in folders:
            both.append(server := stack.enter_context(start_server("--model", str(folder), *flags)))
            server.wait_for(lambda it=server: it.status_of("/readyz") == 200 or REFUSAL in it.log, "an answer", 120)
            assert REFUSAL not in server.log, server.log
        yield both[0], both[1]


def outcomes(folder: Path, stage: str) -> dict[str, str]:
    """Outcome by bucket."""
    verdicts = json.loads((folder / "canary.json").read_text())["verdicts"]
    return {it["bucket"]: it["outcome"] for it in verdicts if it["stage"] == stage}


def test_a_window_off_by_one_fails_numerics_in_its_bucket(servers: tuple[Server, Server], tmp_path: Path) -> None:
    """Compare with `--exact`: nothing else has changed, and bf16's tolerance would hide the difference."""
    right, wrong = servers
    flags = ("--baseline", right.url, "--exact", "--no-performance", "--out-dir", str(tmp_path))
    done = canary(wrong.url, *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    assert outcomes(tmp_path, "numerics") == dict.fromkeys(BUCKETS, "pass") | {"le_8k": "fail"}


def test_a_server_against_itself_passes(servers: tuple[Server, Server], tmp_path: Path) -> None:
    right, _ = servers
    done = canary(right.url, "--baseline", right.url, "--exact", *TRACE, "--out-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(tmp_path, "numerics") == dict.fromkeys(BUCKETS, "pass")
    assert outcomes(tmp_path, "performance") == dict.fromkeys(TIMED, "pass")


def test_a_prefill_a_third_slower_fails_in_its_bucket_only(servers: tuple[Server, Server], tmp_path: Path) -> None:
    right, _ = servers
    with ExitStack() as stack:
        baseline = stack.enter_context(holding(right.url))
        candidate = stack.enter_context(holding(right.url, slowdown=1.3, lengths=range(513, 2049)))
        done = canary(candidate, "--baseline", baseline, *TRACE, "--out-dir", str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert outcomes(tmp_path, "performance") == dict.fromkeys(TIMED, "pass") | {"le_2k": "fail"}
