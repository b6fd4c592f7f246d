"""The canary against itself and against a build with a slower prefill, in under a minute of an H200.

python tests/e2e/canary_rows.py --out docs/benchmarks/canary-nvidia-h200.json [--matrix DIR]

Two servers of some layers of Llama-3.1-8B with the demo's vocabulary and dummy weights; on a CPU the demo model. The
second one is the same build, but before each step with a prompt of one bucket its engine waits for 0.3 of what such a
prompt takes. Rows of the same runs in FILE are replaced, others stay. Exits with 1 when a verdict is not what it must
be. Numerics by a real model's sizes of weights, and a window off by one: `test_canary_gpu.py`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import torch
from planted_servers import HALLMARK
from running_server import DEMO, ROOT, Server, free_port, running

SLOWDOWN = 1.3
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
# Loaded by the engine of the slower build. The file `wait` beside it holds seconds.
SITE = """
import sys

if "server.engine.process" in sys.orig_argv:
    import time
    from pathlib import Path

    from server.engine.runner import ModelRunner

    WAIT, LENGTHS = Path(__file__).with_name("wait"), range({lo}, {hi})
    launch = ModelRunner.launch

    def slower(self, batch):
        num_prompts = batch.num_prefill + batch.num_extend
        if any(length in LENGTHS for length in batch.query_lens[:num_prompts]) and WAIT.exists():
            time.sleep(float(WAIT.read_text()))
        return launch(self, batch)

    ModelRunner.launch = slower
"""


@dataclass(frozen=True)
class Trace:
    """What is sent, and the bucket whose prompts are slowed down."""

    lengths: tuple[int, ...]
    buckets: tuple[str, ...]
    slowed: range  # prompt tokens
    slowed_bucket: str
    flags: tuple[str, ...]

    @property
    def slowed_length(self) -> int:
        return next(length for length in self.lengths if length in self.slowed)


GPU = Trace((96, 384, 1536), ("le_128", "le_512", "le_2k"), range(513, 2049), "le_2k", ("--utilization", "0.3"))
CPU = Trace((32, 160), ("le_128", "le_512"), range(129, 513), "le_512", ("--utilization", "0.5", "--noise-ms", "20"))


def model_folder(folder: Path, layers: int) -> Path:
    """The demo's tokenizer beside the 8B's config.json; no weights."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    config = json.loads((folder / "config.json").read_text()) | LLAMA_8B | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def started(stack: ExitStack, folder: Path, flags: list[str], site: str | None = None) -> Server:
    """A server whose engine loads `site`; not ready yet."""
    folder.mkdir()
    known = [path for path in (os.environ.get("PYTHONPATH"), str(ROOT)) if path]
    if site is not None:
        (folder / "sitecustomize.py").write_text(site)
        known.insert(0, str(folder))
    environ = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(known), "HALLMARK_CACHE_DIR": str(folder / "cache")}
    port = free_port()
    program = [*HALLMARK, "serve", "--port", str(port), *flags]
    return stack.enter_context(running(program, port, folder / "log", environ))


def prompt_s(server: Server, num_tokens: int) -> float:
    """Median seconds of a prompt of fresh tokens and one more."""
    samples = []
    with httpx.Client(timeout=60) as client:  # one for all: to make one takes 20 ms, twice such a prompt
        for n in range(7):
            prompt = [10 + (n * 131 + i * 7) % 3000 for i in range(num_tokens)]
            began = time.perf_counter()
            body = {"model": "canary", "prompt": prompt, "max_tokens": 1}
            client.post(f"{server.url}/v1/completions", json=body).raise_for_status()
            samples.append(time.perf_counter() - began)
    return statistics.median(samples[2:])


