"""Compare the speed of two servers: one seeded open-loop trace to both, in turns; no distribution assumed.

What else the machine does changes within a minute and meets both sides alike, so that times of two live servers are
compared in pairs: the same request of the same round to each. Recorded times have no partner.
"""

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kernels.vocabulary.buckets import bucket_of
from qualification.canary.golden import Times
from qualification.canary.verdict import Outcome, Stage, Verdict
from qualification.common.quantiles import Interval, needed_samples, quantile_interval, ratio_interval
from qualification.load.client import LoadClient
from qualification.load.sample import ClientLag, LoadResult
from qualification.load.trace import Seed, stratified

OUTPUT_TOKENS = 16  # of each request of the trace
LENGTHS = (96, 384, 1536, 6144, 24576, 98304)  # one a bucket, away from its edges
_ROUND_SAMPLES = 4  # of a bucket, before the other side has its turn
_CONFIDENCE = 0.95
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits beyond which a server counts as slower."""

    max_slowdown: float = 1.15  # against the baseline, in the median
    noise_s: float = 0.0005  # differences below it are ignored, whatever their factor
    num_samples: int = 12  # of a bucket, before the first look
    num_looks: int = 3  # as many samples again before each further one, while a bucket is undecided
    vocab_size: int = 2048
    lengths: tuple[int, ...] = LENGTHS
    # Share of the time in which a request runs: so few meet that a slow bucket slows no other's median.
    utilization: float = 0.2
    seed: int = 20261121
    salt: str = ""  # of the token ids: another one each run, or a prefix cache answers

    @property
    def confidence(self) -> float:
        """Return the confidence of one look, so that all looks together are wrong as seldom as one (Bonferroni)."""
        return 1 - (1 - _CONFIDENCE) / self.num_looks


@dataclass(slots=True)
class SideTimes:
    """The times of one side so far, by bucket."""

    times: dict[str, Times] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    lags: list[ClientLag] = field(default_factory=list)

    def add(self, result: LoadResult) -> dict[str, Times]:
        """Take a round's result; returns its times by bucket."""
        self.lags.append(result.lag)
        of_round: dict[str, Times] = {}
        for sample in result.samples:
            if sample.error is not None:
                self.errors.append(sample.error)
                continue
            bucket = bucket_of(sample.num_prompt_tokens).label
            for known in (self.times.setdefault(bucket, Times([], [])), of_round.setdefault(bucket, Times([], []))):
                known.ttft_s.extend(round(value, 6) for value in _values(sample.ttft_s))
                known.tpot_s.extend(round(value, 7) for value in _values(sample.tpot_s))
        return of_round


class Pairs:
    """Times of both sides by bucket, each of the candidate's with the baseline's of the same request."""

    def __init__(self) -> None:
        self.candidate: dict[str, Times] = {}
        self.baseline: dict[str, Times] = {}

    def add(self, candidate: Mapping[str, Times], baseline: Mapping[str, Times]) -> None:
        """Take a round. Where a request of a bucket failed on one side, the round has no pairs of it."""
        for bucket in candidate.keys() & baseline.keys():
            for name in ("ttft_s", "tpot_s"):
                ours, theirs = getattr(candidate[bucket], name), getattr(baseline[bucket], name)
                if len(ours) == len(theirs):
                    getattr(self.candidate.setdefault(bucket, Times([], [])), name).extend(ours)
                    getattr(self.baseline.setdefault(bucket, Times([], [])), name).extend(theirs)


def lengths_for(rules: Rules, max_model_len: int) -> list[int]:
    """Prompt lengths of the trace that fit."""
    return [length for length in rules.lengths if length + OUTPUT_TOKENS <= max_model_len]


