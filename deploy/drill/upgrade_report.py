"""Report of the upgrade drill: each gate's verdict beside the expected one, and the stable server's answers."""

import json
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass

from report import Judgement
from steady_load import Steady
from traffic import quantile

INCONCLUSIVE = 4


@dataclass(frozen=True, slots=True)
class Expected:
    """The gate's exit code, of a request its status, and the verdicts that must be its only failures."""

    code: int
    failures: Set[str] | None = None  # None: whichever


@dataclass(frozen=True, slots=True)
class GateRun:
    """One command of the drill with its output."""

    case: str
    what: str
    command: str
    expected: Expected
    code: int
    lines: Sequence[str]
    took_s: float
    others_cores: float = 0.0  # that other programs took meanwhile, in the mean
    is_repeated: bool = False  # it could not decide, and was run once more

    @property
    def failures(self) -> Set[str]:
        """`numerics le_2k` of the line `numerics le_2k: FAIL: ...`."""
        return {line.split(": ")[0] for line in self.lines if ": FAIL: " in line}

    @property
    def judgement(self) -> Judgement:
        """A gate that could not decide shows nothing; any other answer than the expected one is wrong."""
        wanted = self.expected
        if self.code == wanted.code and wanted.failures in (None, self.failures):
            return Judgement.YES
        return Judgement.CANNOT if self.code == INCONCLUSIVE else Judgement.NO

    def __str__(self) -> str:
        failures = f", failed: {', '.join(sorted(self.failures))}" if self.failures else ""
        load = ""
        if self.judgement is Judgement.CANNOT:
            load = f", while other programs took {self.others_cores:.2f} cores" + ", repeated" * self.is_repeated
        wanted = f"exit {self.code}, wanted {self.expected.code}"
        return f"{self.judgement.value}: {self.case}: {self.what}: {wanted}{failures}{load}"


@dataclass(frozen=True, slots=True)
class Drilled:
    """The whole drill."""

    runs: Sequence[GateRun]
    stable: Steady

    @property
    def is_stable_whole(self) -> bool:
        """Return whether the stable server answered every request, always with the same text."""
        return not self.stable.lost and len(self.stable.answers) == 1

    @property
    def exit_code(self) -> int:
        judgements = {run.judgement for run in self.runs if not run.is_repeated}
        if Judgement.NO in judgements or not self.is_stable_whole:
            return 1
        return INCONCLUSIVE if Judgement.CANNOT in judgements else 0

    @property
    def stable_ms(self) -> dict[str, float]:
        """Times of the stable server's answers, whole; empty where there were none."""
        seconds = self.stable.seconds
        return {f"p{100 * it:g}": round(1e3 * quantile(seconds, it), 1) for it in (0.5, 0.99) if seconds}

    def stable_line(self) -> str:
        it = self.stable
        verdict = Judgement.YES if self.is_stable_whole else Judgement.NO
        times = ", ".join(f"{name} {ms:.0f} ms" for name, ms in self.stable_ms.items())
        return (
            f"{verdict.value}: the stable server lost {len(it.lost)} of {it.num_sent} requests, whole and streamed, "
            f"and gave {len(it.answers)} different answers to them ({times or 'none answered'})"
        )


def as_json(drilled: Drilled, head: dict[str, str]) -> str:
    """Lines of output one by one, so that a diff shows what another run said."""
    runs = [
        {name: value for name, value in asdict(run).items() if name not in ("expected", "lines")}
        | {"wanted": run.expected.code, "judgement": run.judgement.value, "output": list(run.lines)}
        for run in drilled.runs
    ]
    stable = drilled.stable
    counts = {"sent": stable.num_sent, "lost": stable.lost, "different_answers": len(stable.answers)}
    found = {**counts, "ms": drilled.stable_ms, "line": drilled.stable_line()}
    return json.dumps({**head, "stable": found, "runs": runs}, indent=1) + "\n"


def as_markdown(drilled: Drilled) -> str:
    parts = ["# Upgrade drill", "", f"- **{drilled.stable_line()}**"]
    parts += [f"- {run}" for run in drilled.runs]
    for run in drilled.runs:
        parts += ["", f"## {run.case}: {run.what}", "", f"    {run.command}", "", "```", *run.lines, "```"]
    return "\n".join(parts) + "\n"
