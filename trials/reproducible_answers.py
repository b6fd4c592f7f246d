"""Compare answers alone and in company to the bit: tokens, log probabilities and likeliest tokens.

    python trials/reproducible_answers.py MODEL --prompts 1000 --tokens 1000 8000 --at-once 64 --out answers.json

MODEL is a folder with config.json; without --weights its weights are random. The first pass asks each prompt alone.
The others ask all of them in an order drawn by the seed, up to --at-once at a time, and are compared with it: mixed,
with prefix hits (twice, on one engine), in odd chunks, with too few pages, eager (on a GPU), and alone again. Each pass
is a process of its own, so that every one is a restart. Greedy and drawn requests, penalties, limits and `n` take
turns.
Other settings go by --set, as --set dtype=bf16. Exit code 1 where an answer differs; --variant leaves the setting out.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qualification.model.config import ModelConfig
from server.engine.scheduling.engine import Engine
from server.engine.startup.builder import build_engine
from server.model.load.load import load_config
from server.protocol.messages import Fork, SamplingParams, Submit
from server.settings import read_settings

KINDS: tuple[Mapping[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8, "seed": 11},
    {"temperature": 1.1, "top_k": 40, "min_p": 0.02, "seed": 12, "repetition_penalty": 1.2},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
)
# Ranks, with --set tensor_parallel_size=2, meet over the loopback, and use no NVLink multicast; the profiler is silent.
ENVIRONMENT = {
    **{"GLOO_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
    "KINETO_LOG_LEVEL": "6",
}
MOST_NAMED = 5  # differences that a pass prints


@dataclass(frozen=True, slots=True)
class Pass:
    """One engine's settings beside the common ones, how many requests it has at once, and how often it is asked."""

    settings: Mapping[str, str]
    is_alone: bool = False
    num_rounds: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int


