"""What the drill found, for a person: one page of Markdown beside one plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from traffic import HIT, MIX, Timed, quantile

BARELY = 0.2  # the average may move so much and nobody would look twice
DOUBLED = 2.0


@dataclass(frozen=True, slots=True)
class Findings:
    before: Sequence[Timed]
    after: Sequence[Timed]
    alerts: Sequence[dict[str, str]]  # labels
    source: str  # of the alerts

    def seconds(self, phase: Sequence[Timed], bucket: str | None = None) -> list[float]:
        return [it.ttft_s for it in phase if bucket in (None, it.bucket)]

    @property
    def average_moved(self) -> float:
        """Of all requests, as a share: 0.1 is a tenth slower."""
        return fmean(self.seconds(self.after)) / fmean(self.seconds(self.before)) - 1

    @property
    def p99_ratio(self) -> float:
        """Of the bucket that is hit."""
        return quantile(self.seconds(self.after, HIT), 0.99) / quantile(self.seconds(self.before, HIT), 0.99)

    def verdicts(self) -> list[tuple[bool, str]]:
        """What the drill is to show, and whether it did."""
        named = [alert for alert in self.alerts if alert.get("reason") == "head_dim"]
        alert = ", ".join(f"{k}={named[0][k]}" for k in ("model", "phase", "from", "to", "reason")) if named else "none"
        return [
            (abs(self.average_moved) <= BARELY, f"the average TTFT of all requests moved by {self.average_moved:+.1%}"),
            (self.p99_ratio >= DOUBLED, f"the p99 of bucket {HIT} went to {self.p99_ratio:.1f} times what it was"),
            (bool(named), f"KernelFallback ({self.source}) says: {alert}"),
        ]


def markdown(findings: Findings) -> str:
    lines = ["# Drill: a model upgrade to a head dim that no wanted kernel path takes", ""]
    lines += ["The same requests twice: as before, all to one server, and as after, a tenth of them to a second one"]
    lines += ["whose model has head dim 320 instead of 64 and runs on the math path (`--on-unproven degrade`)."]
    lines += ["", "![TTFT](ttft.svg)", ""]
    lines += [f"- {'yes' if is_so else '**NO**'}: {text}" for is_so, text in findings.verdicts()]
    heads = [f"{name} {phase}" for name in ("mean", "p50", "p99") for phase in ("before", "after")]
    lines += ["", f"| TTFT, ms | requests | {' | '.join(heads)} |", f"| --- |{' ---: |' * 7}"]
    lines += [_row(findings, bucket) for bucket in (None, *(bucket for _, _, bucket, _ in MIX))]
    lines += ["", "Alerts:", ""]
    lines += [f"- {', '.join(f'{name}={text}' for name, text in sorted(alert.items()))}" for alert in findings.alerts]
    lines += ["", "Times are the client's, both sides in turn; p99 is the nearest rank."]
    return "\n".join(lines) + "\n"


def _row(findings: Findings, bucket: str | None) -> str:
    before, after = findings.seconds(findings.before, bucket), findings.seconds(findings.after, bucket)
    cells = [fmean(before), fmean(after)]
    cells += [quantile(values, share) for share in (0.5, 0.99) for values in (before, after)]
    numbers = " | ".join(f"{1000 * cell:.1f}" for cell in cells)
    return f"| {bucket or 'all'} | {len(after)} | {numbers} |"
