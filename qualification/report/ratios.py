"""Ratios of one server's times to those of others under the same load. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qualification.common.quantiles import ratio_interval
from qualification.load.served import Scenario, ServedSide, ServeRow

_RATIO_HEAD = ("case", "group", "number", "ours", "peer", "value", "ratio", "95% interval", "better")


@dataclass(frozen=True, slots=True)
class Ratio:
    """One number of ours over a peer's; `is_better` None: the interval holds 1, or there is none."""

    case: str
    group: str
    number: str
    ours: float
    peer: str
    theirs: float
    lo: float | None
    hi: float | None
    is_higher_better: bool

    @property
    def value(self) -> float:
        return self.ours / self.theirs

    @property
    def is_better(self) -> bool | None:
        if self.lo is None or self.hi is None or self.lo <= 1 <= self.hi:
            return None
        return (self.value > 1) == self.is_higher_better


def ratios(ours: ServedSide, peers: Sequence[ServedSide]) -> list[Ratio]:
    """Return the ratio that judges a scenario, for each row that both sides have."""
    found = []
    for row in ours.rows:
        for peer in peers:
            other = same_case(peer.rows, row)
            if other is not None:
                found += _ratios(row, other, peer.name)
    return found


def ratios_table(found: Iterable[Ratio]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    words = {None: "no difference shown", True: "yes", False: "no"}
    return _RATIO_HEAD, [
        (
            ratio.case,
            ratio.group,
            ratio.number,
            f"{ratio.ours:.4g}",
            ratio.peer,
            f"{ratio.theirs:.4g}",
            f"{ratio.value:.3f}",
            "-" if ratio.lo is None or ratio.hi is None else f"{ratio.lo:.3f} to {ratio.hi:.3f}",
            words[ratio.is_better] if ratio.lo is not None else "-",
        )
        for ratio in found
    ]


def same_case(rows: Iterable[ServeRow], row: ServeRow) -> ServeRow | None:
    """Return the row of the same case and group, if there is one."""
    return next((other for other in rows if (other.case, other.group) == (row.case, row.group)), None)


def _ratios(row: ServeRow, other: ServeRow, peer: str) -> list[Ratio]:
    def ratio(number: str, ours: float | None, theirs: float | None, q: float | None = None) -> list[Ratio]:
        if not ours or not theirs:
            return []
        samples = (row.ttft_ms, other.ttft_ms) if number.startswith("TTFT") else (row.tpot_ms, other.tpot_ms)
        bounds = None if q is None else ratio_interval(*samples, q)
        lo, hi = (None, None) if bounds is None else (bounds.lo, bounds.hi)
        return [Ratio(row.case, row.group, number, ours, peer, theirs, lo, hi, is_higher_better=q is None)]

    ttft = ratio("TTFT p50, ms", row.ttft_p50_ms, other.ttft_p50_ms, 0.5)
    tail = ratio("TTFT p99, ms", row.ttft_p99_ms, other.ttft_p99_ms, 0.99)
    tpot = ratio("token p50, ms", row.tpot_p50_ms, other.tpot_p50_ms, 0.5)
    speed = ratio("tokens a second", row.output_tokens_per_s, other.output_tokens_per_s)
    goodput = ratio("good answers a second", row.goodput_per_s, other.goodput_per_s)
    return {
        Scenario.TTFT: [*ttft, *tail],
        Scenario.TPOT: tpot,
        Scenario.THROUGHPUT: speed,
        Scenario.MIX: [*ttft, *tail, *tpot, *goodput],
        Scenario.PREFIX: ttft,
    }[row.scenario]
