"""`hallmark canary`: ask a running server whether it may take traffic. An HTTP client; no GPU, no torch."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

from kernels.buckets import bucket_of
from qualification.canary.client import CanaryError, Candidate, Model, RequestFailed, watched
from qualification.canary.golden import (
    SCHEMA,
    Golden,
    GoldenError,
    GoldenPrompt,
    is_same_machine,
    load_golden,
    save_golden,
    shipped_golden,
)
from qualification.canary.verdict import (
    Answer,
    ExitCode,
    Outcome,
    Stage,
    Verdict,
    exit_code,
    judge_numerics,
    judge_performance,
    judge_plan,
    judge_service,
)

ANSWER_TOKENS = 24
# Tokens of recorded prompts: two in each bucket, one beside an edge.
PROMPT_TOKENS = (5, 127, 129, 400, 600, 1900, 2049, 3500, 8193, 20000, 32769)

_TEXT = (
    "The keeper of the lighthouse wrote down everything that passed. In spring the fishing boats went out before dawn, "
    "and he counted their lamps; in autumn he counted the geese. Nobody had asked him to. When the inspector came he "
    "turned the pages slowly, year by year, and found that every ship which had gone missing was there, with the hour "
    "at which it had last been seen, the wind, and the colour of the sea. "
)


@dataclass(frozen=True, slots=True)
class Options:
    golden: Path | None = None  # None: the one that ships for the served model
    num_samples: int = 7  # streamed requests a bucket
    max_ttft_factor: float = 1.5
    must_be_reviewed: bool = False  # provisional evidence does not do
    has_performance: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hallmark canary`."""
    parser.add_argument("--url", required=True, help="the server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--admin-url", help="where /attention and /metrics are, if the server has an admin port")
    parser.add_argument("--golden", type=Path, metavar="FILE", help="default: the file that ships for the served model")
    parser.add_argument("--record", type=Path, metavar="FILE", help="trust this server: write its answers and times")
    parser.add_argument("--samples", type=int, default=7, help="streamed requests for each bucket (default: 7)")
    parser.add_argument(
        "--max-ttft-factor", type=float, default=1.5, help="slowest TTFT p50, as a multiple of the recorded (1.5)"
    )
    parser.add_argument("--require-proven", action="store_true", help="what only the server itself has proven fails")
    parser.add_argument("--no-performance", action="store_true", help="skip the comparison of times")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="its first line is sent as the bearer token")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one request (default: 120)")


def run(args: argparse.Namespace) -> int:
    """Run with parsed flags, print, and return the exit code."""
    try:
        headers = {}
        if args.api_key_file is not None:
            headers["authorization"] = f"Bearer {args.api_key_file.read_text().split()[0]}"
        public = httpx.Client(base_url=args.url, timeout=args.timeout, headers=headers)
        admin = httpx.Client(base_url=args.admin_url or args.url, timeout=args.timeout, headers=headers)
    except (OSError, IndexError, httpx.InvalidURL) as error:
        print(f"{Stage.ENVIRONMENT.value}: FAIL: {error}", flush=True)
        return ExitCode.ENVIRONMENT
    with public, admin:
        candidate = Candidate(public, admin)
        if args.record is not None:
            return record(candidate, args.record, prompts_from=args.golden, num_samples=args.samples, say=_print)
        options = Options(
            golden=args.golden,
            num_samples=args.samples,
            max_ttft_factor=args.max_ttft_factor,
            must_be_reviewed=args.require_proven,
            has_performance=not args.no_performance,
        )
        return run_canary(candidate, options, say=_print)


def run_canary(candidate: Candidate, options: Options, *, say: Callable[[str], None]) -> ExitCode:
    """Every stage in turn; `say` gets one line a verdict, and one for each reason below it."""
    verdicts: list[Verdict] = []

    def give(verdict: Verdict) -> None:
        verdicts.append(verdict)
        say(str(verdict))
        for reason in verdict.reasons:
            say(f"    {reason}")

    try:
        model, report = candidate.model(), candidate.attention()
        before = candidate.counters()
        golden = _golden_of(model, options.golden)
        give(_judge_environment(model, golden))
        rows = report.get("shapes")
        give(judge_plan(rows if isinstance(rows, list) else [], must_be_reviewed=options.must_be_reviewed))
        if golden is None or golden.model != model.name:
            reason = f"no golden file for {model.name}: record one with --record"
            give(Verdict(Stage.NUMERICS, Outcome.NO_DATA, reason))
            give(Verdict(Stage.PERFORMANCE, Outcome.NO_DATA, reason))
        else:
            is_same = is_same_machine(golden, _fingerprint(report))
            give(judge_numerics(ask(candidate, golden.prompts, model), is_same_machine=is_same))
            give(_performance(candidate, golden, model, options, is_same))
        give(_service(before, candidate.counters()))
    except (CanaryError, GoldenError) as error:
        give(Verdict(Stage.ENVIRONMENT, Outcome.FAIL, str(error)))
    code = exit_code(verdicts)
    say(f"verdict: {code.name} (exit {code.value})")
    return code


