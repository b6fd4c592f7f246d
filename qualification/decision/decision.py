"""The answer for one attention shape: which path serves it, how well that is proven, and why not the others."""

from dataclasses import dataclass
from enum import Enum

from kernels.path import Reject, Rejection
from kernels.shape import AttentionShape

Pairs = frozenset[tuple[str, str]]  # of (path, str(shape))


class Status(Enum):
    PROVEN = "proven"  # by the reviewed matrix
    PROVISIONAL = "provisional"  # by this machine itself at start-up, under the same checks; not in git
    STALE = "stale"  # proven once, but the machine or the source has changed since
    UNPROVEN = "unproven"  # nobody has measured it
    FAILED = "failed"  # measured, and a check failed
    QUARANTINED = "quarantined"  # it broke in service, or an operator took it out


class Policy(Enum):
    """What to do at start-up about a shape without valid evidence."""

    REFUSE = "refuse"  # never become ready
    QUALIFY = "qualify"  # prove it now
    DEGRADE = "degrade"  # serve on the best path there is, counted and alerted


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path that was considered and not taken."""

    path: str
    rejections: tuple[Rejection, ...]  # empty: it could have served, the chosen one is preferred


@dataclass(frozen=True, slots=True)
class Decision:
    """Made once for each shape, before ready; a dictionary hit in service."""

    shape: AttentionShape
    path: str | None  # None: no path may serve this shape (the server does not become ready)
    status: Status
    wanted: str  # the path that would serve if nothing stood against it; differs from `path` in a fallback
    fallback_reasons: tuple[Reject, ...]  # empty exactly when this is no fallback
    candidates: tuple[Candidate, ...]
    matrix_digest: str | None  # of the matrix that holds the evidence; None where there is none
    notes: tuple[str, ...] = ()  # for people: how measured times chose, where that is not what the catalog says

    @property
    def is_fallback(self) -> bool:
        return bool(self.fallback_reasons)
