"""Time embeddings of dummy Qwen3-Embedding-0.6B and -8B on one GPU, over HTTP, beside transformers' Qwen3Model.

python trials/embeddings_beside_transformers.py --out docs/benchmarks/embeddings-nvidia-h200.json [--limit-s 118]
python trials/embeddings_beside_transformers.py --tiny --out FILE --limit-s 600   # two layers on a CPU: does it work?

Both servers start at once and are measured one after the other by embedding_speed.py, the other idle. Then transformers
(sdpa, the server's dtype) computes what was asked in one request, as ids on the device: no HTTP, and no padding. The
file is written after each piece, and what there was no time for is left out of it. Needs transformers. The last lines
are the table for a page. The exit status is 1 where a server was not measured.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import psutil
import torch
import transformers
import triton
from ready import wait_ready
from running_server import DEMO, ROOT, free_port, running

SIZES = {"0.6b": (1024, 3072, 28, 16), "8b": (4096, 12288, 36, 32)}  # hidden size, width, layers, query heads
TINY = {"tiny": (256, 640, 2, 2)}
ROUNDS = 5  # requests of a row
SERVE = (
    *("--task", "embed", "--load-format", "dummy", "--no-prefix-caching", "--on-unproven", "degrade"),
    *("--max-model-len", "16384", "--max-num-batched-tokens", "8192", "--kv-cache-tokens", "65536"),
)


def write_model(folder: Path, hidden: int, width: int, layers: int, heads: int, *, is_tiny: bool) -> dict[str, Any]:
    """Write the configuration and the demo model's tokenizer; weights are the server's to draw."""
    folder.mkdir()
    config = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": min(8, heads),
        "head_dim": 128,
        "vocab_size": 4096 if is_tiny else 151_665,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    served = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": _dtype(is_tiny)}
    (folder / "config.json").write_text(json.dumps(config | served))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return config


def _dtype(is_tiny: bool) -> str:
    return "float32" if is_tiny else "bfloat16"


def by_transformers(config: dict[str, Any], rows: list[dict[str, Any]], until: float) -> list[dict[str, Any]]:
    """Time the rows of one request each, in this process; those that `until` (monotonic seconds) has room for."""
    is_tiny = config["hidden_size"] == TINY["tiny"][0]
    device = torch.device("cpu" if is_tiny else "cuda")
    torch.set_default_dtype(getattr(torch, _dtype(is_tiny)))
    with device:
        made = transformers.Qwen3Config(**config, attn_implementation="sdpa")
        model = transformers.Qwen3Model(made).eval()
    torch.set_default_dtype(torch.float32)
    found = []
    for row in rows:
        # Three times what ours took is room enough, but for the longest lists (2.9 times, two cores).
        if row["case"] == "clients" or time.monotonic() + 3 * (1 + ROUNDS) * row["ms"] / 1e3 > until:
            continue
        times = []
        for _ in range(1 + ROUNDS):
            ids = torch.randint(10, 2000, (row["texts"], row["tokens"]), device=device)
            if not is_tiny:
                torch.cuda.synchronize()  # the ids are drawn
            began = time.perf_counter()
            with torch.inference_mode():
                states = model(ids, use_cache=False).last_hidden_state[:, -1]
                torch.nn.functional.normalize(states.float(), dim=-1).cpu()  # waits for the device
            times.append(1e3 * (time.perf_counter() - began))
        spread = {"ms": statistics.median(times[1:]), "ms_min": min(times[1:]), "ms_max": max(times[1:])}
        what = {key: row[key] for key in ("case", "texts", "tokens")}
        found.append(what | {"n": ROUNDS} | {name: round(ms, 2) for name, ms in spread.items()})
    return found


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    if torch.cuda.is_available():
        query = "--query-gpu=name,driver_version,power.limit,clocks.max.sm"
        asked = ["nvidia-smi", query, "--format=csv,noheader", "-i", "0"]
        found["gpu"] = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    return found


def plan_of(url: str) -> dict[str, int]:
    """Count the shapes of the server's plan by status."""
    shapes = httpx2.get(f"{url}/plan", timeout=20).raise_for_status().json()["shapes"]
    return {status: sum(it["status"] == status for it in shapes) for status in sorted({it["status"] for it in shapes})}


def markdown(models: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| model | asked | ms (range) | texts a second | transformers ms | its time over ours |",
        "| --- " * 6 + "|",
    ]
    for name, found in models.items():
        beside = {(it["texts"], it["tokens"]): it["ms"] for it in found.get("transformers", ())}
        for row in found.get("rows", ()):
            peer = beside.get((row.get("texts"), row["tokens"]))
            texts = row.get("texts", row.get("clients"))
            asked = f"{row['case']}: {texts} of {row['tokens']} tokens"
            rate = row.get("texts_per_s") or round(row["texts"] / row["ms"] * 1e3)
            ratio = "" if peer is None else f"{peer / row['ms']:.2f}"
            ours = f"{row['ms']} ({row['ms_min']} to {row['ms_max']})"
            lines.append(f"| {name} | {asked} | {ours} | {rate} | {'' if peer is None else peer} | {ratio} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=118.0, help="in all (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, on a CPU")
    parser.add_argument("--commit", help="what runs, where the checkout has no git")
    args = parser.parse_args()
    since_start_s = time.time() - psutil.Process().create_time()  # torch and transformers are imported
    until, sizes = time.monotonic() - since_start_s + args.limit_s, TINY if args.tiny else SIZES
    result: dict[str, Any] = {
        "command": f"python trials/embeddings_beside_transformers.py --limit-s {args.limit_s:g}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": args.commit,
        "machine": machine(),
        "serve": " ".join(SERVE),
        "models": {},
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def left(after_s: float = 0.0) -> float:
        seconds: float = until - time.monotonic() - after_s
        return max(1.0, seconds)

    def save() -> None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, began = Path(name), time.monotonic()
        servers, configs = {}, {}
        for size, numbers in sizes.items():
            model, port, log = folder / f"qwen3-embedding-{size}", free_port(), folder / f"{size}.log"
            configs[size] = write_model(model, *numbers, is_tiny=args.tiny)
            command = [sys.executable, "-m", "server.cli", "serve", "--model", str(model), "--port", str(port), *SERVE]
            servers[size] = stack.enter_context(running(command, port, log, environment)), log
        for size, (server, log) in servers.items():
            entry = result["models"].setdefault(size, {})
            try:
                wait_ready(server.process, server.url, log, left(after_s=30))
                entry["ready_after_s"] = round(time.monotonic() - began, 1)
            except RuntimeError as error:
                entry["error"] = str(error)[-1500:]
            save()
        for size, (server, _) in servers.items():
            entry, rows = result["models"][size], folder / f"{size}.json"
            if "error" in entry:
                continue
            speed = [sys.executable, str(ROOT / "trials" / "embedding_speed.py"), "--url", server.url]
            speed += ["--out", str(rows), "--rounds", str(ROUNDS), "--seconds", "2"]
            try:
                subprocess.run(speed, check=True, timeout=left(), stdout=subprocess.DEVNULL)
                entry |= {"plan": plan_of(server.url), "rows": json.loads(rows.read_text())["rows"]}
            except (subprocess.SubprocessError, httpx2.HTTPError) as error:
                entry["error"] = repr(error)
            save()
        for size in reversed(sizes):
            entry = result["models"][size]
            if "rows" in entry and left() > 10:
                entry["transformers"] = by_transformers(configs[size], entry["rows"], until - 4)
                save()
    sys.stdout.write(markdown(result["models"]) + "\n")
    return 0 if all("rows" in entry for entry in result["models"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
