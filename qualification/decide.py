"""Which path serves a shape: from evidence alone, the same every time, and with a reason for all that is not ideal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kernels.fingerprint import Fingerprint
from kernels.path import KernelPath, Reject, Rejection, Tier
from kernels.shape import AttentionShape
from qualification.decision import Candidate, Decision, Pairs, Policy, Status
from qualification.evidence import Check, Evidence
from qualification.matrix import Key, Matrix

_PROOF = frozenset({Status.PROVEN, Status.PROVISIONAL})
_MAY_SERVE: dict[Policy, frozenset[Status]] = {
    Policy.REFUSE: frozenset({Status.PROVEN}),
    Policy.QUALIFY: _PROOF,
    # What was measured and found wrong, or broke in service, serves under no policy.
    Policy.DEGRADE: _PROOF | {Status.STALE, Status.UNPROVEN},
}
# Among those that may serve, and to name the state of a shape that nothing serves.
_RANK = {status: rank for rank, status in enumerate(Status)} | {Status.PROVISIONAL: 0}
_QUARANTINED = Rejection(Reject.QUARANTINED, "it broke on this machine for this shape")
_OVERRIDDEN = Rejection(Reject.OPERATOR_OVERRIDE, "an operator took it out of service")


@dataclass(frozen=True, slots=True)
class Book:
    """All that is known when a decision is made."""

    reviewed: Matrix = field(default_factory=Matrix)  # from git: it makes a path proven
    own: Mapping[Key, Evidence] = field(default_factory=lambda: MappingProxyType({}))  # makes it provisional


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one path stands for one shape."""

    path: KernelPath
    index: int  # in the catalog
    limits: tuple[Rejection, ...]  # why it cannot compute the shape; empty when it can
    status: Status
    doubt: Rejection | None  # why its status is not PROVEN
    evidence: Evidence | None  # what the status rests on
    is_reviewed: bool  # the evidence is from git
    proven_us: float  # by valid evidence, whatever befell the path since; infinite where there is none

    @property
    def p50_us(self) -> float:
        """Measured time of what may serve; infinite where there is none."""
        return self.proven_us if self.status in _PROOF else float("inf")

    def may_serve(self, policy: Policy) -> bool:
        return not self.limits and self.status in _MAY_SERVE[policy]

    def rejections(self, policy: Policy) -> tuple[Rejection, ...]:
        """All that stands against it under this policy: what it cannot compute, else what is not proven of it."""
        if self.limits or self.doubt is None or self.status in _MAY_SERVE[policy] & _PROOF:
            return self.limits
        return (self.doubt,)


def decide(
    shape: AttentionShape,
    *,
    paths: Sequence[KernelPath],
    fingerprint: Fingerprint,
    book: Book,
    quarantined: Pairs,
    policy: Policy,
    overridden: Pairs = frozenset(),
) -> Decision:
    """Choose among `paths` (the catalog, most preferred first).

    `quarantined` holds the pairs of (path, str(shape)) that broke, `overridden` those that an operator took out.

    The first tier goes before the fallback tier; inside a tier the faster measured path, then the catalog's order.
    Under DEGRADE the better status goes before all of that. Raises ValueError without any path.
    """
    if not paths:
        raise ValueError("the catalog is empty")
    excluded = dict.fromkeys(overridden, _OVERRIDDEN) | dict.fromkeys(quarantined, _QUARANTINED)
    standings = [
        _standing(path, index, shape, fingerprint=fingerprint, book=book, excluded=excluded)
        for index, path in enumerate(paths)
    ]
    able = [standing for standing in standings if standing.may_serve(policy)]
    chosen = min(able, key=_preference, default=None)
    wanted, reasons = _wanted(standings, chosen, shape, policy)
    return Decision(
        shape=shape,
        path=chosen.path.name if chosen else None,
        status=chosen.status if chosen else _status_unserved(standings),
        wanted=wanted.path.name,
        fallback_reasons=reasons,
        candidates=tuple(
            Candidate(standing.path.name, standing.rejections(policy))
            for standing in standings
            if standing is not chosen
        ),
        matrix_digest=book.reviewed.digest if chosen and chosen.is_reviewed else None,
    )


def path_standing(
    path: KernelPath, shape: AttentionShape, *, fingerprint: Fingerprint, book: Book
) -> tuple[Status, Rejection | None]:
    """The status of one path for one shape by the evidence alone, and why it is not PROVEN."""
    status, doubt, _, _ = _status(path, shape, fingerprint, book)
    return status, doubt


def evidence_for(path: KernelPath, shape: AttentionShape, *, fingerprint: Fingerprint, book: Book) -> Evidence | None:
    """What the status of one path for one shape rests on; where all of it is stale, that."""
    return _status(path, shape, fingerprint, book)[2]


def _standing(
    path: KernelPath,
    index: int,
    shape: AttentionShape,
    *,
    fingerprint: Fingerprint,
    book: Book,
    excluded: Mapping[tuple[str, str], Rejection],
) -> Standing:
    limits = path.rejects(shape, fingerprint)
    if path.run is None and not limits:
        limits = (Rejection(Reject.ARCH, "its module cannot be imported here"),)
    status, doubt, evidence, is_reviewed = _status(path, shape, fingerprint, book)
    timing = evidence.timing if evidence is not None and status in _PROOF else None
    if (path.name, str(shape)) in excluded:
        status, doubt = Status.QUARANTINED, excluded[path.name, str(shape)]
    proven_us = float("inf") if timing is None else timing.p50_us
    return Standing(path, index, limits, status, doubt, evidence, is_reviewed, proven_us)