def canary(candidate: Server, baseline: Server, trace: Trace, folder: Path, *flags: str) -> dict[str, Any]:
    """Its verdicts as a row, shown as they come."""
    lengths = ["--lengths", *map(str, trace.lengths), "--vocab-size", "4000", "--samples", "20", "--looks", "2"]
    command = [*HALLMARK, "canary", "--url", candidate.url, "--baseline", baseline.url, *lengths, *trace.flags, *flags]
    at, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    done = subprocess.run([*command, "--out-dir", str(folder)], cwd=ROOT, check=False)
    verdicts = json.loads((folder / "canary.json").read_text())["verdicts"]
    rows = [[it["stage"], it["bucket"], it["outcome"], it["detail"], it["reasons"]] for it in verdicts]
    took_s = round(time.perf_counter() - began, 1)
    return {"at": at, "took_s": took_s, "exit_code": done.returncode, "verdicts": rows}


def outcomes(row: dict[str, Any]) -> dict[str, str]:
    """Of performance, by bucket."""
    return {bucket: outcome for stage, bucket, outcome, *_ in row["verdicts"] if stage == "performance"}


def write(out: Path, machine: dict[str, Any], command: str, rows: list[dict[str, Any]]) -> None:
    """A line a run, so that a diff shows which are new."""
    older = json.loads(out.read_text())["runs"] if out.exists() else []
    names = {row["run"] for row in rows}
    lines = [json.dumps(row) for row in [*(row for row in older if row["run"] not in names), *rows]]
    head = f'"command": {json.dumps(command)},\n"machine": {json.dumps(machine)}'
    out.write_text(f'{{\n{head},\n"runs": [\n' + ",\n".join(lines) + "\n]\n}\n")


def itself(right: Server, trace: Trace, place: Path, what: str) -> tuple[bool, dict[str, Any]]:
    """Whether a server passes against itself, and the row."""
    row = canary(right, right, trace, place / "itself", "--exact")
    is_right = row["exit_code"] == 0 and outcomes(row) == dict.fromkeys(trace.buckets, "pass")
    return is_right, {"run": f"itself, {what}", **row}


def slower(right: Server, slow: Server, trace: Trace, place: Path, what: str) -> tuple[bool, dict[str, Any]]:
    """Whether the slower build fails in its bucket, and in no other; and the row."""
    wait_s = (SLOWDOWN - 1) * prompt_s(right, trace.slowed_length)
    (place / "slow" / "wait").write_text(str(wait_s))
    row = canary(slow, right, trace, place / "slower")
    expected = dict.fromkeys(trace.buckets, "pass") | {trace.slowed_bucket: "fail"}
    name = f"prefill of {trace.slowed_bucket} made {SLOWDOWN}x slower, {what}"
    return row["exit_code"] == 2 and outcomes(row) == expected, {"run": name, "wait_ms": round(wait_s * 1e3, 3), **row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8, help="of the model on a GPU")
    parser.add_argument("--matrix", type=Path, help="with evidence of Llama-3.1-8B's shapes on this machine")
    arguments = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    trace = GPU if is_cuda else CPU
    what = f"{arguments.layers} layers of Llama-3.1-8B" if is_cuda else "the demo model"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        flags = ["--served-model-name", "canary", "--max-model-len", "4096" if is_cuda else "512"]
        flags += ["--max-num-seqs", "16", "--kv-cache-tokens", "65536", "--attestation-interval-s", "0"]
        flags += ["--matrix", str(arguments.matrix.resolve())] if arguments.matrix else []
        if is_cuda:
            flags += ["--model", str(model_folder(place / "model", arguments.layers)), "--load-format", "dummy"]
        site = SITE.format(lo=trace.slowed.start, hi=trace.slowed.stop)
        right, slow = (started(stack, place / it, flags, site if it == "slow" else None) for it in ("right", "slow"))
        for server in (right, slow):
            server.wait_ready()
        machine = right.get("/attention").json()["fingerprint"]
        found = []
        for run in (lambda: itself(right, trace, place, what), lambda: slower(right, slow, trace, place, what)):
            found.append(run())
            write(arguments.out, machine, "python tests/e2e/canary_rows.py", [row for _, row in found])
    num_right = sum(is_right for is_right, _ in found)
    print(f"{num_right} of {len(found)} runs are what they must be", flush=True)
    return 0 if num_right == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
