"""`hallmark bench serve`: open-loop and fixed loads on any OpenAI-compatible server, beside others."""

import argparse
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench.machine import RESULTS
from bench.serve.cases import ServeCase, cases_of
from bench.serve.file import SCHEMA, load_side, save
from bench.serve.report import markdown, serve_charts, sides_table, warnings
from bench.serve.row import LatencyObjectives
from bench.serve.run import Load, Side, measure
from kernels.vocabulary.buckets import Bucket
from qualification.common.flags import count, positive
from qualification.common.out_folder import ready_to_write
from qualification.common.progress import ProgressLine
from qualification.common.table import table
from qualification.load.discovery import DiscoveryError, discover, first_key
from qualification.load.served import Scenario, ServedSide, ServeFile, ServePlan
from qualification.load.workers import WorkerError
from qualification.report.ratios import ratios, ratios_table

_QUICK = ServePlan(
    lengths=(128, 512),
    samples=5,
    batches=(1, 4),
    tpot_input=32,
    tpot_output=32,
    streams=(8,),
    throughput_input=64,
    throughput_output=16,
    requests=15,
    mix_input=64,
    mix_input_most=512,
    mix_output=8,
    mix_output_most=32,
    prefix_tokens=256,
    prefix_groups=5,
)
_TTFT_MS = {"le_128": 100.0, "le_512": 200.0, "le_2k": 500.0, "le_8k": 2000.0, "le_32k": 6000.0}
_CORES_A_PROCESS, _MOST_PROCESSES = 4, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hallmark bench serve`. Those of the load are the fields of ServePlan."""
    group = parser.add_argument_group("servers")
    group.add_argument("--url", required=True, help="of any OpenAI-compatible server, e.g. http://127.0.0.1:8000")
    group.add_argument("--name", default="hallmark", help="of that server in tables and files (default: hallmark)")
    group.add_argument(
        "--peer", action="append", default=[], type=_peer, metavar="NAME=URL|FILE", help="beside it, or measured before"
    )
    group = parser.add_argument_group("load")
    group.add_argument("--quick", action="store_true", help="a tiny load, seconds on a CPU")
    for field in msgspec.structs.fields(ServePlan):
        default = field.default
        kind: Callable[[str], object] = positive if isinstance(default, float) else count
        if field.name == "scenarios":
            kind = Scenario
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            nargs="+" if isinstance(default, tuple) else None,
            metavar="|".join(scenario.value for scenario in Scenario) if kind is Scenario else "N",
            help=f"default: {_default_text(default) or 'log-normal, of which --mix-input is the median'}",
        )
    group = parser.add_argument_group("objectives and client")
    group.add_argument(
        "--ttft-objective", nargs="+", default=[], type=_objective, metavar="BUCKET=MS", help="of goodput"
    )
    group.add_argument("--tpot-objective", type=positive, default=50.0, metavar="MS", help="of goodput (default: 50)")
    group.add_argument("--processes", type=count, help="that send (default: by cores, up to 4)")
    group.add_argument("--timeout", type=positive, default=300.0, help="seconds for one request (default: 300)")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="its first key is sent as the bearer token")
    group.add_argument("--salt", help="of the token ids (default: another one each run, so no prefix is known)")
    group = parser.add_argument_group("results")
    group.add_argument("--out-dir", type=Path, metavar="DIR", default=RESULTS, help="default: ./%(default)s")
    group.add_argument("--out-name", help="of the files (default: serve-NAME)")


def run(args: argparse.Namespace) -> int:
    """Run with parsed flags, print and write; 0 when every case was answered, 3 when it cannot run, 4 otherwise."""
    try:
        return _run(args)
    except (OSError, ValueError, DiscoveryError, WorkerError) as error:
        print(f"hallmark: {error}", file=sys.stderr)
        return 3


def plan_of(args: argparse.Namespace) -> ServePlan:
    """The default or the quick plan, with what the flags say instead."""
    values = ((name, getattr(args, name)) for name in ServePlan.__struct_fields__)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values if value is not None}
    return msgspec.structs.replace(_QUICK if args.quick else ServePlan(), **given)


def _run(args: argparse.Namespace) -> int:
    _refuse_doubles([args.name, *(name for name, _ in args.peer)])
    ready_to_write(args.out_dir)
    plan, salt = plan_of(args), args.salt or secrets.token_hex(4)
    bearer = None if args.api_key_file is None else first_key(args.api_key_file)
    recorded = [load_side(Path(place), name, plan) for name, place in args.peer if "://" not in place]
    named = [(args.name, args.url), *((name, place) for name, place in args.peer if "://" in place)]
    sides = [Side(name, url, *discover(url, bearer=bearer)) for name, url in named]
    num_processes = args.processes or max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // _CORES_A_PROCESS))
    fitting, skipped = _fitting(cases_of(plan, salt), sides)
    objectives = LatencyObjectives(_TTFT_MS | dict(args.ttft_objective), args.tpot_objective)
    line = ProgressLine(sys.stderr, time.monotonic, is_terminal=sys.stderr.isatty())
    loads = [Load(side, num_processes=num_processes, timeout_s=args.timeout) for side in sides]
    try:
        measured = measure(fitting, loads, objectives=objectives, progress=line)
    finally:
        line.close()
        for load in loads:
            load.close()
    served = [ServedSide(it.side.name, it.side.url, it.side.target.model, it.rows, skipped) for it in measured]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    file = ServeFile(SCHEMA, "hallmark " + shlex.join(sys.argv[1:]), now, plan, salt, served)
    _report(args, file, [*served, *recorded])
    has_gap = any(row.num_errors == row.num_requests for side in served for row in side.rows)
    return 4 if has_gap or not fitting else 0


def _refuse_doubles(names: Sequence[str]) -> None:
    """Refuse two sides of one name, which names their samples. Raises ValueError."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two sides are called {name}")


def _fitting(cases: Sequence[ServeCase], sides: Sequence[Side]) -> tuple[list[ServeCase], list[str]]:
    """The cases that every side's context takes, and why the others are left out."""
    limits = [(side.max_model_len, side.name) for side in sides if side.max_model_len is not None]
    least, name = min(limits, default=(None, ""))
    fitting = [case for case in cases if least is None or case.longest <= least]
    return fitting, [
        f"{case.name}: {case.longest} tokens, {name} takes {least}" for case in cases if case not in fitting
    ]


def _report(args: argparse.Namespace, file: ServeFile, sides: list[ServedSide]) -> None:
    """Print, and write JSON, Markdown and charts."""
    head, lines = sides_table(sides)
    ratio_head, ratio_lines = ratios_table(ratios(sides[0], sides[1:]))
    notes = warnings(sides)
    parts = ["\n".join(table(head, lines)), "\n".join(notes)]
    texts = ["# Load", f"`{file.command}`, {file.date}. Times in milliseconds.", "\n".join(markdown(head, lines))]
    if ratio_lines:
        parts.insert(1, "\n".join(table(ratio_head, ratio_lines)))
        texts += ["Ours over the peer's:", "\n".join(markdown(ratio_head, ratio_lines))]
    texts += ["\n".join(f"- {note}" for note in notes)]
    print("\n\n".join(part for part in parts if part), flush=True)
    name = args.out_name or f"serve-{args.name}"
    save(args.out_dir / f"{name}.json", file)
    (args.out_dir / f"{name}.md").write_text("\n\n".join(text for text in texts if text) + "\n", encoding="utf-8")
    charts = serve_charts(sides)
    for chart, text in charts.items():
        (args.out_dir / f"{name}-{chart}.svg").write_text(text, encoding="utf-8")
    print(f"\nwrote {args.out_dir / name}.json, .md and {len(charts)} charts", flush=True)


def _peer(text: str) -> tuple[str, str]:
    name, is_there, place = text.partition("=")
    if not name or not is_there or not place:
        raise argparse.ArgumentTypeError(f"must be NAME=URL or NAME=FILE, got {text}")
    return name, place


def _objective(text: str) -> tuple[str, float]:
    bucket, _, limit_ms = text.partition("=")
    if bucket not in {bucket.label for bucket in Bucket}:
        raise argparse.ArgumentTypeError(f"{bucket!r} is none of {', '.join(bucket.label for bucket in Bucket)}")
    return bucket, positive(limit_ms)


def _default_text(default: object) -> str:
    values = default if isinstance(default, tuple) else (default,)
    return " ".join(str(value.value if isinstance(value, Scenario) else value) for value in values)
