"""What was measured for one shape and one path on one machine. Whether that is a proof is computed, never stored."""

import math
from dataclasses import dataclass

from kernels.buckets import Bucket
from kernels.fingerprint import Fingerprint
from kernels.path import KernelPath
from kernels.shape import AttentionShape

SUITE = 1  # raise it whenever checks or inputs become stricter: what an older suite found is then stale

# Without every one of these there is no proof, whatever else was checked.
REQUIRED_CHECKS = frozenset(
    {"max_error", "mean_error", "absolute_error", "nonfinite", "guard_writes", "unequal_repeat"}
)


@dataclass(frozen=True, slots=True)
class Check:
    """The worst result of one measure over all inputs of a shape."""

    name: str
    case: str  # the input it was worst on
    measured: float
    limit: float  # the largest value that passes
    unit: str  # "abs" for an error in the output's own scale, "values" for a count
    seed: int

    @property
    def is_passed(self) -> bool:
        return self.measured <= self.limit  # False for NaN


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call, cold caches on a GPU."""

    p50_us: float
    spread: float  # half the 95% confidence interval of the median, as a share of it
    n: int  # samples


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of (shape, path). Tokens are those of the longest sequence that was tested."""

    shape: AttentionShape
    path: str
    source_digest: str
    fingerprint: Fingerprint
    checks: tuple[Check, ...]
    tested_query_tokens: int
    tested_context_tokens: int
    at: str  # ISO 8601, UTC
    timing: Timing | None = None
    tflops: float | None = None  # achieved, causal counted as half the square
    bytes_per_second: float | None = None  # by the IO model of tiled attention
    failure: str | None = None  # what the path raised instead of answering
    suite: int = SUITE
    commit: str | None = None

    @property
    def is_proven(self) -> bool:
        """Every required check is there, all checks pass, and the tested lengths lie in the shape's buckets."""
        return (
            self.failure is None
            and {check.name for check in self.checks} >= REQUIRED_CHECKS
            and all(check.is_passed for check in self.checks)
            and _lies_in(self.tested_query_tokens, self.shape.query_bucket)
            and _lies_in(self.tested_context_tokens, self.shape.context_bucket)
        )

    @property
    def worst_check(self) -> Check | None:
        """The check nearest to its limit, or furthest beyond it."""
        return max(self.checks, key=lambda check: strain(check.measured, check.limit), default=None)

    def differing_fields(self, path: KernelPath, fingerprint: Fingerprint) -> tuple[str, ...]:
        """What has changed since it was measured: names of fingerprint fields, `source_digest`, `suite`."""
        changed = list(self.fingerprint.differing_fields(fingerprint))
        if self.source_digest != path.source_digest:
            changed.append("source_digest")
        if self.suite != SUITE:
            changed.append("suite")
        return tuple(changed)


def strain(measured: float, limit: float) -> float:
    """How near a value is to its limit: 1 is on it, more is beyond; a value that is no number is infinitely so."""
    if math.isnan(measured):
        return math.inf
    if limit > 0:
        return measured / limit
    return math.inf if measured > limit else 0.0


def summarize(evidence: Evidence) -> dict[str, float | str | bool]:
    """The few numbers that a plan shows of it."""
    summary: dict[str, float | str | bool] = {
        "is_proven": evidence.is_proven,
        "tested_query_tokens": evidence.tested_query_tokens,
        "tested_context_tokens": evidence.tested_context_tokens,
        "at": evidence.at,
    }
    if evidence.timing is not None:
        summary |= {"p50_us": evidence.timing.p50_us, "spread": evidence.timing.spread, "n": evidence.timing.n}
    if evidence.tflops is not None:
        summary["tflops"] = evidence.tflops
    if evidence.bytes_per_second is not None:
        summary["bytes_per_second"] = evidence.bytes_per_second
    if evidence.failure is not None:
        summary["failure"] = evidence.failure
    worst = evidence.worst_check
    if worst is not None:
        summary |= {"worst_check": worst.name, "worst_case": worst.case}
        summary |= {"worst_measured": worst.measured, "worst_limit": worst.limit}
    return summary


def _lies_in(num_tokens: int, bucket: Bucket) -> bool:
    return bucket.lo < num_tokens and (bucket.hi is None or num_tokens <= bucket.hi)
