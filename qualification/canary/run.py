"""`hallmark canary`: ask a running server whether it may take traffic. An HTTP client; no GPU, no torch."""

import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from qualification.canary.client import CanaryError, Candidate, Model, RequestFailed, watched
from qualification.canary.golden import (
    Golden,
    GoldenError,
    Times,
    check_date,
    is_same_machine,
    load_golden,
    shipped_golden,
)
from qualification.canary.kernels import judge_kernels
from qualification.canary.mix import LEAST_CONTEXT, MIX, ask_mix, judge_mix, record_mix
from qualification.canary.model import digests_of, judge_model
from qualification.canary.numerics import QuantizedFormats, judge_numerics
from qualification.canary.performance import OUTPUT_TOKENS, Rules, compare, lengths_for, record_times
from qualification.canary.plan import (
    Reviewed,
    dtype_of,
    judge_layers,
    judge_plan,
    quantized_formats,
    reviewed_matrix,
)
from qualification.canary.receipts import judge_receipts, record_receipts
from qualification.canary.record import ask, draw_mix, draw_prompts, fingerprint_of, record
from qualification.canary.report import Result
from qualification.canary.verdict import Outcome, Stage, Verdict, judge_service
from qualification.load.client import LoadClient
from qualification.load.discovery import DiscoveryError, discover
from qualification.receipt.replay import RefusedReplay, ServerError

Say = Callable[[str], None]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Options:
    url: str
    bearer: str | None = None
    timeout_s: float = 120.0
    golden: Path | None = None  # None: the one that ships for the served model
    baseline: str | None = None  # a URL or a golden file; None: the golden file
    matrix: Path | None = None  # folder of reviewed matrices
    matrix_digest: str | None = None
    must_be_reviewed: bool = False  # provisional evidence does not do
    is_same_build: bool = False  # nothing that computes has changed since the golden file
    is_quantized: bool = False  # the candidate is the golden file's model in 8 or 4 bits
    has_performance: bool = True
    rules: Rules = Rules()  # noqa: RUF009 -- frozen

    @property
    def has_live_baseline(self) -> bool:
        return self.baseline is not None and "://" in self.baseline


