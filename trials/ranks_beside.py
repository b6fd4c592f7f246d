"""Time a model on several ranks beside other servers and one rank of ours, under one load, and hold it to targets.

    python trials/ranks_beside.py FOLDER --out FILE --ours 2:0,1 --ours 1:1 --peer 'vllm:0,1:COMMAND' --targets bf16

Starts every server on its GPUs, a peer by a command that may hold {model} and {port}, or named as NAME:-:URL where it
runs already; then `hallmark bench serve`'s load goes to each in turn, so that the others are idle. With --apart only
one of them is up at a time. Weights are dummies. The first of --ours is compared with all others. No server gets NVLink
multicast. Exit code 2 where a ratio misses its target, 4 where a number is missing.
"""

import argparse
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import torch
from running_server import ROOT, free_port, running

sys.path.insert(0, str(ROOT))  # for bench, which is not installed

from bench.machine import commit_of_code
from bench.serve.cases import cases_of
from bench.serve.report import sides_table, warnings
from bench.serve.row import LatencyObjectives
from bench.serve.run import Load, Side, SideRows, measure
from bench.steps.floor import step_floor_ms
from kernels.vocabulary.shape import Dtype
from qualification.common.exit_code import ExitCode
from qualification.common.table import table
from qualification.load.discovery import discover
from qualification.load.served import Scenario, ServedSide, ServePlan, ServeRow
from qualification.measure.costs.ceilings import Ceilings
from qualification.model.config import num_parameters, weight_bytes
from qualification.model.families.quantization import rounded_at_load
from qualification.report.ratios import ratios, same_case
from server.model.load.load import load_config

# Both libraries must not try NVLink's multicast: a program that ends while it uses it can cost the host its GPUs.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
NO_GPUS = "-"
H200_TFLOPS, H200_TBS = 790.0, 4.2  # of bf16, twice that of 8 bits; the floors' rates
SECONDS_TO_START = 300.0


@dataclass(frozen=True, slots=True)
class Targets:
    """The largest ratios of the first side's numbers: over a peer's, and over one rank's of ours; by case."""

    peer: Mapping[str, float]
    one: Mapping[str, float] = field(default_factory=dict)


