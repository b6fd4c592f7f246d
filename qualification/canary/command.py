"""The command line of `hallmark canary`."""

import argparse
import math
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx2

from qualification.canary.client import CanaryError, Candidate
from qualification.canary.golden import GoldenError, save_golden
from qualification.canary.performance import LENGTHS, Rules
from qualification.canary.report import write
from qualification.canary.run import Canary, Options, new_salt, record_golden
from qualification.canary.verdict import Outcome, Stage, Verdict
from qualification.common.exit_code import ExitCode
from qualification.common.flags import Commands, add_command
from qualification.common.out_folder import ready_to_write
from qualification.common.progress import ProgressLine
from qualification.load.discovery import DiscoveryError, client_of, first_key

_DIGEST = re.compile(r"[0-9a-f]{8,64}")  # an empty one, of an unset variable, would match any matrix


def add_parser(commands: Commands) -> None:
    """Add `hallmark canary` to the commands of the program."""
    add_arguments(
        add_command(
            commands,
            "canary",
            "ask a running server whether it may take traffic",
            "Compare plan, numerics and speed of a running server with a golden file or another server. The exit code "
            "is the verdict: 0 pass, 1 numerics, 2 performance, 3 environment or kernel path, 4 inconclusive.",
            "hallmark canary --url http://127.0.0.1:8000",
            "hallmark canary record --url http://127.0.0.1:8000 --out golden.json",
        )
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hallmark canary` and `hallmark canary record`."""
    rules = Rules()
    parser.add_argument("action", nargs="?", choices=["check", "record"], default="check", help="default: check")
    group = parser.add_argument_group("server")
    group.add_argument("--url", required=True, help="the server, e.g. http://127.0.0.1:8000")
    group.add_argument("--admin-url", help="where /attention and /metrics are, if the server has an admin port")
    group = parser.add_argument_group("what it is compared with")
    group.add_argument("--golden", type=Path, metavar="FILE", help="default: the file that ships for the served model")
    group.add_argument("--baseline", metavar="URL|FILE", help="to compare times with (default: the golden file's)")
    group.add_argument("--matrix", type=Path, metavar="DIR", help="the reviewed matrices: path and status must follow")
    group.add_argument("--matrix-digest", metavar="HEX", help="or their digest alone; its first 8 digits will do")
    group.add_argument("--require-proven", action="store_true", help="what only the server itself has proven fails")
    group.add_argument(
        "--exact",
        action="store_true",
        help="nothing that computes has changed: 16 bits get the limits of fp32, golden receipts are equal to the bit",
    )
    group.add_argument(
        "--quantized",
        action="store_true",
        help="the server has the golden file's model in 8 or 4 bits: other weights, limits of their own",
    )
    group = parser.add_argument_group("comparison of times")
    group.add_argument("--no-performance", action="store_true", help="skip the comparison of times")
    group.add_argument("--max-slowdown", type=float, default=rules.max_slowdown, help="of a median (default: 1.15)")
    group.add_argument("--noise-ms", type=float, default=1e3 * rules.noise_s, help="never a slowdown (default: 0.5)")
    group.add_argument("--samples", type=int, default=rules.num_samples, help="of a bucket and look (default: 12)")
    group.add_argument("--looks", type=int, default=rules.num_looks, help="at most, until all is decided (default: 3)")
    group.add_argument("--lengths", nargs="+", type=int, help=f"of the trace (default: {' '.join(map(str, LENGTHS))})")
    group.add_argument("--utilization", type=float, default=rules.utilization, help="of a side by it (default: 0.2)")
    group.add_argument("--vocab-size", type=int, default=rules.vocab_size, help="token ids of the trace (2048)")
    group.add_argument("--seed", type=int, default=rules.seed, help="of the trace")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="its first key is sent as the bearer token; without --admin-url an operator's",
    )
    group.add_argument("--timeout", type=float, default=120.0, help="seconds for one request (default: 120)")
    group = parser.add_argument_group("results")
    group.add_argument("--out", type=Path, metavar="FILE", help="record: the golden file to write")
    group.add_argument("--valid-days", type=int, help="record: after that the file is refused (default: never)")
    group.add_argument("--out-dir", type=Path, metavar="DIR", help="check: JSON, Markdown, JUnit and a chart go here")


def run(args: argparse.Namespace) -> int:
    """Run with parsed flags, print, and return the exit code."""
    line = ProgressLine(sys.stderr, time.monotonic, is_terminal=sys.stderr.isatty())
    try:
        options = _options(args)
        with ExitStack() as stack:

            def client(url: str) -> httpx2.Client:
                return stack.enter_context(client_of(url, bearer=options.bearer, timeout_s=args.timeout))

            candidate = Candidate(client(args.url), client(args.admin_url or args.url))
            live = client(args.baseline) if options.has_live_baseline else None
            return _run(args, candidate, None if live is None else Candidate(live, live), options, line)
    except (CanaryError, GoldenError, DiscoveryError, OSError, ValueError, httpx2.InvalidURL) as error:
        print(Verdict(Stage.ENVIRONMENT, Outcome.FAIL, str(error)), flush=True)
        return ExitCode.ENVIRONMENT
    except KeyboardInterrupt:
        line.close()
        print("interrupted: nothing was decided", flush=True)
        return ExitCode.INCONCLUSIVE
    finally:
        line.close()


def _run(
    args: argparse.Namespace,
    candidate: Candidate,
    reference: Candidate | None,
    options: Options,
    line: ProgressLine,
) -> int:
    if args.action == "record":
        if args.out is None:
            raise ValueError("record needs --out FILE")
        if not args.out.parent.is_dir():  # that is misspelt, and not to be made
            raise ValueError(f"{args.out.parent} is no folder to write --out into")
        if not args.out.exists():
            ready_to_write(args.out.parent)
        golden = record_golden(candidate, options, valid_days=args.valid_days, progress=line)
        save_golden(args.out, golden)
        what = f"{len(golden.prompts)} prompts of {golden.model} and the times of {len(golden.times)} buckets"
        print(f"recorded {what} in {args.out}", flush=True)
        return ExitCode.PASS
    if args.out_dir is not None:
        ready_to_write(args.out_dir)
    result = Canary(candidate, options, say=_print, progress=line, reference=reference).run()
    if args.out_dir is not None:
        write(args.out_dir, result)
    return result.code


def _options(args: argparse.Namespace) -> Options:
    _refuse_pointless(args)
    rules = replace(
        Rules(),
        max_slowdown=args.max_slowdown,
        noise_s=args.noise_ms / 1e3,
        num_samples=args.samples,
        num_looks=args.looks,
        vocab_size=args.vocab_size,
        lengths=LENGTHS if args.lengths is None else tuple(args.lengths),
        utilization=args.utilization,
        seed=args.seed,
        salt=new_salt(),
    )
    return Options(
        url=args.url,
        bearer=None if args.api_key_file is None else first_key(args.api_key_file),
        timeout_s=args.timeout,
        golden=args.golden,
        baseline=args.baseline,
        matrix=args.matrix,
        matrix_digest=args.matrix_digest,
        must_be_reviewed=args.require_proven,
        is_same_build=args.exact,
        is_quantized=args.quantized,
        has_performance=not args.no_performance,
        rules=rules,
    )


def _refuse_pointless(args: argparse.Namespace) -> None:
    """Refuse a limit that every run would pass or fail: NaN is below no limit. Raises ValueError."""
    if args.samples < 1 or args.looks < 1:
        raise ValueError("--samples and --looks must be at least 1")
    if not (math.isfinite(args.max_slowdown) and args.max_slowdown >= 1):
        raise ValueError(f"--max-slowdown must be at least 1, got {args.max_slowdown:g}")
    if not (math.isfinite(args.noise_ms) and args.noise_ms >= 0):
        raise ValueError(f"--noise-ms must not be negative, got {args.noise_ms:g}")
    for flag, value in (("--utilization", args.utilization), ("--timeout", args.timeout)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{flag} must be positive, got {value:g}")
    if min([*(args.lengths or ()), args.vocab_size]) < 1:
        raise ValueError("--lengths and --vocab-size must be at least 1")
    if args.valid_days is not None and args.valid_days < 1:
        raise ValueError(f"--valid-days must be at least 1, got {args.valid_days}")
    if args.exact and args.quantized:
        raise ValueError("--exact and --quantized exclude each other: weights in other bits give other numbers")
    if args.valid_days is not None and args.action != "record":
        raise ValueError("--valid-days goes with record: a check asks the golden file")
    if args.matrix_digest is not None and not _DIGEST.fullmatch(args.matrix_digest):
        raise ValueError("--matrix-digest takes 8 to 64 hexadecimal digits")


def _print(line: str) -> None:
    print(line, flush=True)
