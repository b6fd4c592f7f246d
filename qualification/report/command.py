"""`hallmark report`: one HTML page from a matrix and, where they are named, benches and a live server. No torch."""

import argparse
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from qualification.common.exit_code import ExitCode
from qualification.common.flags import Commands, add_command
from qualification.evidence.matrix import MATRICES
from qualification.report.page import render
from qualification.report.sources import ReportError, gather


def add_parser(commands: Commands) -> None:
    """Add `hallmark report` to the commands of the program."""
    add_arguments(
        add_command(
            commands,
            "report",
            "what the evidence says, as one page",
            "Write one HTML page from evidence and, where they are named, benches and a running server.",
            "hallmark report qualification/matrices/nvidia-h200 --out report.html",
            "hallmark report qualification/matrices/nvidia-h200 --url http://127.0.0.1:8000",
        )
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hallmark report`."""
    parser.add_argument(
        "place",
        type=Path,
        nargs="?",
        default=MATRICES,
        metavar="FILE|DIR",
        help="evidence of one machine (default: ours, of which one GPU's must be named where it has several)",
    )
    group = parser.add_argument_group("sources")
    group.add_argument("--url", metavar="URL", help="a running server, to show what it does now")
    group.add_argument(
        "--bench", type=Path, nargs="+", default=[], metavar="FILE", help="results of `hallmark bench attention`"
    )
    group.add_argument(
        "--served",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="results of `hallmark bench serve`, ours first",
    )
    group = parser.add_argument_group("result")
    group.add_argument(
        "--out", type=Path, default=Path("hallmark-report.html"), metavar="FILE", help="(default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, say where, and return the exit code."""
    try:
        sources = gather(args.place, args.bench, args.served, args.url)
    except (ReportError, OSError) as error:
        print(f"hallmark: {error}", file=sys.stderr)
        return ExitCode.ENVIRONMENT
    at = datetime.now(UTC).isoformat(timespec="seconds")
    page = render(sources, at=at, command=shlex.join(["hallmark", *sys.argv[1:]]))
    try:
        args.out.write_text(page, encoding="utf-8")
    except OSError as error:
        print(f"hallmark: {args.out} cannot be written: {error.strerror}", file=sys.stderr)
        return ExitCode.ENVIRONMENT
    num_models = len(sources.models)
    print(f"{args.out}: {num_models} model{'s' if num_models != 1 else ''}, {args.out.stat().st_size / 1e6:.1f} MB")
    for reason in sources.refused:
        print(f"refused: {reason}")
    return ExitCode.ENVIRONMENT if sources.refused else ExitCode.PASS