TARGETS = {
    "bf16": Targets(
        {
            **{"ttft 128": 0.75, "ttft 512": 0.80, "ttft 2048": 0.90, "ttft 8192": 0.92},
            **{"tpot 1": 0.72, "tpot 8": 0.80, "tpot 32": 0.85},
        },
        {"tpot 1": 0.62, "ttft 8192": 0.64},
    ),
    "fp8": Targets(
        {
            **dict.fromkeys(("ttft 128", "ttft 512", "ttft 2048", "ttft 8192"), 0.90),
            **dict.fromkeys(("tpot 1", "tpot 8", "tpot 32"), 0.85),
        }
    ),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A server to compare. `command` None: it runs at `url`."""

    name: str
    gpus: str
    ranks: int | None  # of ours
    command: list[str] | None
    url: str
    port: int = 0


@dataclass
class Measured:
    """A server's numbers. `start_s` until it was ready; None: it ran before."""

    asked: Asked
    side: ServedSide
    start_s: float | None
    version: str


def ours(args: argparse.Namespace, ranks: int, gpus: str) -> Asked:
    port, longest = free_port(), max(*args.lengths, 512) + 512
    flags = [
        *("--model", str(args.model), "--load-format", "dummy", "--tensor-parallel-size", str(ranks)),
        *("--max-model-len", str(longest), "--max-num-seqs", str(max(*args.batches, *args.streams, 1))),
        # Given, because servers that start beside each other would each take what is free at that moment.
        *("--kv-cache-tokens", str(args.kv_cache_tokens), "--attestation-interval-s", "0", "--shadow-budget", "0"),
        *("--on-unproven", args.on_unproven, "--port", str(port)),
        *(("--quantization", args.quantization) if args.quantization else ()),
        *args.flags,
    ]
    command = [sys.executable, "-m", "server.cli", "serve", *flags]
    return Asked(f"ours-tp{ranks}", gpus, ranks, command, f"http://127.0.0.1:{port}", port)


def peer(args: argparse.Namespace, name: str, gpus: str, text: str) -> Asked:
    if text.startswith(("http://", "https://")):
        return Asked(name, gpus, None, None, text)
    port = free_port()
    command = ["bash", "-c", text.replace("{model}", str(args.model)).replace("{port}", str(port))]
    return Asked(name, gpus, None, command, f"http://127.0.0.1:{port}", port)


@contextmanager
def started(asked: Asked, folder: Path, logs: Path) -> Iterator[float | None]:
    """Give the seconds until a server is ready, and end it afterwards; its log's end is kept beside the results."""
    if asked.command is None:
        yield None
        return
    gpus = {} if asked.gpus == NO_GPUS else {"CUDA_VISIBLE_DEVICES": asked.gpus}
    environ = {**os.environ, **NO_MULTICAST, **gpus}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    log_file, began = folder / f"{asked.name}.log", time.monotonic()
    with running(asked.command, asked.port, log_file, environ) as server:
        try:
            server.wait_for(lambda: server.status_of("/health") == 200, f"{asked.name} to be ready", SECONDS_TO_START)
            yield time.monotonic() - began
        finally:
            text = server.log[-20000:]
            logs.with_suffix(f".{asked.name}.log").write_text(text)


def measured_together(
    args: argparse.Namespace, plan: ServePlan, salt: str, group: Sequence[Asked], deadline: float
) -> list[Measured]:
    """Start some servers side by side, and send each case to all of them in turn; none from `deadline` on."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        with ThreadPoolExecutor(len(group)) as pool:
            contexts = [started(it, Path(folder), args.out) for it in group]
            waits = [pool.submit(it.__enter__) for it in contexts]
            for context in contexts:
                stack.push(context)
            starts = [it.result() for it in waits]
        print("ready after", {it.name: s and round(s, 1) for it, s in zip(group, starts, strict=True)}, flush=True)
        sides = [Side(it.name, it.url, *discover(it.url)) for it in group]
        loads = [Load(side, num_processes=args.processes, timeout_s=120) for side in sides]
        found, say = [SideRows(it) for it in sides], progress()
        try:
            for case in cases_of(plan, salt):
                if time.monotonic() > deadline:
                    print(f"{case.name} is left out, and what is behind it: --limit-s is over", flush=True)
                    break
                of_case = measure([case], loads, objectives=LatencyObjectives({}, 50.0), progress=say)
                for all_rows, these in zip(found, of_case, strict=True):
                    all_rows.rows += these.rows
        finally:
            for load in loads:
                load.close()
        versions = [version_of(it.url) for it in group]
    served = [ServedSide(it.side.name, it.side.url, it.side.target.model, it.rows, []) for it in found]
    return [Measured(*it) for it in zip(group, served, starts, versions, strict=True)]


def progress() -> Any:
    last, began = [""], time.monotonic()

    def say(_: int, __: int, what: str) -> None:
        if what != last[0]:
            last[0] = what
            print(f"  {time.monotonic() - began:.0f} s {what}", file=sys.stderr, flush=True)

    return say


def version_of(url: str) -> str:
    try:
        return str(httpx2.get(f"{url}/version", timeout=10).json()["version"])
    except (httpx2.HTTPError, ValueError, KeyError) as error:
        return f"not said: {type(error).__name__}"


def number_of(row: ServeRow) -> float | None:
    """Return what judges a case: milliseconds, of throughput tokens a second."""
    if row.scenario is Scenario.THROUGHPUT:
        return row.output_tokens_per_s
    return row.ttft_p50_ms if row.scenario is Scenario.TTFT else row.tpot_p50_ms


def compared(sides: Sequence[Measured], targets: Targets | None, floors: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a row for each case: all numbers, the first side's share of each other, its target, and the floor."""
    first, *others = sides
    intervals = {(it.case, it.peer): (it.lo, it.hi) for it in ratios(first.side, [it.side for it in others])}
    found = []
    for row in first.side.rows:
        value = number_of(row)
        unit = "tokens/s" if row.scenario is Scenario.THROUGHPUT else "ms"
        line: dict[str, Any] = {"case": row.case, "unit": unit, "number": {first.asked.name: value}, "over": {}}
        if row.case in floors:
            line |= {"floor_ms": round(floors[row.case], 3), "of_floor": value and round(value / floors[row.case], 3)}
        for other in others:
            same = same_case(other.side.rows, row)
            theirs = None if same is None else number_of(same)
            wanted = {} if targets is None else targets.one if other.asked.ranks == 1 else targets.peer
            target = None if other.asked.ranks not in (1, None) else wanted.get(row.case)
            ratio = round(value / theirs, 4) if value and theirs else None
            line["number"][other.asked.name] = theirs
            line["over"][other.asked.name] = {
                "ratio": ratio,
                "interval": intervals.get((row.case, other.asked.name)),
                "target": target,
                "is_met": None if target is None or ratio is None else ratio <= target,
            }
        found.append(line)
    return found


def floors_of(args: argparse.Namespace, plan: ServePlan) -> dict[str, float]:
    """Return the least milliseconds of each case on the ranks of the first side: a share of FLOPs and bytes each.

    Nothing but on an H200, whose rates are known. Sums over the ranks are not in it.
    """
    if not torch.cuda.is_available() or "H200" not in torch.cuda.get_device_name(0):
        return {}
    model, ranks = load_config(args.model), args.ours[0][0]
    model = rounded_at_load(model) if args.quantization else model
    is_of_8_bits = weight_bytes(model, Dtype.BF16) < 1.5 * num_parameters(model)
    ceilings = Ceilings((1 + is_of_8_bits) * H200_TFLOPS * 1e12, H200_TBS * 1e12)
    half_way = plan.tpot_input + plan.tpot_output // 2
    rows = {f"ttft {it}": [(it, it)] for it in plan.lengths}
    rows |= {f"tpot {it}": [(1, half_way)] * it for it in plan.batches}
    return {case: step_floor_ms(model, Dtype.BF16, Dtype.BF16, ceilings, it) / ranks for case, it in rows.items()}


def printed(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0]["number"])
    head = ("case", "unit", *names, *(f"over {it}" for it in names[1:]), "floor", "of floor")

    def cell(over: Mapping[str, Any]) -> str:
        target = "" if over["target"] is None else f" (<= {over['target']:g}: {over['is_met']})"
        return f"{'-' if over['ratio'] is None else format(over['ratio'], '.3f')}{target}"

    lines = [
        (
            row["case"],
            row["unit"],
            *("NO_DATA" if it is None else f"{it:.2f}" for it in row["number"].values()),
            *(cell(row["over"][it]) for it in names[1:]),
            *(str(row.get(it, "-")) for it in ("floor_ms", "of_floor")),
        )
        for row in rows
    ]
    return "\n".join(table(head, lines))


