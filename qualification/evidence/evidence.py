"""Evidence: the measurements of one shape and one path on one machine. A proof is computed from it, never stored."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyBucket, AnyShape, Operator, buckets_of, operator_of
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.value_shape import any_flops, any_hbm_bytes, indexer_of

# Raise it when checks, limits or inputs change so that what passed may fail: what an older suite found, failures too,
# is then stale. A limit that only becomes wider leaves it (docs/decisions/qualification.md).
SUITE = 3

# The largest value of each check that passes, and its unit. Without every one of these there is no proof, whatever else
# was checked; a file whose limits are others is refused.
CHECK_LIMITS: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "drawn_rows": (1.0, "limit"),
        "every_row": (1.0, "limit"),
        "bias": (1.0, "limit"),
        "nonfinite": (0.0, "values"),
        "guard_writes": (0.0, "values"),
        "unequal_repeat": (0.0, "values"),
        "unequal_ranks": (0.0, "values"),
        "choice": (0.0, "values"),
    }
)
_OF_ATTENTION_ALONE = frozenset({"drawn_rows", "bias"})  # of others every row is compared with fp64
_OF_RANKS_ALONE = frozenset({"unequal_ranks"})
_OF_INDEXERS_ALONE = frozenset({"choice"})


def required_checks(shape: AnyShape) -> frozenset[str]:
    """The checks without which there is no proof of the shape."""
    every, operator = frozenset(CHECK_LIMITS), operator_of(shape)
    if indexer_of(shape) is None:
        every -= _OF_INDEXERS_ALONE
    if operator is Operator.ATTENTION:
        return every - _OF_RANKS_ALONE
    return every - _OF_ATTENTION_ALONE - (frozenset() if operator is Operator.COLLECTIVE else _OF_RANKS_ALONE)


@dataclass(frozen=True, slots=True)
class Check:
    """The worst result of one measure over all inputs of a shape."""

    name: str
    case: str  # the input it was worst on
    measured: float
    limit: float  # the largest value that passes
    unit: str  # "limit": an error as a share of its own limit (docs/limits.md), "values": a count
    seed: int
    where: str = ""  # of a check that failed: the place of the worst value, what was found there and what may be

    @property
    def is_passed(self) -> bool:
        return self.measured <= self.limit  # False for NaN


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call, cold caches on a GPU."""

    p50_us: float
    spread: float  # half the 95% confidence interval of the median, as a share of it
    n: int  # samples


# A time that is known no better than this orders nothing: of two paths the wrong one would serve.
MAX_SPREAD = 0.2
# A ceiling is a rate that was reached, not the highest there is. An H200's data sheet promises 1.25 times of what its
# large products reach and 1.14 times of its large copies; of 1152 timed calls on one, the one furthest below its floor
# took 1/1.05 of it (decode, which reads and hardly writes). What takes less than 1/1.25 of its floor was not measured.
MAX_BELOW_FLOOR = 1.25
# A path that is not of the first tier serves before it where it may and takes less than 1/1.2 of its time.
MIN_GAIN = 1.2


def timing_doubt(timing: Timing, floor_us: float | None) -> str | None:
    """Return why a time is not believed, naming value and limit; None where it is."""
    if not timing.spread <= MAX_SPREAD:
        return f"spread {timing.spread:.0%}, at most {MAX_SPREAD:.0%} is believed"
    if floor_us is not None and timing.p50_us * (1 + timing.spread) * MAX_BELOW_FLOOR < floor_us:
        return f"{timing.p50_us:.4g} us, its floor is {floor_us:.4g} us: faster than this machine can be"
    return None


def is_clearly_faster(one: Timing, other: Timing) -> bool:
    """True when `one` gains at least MIN_GAIN, and more than the uncertainty of both times."""
    gain = other.p50_us * (1 - other.spread) / (one.p50_us * (1 + one.spread))
    return gain > 1 and other.p50_us > MIN_GAIN * one.p50_us


# Raise it when the check of an order changes so that what passed may fail. What an older one found counts as unchecked.
ORDER_SUITE = 1