def record(
    candidate: Candidate, path: Path, *, prompts_from: Path | None, num_samples: int, say: Callable[[str], None]
) -> ExitCode:
    """Write the golden file of a server that is trusted: prompts of an older file, or drawn from our own text."""
    try:
        model, report = candidate.model(), candidate.attention()
        known = load_golden(prompts_from).prompts if prompts_from is not None else _prompts(candidate, model)
        prompts = [_answered(candidate, prompt) for prompt in known]
        golden = Golden(
            schema=SCHEMA,
            model=model.name,
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
            fingerprint=_plain(_fingerprint(report)),
            prompts=prompts,
            ttft_s=time_first_tokens(candidate, prompts, num_samples),
        )
        save_golden(path, golden)
    except (CanaryError, GoldenError, OSError) as error:
        say(str(Verdict(Stage.ENVIRONMENT, Outcome.FAIL, str(error))))
        return ExitCode.ENVIRONMENT
    say(f"recorded {len(prompts)} answers of {model.name} and the times of {len(golden.ttft_s)} buckets in {path}")
    return ExitCode.PASS


def ask(candidate: Candidate, prompts: list[GoldenPrompt], model: Model) -> list[Answer]:
    """Each golden prompt that the candidate's context takes, answered greedily."""
    answers = []
    for prompt in prompts:
        if len(prompt.token_ids) + prompt.max_tokens > model.max_model_len:
            continue
        try:
            got: str | None = candidate.complete(prompt.token_ids, prompt.max_tokens)
        except RequestFailed:
            got = None
        answers.append(Answer(prompt.name, prompt.text, got))
    return answers


def time_first_tokens(candidate: Candidate, prompts: list[GoldenPrompt], num_samples: int) -> dict[str, list[float]]:
    """Seconds to the first token of the longest prompt of each bucket, after one that is not counted.

    Each prompt is the same tokens rotated by another step, so that no cache of prefixes can answer for the kernels.
    """
    longest: dict[str, list[int]] = {}
    for prompt in prompts:
        longest[prompt.bucket] = max(longest.get(prompt.bucket, []), prompt.token_ids, key=len)
    samples: dict[str, list[float]] = {bucket: [] for bucket in longest}
    for step in range(num_samples + 1):
        for bucket, token_ids in longest.items():
            shift = (step + 1) % len(token_ids)
            try:
                seconds = candidate.first_token_s(token_ids[shift:] + token_ids[:shift])
            except RequestFailed:
                continue  # counted by the server; a bucket with too few samples is no pass
            if step:
                samples[bucket].append(round(seconds, 6))
    return samples


def _performance(candidate: Candidate, golden: Golden, model: Model, options: Options, is_same: bool) -> Verdict:
    if not options.has_performance:
        return Verdict(Stage.PERFORMANCE, Outcome.SKIPPED, "by --no-performance")
    fitting = [prompt for prompt in golden.prompts if len(prompt.token_ids) < model.max_model_len]
    return judge_performance(
        golden.ttft_s,
        time_first_tokens(candidate, fitting, options.num_samples),
        is_same_machine=is_same,
        max_factor=options.max_ttft_factor,
    )


def _service(before: Mapping[str, float], after: Mapping[str, float]) -> Verdict:
    missing = sorted(set(watched()) - after.keys())
    if missing:
        return Verdict(Stage.SERVICE, Outcome.NO_DATA, "/metrics lacks what counts " + ", ".join(missing))
    return judge_service(before, after)


def _judge_environment(model: Model, golden: Golden | None) -> Verdict:
    if golden is not None and golden.model != model.name:
        detail = f"the server serves {model.name}, the golden file is of {golden.model}"
        return Verdict(Stage.ENVIRONMENT, Outcome.FAIL, detail)
    return Verdict(Stage.ENVIRONMENT, Outcome.PASS, f"{model.name} is served, up to {model.max_model_len} tokens")


def _golden_of(model: Model, path: Path | None) -> Golden | None:
    if path is not None:
        return load_golden(path)
    shipped = shipped_golden(model.name)
    return load_golden(shipped) if shipped.exists() else None


def _prompts(candidate: Candidate, model: Model) -> list[GoldenPrompt]:
    longest = model.max_model_len - ANSWER_TOKENS
    lengths = [length for length in PROMPT_TOKENS if length <= longest]
    known = candidate.tokenize(_TEXT)
    # One text as often as it takes: a prompt of every length begins at another place in it.
    return [
        GoldenPrompt(
            name=f"{bucket_of(length).label}-{length}",
            bucket=bucket_of(length).label,
            token_ids=(known[n % len(known) :] + known * (length // len(known) + 1))[:length],
            max_tokens=ANSWER_TOKENS,
            text="",
        )
        for n, length in enumerate(lengths)
    ]


def _answered(candidate: Candidate, prompt: GoldenPrompt) -> GoldenPrompt:
    text = candidate.complete(prompt.token_ids, prompt.max_tokens)
    return GoldenPrompt(prompt.name, prompt.bucket, prompt.token_ids, prompt.max_tokens, text)


def _fingerprint(report: Mapping[str, object]) -> Mapping[str, object]:
    found = report.get("fingerprint")
    if not isinstance(found, Mapping):
        raise CanaryError("/attention has no fingerprint: is the server ready?")
    return found


def _plain(fingerprint: Mapping[str, object]) -> dict[str, str | int | None]:
    return {name: value if isinstance(value, str | int) else None for name, value in fingerprint.items()}


def _print(line: str) -> None:
    print(line, flush=True)
