"""`hallmark matrix ptx`: whether two checkouts compile the same kernels, on a machine without a GPU."""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from kernels.system.whole_file import write_whole
from qualification.common.exit_code import ExitCode
from qualification.common.flags import add_command, count
from qualification.common.progress import ProgressLine
from qualification.measure.compiling.ptx import (
    Collected,
    Pair,
    PtxError,
    collect,
    differences,
    pairs_of,
    read_collected,
    selected_pairs,
)

OURS = Path(__file__).resolve().parent.parent.parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hallmark matrix ptx`."""
    actions = parser.add_subparsers(dest="ptx", required=True, metavar="WHAT", title="actions")
    collect_parser = add_command(
        actions,
        "collect",
        "write the digest of each kernel's PTX to a file",
        "Compile a checkout's kernels for sm_90 and write the digest of each one's PTX to a file.",
        "hallmark matrix ptx collect --out kernels.json",
    )
    collect_parser.add_argument("checkout", type=Path, nargs="?", default=OURS, metavar="DIR", help="default: ours")
    collect_parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    compare_parser = add_command(
        actions,
        "compare",
        "which kernels differ, are new or are gone from A to B",
        "Compare the PTX of two checkouts, or of files that were collected from them.",
        "hallmark matrix ptx compare ../other-checkout",
    )
    compare_parser.add_argument("before", type=Path, metavar="A", help="a checkout's folder, or a collected file")
    compare_parser.add_argument("after", type=Path, nargs="?", default=OURS, metavar="B", help="default: ours")
    for each in (collect_parser, compare_parser):
        each.add_argument("--paths", nargs="+", metavar="PATH", help="Gluon or Triton paths (default: all)")
        each.add_argument("--limit", type=count, metavar="N", help="shapes of each path (default: all)")
        each.add_argument("--jobs", type=count, metavar="N", default=os.cpu_count() or 1, help="processes (one a core)")
        each.add_argument("--cache-dir", type=Path, metavar="DIR", default=Path.home() / ".cache" / "hallmark")


def run(args: argparse.Namespace) -> ExitCode:
    """Run with parsed flags, print, and return the exit code. Raises PtxError and OSError."""
    if args.ptx == "collect":
        return _write(args)
    return _compare(args)


def _write(args: argparse.Namespace) -> ExitCode:
    pairs = selected_pairs(pairs_of(args.checkout), args.paths, args.limit)
    if not pairs:
        return _nothing(args.checkout)
    collected = _collected(args.checkout, pairs, args)
    write_whole(args.out, msgspec.json.format(msgspec.json.encode(collected), indent=1) + b"\n")
    _print(f"{args.out}: {len(collected.variants)} kernels of {len(pairs)} pairs")
    return _print_failures(args.checkout, collected)


def _compare(args: argparse.Namespace) -> ExitCode:
    """Compare two checkouts on the pairs of both, and collected files on the pairs that they were collected for."""
    places = (args.before, args.after)
    if args.before.resolve() == args.after.resolve():
        raise PtxError(f"{args.before} and {args.after} are the same place: name another checkout or collected file")
    known = {place: read_collected(place) for place in places if place.is_file()}
    asked = [collected.pairs for collected in known.values()]
    if known and (args.paths or args.limit):
        raise PtxError(f"--paths and --limit choose from matrices: {next(iter(known))} has its own list of shapes")
    if not known:
        asked = [selected_pairs({pair for place in places for pair in pairs_of(place)}, args.paths, args.limit)]
    if asked[0] != asked[-1]:
        raise PtxError(f"{args.before} and {args.after} were collected for different pairs: collect both again")
    if not asked[0]:
        return _nothing(*places)
    before, after = (known.get(place) or _collected(place, asked[0], args) for place in places)
    if not before.variants and not after.variants and not before.failed and not after.failed:
        return _nothing(*places)
    for name, old, new in (("triton", before.triton, after.triton), ("ptxas", before.ptxas, after.ptxas)):
        if old != new:
            _print(f"{name}: {old} -> {new}")
    found = differences(before, after)
    for what, variant in found:
        _print(f"{what:<8} {variant}")
    codes = [_print_failures(*side) for side in zip(places, (before, after), strict=True)]
    code = max(*codes, ExitCode.NUMERICS if found else ExitCode.PASS)
    tally = Counter(what for what, _ in found)
    result = f"{tally['differs']} differ, {tally['new']} new, {tally['gone']} gone" if found else "no difference"
    counts = f"{len(before.variants)} -> {len(after.variants)} kernels of {len(asked[0])} pairs"
    _print(f"{counts}: {result} (exit {code.value})")
    return code


def _collected(checkout: Path, pairs: list[Pair], args: argparse.Namespace) -> Collected:
    line = ProgressLine(sys.stderr, time.monotonic, is_terminal=sys.stderr.isatty())
    try:
        return collect(checkout, pairs, cache=args.cache_dir / "ptx", num_processes=args.jobs, progress=line)
    finally:
        line.close()


def _print_failures(place: Path, collected: Collected) -> ExitCode:
    for pair, error in collected.failed.items():
        _print(f"failed   {place}: {pair}: {error}")
    return ExitCode.ENVIRONMENT if collected.failed else ExitCode.PASS


def _nothing(*places: Path) -> ExitCode:
    _print(f"no matrix of {' or '.join(map(str, places))} names such a path: nothing was compiled")
    return ExitCode.INCONCLUSIVE


def _print(line: str) -> None:
    print(line, flush=True)