def compare(
    candidate: LoadClient,
    baseline: LoadClient | Mapping[str, Times],
    lengths: Sequence[int],
    rules: Rules,
    progress: Progress,
) -> tuple[SideTimes, SideTimes, list[Verdict]]:
    """Candidate's times, the baseline's, and a verdict for each bucket. Looks again while one is undecided."""
    sides = {"candidate": SideTimes(), "baseline": SideTimes()}
    clients = {"candidate": candidate}
    if isinstance(baseline, LoadClient):
        clients["baseline"] = baseline
    else:
        sides["baseline"].times = dict(baseline)
    rate = _warm_up(clients, lengths, rules)
    trace = _Trace(clients, sides, lengths, rules, rate, progress)
    verdicts: list[Verdict] = []
    for look in range(rules.num_looks):
        trace.run(rules.num_samples * (look + 1))
        if "baseline" in clients:
            pairs = trace.pairs
            verdicts = judge_performance(pairs.baseline, pairs.candidate, lengths, rules, is_paired=True)
        else:
            verdicts = judge_performance(sides["baseline"].times, sides["candidate"].times, lengths, rules)
        if not any(verdict.outcome is Outcome.NO_DATA for verdict in verdicts) or sides["candidate"].errors:
            break
    return sides["candidate"], sides["baseline"], verdicts


def record_times(client: LoadClient, lengths: Sequence[int], rules: Rules, progress: Progress) -> SideTimes:
    """One side's times by the trace that `compare` sends, with the samples of every look."""
    sides = {"candidate": SideTimes()}
    clients = {"candidate": client}
    trace = _Trace(clients, sides, lengths, rules, _warm_up(clients, lengths, rules), progress)
    trace.run(rules.num_samples * rules.num_looks)
    return sides["candidate"]


def judge_performance(
    baseline: Mapping[str, Times],
    candidate: Mapping[str, Times],
    lengths: Iterable[int],
    rules: Rules,
    *,
    is_paired: bool = False,
) -> list[Verdict]:
    """Judge each bucket: FAIL if the slowdown surely exceeds the limit, PASS if it surely does not, else NO_DATA.

    `is_paired`: the times of both sides at the same place are of one request, and the slowdown is the median of their
    ratios; else it is the ratio of the medians.
    """
    empty = Times([], [])
    return [
        _judge_bucket(bucket, baseline.get(bucket, empty), candidate.get(bucket, empty), rules, is_paired=is_paired)
        for bucket in dict.fromkeys(bucket_of(length).label for length in lengths)
    ]


class _Trace:
    """The trace, round by round, to every side in turn."""

    def __init__(
        self,
        clients: Mapping[str, LoadClient],
        sides: Mapping[str, SideTimes],
        lengths: Sequence[int],
        rules: Rules,
        rate: float,
        progress: Progress,
    ) -> None:
        self._clients = clients
        self._sides = sides
        self._lengths = lengths
        self._rules = rules
        self._rate = rate
        self._progress = progress
        self._num_sent = 0  # requests of each length to each side
        self.pairs = Pairs()

    def run(self, until: int) -> None:
        """Send rounds until each length was sent `until` times."""
        order = random.Random(f"{self._rules.seed} {until}")
        while self._num_sent < until:
            num_each = min(_ROUND_SAMPLES, until - self._num_sent)
            names = list(self._clients)
            order.shuffle(names)  # who goes first
            of_round: dict[str, dict[str, Times]] = {}
            for name in names:
                self._progress(self._num_sent, until, f"performance of the {name}")
                requests = stratified(
                    _seed(self._rules, f"round {self._num_sent}", name),
                    rate=self._rate,
                    lengths=self._lengths,
                    num_each=num_each,
                    num_output=OUTPUT_TOKENS,
                )
                of_round[name] = self._sides[name].add(self._clients[name].run(requests))
            if "baseline" in of_round:
                self.pairs.add(of_round["candidate"], of_round["baseline"])
            self._num_sent += num_each