@dataclass(frozen=True, slots=True)
class Invariance:
    """The check of a path that claims an order: whether the bits of a row depend on the batch.

    There is no tolerance: one value of other bits and the path serves nothing under `reproducible`.

    compared  values of rows that were computed again beside others, elsewhere in a batch or in other chunks
    changed   those of them with other bits than the first time
    where     of a failure: the batch and the row where it was seen first
    digests   (input, of the bits of its rows), sorted: rows that every path of the order computes
    """

    order: str
    compared: int
    changed: int
    digests: tuple[tuple[str, str], ...]
    where: str = ""
    suite: int = ORDER_SUITE

    @property
    def is_passed(self) -> bool:
        """Something was compared, and no bit changed."""
        return self.compared > 0 and self.changed == 0 and bool(self.digests)

    @property
    def failure(self) -> str:
        """Return the reason of a failure, as the end of a sentence that names the path."""
        if self.changed:
            return f"{self.changed} of {self.compared} values change with the batch ({self.where})"
        return "nothing of it was compared"

    def is_of(self, order: str | None) -> bool:
        """Return whether it was measured of this order, by the check of this version."""
        return self.order == order and self.suite == ORDER_SUITE


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of (shape, path). What follows from it (proof, rates, predicted bytes) is computed, not stored.

    Tokens are those of the longest sequence that was tested; one call on `timed_sequences` such sequences was timed.
    Of an operator without context both numbers are the rows of the largest call, which was timed.
    """

    shape: AnyShape
    path: str
    source_digest: str
    fingerprint: Fingerprint
    checks: tuple[Check, ...]
    tested_query_tokens: int
    tested_context_tokens: int
    at: str  # ISO 8601, UTC: when the run began that measured it
    timing: Timing | None = None
    timed_sequences: int = 1
    floor_us: float | None = None  # of the timed call: no version runs much faster on this machine
    kernels: tuple[str, ...] | None = None  # what every call launched, by the profiler; None: it cannot look here
    kernels_sometimes: tuple[str, ...] = ()  # what some of the profiled calls launched besides
    temporary_bytes: int | None = None  # peak, beyond the inputs and the output; None on a CPU
    measured_bytes: int | None = None  # read from and written to HBM by the timed call, by hardware counters; a sample
    failure: str | None = None  # what the path raised instead of answering
    suite: int = SUITE
    commit: str | None = None
    command: str | None = None  # what a person typed to measure it
    invariance: Invariance | None = None  # None: not checked, as of a path that claims no order

    @property
    def timing_doubt(self) -> str | None:
        """Why its time is not believed; None where it is, or where there is none."""
        if self.timing is None:
            return None
        return timing_doubt(self.timing, self.floor_us)

    @property
    def believed_timing(self) -> Timing | None:
        """The time, if it may choose a path; None where it is in doubt."""
        return None if self.timing_doubt is not None else self.timing

    @property
    def all_kernels(self) -> tuple[str, ...] | None:
        """The kernels that any profiled call launched."""
        return None if self.kernels is None else self.kernels + self.kernels_sometimes

    @property
    def is_proven(self) -> bool:
        """Every required check is there, all checks pass, and the tested lengths lie in the shape's buckets."""
        return (
            self.failure is None
            and {check.name for check in self.checks} >= required_checks(self.shape)
            and all(check.is_passed for check in self.checks)
            and all(
                _lies_in(tokens, bucket) for tokens, bucket in zip(self._tested, buckets_of(self.shape), strict=True)
            )
        )

    @property
    def predicted_bytes(self) -> tuple[int, int]:
        """HBM bytes of the timed call by the IO model: of tiled attention, and of standard attention."""
        tiled, standard = any_hbm_bytes(self.shape, *self._tested)
        return tiled * self.timed_sequences, standard * self.timed_sequences

    @property
    def tflops(self) -> float | None:
        """Achieved, in 1e12 a second; causal counted as half the square."""
        return _rate(self.timing, self.timed_sequences * self._flops_of_one / 1e12)

    @property
    def bytes_per_second(self) -> float | None:
        """Achieved, by the IO model of tiled attention."""
        return _rate(self.timing, self.predicted_bytes[0])

    @property
    def floor_fraction(self) -> float | None:
        """The share of the machine's rate that was reached: 1 is all of it."""
        timing = self.timing
        return None if timing is None or self.floor_us is None else self.floor_us / timing.p50_us

    @property
    def _flops_of_one(self) -> int:
        return any_flops(self.shape, *self._tested)

    @property
    def _tested(self) -> tuple[int, int]:
        return self.tested_query_tokens, self.tested_context_tokens

    @property
    def worst_check(self) -> Check | None:
        """The check nearest to its limit, or furthest beyond it."""
        return max(self.checks, key=lambda check: strain(check.measured, check.limit), default=None)

    def differing_fields(self, path: AnyPath, fingerprint: Fingerprint) -> tuple[str, ...]:
        """Name what has changed since the measurement: fingerprint fields, `source_digest`, `suite`."""
        changed = list(self.fingerprint.differing_fields(fingerprint))
        if self.source_digest != path.source_digest:
            changed.append("source_digest")
        if self.suite != SUITE:
            changed.append("suite")
        return tuple(changed)


def strain(measured: float, limit: float) -> float:
    """Return a value as a share of its limit: 1 is on it, more is beyond; infinite for a value that is no number."""
    if math.isnan(measured):
        return math.inf
    if limit > 0:
        return measured / limit
    return math.inf if measured > limit else 0.0


def _rate(timing: Timing | None, amount: float) -> float | None:
    """Four digits a second: more would only feign exactness."""
    return None if timing is None else float(f"{amount / (timing.p50_us * 1e-6):.4g}")


def summarize(evidence: Evidence) -> dict[str, float | str | bool]:
    """The few numbers that a plan shows of it."""
    tiled, standard = evidence.predicted_bytes
    summary: dict[str, float | str | bool] = {
        "is_proven": evidence.is_proven,
        "tested_query_tokens": evidence.tested_query_tokens,
        "tested_context_tokens": evidence.tested_context_tokens,
        "at": evidence.at,
    }
    if evidence.timing is not None:
        summary |= {"p50_us": evidence.timing.p50_us, "spread": evidence.timing.spread, "n": evidence.timing.n}
        summary |= {"hbm_bytes_tiled": tiled, "hbm_bytes_standard": standard}
    optional = {
        "timing_doubt": evidence.timing_doubt,
        "tflops": evidence.tflops,
        "bytes_per_second": evidence.bytes_per_second,
        "floor_fraction": evidence.floor_fraction,
        "temporary_bytes": evidence.temporary_bytes,
        "measured_bytes": evidence.measured_bytes,
        "kernels": None if evidence.all_kernels is None else ", ".join(evidence.all_kernels),
        "failure": evidence.failure,
    }
    summary |= {name: value for name, value in optional.items() if value is not None}
    if evidence.invariance is not None:
        summary |= {"order": evidence.invariance.order, "is_batch_invariant": evidence.invariance.is_passed}
    worst = evidence.worst_check
    if worst is not None:
        summary |= {"worst_check": worst.name, "worst_case": worst.case}
        summary |= {"worst_measured": worst.measured, "worst_limit": worst.limit}
    return summary


def _lies_in(num_tokens: int, bucket: AnyBucket) -> bool:
    return bucket.lo < num_tokens and (bucket.hi is None or num_tokens <= bucket.hi)
