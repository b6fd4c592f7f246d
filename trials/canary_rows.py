"""The canary against itself and against a build with a slower prefill, in some 80 s of an H200.

python trials/canary_rows.py --out docs/benchmarks/canary-nvidia-h200.json [--matrix DIR]

Two servers of some layers of Llama-3.1-8B with the demo's vocabulary and dummy weights; on a CPU the demo model. The
second one is the same build, but before each step with a prompt of one bucket its engine waits, so long that the first
token of such a prompt takes 1.3 times as long; what it takes with the wait and without is measured, and said. Rows of
the same runs in FILE are replaced, others stay. Exits with 1 when a verdict is not what it must be. Numerics by a real
model's sizes of weights, and a window off by one: `test_canary_gpu.py`.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from planted_servers import HALLMARK
from running_server import DEMO, ROOT, Server, free_port, running

from qualification.load.client import LoadClient
from qualification.load.discovery import discover
from qualification.load.trace import Seed, stratified

SLOWDOWN = 1.3
_VOCAB_SIZE, _OUTPUT_TOKENS = 4000, 4  # of what is sent to find the wait
_ROUNDS, _EACH = 4, 24  # of prompts without the wait and with it, before it is set anew
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

    from server.engine.execution.runner import ModelRunner

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
    """Requests that are sent, and the bucket whose prompts are slowed down."""

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


def model_folder(folder: Path, changes: Mapping[str, object]) -> Path:
    """The demo's tokenizer beside another config.json; no weights."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    config = json.loads((folder / "config.json").read_text()) | dict(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def folder_of(place: Path, layers: int) -> Path:
    """Some layers of Llama-3.1-8B."""
    return model_folder(place, LLAMA_8B | {"num_hidden_layers": layers})


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


class FirstTokens:
    """Times to the first token of fresh prompts of one length, by the canary's own client, as rarely as it sends."""

    def __init__(self, server: Server, num_tokens: int) -> None:
        self._client = LoadClient(discover(server.url)[0])
        self._num_tokens = num_tokens
        self._num_sent = 0
        warm = self._client.run_in_turn(self._requests(1e9)).samples
        spans = [it.read_at[-1] for it in warm if it.read_at]
        self._rate = 0.3 / statistics.median(spans)

    def median_s(self) -> float:
        samples = self._client.run(self._requests(self._rate)).samples
        return statistics.median(it.ttft_s for it in samples if it.ttft_s is not None)

    def close(self) -> None:
        self._client.close()

    def _requests(self, rate: float) -> list[Any]:
        self._num_sent += 1
        seed = Seed("wait", str(self._num_sent), _VOCAB_SIZE)
        return stratified(seed, rate=rate, lengths=(self._num_tokens,), num_each=_EACH, num_output=_OUTPUT_TOKENS)


def set_wait(slow: Server, file: Path, num_tokens: int) -> dict[str, float]:
    """Write into `file` what makes the first token `SLOWDOWN` times as late, and say what it does.

    A sleep is longer than asked for, and the engine looks for work another while: so the wait is set by its effect.
    """
    with closing(FirstTokens(slow, num_tokens)) as first_tokens:
        wait_s, found = 0.0, {}
        for _ in range(_ROUNDS):
            file.unlink(missing_ok=True)
            bare_s = first_tokens.median_s()
            wait_s = wait_s or (SLOWDOWN - 1) * bare_s
            file.write_text(str(wait_s))
            factor = first_tokens.median_s() / bare_s
            found = {"bare_ms": 1e3 * bare_s, "wait_ms": 1e3 * wait_s, "factor": factor}
            found = {name: round(value, 3) for name, value in found.items()}
            print(f"first token of {num_tokens}: {found}", flush=True)
            if abs(factor - SLOWDOWN) < 0.02:
                break
            wait_s *= (SLOWDOWN - 1) / max(factor - 1, 0.05)
    return found


def canary(candidate: Server, baseline: Server, trace: Trace, folder: Path, *flags: str) -> dict[str, Any]:
    """Run the canary and return its verdicts as a row; they are printed as they come."""
    load = ["--lengths", *map(str, trace.lengths), "--vocab-size", str(_VOCAB_SIZE)]
    load += ["--samples", "20", "--looks", "2"]
    command = [*HALLMARK, "canary", "--url", candidate.url, "--baseline", baseline.url, *load, *trace.flags, *flags]
    at, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    done = subprocess.run([*command, "--out-dir", str(folder)], cwd=ROOT, check=False)
    verdicts = json.loads((folder / "canary.json").read_text())["verdicts"]
    rows = [[it["stage"], it["bucket"], it["outcome"], it["detail"], it["reasons"]] for it in verdicts]
    took_s = round(time.perf_counter() - began, 1)
    return {"at": at, "took_s": took_s, "exit_code": done.returncode, "verdicts": rows}


def outcomes(row: dict[str, Any]) -> dict[str, str]:
    """Return the outcomes of performance, by bucket."""
    return {bucket: outcome for stage, bucket, outcome, *_ in row["verdicts"] if stage == "performance"}


def write(out: Path, machine: dict[str, Any], command: str, rows: list[dict[str, Any]]) -> None:
    """A line a run, so that a diff shows which are new; of a slowdown the latest, whatever its factor."""

    def kind(row: dict[str, Any]) -> str:
        return re.sub(r"[\d.]+x", "", row["run"])

    older = json.loads(out.read_text())["runs"] if out.exists() else []
    kinds = {kind(row) for row in rows}
    lines = [json.dumps(row) for row in [*(row for row in older if kind(row) not in kinds), *rows]]
    head = f'"command": {json.dumps(command)},\n"machine": {json.dumps(machine)}'
    out.write_text(f'{{\n{head},\n"runs": [\n' + ",\n".join(lines) + "\n]\n}\n")


def itself(right: Server, trace: Trace, place: Path, what: str) -> tuple[bool, dict[str, Any]]:
    """Return whether a server passes against itself, and the row."""
    row = canary(right, right, trace, place / "itself", "--exact")
    is_right = row["exit_code"] == 0 and outcomes(row) == dict.fromkeys(trace.buckets, "pass")
    return is_right, {"run": f"itself, {what}", **row}


def slower(right: Server, slow: Server, trace: Trace, place: Path, what: str) -> tuple[bool, dict[str, Any]]:
    """Return whether the slower build fails in its bucket, and in no other; and the row."""
    planted = set_wait(slow, place / "slow" / "wait", trace.slowed_length)
    row = canary(slow, right, trace, place / "slower")
    expected = dict.fromkeys(trace.buckets, "pass") | {trace.slowed_bucket: "fail"}
    name = f"prefill of {trace.slowed_bucket} made {SLOWDOWN}x slower, {what}"
    return row["exit_code"] == 2 and outcomes(row) == expected, {"run": name, **planted, **row}


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
            flags += ["--model", str(folder_of(place / "model", arguments.layers)), "--load-format", "dummy"]
        site = SITE.format(lo=trace.slowed.start, hi=trace.slowed.stop)
        right, slow = (started(stack, place / it, flags, site if it == "slow" else None) for it in ("right", "slow"))
        for server in (right, slow):
            server.wait_ready()
        machine = right.get("/attention").json()["fingerprint"]
        found = []
        for run in (lambda: itself(right, trace, place, what), lambda: slower(right, slow, trace, place, what)):
            found.append(run())
            write(arguments.out, machine, "python trials/canary_rows.py", [row for _, row in found])
    num_right = sum(is_right for is_right, _ in found)
    print(f"{num_right} of {len(found)} runs are what they must be", flush=True)
    return 0 if num_right == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