def _status(
    path: KernelPath, shape: AttentionShape, fingerprint: Fingerprint, book: Book
) -> tuple[Status, Rejection | None, Evidence | None, bool]:
    """A failure on this very stack outweighs any proof; a proof by review outweighs the machine's own."""
    stale: Evidence | None = None
    proof: tuple[Evidence, bool] | None = None
    for evidence, is_reviewed in (
        (book.reviewed.evidence.get((shape, path.name)), True),
        (book.own.get((shape, path.name)), False),
    ):
        if evidence is None:
            continue
        if evidence.differing_fields(path, fingerprint):
            stale = stale or evidence
        elif not evidence.is_proven:
            return Status.FAILED, Rejection(Reject.FAILED, _failure(evidence)), evidence, is_reviewed
        else:
            proof = proof or (evidence, is_reviewed)
    if proof is not None and proof[1]:
        return Status.PROVEN, None, *proof
    if proof is not None:
        detail = "proven by this machine itself, not by the reviewed matrix"
        return Status.PROVISIONAL, Rejection(Reject.UNPROVEN, detail + _refused(book)), *proof
    if stale is not None:
        changed = ", ".join(stale.differing_fields(path, fingerprint))
        detail = f"changed since it was measured: {changed}"
        return Status.STALE, Rejection(Reject.STALE, detail + _refused(book)), stale, False
    if book.reviewed.problems:
        return Status.UNPROVEN, Rejection(Reject.MATRIX_INVALID, _problems(book)), None, False
    return Status.UNPROVEN, Rejection(Reject.UNPROVEN, "nobody has measured it"), None, False


def _problems(book: Book) -> str:
    return "; ".join(problem.detail for problem in book.reviewed.problems)


def _refused(book: Book) -> str:
    """To be said beside any other doubt: in the refused files may be the proof that is missing."""
    return f"; refused of the matrix: {_problems(book)}" if book.reviewed.problems else ""


def _failure(evidence: Evidence) -> str:
    """What failed, by how much, where, and where to read what to do."""
    if evidence.failure is not None:
        return evidence.failure
    bad = [_check_failure(check) for check in evidence.checks if not check.is_passed]
    if not bad:
        return "its checks are not all there, or its lengths lie outside the shape's buckets"
    return f"it computes wrong numbers here: {'; '.join(bad)}; docs/limits.md says what it may mean and what to do"


def _check_failure(check: Check) -> str:
    where = f" ({check.where})" if check.where else ""
    if check.unit == "values":
        return f"{check.name}: {check.measured:g} values on {check.case}, none may be{where}"
    return f"{check.name} is {check.measured:.3g} times its limit on {check.case}{where}"


def _preference(standing: Standing) -> tuple[int, bool, float, int]:
    """What is proven goes first, by review or by this machine alike; only DEGRADE lets anything else stand here."""
    return (_RANK[standing.status], standing.path.tier is Tier.FALLBACK, standing.p50_us, standing.index)


def _wanted(
    standings: list[Standing], chosen: Standing | None, shape: AttentionShape, policy: Policy
) -> tuple[Standing, tuple[Reject, ...]]:
    """The path that would serve if nothing stood against it, and what does; no reasons when it is the chosen one.

    That is the first of the first tier which serves the phase and can compute the shape, else the first which this
    machine can run at all; one that could serve as well but was measured slower than the chosen one is not wanted. One
    that was measured faster and then broke goes before all: it served.
    """
    first = [standing for standing in standings if _is_first_choice(standing, shape)]
    here = [standing for standing in first if Reject.ARCH not in {code.code for code in standing.limits}]
    able = [standing for standing in here if not standing.limits]
    broken = [standing for standing in able if standing.status is Status.QUARANTINED and _is_faster(standing, chosen)]
    broken.sort(key=lambda standing: standing.proven_us)
    for standing in (*broken, *(able or here or first)):
        against = standing.rejections(policy)
        if standing is chosen or against:
            return standing, tuple(dict.fromkeys(rejection.code for rejection in against))
    if chosen is not None:  # the catalog holds no path of the first tier for this phase
        doubts = tuple(dict.fromkeys(rejection.code for rejection in chosen.rejections(policy)))
        return chosen, doubts or (Reject.LAYOUT,)
    against = standings[0].rejections(policy)
    return standings[0], tuple(dict.fromkeys(rejection.code for rejection in against))


def _is_faster(standing: Standing, chosen: Standing | None) -> bool:
    return chosen is not None and standing.proven_us < chosen.p50_us


def _is_first_choice(standing: Standing, shape: AttentionShape) -> bool:
    return standing.path.tier is Tier.FIRST and shape.phase in standing.path.limits.phases


def _status_unserved(standings: list[Standing]) -> Status:
    able = [standing.status for standing in standings if not standing.limits]
    return min(able, key=lambda status: _RANK[status], default=Status.UNPROVEN)
