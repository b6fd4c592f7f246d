"""`hallmark bench attention`: every path that can run here beside its peers, as a table, JSON and charts."""

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from bench.attention.cases import Sweep, quick_sweep
from bench.attention.charts import charts
from bench.attention.row import Outcome, absences_as_json, rows_as_json
from bench.attention.suite import FA3_PAGE_SIZES, Part, chosen_parts, full_suite, new_cases
from bench.attention.table import absences_lines, rows_table, summary_table
from bench.machine import RESULTS, add_ceiling_arguments, ceilings_of, commit_of_code, machine_of, slug
from kernels.system.triton_cache import use_own_cache
from kernels.vocabulary.shape import PLANNED_PHASES, Dtype, Phase
from qualification.common.flags import count, dtype_name, positive
from qualification.common.out_folder import ready_to_write

if TYPE_CHECKING:
    import torch

    from bench.attention.peers import Peer
    from bench.attention.run import CaseBench, Contender

_LISTS = (
    "head_dims", "heads", "lengths", "mixes", "chunks", "extend_contexts", "batches", "decode_contexts", "queries",
    "windows",
)  # fmt: skip
_SINGLES = ("softcap", "sinks", "page_size")
_QUICK_BUDGET_S = 0.02
_SEED = 20261121
Named = TypeVar("Named")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hallmark bench attention`. Every combination of the sweep's flags is a case."""
    phases = [phase.value for phase in PLANNED_PHASES]
    group = parser.add_argument_group("size of the sweep")
    group.add_argument("--quick", action="store_true", help="a tiny sweep, seconds on a CPU")
    group.add_argument("--full", action="store_true", help="every case of docs/benchmarks: some minutes")
    group = parser.add_argument_group("cases")
    group.add_argument("--phases", nargs="+", choices=phases)
    group.add_argument("--head-dims", nargs="+", type=count, metavar="N")
    group.add_argument("--heads", nargs="+", type=_heads, metavar="Q:KV", help="default: 32:8, 16:4 above d128")
    group.add_argument("--lengths", nargs="+", type=count, metavar="N", help="of prefill, 16384 tokens in all")
    group.add_argument("--mixes", nargs="*", type=count, metavar="SEQS", help="log-normal lengths; none: no mixes")
    group.add_argument("--chunks", nargs="+", type=count, metavar="N", help="new tokens of extend")
    group.add_argument("--extend-contexts", nargs="+", type=count, metavar="N", help="tokens cached before a chunk")
    group.add_argument("--batches", nargs="+", type=count, metavar="N", help="sequences of decode")
    group.add_argument("--decode-contexts", nargs="+", type=count, metavar="N", help="tokens, the new one included")
    group.add_argument("--queries", nargs="+", type=count, metavar="N", help="new tokens of a sequence of decode")
    group.add_argument("--windows", nargs="+", type=_window, metavar="N", help="`none` for no window (the default)")
    group.add_argument("--softcap", type=positive)
    group.add_argument("--sinks", action="store_true", default=None)
    group.add_argument(
        "--dtype", type=dtype_name, choices=[dtype.value for dtype in Dtype], help="default: bf16, fp32 on a CPU"
    )
    group.add_argument("--page-size", type=count, metavar="N", help="tokens")
    group = parser.add_argument_group("contenders")
    group.add_argument("--paths", nargs="+", metavar="PATTERN", help="as 'triton.*' (default: all)")
    group.add_argument("--peers", nargs="*", metavar="PATTERN", help="fa2 cudnn flex fa3 (default: all; none: no peer)")
    group.add_argument("--fa3-library", type=Path, metavar="FILE", help="vLLM's compiled _vllm_fa3_C")
    group.add_argument(
        "--fa3-page-sizes", nargs="+", type=count, metavar="N", help="FlashAttention 3 over pages of these too"
    )
    add_ceiling_arguments(group)
    group.add_argument(
        "--compile-jobs", type=count, default=1, metavar="N", help="processes that first compile what will be launched"
    )
    group = parser.add_argument_group("time and results")
    group.add_argument("--budget", type=positive, metavar="SECONDS", help="of timing, for each contender of a case")
    group.add_argument("--time-limit", type=positive, metavar="SECONDS", help="start no case after that")
    group.add_argument("--out-dir", type=Path, metavar="DIR", default=RESULTS, help="default: ./%(default)s")
    group.add_argument("--name", help="of the files (default: attention-<gpu>)")


def run(args: argparse.Namespace) -> int:
    """Run with parsed flags, print and write; 0 when every row of a path is right, 1 when not, 3 when it cannot run."""
    try:
        return _run(args)
    except (OSError, ValueError) as error:
        print(f"hallmark: {error}", file=sys.stderr)
        return 3


def parts_of(args: argparse.Namespace, device_type: str) -> list[Part]:
    """The default, the quick or every sweep, with what the flags say instead. Raises ValueError for flags at odds."""
    default = Dtype.FP32 if device_type == "cpu" else Dtype.BF16
    dtype = default if args.dtype is None else Dtype(args.dtype)
    phases = tuple(Phase(phase) for phase in args.phases or ())
    given: dict[str, object] = {
        name: tuple(getattr(args, name)) for name in _LISTS if getattr(args, name) is not None
    } | {name: getattr(args, name) for name in _SINGLES if getattr(args, name) is not None}
    if args.full:
        if args.quick or given.keys() - {"head_dims", "page_size"}:
            raise ValueError("--full goes with --phases, --head-dims and --page-size alone of the flags of sweeps")
        if args.fa3_page_sizes:
            raise ValueError("--full has its own --fa3-page-sizes")
        size = args.page_size or Sweep(dtype).page_size
        parts = [replace(part, sweep=replace(part.sweep, seed=_SEED, page_size=size)) for part in full_suite(dtype)]
        chosen = chosen_parts(parts, phases, args.head_dims or ())
        if not any(cases for _, cases in new_cases(chosen)):
            raise ValueError("--full has no case of these phases and head dims")  # it would write over what there is
        return chosen
    sweep = quick_sweep(dtype) if args.quick else Sweep(dtype)
    return [Part(replace(sweep, seed=_SEED, phases=phases or sweep.phases, **given))]  # type: ignore[arg-type]


def _run(args: argparse.Namespace) -> int:
    import torch  # the command line as a whole does without it

    from bench.attention.ahead import compile_ahead
    from bench.attention.run import CaseBench, contenders_of
    from kernels.catalog import PATHS
    from kernels.system.device import read_fingerprint

    use_own_cache()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fingerprint, parts = read_fingerprint(device), parts_of(args, device.type)
    ready_to_write(args.out_dir)
    found, missing = _find_peers(device, args)
    peers = _chosen(found, args.peers, lambda peer: peer.name, known=missing)
    paths = _chosen(PATHS, args.paths, lambda path: path.name)
    ceilings = ceilings_of(args, device, parts[0].sweep.dtype, fingerprint)
    _say(f"on {fingerprint}")
    if args.compile_jobs > 1:
        names, cases = [path.name for path in paths], [case for _, cases in new_cases(parts) for case in cases]
        _say(compile_ahead(cases, names, device, num_processes=args.compile_jobs, seed=_SEED))
    head = {
        **_head(peers, missing),
        "machine": machine_of(fingerprint, device),
        "ceilings": None if ceilings is None else asdict(ceilings),
    }
    bench = CaseBench(device, ceilings, seed=_SEED, budget_s=args.budget or (_QUICK_BUDGET_S if args.quick else None))
    contenders = contenders_of(paths, peers, fingerprint)
    name = args.name or f"attention-{slug(fingerprint.gpu)}"
    outcome = _measure(parts, contenders, bench, args.time_limit, lambda found: write(args.out_dir, name, head, found))
    for line in report_lines(outcome, missing):
        _say(line)
    for file in write(args.out_dir, name, head, outcome):
        _say(f"wrote {file}")
    if outcome.lost is not None:
        return 3
    return int(any(not row.is_right for row in outcome.rows if not row.is_peer))


def _head(peers: "Sequence[Peer]", missing: Mapping[str, str]) -> dict[str, object]:
    return {
        "command": shlex.join(["hallmark", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of_code(),
        "peers": {peer.name: peer.version for peer in peers},
        "missing_peers": missing,
        "seed": _SEED,
    }


def _measure(
    parts: Sequence[Part],
    contenders: "Sequence[Contender]",
    bench: "CaseBench",
    limit_s: float | None,
    save: Callable[[Outcome], object],
) -> Outcome:
    """Measure part by part and save each, so that an interrupted run keeps what it has measured."""
    from bench.attention.run import joined, measure_all

    started, outcome = time.monotonic(), Outcome((), ())
    for part, cases in new_cases(parts):
        if outcome.lost is not None:
            outcome = replace(outcome, unmeasured=(*outcome.unmeasured, *cases))
            continue
        left = None if limit_s is None else limit_s - (time.monotonic() - started)
        beside = [one for one in contenders if not one.is_peer or _is_named(one.name, part.peers)]
        outcome = joined(outcome, measure_all(cases, beside, bench, time_limit_s=left, say=_say))
        save(outcome)
    return outcome


def report_lines(outcome: Outcome, missing: Mapping[str, str]) -> list[str]:
    """The tables, and everything that is not in them and why."""
    lines = ["", *rows_table(outcome.rows), ""]
    lines += [*summary_table(outcome.rows), ""] if any(row.ratio is not None for row in outcome.rows) else []
    lines += absences_lines(outcome.absences)
    lines += [f"{name}: not here: {reason}" for name, reason in sorted(missing.items())]
    if outcome.unmeasured:
        why = outcome.lost or "the time limit"
        lines.append(f"{len(outcome.unmeasured)} cases were not measured: {why}")
    return lines


def write(folder: Path, name: str, head: Mapping[str, object], outcome: Outcome) -> list[Path]:
    """Write NAME.json and NAME-<group>.svg, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f"{name}.json": _as_text(head, outcome)}
    texts |= {f"{name}-{group}.svg": text for group, text in charts(outcome.rows).items()}
    for file, text in texts.items():
        (folder / file).write_text(text)
    return [folder / file for file in texts]


def _as_text(head: Mapping[str, object], outcome: Outcome) -> str:
    """JSON, a row a line: a file of a thousand rows is for programs, and for diffs."""
    content = {
        **head,
        "unmeasured_cases": [str(case) for case in outcome.unmeasured],
        "absent": absences_as_json(outcome.absences),
    }
    text = msgspec.json.format(msgspec.json.encode(content), indent=1).decode().removesuffix("\n}")
    rows = ",\n".join(f"  {msgspec.json.encode(row).decode()}" for row in rows_as_json(outcome.rows))
    return f'{text},\n "rows": [\n{rows}\n ]\n}}\n'


def _find_peers(device: "torch.device", args: argparse.Namespace) -> tuple[list["Peer"], dict[str, str]]:
    """The peers there are, and by name why others are not."""
    from bench.attention.fa3 import find_fa3, on_pages
    from bench.attention.peers import torch_peers

    peers = torch_peers(device)
    if device.type != "cuda":
        return peers, dict.fromkeys(("fa2", "cudnn", "flex", "fa3"), "needs a CUDA GPU")
    fa3 = find_fa3(args.fa3_library)
    if isinstance(fa3, str):
        return peers, {"fa3": fa3}
    sizes = args.fa3_page_sizes or (FA3_PAGE_SIZES if args.full else ())
    return [*peers, fa3, *(on_pages(fa3, size) for size in sizes)], {}


def _chosen(
    candidates: Iterable[Named],
    patterns: Sequence[str] | None,
    name_of: Callable[[Named], str],
    *,
    known: Iterable[str] = (),
) -> list[Named]:
    """Return those whose names match; all without patterns. Raises ValueError for a pattern that matches no name."""
    candidates = list(candidates)
    if patterns is None:
        return candidates
    names = [*map(name_of, candidates), *known]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{pattern!r} matches none of {', '.join(names)}")
    return [one for one in candidates if _is_named(name_of(one), patterns)]


def _is_named(name: str, patterns: Sequence[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def _window(text: str) -> int | None:
    return None if text == "none" else count(text)


def _heads(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be QUERY_HEADS:KV_HEADS, got {text}")
    return count(found[1]), count(found[2])


def _say(line: str) -> None:
    print(line, flush=True)
