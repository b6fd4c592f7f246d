"""From what a canary saw to a verdict for each stage, and from those to the exit code. Talks to nobody."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import takewhile

MIN_SAMPLES = 5  # times to the first token a bucket needs on both sides before their medians are compared
NOISE_S = 0.005  # a difference below this is nobody's concern, whatever its factor

# Another machine rounds otherwise, so a near-tie may fall otherwise and the rest of that answer with it. A wrong kernel
# disagrees from the first tokens on. On the same fingerprint every answer must be equal.
MIN_AGREEMENT_ELSEWHERE = 0.7

_BAD_STATUS = frozenset({"unproven", "stale", "failed", "quarantined"})


class Outcome(Enum):
    PASS = "pass"
    FAIL = "fail"
    NO_DATA = "no data"  # never counts as a pass
    SKIPPED = "skipped"  # the operator asked for it


class Stage(Enum):
    """In the order in which they run."""

    ENVIRONMENT = "environment"  # reachable, ready, the right model
    PLAN = "plan"
    NUMERICS = "numerics"
    PERFORMANCE = "performance"
    SERVICE = "service"


class ExitCode(IntEnum):
    PASS = 0
    NUMERICS = 1
    PERFORMANCE = 2
    ENVIRONMENT = 3  # or the kernel path
    INCONCLUSIVE = 4


_FAILURE = dict.fromkeys(Stage, ExitCode.ENVIRONMENT) | {
    Stage.NUMERICS: ExitCode.NUMERICS,
    Stage.PERFORMANCE: ExitCode.PERFORMANCE,
}
_GRAVEST_FIRST = (ExitCode.NUMERICS, ExitCode.ENVIRONMENT, ExitCode.PERFORMANCE)


@dataclass(frozen=True, slots=True)
class Verdict:
    stage: Stage
    outcome: Outcome
    detail: str  # what was looked at, in one line
    reasons: tuple[str, ...] = ()  # why it is no pass, one line each

    def __str__(self) -> str:
        return f"{self.stage.value}: {self.outcome.value.upper()}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A golden prompt, what the reference answered, and what the candidate did (None: an error)."""

    name: str
    expected: str
    got: str | None


def exit_code(verdicts: Sequence[Verdict]) -> ExitCode:
    """Wrong answers before wrong paths before slowness before not knowing. 0 only when no stage failed or had no data.

    No verdict at all is inconclusive.
    """
    failed = {_FAILURE[verdict.stage] for verdict in verdicts if verdict.outcome is Outcome.FAIL}
    for code in _GRAVEST_FIRST:
        if code in failed:
            return code
    if not any(verdict.outcome is Outcome.PASS for verdict in verdicts):
        return ExitCode.INCONCLUSIVE
    has_gap = any(verdict.outcome is Outcome.NO_DATA for verdict in verdicts)
    return ExitCode.INCONCLUSIVE if has_gap else ExitCode.PASS


def judge_plan(rows: Sequence[Mapping[str, object]], *, must_be_reviewed: bool) -> Verdict:
    """Rows of GET /attention: each shape has a path, proven, and the wanted one. `must_be_reviewed`: by the matrix."""
    if not rows:
        return Verdict(Stage.PLAN, Outcome.NO_DATA, "the plan is empty")
    bad = _BAD_STATUS | {"provisional"} if must_be_reviewed else _BAD_STATUS
    reasons = []
    for row in rows:
        path, status, shape = row.get("path"), row.get("status"), row.get("shape")
        codes = row.get("fallback_reasons")
        if not isinstance(status, str) or not isinstance(codes, list):
            return Verdict(Stage.PLAN, Outcome.NO_DATA, "a row of the plan has no status or no fallback_reasons")
        why = f" ({', '.join(map(str, codes))})" if codes else ""
        if path is None:
            reasons.append(f"{shape}: no path{why}")
        elif codes:
            reasons.append(f"{shape}: falls back from {row.get('wanted')} to {path}{why}")
        elif status in bad:
            reasons.append(f"{shape}: {path} is {status}")
    if reasons:
        return Verdict(Stage.PLAN, Outcome.FAIL, f"{len(reasons)} of {len(rows)} shapes", tuple(reasons))
    num_own = sum(row["status"] == "provisional" for row in rows)
    return Verdict(
        Stage.PLAN,
        Outcome.PASS,
        f"{len(rows)} shapes, no fallback, {len(rows) - num_own} proven by the matrix, {num_own} by the server itself",
    )