def machine() -> dict[str, object]:
    """GPUs, and how they are linked."""
    smi = shutil.which("nvidia-smi")

    def said(*arguments: str) -> list[str]:
        if smi is None:
            return []
        return subprocess.run([smi, *arguments], capture_output=True, text=True, check=False).stdout.splitlines()

    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "driver": next(iter(said("--query-gpu=driver_version", "--format=csv,noheader")), None),
        "power_limit": said("--query-gpu=power.limit", "--format=csv,noheader"),
        "link": said("topo", "-m"),
        "cores": os.cpu_count(),
        "environment": NO_MULTICAST,
    }


def versions() -> dict[str, object]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    return {
        **{"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl},
        "triton": version("triton"),
    }


def save(args: argparse.Namespace, plan: ServePlan, salt: str, sides: list[Measured], rows: list[Any]) -> None:
    found = {
        "schema": 1,
        "what": args.what or f"{args.model.name}, dummy weights: {', '.join(it.asked.name for it in sides)}",
        "command": "python " + shlex.join(sys.argv),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": args.commit or commit_of_code(),
        "machine": machine(),
        "versions": versions(),
        "is_apart": args.apart,
        "ratios": rows,
        "plan": msgspec.to_builtins(plan),
        "salt": salt,
        "sides": [
            {
                **msgspec.to_builtins(it.side),
                "version": it.version,
                "gpus": it.asked.gpus,
                "server": shlex.join(it.asked.command or [it.asked.url]),
                "start_s": it.start_s and round(it.start_s, 1),
            }
            for it in sides
        ],
    }
    args.out.write_text(json.dumps(found).replace('{"case"', '\n{"case"') + "\n")


def run(args: argparse.Namespace) -> int:
    began, salt = time.monotonic(), secrets.token_hex(4)
    plan = ServePlan(
        scenarios=(Scenario.TTFT, Scenario.TPOT, *([Scenario.THROUGHPUT] if args.streams else ())),
        lengths=tuple(args.lengths),
        samples=args.samples,
        batches=tuple(args.batches),
        tpot_output=args.tpot_output,
        tpot_rounds=args.rounds,
        streams=tuple(args.streams),
        throughput_rounds=1,
    )
    asked = [ours(args, *it) for it in args.ours] + [peer(args, *it) for it in args.peer]
    groups = [[it] for it in asked] if args.apart else [asked]
    deadline = began + args.limit_s
    sides = [it for group in groups for it in measured_together(args, plan, salt, group, deadline)]
    rows = compared(sides, TARGETS.get(args.targets), floors_of(args, plan))
    save(args, plan, salt, sides, rows)
    if not rows:
        print(f"no case was measured within --limit-s {args.limit_s:g}; wrote {args.out}")
        return ExitCode.INCONCLUSIVE
    print("\n".join(table(*sides_table([it.side for it in sides]))), end="\n\n")
    print(printed(rows), *warnings([it.side for it in sides]), sep="\n")
    print(f"{time.monotonic() - began:.0f} s; wrote {args.out}", flush=True)
    judged = [over for row in rows for over in row["over"].values() if over["target"] is not None]
    if any(value is None for row in rows for value in row["number"].values()):
        return ExitCode.INCONCLUSIVE
    return ExitCode.PERFORMANCE if any(it["is_met"] is False for it in judged) else ExitCode.PASS


def _own(text: str) -> tuple[int, str]:
    ranks, _, gpus = text.partition(":")
    if not ranks.isdigit() or (gpus != NO_GPUS and len(gpus.split(",")) != int(ranks)):
        raise argparse.ArgumentTypeError(f"must be RANKS:GPUS with a GPU for each rank, or RANKS:-, got {text}")
    return int(ranks), gpus


def _peer(text: str) -> tuple[str, str, str]:
    name, gpus, command = [*text.split(":", 2), "", ""][:3]
    if not (name and gpus and command):
        raise argparse.ArgumentTypeError(f"must be NAME:GPUS:COMMAND, or NAME:-:URL, got {text}")
    return name, gpus, command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder; its weights are not read")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; ends of logs are written beside it")
    parser.add_argument("--ours", type=_own, action="append", required=True, metavar="RANKS:GPUS")
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="NAME:GPUS:COMMAND")
    parser.add_argument("--apart", action="store_true", help="one server up at a time, where memory has room for one")
    parser.add_argument("--targets", choices=TARGETS)
    parser.add_argument("--what", help="first line of the file")
    parser.add_argument("--commit", help="where this is no checkout")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tpot-output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="of each batch: a median of one stream needs five")
    parser.add_argument("--streams", type=int, nargs="*", default=[128], help="requests at once, of throughput")
    parser.add_argument("--processes", type=int, default=1, help="that send the load")
    parser.add_argument("--kv-cache-tokens", type=int, default=131072, help="of each of ours")
    parser.add_argument("--on-unproven", default="degrade")
    parser.add_argument("--quantization", choices=("fp8",), help="of ours, of a folder of 16 bits")
    parser.add_argument("--limit-s", type=float, default=3600, help="after which no case begins: the rest is written")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of ours")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