class Canary:
    """One run against one server."""

    def __init__(
        self,
        candidate: Candidate,
        options: Options,
        *,
        say: Say,
        progress: Progress,
        reference: Candidate | None = None,
    ) -> None:
        """`say` gets one line a verdict, and one for each reason below it.

        reference  the live baseline: it answers the golden prompts where there is no golden file
        """
        self._candidate = candidate
        self._reference = reference
        self._options = options
        self._say = say
        self._progress = progress
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.result = Result(options.url, options.baseline or "the golden file", now)

    def run(self) -> Result:
        """Every stage in turn. What makes all of it pointless is one verdict on the environment."""
        try:
            self._run()
        except (CanaryError, GoldenError, DiscoveryError) as error:
            self._give(Verdict(Stage.ENVIRONMENT, Outcome.FAIL, str(error)))
        code = self.result.code
        self._say(f"verdict: {code.name} (exit {code.value})")
        return self.result

    def _run(self) -> None:
        candidate = self._candidate
        model, report = candidate.model(), candidate.attention()
        before, fingerprint = candidate.counters(), fingerprint_of(report)
        golden = self._golden(model)
        if golden is not None:
            check_date(golden, datetime.now(UTC))
            if golden.model != model.name:
                raise CanaryError(f"the server serves {model.name}, the golden file is of {golden.model}")
        detail = f"{model.name} is served, up to {model.max_model_len} tokens"
        self._give(Verdict(Stage.ENVIRONMENT, Outcome.PASS, detail))
        rows = report.get("shapes")
        rows = rows if isinstance(rows, list) else []
        if not all(isinstance(row, dict) for row in rows):
            raise CanaryError("/attention lists shapes that are no objects")
        quantized = self._quantized(rows)
        if golden is not None:
            formats = None if quantized is None else ", ".join(quantized.names)
            self._give(judge_model(golden, digests_of(report), max_model_len=model.max_model_len, quantized=formats))
        self._give(self._plan(rows, report, fingerprint))
        layers = judge_layers(report)
        if layers is not None:
            self._give(layers)
        is_same = golden is not None and is_same_machine(golden, fingerprint)
        if golden is None:
            reason = f"no golden file for {model.name}: record one with `hallmark canary record`"
            self._give(Verdict(Stage.NUMERICS, Outcome.NO_DATA, reason))
        else:
            replies = ask(candidate, golden.prompts, model, self._progress)
            is_same_build = self._options.is_same_build
            self._give(
                *judge_numerics(
                    replies,
                    dtype=dtype_of(rows),
                    is_same_machine=is_same,
                    is_same_build=is_same_build,
                    quantized=quantized,
                )
            )
            if quantized is None:
                self._give(self._mix(golden, model, dtype_of(rows), is_exact=is_same and is_even(report, rows)))
            else:
                detail = "requests at once are held to answers of the same weights: record a golden file of these"
                self._give(Verdict(Stage.NUMERICS, Outcome.SKIPPED, detail, bucket=MIX))
            if is_same_build:
                self._give(self._receipts(golden, model))
            self._give(*judge_kernels(report, candidate.attention()))
        self._performance(golden, model, is_same=is_same)
        self._give(self._service(before, candidate.counters()))

    def _quantized(self, rows: list[Mapping[str, object]]) -> QuantizedFormats | None:
        """Return the formats of a candidate that is said to be quantised. Raises CanaryError where none is."""
        if not self._options.is_quantized:
            return None
        found = quantized_formats(rows)
        if found is None:
            raise CanaryError("--quantized: no weight of the server's plan has 8 or 4 bits: leave the flag out")
        return found

    def _receipts(self, golden: Golden, model: Model) -> Verdict:
        """Golden receipts, computed again. Raises CanaryError."""
        try:
            return judge_receipts(
                golden.receipts,
                self._candidate.replays(),
                max_model_len=model.max_model_len,
                progress=self._progress,
            )
        except (ServerError, RefusedReplay) as error:
            raise CanaryError(str(error)) from error

    def _give(self, *verdicts: Verdict) -> None:
        for verdict in verdicts:
            self.result.verdicts.append(verdict)
            self._say(str(verdict))
            for reason in verdict.reasons:
                self._say(f"    {reason}")

    def _golden(self, model: Model) -> Golden | None:
        options = self._options
        if options.golden is not None:
            return load_golden(options.golden)
        if options.baseline is not None and not options.has_live_baseline:
            return load_golden(Path(options.baseline))
        shipped = shipped_golden(model.name)
        if shipped.exists():
            return load_golden(shipped)
        if self._reference is None:
            return None
        self.result.baseline += ", whose answers are the golden ones"
        live = replace(options, golden=None, has_performance=False)
        return record_golden(self._reference, live, valid_days=None, progress=self._progress)

    def _plan(
        self, rows: list[Mapping[str, object]], report: Mapping[str, object], fingerprint: Mapping[str, object]
    ) -> Verdict:
        options, matrix = self._options, report.get("matrix")
        digest = matrix.get("digest") if isinstance(matrix, Mapping) else None
        try:
            reviewed = None if options.matrix is None else reviewed_matrix(options.matrix, fingerprint)
        except ValueError as error:
            return Verdict(Stage.PLAN, Outcome.FAIL, str(error))
        if options.matrix_digest is not None:
            if reviewed is not None and not reviewed.digest.startswith(options.matrix_digest):
                held, named = reviewed.digest[:12], options.matrix_digest[:12]
                detail = f"{options.matrix} holds matrix {held}, --matrix-digest names {named}"
                return Verdict(Stage.PLAN, Outcome.FAIL, detail)
            reviewed = reviewed or Reviewed(options.matrix_digest)
        return judge_plan(
            rows,
            must_be_reviewed=options.must_be_reviewed,
            reviewed=reviewed,
            digest=digest if isinstance(digest, str) else None,
        )

    def _mix(self, golden: Golden, model: Model, dtype: str | None, *, is_exact: bool) -> Verdict:
        if not golden.mix:
            detail = f"the golden file of {golden.recorded_at} has no requests to ask at once: record it anew"
            return Verdict(Stage.NUMERICS, Outcome.SKIPPED, detail, bucket=MIX)
        if model.max_model_len < LEAST_CONTEXT:
            detail = f"the requests to ask at once need a context of {LEAST_CONTEXT}, not {model.max_model_len}"
            return Verdict(Stage.NUMERICS, Outcome.SKIPPED, detail, bucket=MIX)
        return judge_mix(ask_mix(self._candidate, golden.mix, self._progress), dtype=dtype, is_exact=is_exact)

    def _performance(self, golden: Golden | None, model: Model, *, is_same: bool) -> None:
        options = self._options
        if not options.has_performance:
            return self._give(Verdict(Stage.PERFORMANCE, Outcome.SKIPPED, "by --no-performance"))
        lengths = lengths_for(options.rules, model.max_model_len)
        if not lengths:
            asked = f"of {', '.join(map(str, options.rules.lengths))} tokens, with {OUTPUT_TOKENS} to generate"
            detail = f"{asked}, none fits the context of {model.max_model_len}"
            return self._give(Verdict(Stage.PERFORMANCE, Outcome.NO_DATA, detail))
        recorded: dict[str, Times] = {}
        if not options.has_live_baseline:
            reason = None
            if golden is None or not golden.times:
                reason = "there are no recorded times: name a --baseline, or record one"
            elif not is_same:
                reason = (
                    "the golden file was recorded on another fingerprint: record one here, or name a --baseline URL"
                )
            if reason is not None or golden is None:
                return self._give(Verdict(Stage.PERFORMANCE, Outcome.NO_DATA, reason or ""))
            recorded = golden.times
        with ExitStack() as stack:
            clients = [open_load(options.url, options, stack)]
            if options.has_live_baseline:
                assert options.baseline is not None
                clients.append(open_load(options.baseline, options, stack))
            ours, theirs, verdicts = compare(
                clients[0], clients[1] if len(clients) > 1 else recorded, lengths, options.rules, self._progress
            )
        self.result.lengths = lengths
        self.result.times = {"candidate": ours, "baseline": theirs}
        self._give(*verdicts)
        for name, side in self.result.times.items():
            if side.errors:
                detail = f"{len(side.errors)} requests of the trace failed on the {name}: {side.errors[0]}"
                outcome = Outcome.FAIL if name == "candidate" else Outcome.NO_DATA
                self._give(Verdict(Stage.SERVICE, outcome, detail))
        return None

    def _service(self, before: Mapping[str, float], after: Mapping[str, float]) -> Verdict:
        missing = sorted(set(watched()) - after.keys())
        if missing:
            return Verdict(Stage.SERVICE, Outcome.NO_DATA, "/metrics lacks what counts " + ", ".join(missing))
        return judge_service(before, after)