def _warm_up(clients: Mapping[str, LoadClient], lengths: Sequence[int], rules: Rules) -> float:
    """Send each length twice to each side, uncounted. Returns the requests a second that keep the slowest side idle."""
    slowest = 0.0
    for name, client in clients.items():
        spans = []
        for n in range(2):
            requests = stratified(
                _seed(rules, f"warm {n}", name), rate=1e9, lengths=lengths, num_each=1, num_output=OUTPUT_TOKENS
            )
            result = client.run_in_turn(requests)
            spans = [sample.read_at[-1] for sample in result.samples if sample.error is None and sample.read_at]
        slowest = max(slowest, statistics.fmean(spans) if spans else 0.0)
    return rules.utilization / max(slowest, 1e-3)


def _judge_bucket(bucket: str, baseline: Times, candidate: Times, rules: Rules, *, is_paired: bool) -> Verdict:
    slow, unsure, compared = [], [], []
    for what, ours, theirs in (
        ("TTFT", candidate.ttft_s, baseline.ttft_s),
        ("token", candidate.tpot_s, baseline.tpot_s),
    ):
        # The noise is taken off the candidate: what it is slower by must be more than that.
        lowered = [max(value - rules.noise_s, 1e-9) for value in ours]
        if is_paired:
            ratios = [mine / other for mine, other in zip(lowered, theirs, strict=True)]
            bounds = quantile_interval(ratios, 0.5, rules.confidence)
        else:
            bounds = ratio_interval(lowered, theirs, 0.5, rules.confidence)
        if bounds is None:
            unsure.append(
                f"{what}: {len(ours)} samples here and {len(theirs)} of the baseline, "
                f"{_needed(rules, is_paired=is_paired)} are needed"
            )
            continue
        compared.append(_comparison(what, ours, theirs, bounds, rules, is_paired=is_paired))
        if bounds.lo > rules.max_slowdown:
            slow.append(f"{what} is surely more than {rules.max_slowdown:g}x the baseline's")
        elif bounds.hi > rules.max_slowdown:
            counts = f"{len(ours)} samples here and {len(theirs)} of the baseline"
            unsure.append(f"{what}: {counts} do not show whether it is more than {rules.max_slowdown:g}x")
    detail = "; ".join(compared) or "nothing measured"
    if slow:
        return Verdict(Stage.PERFORMANCE, Outcome.FAIL, detail, tuple(slow), bucket)
    outcome = Outcome.NO_DATA if unsure else Outcome.PASS
    return Verdict(Stage.PERFORMANCE, outcome, detail, tuple(unsure), bucket)


def _comparison(
    what: str, ours: Sequence[float], theirs: Sequence[float], bounds: Interval, rules: Rules, *, is_paired: bool
) -> str:
    """Format both medians and the interval of the slowdown by which the bucket is judged."""
    mine, other = statistics.median(ours), statistics.median(theirs)
    slowdown = statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if is_paired else mine / other
    of = f" of {len(ours)} pairs" if is_paired else ""
    noise = f", less {1e3 * rules.noise_s:g} ms of noise" if rules.noise_s else ""
    surely = f"{bounds.lo:.4g} to {bounds.hi:.4g}x with {rules.confidence:.1%} confidence{noise}"
    return f"{what} p50 {1e3 * mine:.2f} ms against {1e3 * other:.2f}, {slowdown:.2f}x{of} ({surely})"


def _needed(rules: Rules, *, is_paired: bool) -> int:
    """The fewest samples, or pairs, that give an interval at the confidence of a look."""
    each = rules.confidence if is_paired else 1 - (1 - rules.confidence) / 2
    least = needed_samples(0.5)
    return next(n for n in range(least, 99) if quantile_interval(range(n), 0.5, each) is not None)


def _seed(rules: Rules, of: str, side: str) -> Seed:
    """Return the seed of one side's tokens, another for each side: both may be one server with a prefix cache."""
    return Seed(f"{rules.seed} canary {of}", f"{rules.salt} {side}", rules.vocab_size)


def _values(value: float | None) -> list[float]:
    return [] if value is None else [value]