def passes(max_model_len: int, chunk: int, is_cuda: bool) -> dict[str, Pass]:
    """Return what is compared, by name, the first of which is the measure of the others."""
    off, few = {"prefix_caching": "false"}, {"kv_cache_tokens": str(max_model_len + 64 * 8)}
    found = {
        "alone": Pass(off, is_alone=True),
        "mixed": Pass(off),
        "hits": Pass({}, num_rounds=2),
        "chunks": Pass({"max_num_batched_tokens": str(chunk), "max_num_interleaved_tokens": str(chunk // 3 * 2 + 1)}),
        "few pages": Pass(few),
        "alone again": Pass({}, is_alone=True),
    }
    return {**found, "eager": Pass({"cuda_graphs": "false"})} if is_cuda else found


def requests(args: argparse.Namespace, config: ModelConfig) -> list[Request]:
    """Return prompts of lengths drawn on a scale of logarithms; half of them begin as others do."""
    draw = random.Random(args.seed)
    low, high = args.tokens
    common = [draw.randrange(config.vocab_size) for _ in range(high)]
    found = []
    for index in range(args.prompts):
        length = round(low * (high / low) ** draw.random())
        shared = draw.randrange(length) if index % 2 else 0
        prompt = (*common[:shared], *(draw.randrange(config.vocab_size) for _ in range(length - shared)))
        kind = KINDS[index % len(KINDS)]
        sampling = SamplingParams(max_tokens=args.answer_tokens, ignore_eos=True, logprobs=index % 3, **kind)  # type: ignore[arg-type]
        found.append(Request(prompt, sampling, 3 if index % 10 == 1 else 1))
    return found


def answers(engine: Engine, asked: Sequence[Request], at_once: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return the tokens of each answer, and what its log probabilities are packed as."""
    draw = random.Random(seed)
    order = [*range(len(asked))]
    draw.shuffle(order)
    found: dict[str, dict[str, Any]] = {}
    left: dict[int, int] = {}  # answers under way of each request
    while order or engine.has_work:
        while order and len(left) < at_once and (at_once == 1 or not left or draw.random() < 0.7):
            index = order.pop()
            it = asked[index]
            left[index] = it.num_choices
            seeds = [None if it.sampling.seed is None else it.sampling.seed + i for i in range(it.num_choices)]
            forks = [Fork(f"{index}/{i}", seeds[i]) for i in range(1, it.num_choices)]
            engine.submit(Submit(f"{index}/0", [*it.prompt], it.sampling, forks=forks))
        output = engine.step()
        for delta in () if output is None else output.deltas:
            entry = found.setdefault(delta.request_id, {"tokens": [], "scores": "", "error": None})
            entry["tokens"] += delta.token_ids
            entry["scores"] += "".join(it.packed.hex() for it in delta.scores)
            entry["error"] = entry["error"] or delta.error_message
            if delta.finish_reason is not None:
                index = int(delta.request_id.partition("/")[0])
                left[index] -= 1
                if not left[index]:
                    del left[index]
    return found


def ask(args: argparse.Namespace) -> None:
    """Run one pass in this process, and write its answers to --out."""
    config = load_config(Path(args.model))
    own = all_passes(args)[args.run]
    given = {name: text for name, _, text in (it.partition("=") for it in args.set)}
    lengths = {"max_model_len": str(longest(args)), "max_num_seqs": str(args.at_once)}
    more = {} if args.weights else {"load_format": "dummy"}
    quiet = {"attestation_interval_s": "0", "shadow_budget": "0"}
    flags = {"model": args.model, "reproducible": str(not args.variant).lower(), **lengths, **more, **quiet, **given}
    built = build_engine(read_settings({**flags, **own.settings}, {}), frozenset(), lambda *_: None)
    asked, found = requests(args, config), []
    began = time.monotonic()
    at_once = 1 if own.is_alone else args.at_once
    for turn in range(own.num_rounds):
        found.append(answers(built.engine, asked, at_once, args.seed + turn))
    paths = sorted({(row.phase, row.path, row.status) for row in built.ready.plan})
    result = {
        "rounds": found,
        "seconds": round(time.monotonic() - began, 1),
        "fingerprint": built.ready.fingerprint,
        "paths": paths,
    }
    Path(args.out).write_text(json.dumps(result))
    if built.followers is not None:
        built.followers.close()


def longest(args: argparse.Namespace) -> int:
    return int(args.tokens[1]) + int(args.answer_tokens) + 1


def all_passes(args: argparse.Namespace) -> dict[str, Pass]:
    import torch

    is_cuda = torch.cuda.is_available() and "device=cpu" not in args.set
    return passes(longest(args), max(args.at_once, args.chunk), is_cuda)


def difference(name: str, alone: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return where an answer leaves the one that was alone."""
    if found["error"] or alone["error"]:
        return f"{name}: {found['error'] or alone['error']}"
    pairs = zip(alone["tokens"], found["tokens"], strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    ends = len(alone["tokens"]), len(found["tokens"])
    if same < max(ends):
        return f"{name}: token {same} of {ends[0]} is another"
    size = len(alone["scores"]) // max(1, len(alone["tokens"]))
    bits = zip(alone["scores"], found["scores"], strict=False)
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], bits)) // max(1, size)
    return f"{name}: its tokens are equal, the log probability of token {place} of {ends[0]} has other bits"


def compare(args: argparse.Namespace) -> int:
    """Run all passes, print what differs, and write all counts to --out."""
    rows, alone = [], None
    machine: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        for name in args.passes or all_passes(args):
            out = Path(folder) / "answers.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--run", name, "--out", str(out)]
            if subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False).returncode:
                print(f"{name:12}  did not run")
                rows.append({"pass": name, "error": "did not run"})
                continue
            result = json.loads(out.read_text())
            machine = {"fingerprint": result["fingerprint"], "paths": result["paths"]}
            for turn, found in enumerate(result["rounds"]):
                if alone is None:
                    alone = found
                names = [it for it in alone if alone[it] != found.get(it)]
                lost = {"tokens": [], "scores": "", "error": "no answer"}
                first = [difference(it, alone[it], found.get(it, lost)) for it in names[:MOST_NAMED]]
                row = {"pass": name, "round": turn, "equal": len(alone) - len(names), "different": len(names)}
                rows.append({**row, "first": first, "seconds": result["seconds"]})
                print(f"{name:12}  {row['equal']} equal, {len(names)} different, {result['seconds']} s", flush=True)
                for line in first:
                    print(f"    {line}", flush=True)
    report = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "reproducible": not args.variant,
        "model": Path(args.model).name,
        **machine,
        "passes": rows,
    }
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return int(any(row.get("different") or row.get("error") for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, nargs=2, default=(1000, 8000), metavar=("LEAST", "MOST"))
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=1237, help="tokens of a step of the pass with odd chunks")
    parser.add_argument("--passes", nargs="+", help="the measure of the others first (default: all)")
    parser.add_argument("--weights", action="store_true", help="load the folder's weights")
    parser.add_argument("--variant", action="store_true", help="without --reproducible, to see what it changes")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="JSON file of the counts")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is None:
        return compare(args)
    ask(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