def is_even(report: Mapping[str, object], rows: list[Mapping[str, object]]) -> bool:
    """Return whether an answer is the same beside others: always under `reproducible`, and but for ties in fp32."""
    return report.get("reproducible") is True or dtype_of(rows) == "fp32"


def record_golden(candidate: Candidate, options: Options, *, valid_days: int | None, progress: Progress) -> Golden:
    """Record the answers and times of a trusted server: to an older file's prompts, or to prompts from our own text.

    Raises CanaryError, GoldenError and DiscoveryError.
    """
    model, report = candidate.model(), candidate.attention()
    older = None if options.golden is None else load_golden(options.golden)
    prompts = draw_prompts(candidate, model) if older is None else older.prompts
    mix, refused = record_mix(candidate, draw_mix(candidate, model) if older is None or not older.mix else older.mix)
    for why in refused:
        progress(len(mix), len(mix) + len(refused), f"not recorded: {why}")
    times: dict[str, Times] = {}
    if options.has_performance:
        with ExitStack() as stack:
            client = open_load(options.url, options, stack)
            measured = record_times(client, lengths_for(options.rules, model.max_model_len), options.rules, progress)
        if measured.errors:
            raise RequestFailed(f"{len(measured.errors)} requests of the trace failed: {measured.errors[0]}")
        times = measured.times
    golden = record(
        candidate,
        model,
        prompts,
        fingerprint=fingerprint_of(report),
        times=times,
        valid_days=valid_days,
        progress=progress,
        model_digests=digests_of(report),
        mix=mix,
    )
    try:
        receipts = record_receipts(candidate.replays(), golden.prompts, progress)
    except (ServerError, RefusedReplay) as error:
        raise CanaryError(str(error)) from error
    return msgspec.structs.replace(golden, receipts=receipts)


def open_load(url: str, options: Options, stack: ExitStack) -> LoadClient:
    """A load generator for the server at `url`, closed with the stack. Raises DiscoveryError."""
    target, _ = discover(url, bearer=options.bearer, timeout_s=options.timeout_s)
    client = LoadClient(target, timeout_s=options.timeout_s)
    stack.callback(client.close)
    return client


def new_salt() -> str:
    return secrets.token_hex(4)