def judge_numerics(answers: Sequence[Answer], *, is_same_machine: bool) -> Verdict:
    """Greedy answers against the golden ones: equal on the same fingerprint, else agreeing for most of their length."""
    if not answers:
        return Verdict(Stage.NUMERICS, Outcome.NO_DATA, "there is no golden prompt")
    if all(not answer.expected for answer in answers):
        return Verdict(Stage.NUMERICS, Outcome.NO_DATA, "every golden answer is empty")
    answered = [answer for answer in answers if answer.got is not None]
    unanswered = tuple(f"{answer.name}: no answer" for answer in answers if answer.got is None)
    differing = tuple(_difference(answer) for answer in answered if answer.got != answer.expected)
    if not answered:
        return Verdict(
            Stage.NUMERICS, Outcome.NO_DATA, f"none of {len(answers)} golden prompts was answered", unanswered
        )
    agreement = statistics.mean(_agreement(answer) for answer in answered)
    num_equal = len(answered) - len(differing)
    detail = f"{num_equal} of {len(answers)} golden answers equal, {agreement:.0%} of the text agrees"
    if not is_same_machine:
        detail += f" (recorded on another fingerprint: {MIN_AGREEMENT_ELSEWHERE:.0%} is asked for)"
    if differing if is_same_machine else agreement < MIN_AGREEMENT_ELSEWHERE:
        return Verdict(Stage.NUMERICS, Outcome.FAIL, detail, differing + unanswered)
    outcome = Outcome.NO_DATA if unanswered else Outcome.PASS  # who did not answer was not wrong
    return Verdict(Stage.NUMERICS, outcome, detail, differing + unanswered)


def judge_performance(
    baseline: Mapping[str, Sequence[float]],
    samples: Mapping[str, Sequence[float]],
    *,
    is_same_machine: bool,
    max_factor: float,
) -> Verdict:
    """Medians of the time to the first token in seconds, by bucket, against the golden file's."""
    medians = {bucket: statistics.median(times) for bucket, times in samples.items() if times}
    detail = ", ".join(f"{bucket} {1e3 * median:.1f} ms" for bucket, median in medians.items()) or "nothing measured"
    if not is_same_machine:
        reason = "the golden file was recorded on another fingerprint: record one here to compare times"
        return Verdict(Stage.PERFORMANCE, Outcome.NO_DATA, f"TTFT p50 {detail}", (reason,))
    slow, short = [], []
    for bucket, known in baseline.items():
        times = samples.get(bucket, ())
        if min(len(times), len(known)) < MIN_SAMPLES:
            short.append(f"{bucket}: {len(times)} samples here and {len(known)} recorded, {MIN_SAMPLES} are needed")
        elif medians[bucket] > max_factor * statistics.median(known) + NOISE_S:
            factor = medians[bucket] / statistics.median(known)
            slow.append(f"{bucket}: {factor:.2f}x the recorded {1e3 * statistics.median(known):.1f} ms")
    if slow:
        return Verdict(Stage.PERFORMANCE, Outcome.FAIL, f"TTFT p50 {detail}; at most {max_factor:g}x", tuple(slow))
    if short or not baseline:
        reasons = tuple(short) or ("the golden file has no times",)
        return Verdict(Stage.PERFORMANCE, Outcome.NO_DATA, f"TTFT p50 {detail}", reasons)
    return Verdict(Stage.PERFORMANCE, Outcome.PASS, f"TTFT p50 {detail}; at most {max_factor:g}x the recorded")


def judge_service(before: Mapping[str, float], after: Mapping[str, float]) -> Verdict:
    """Counters by what they count, before and after the run: none may have grown, none may be missing."""
    missing = sorted(before.keys() ^ after.keys())
    if missing or not after:
        return Verdict(Stage.SERVICE, Outcome.NO_DATA, "/metrics lacks " + (", ".join(missing) or "every counter"))
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    if any(growth < 0 for growth in grown.values()):
        return Verdict(Stage.SERVICE, Outcome.NO_DATA, "counters went back: the server was restarted during the run")
    if grown:
        reasons = tuple(f"{name}: {growth:g} more" for name, growth in sorted(grown.items()))
        return Verdict(Stage.SERVICE, Outcome.FAIL, "counters grew during the run", reasons)
    return Verdict(Stage.SERVICE, Outcome.PASS, f"no {', no '.join(sorted(after))}")


def _agreement(answer: Answer) -> float:
    """Share of the expected text that the candidate's begins with; of an empty one, whether it is empty too."""
    if not answer.expected:
        return float(answer.got == answer.expected)
    return _common_prefix(answer) / len(answer.expected)


def _difference(answer: Answer) -> str:
    return f"{answer.name}: differs from character {_common_prefix(answer)} of {len(answer.expected)} on"


def _common_prefix(answer: Answer) -> int:
    """Characters that both texts begin with."""
    pairs = zip(answer.expected, answer.got or "", strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
