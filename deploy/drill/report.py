"""Report of a drill for a person: one page of Markdown beside one plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from traffic import HIT, MIX, SHARES, Timed, Times, quantile

BARELY = 0.25  # the average may move by so much unnoticed
DOUBLED = 2.0
MOST_NOISE = (
    0.1  # by which the average of the same requests to the same server may differ, or nothing can be said of it
)
_WEIGHED = 100_000  # values that stand for the whole traffic; of the rarest bucket still eight for each of 240


class Judgement(Enum):
    YES = "yes"
    NO = "NO"
    CANNOT = "CANNOT JUDGE"


@dataclass(frozen=True, slots=True)
class Findings:
    times: Times
    alerts: Sequence[dict[str, str]]  # labels
    source: str  # of the alerts

    @property
    def baseline(self) -> list[Timed]:
        return [*self.times.before, *self.times.again]

    def seconds(self, phase: Sequence[Timed], bucket: str | None = None) -> list[float]:
        """Times of a bucket; of the whole traffic each bucket's repeated until they are its share of _WEIGHED.

        A phase of twice as many requests has the same weights: a value is repeated as often as any of its bucket, or
        once more, the extra ones spread evenly over the sorted values.
        """
        found = {name: [it.ttft_s for it in phase if it.bucket == name] for name in SHARES}
        if bucket is not None:
            return found[bucket]
        whole: list[float] = []
        for name, values in found.items():
            ordered, num = sorted(values), round(_WEIGHED * SHARES[name])
            whole += [ordered[place * len(ordered) // num] for place in range(num)]
        return whole

    def average(self, phase: Sequence[Timed]) -> float:
        """Return the average over the whole traffic in seconds."""
        return sum(share * fmean(self.seconds(phase, bucket)) for bucket, share in SHARES.items())

    def p99(self, phase: Sequence[Timed]) -> float:
        """Return the p99 of the bucket that is hit, in seconds."""
        return quantile(self.seconds(phase, HIT), 0.99)

    @property
    def average_moved(self) -> float:
        """Return the change of the average as a share: 0.1 is a tenth slower."""
        return self.average(self.times.after) / self.average(self.baseline) - 1

    @property
    def average_noise(self) -> float:
        return abs(self.average(self.times.again) / self.average(self.times.before) - 1)

    @property
    def p99_ratio(self) -> float:
        return self.p99(self.times.after) / self.p99(self.baseline)

    @property
    def p99_noise(self) -> float:
        """The larger of two p99 of the same requests to the same server over the smaller."""
        ratio = self.p99(self.times.again) / self.p99(self.times.before)
        return max(ratio, 1 / ratio)

    def verdicts(self) -> list[tuple[Judgement, str]]:
        """Return what the drill is to show, whether it did, and by which limit."""
        named = [alert for alert in self.alerts if alert.get("reason") == "head_dim"]
        alert = ", ".join(f"{k}={named[0][k]}" for k in ("model", "phase", "from", "to", "reason")) if named else "none"
        num = len(self.seconds(self.times.after, HIT))
        return [
            (
                self._average_judged(),
                f"the average TTFT of all requests moved by {self.average_moved:+.1%} (limit {BARELY:.0%}); the same "
                f"requests to the same server differ by {self.average_noise:.1%} (limit {MOST_NOISE:.0%})",
            ),
            (
                self._p99_judged(),
                f"the p99 of bucket {HIT} went to {self.p99_ratio:.1f} times what it was (at least {DOUBLED:g}), of "
                f"{num} requests; the same requests to the same server differ {self.p99_noise:.2f} times",
            ),
            (Judgement.YES if named else Judgement.NO, f"KernelFallback ({self.source}) says: {alert}"),
        ]

    def _average_judged(self) -> Judgement:
        if self.average_noise > MOST_NOISE:
            return Judgement.CANNOT
        if abs(self.average_moved) <= BARELY:
            return Judgement.YES
        return Judgement.CANNOT if abs(self.average_moved) <= BARELY + self.average_noise else Judgement.NO

    def _p99_judged(self) -> Judgement:
        """A ratio that the noise alone could make shows nothing, and noise can hide one."""
        if self.p99_ratio >= DOUBLED * max(1.0, self.p99_noise / 1.5):
            return Judgement.YES
        return Judgement.CANNOT if self.p99_noise > 1.2 else Judgement.NO


def markdown(findings: Findings) -> str:
    lines = ["# Drill: a model upgrade to a head dim that no wanted kernel path takes", ""]
    lines += [
        "The same requests three times: as before, all to one server, twice, and as after, a tenth to a second one"
    ]
    lines += ["whose model has head dim 320 instead of 64 and runs on the math path (`--on-unproven degrade`)."]
    lines += ["", "![TTFT](ttft.svg)", ""]
    lines += [f"- **{judgement.value}**: {text}" for judgement, text in findings.verdicts()]
    heads = [f"{name} {phase}" for name in ("mean", "p50", "p99") for phase in ("before", "after")]
    lines += ["", f"| TTFT, ms | requests | {' | '.join(heads)} |", f"| --- |{' ---: |' * 7}"]
    lines += [_row(findings, bucket) for bucket in (None, *(bucket for _, _, bucket, _ in MIX))]
    lines += ["", "Alerts:", ""]
    lines += [f"- {', '.join(f'{name}={text}' for name, text in sorted(alert.items()))}" for alert in findings.alerts]
    lines += [
        "",
        "Times are the client's, the sides in turn; p99 is the nearest rank. `all` weighs buckets by their share.",
    ]
    return "\n".join(lines) + "\n"


def _row(findings: Findings, bucket: str | None) -> str:
    phases = findings.baseline, findings.times.after
    before, after = (findings.seconds(phase, bucket) for phase in phases)
    cells = [findings.average(it) for it in phases] if bucket is None else [fmean(before), fmean(after)]
    cells += [quantile(values, share) for share in (0.5, 0.99) for values in (before, after)]
    numbers = " | ".join(f"{1000 * cell:.1f}" for cell in cells)
    num = len([it for it in findings.times.after if bucket in (None, it.bucket)])
    return f"| {bucket or 'all'} | {num} | {numbers} |"
