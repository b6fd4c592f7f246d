"""The verdicts of a canary, and the exit code of them all. Sends no requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from qualification.common.exit_code import ExitCode


class Outcome(Enum):
    PASS = "pass"
    FAIL = "fail"
    NO_DATA = "no data"  # never counts as a pass
    SKIPPED = "skipped"  # the operator asked for it, or the golden file is of before there was such a stage


class Stage(Enum):
    """The stages, in the order in which they run."""

    ENVIRONMENT = "environment"  # reachable, ready, the right model
    MODEL = "model"  # its tokenizer and weights
    PLAN = "plan"
    NUMERICS = "numerics"
    PERFORMANCE = "performance"
    SERVICE = "service"


_FAILURE = dict.fromkeys(Stage, ExitCode.ENVIRONMENT) | {
    Stage.NUMERICS: ExitCode.NUMERICS,
    Stage.PERFORMANCE: ExitCode.PERFORMANCE,
}
_GRAVEST_FIRST = (ExitCode.NUMERICS, ExitCode.ENVIRONMENT, ExitCode.PERFORMANCE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One stage, or one bucket of it."""

    stage: Stage
    outcome: Outcome
    detail: str  # what was looked at, in one line
    reasons: tuple[str, ...] = ()  # why it is no pass, one line each
    bucket: str | None = None

    @property
    def name(self) -> str:
        return self.stage.value if self.bucket is None else f"{self.stage.value} {self.bucket}"

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome.value.upper()}: {self.detail}"


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
