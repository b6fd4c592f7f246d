"""The decision for a shape: from evidence alone, the same every time, with a reason for every fallback."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Generic, TypeVar, cast

from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape, operator_of
from kernels.vocabulary.path import AnyPath, Reject, Rejection, Tier
from kernels.vocabulary.path_order import is_chosen_by_time
from qualification.decision.class_order import ClassOrder
from qualification.evidence.choice import Rated, beats, first_of
from qualification.evidence.evidence import Check, Evidence, Timing
from qualification.evidence.matrix import Key, Matrix

Pairs = frozenset[tuple[str, str]]  # of (path, str(shape))
ShapeT_co = TypeVar("ShapeT_co", bound=AnyShape, covariant=True)
ShapeT = TypeVar("ShapeT", bound=AnyShape)


class Status(Enum):
    PROVEN = "proven"  # by the reviewed matrix
    PROVISIONAL = "provisional"  # by this machine itself at start-up, under the same checks; not in git
    STALE = "stale"  # proven once, but the machine or the source has changed since
    UNPROVEN = "unproven"  # not measured
    FAILED = "failed"  # measured, and a check failed
    QUARANTINED = "quarantined"  # it broke in service, an operator took it out, or the machine's set-up refuses it

    @property
    def is_valid(self) -> bool:
        """Return whether evidence that holds proves the path, reviewed or this machine's own."""
        return self in (Status.PROVEN, Status.PROVISIONAL)

    @property
    def has_result(self) -> bool:
        """Return whether evidence holds that says something of the path, for it or against."""
        return self.is_valid or self is Status.FAILED


class Policy(Enum):
    """The handling of a shape without valid evidence at start-up."""

    REFUSE = "refuse"  # never become ready
    QUALIFY = "qualify"  # prove it now
    DEGRADE = "degrade"  # serve on the best path there is, counted and alerted


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path that was considered and not taken."""

    path: str
    rejections: tuple[Rejection, ...]  # empty: it could have served, the chosen one is preferred


@dataclass(frozen=True, slots=True)
class Decision(Generic[ShapeT_co]):
    """Made once for each shape, before ready; a dictionary hit in service."""

    shape: ShapeT_co
    path: str | None  # None: no path may serve this shape (the server does not become ready)
    status: Status
    wanted: str  # the path that would serve if nothing stood against it; differs from `path` in a fallback
    fallback_reasons: tuple[Reject, ...]  # empty exactly when this is no fallback
    candidates: tuple[Candidate, ...]
    matrix_digest: str | None  # of the matrix that holds the evidence; None where there is none
    notes: tuple[str, ...] = ()  # for people: how measured times chose, where that is not what the catalog says
    order: str | None = None  # in which the path sums; None where none was asked for

    @property
    def is_fallback(self) -> bool:
        return bool(self.fallback_reasons)


def decisions_of(
    operator_shape: type[ShapeT], decisions: Mapping[AnyShape, Decision[AnyShape]]
) -> dict[ShapeT, Decision[ShapeT]]:
    """Return the decisions of one operator, named by the class of its shapes."""
    of_operator = {shape: it for shape, it in decisions.items() if isinstance(shape, operator_shape)}
    return cast("dict[ShapeT, Decision[ShapeT]]", of_operator)


_MAY_SERVE: dict[Policy, frozenset[Status]] = {
    Policy.REFUSE: frozenset({Status.PROVEN}),
    Policy.QUALIFY: frozenset({Status.PROVEN, Status.PROVISIONAL}),
    # What was measured and found wrong, or broke in service, serves under no policy.
    Policy.DEGRADE: frozenset({Status.PROVEN, Status.PROVISIONAL, Status.STALE, Status.UNPROVEN}),
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
    """The status of one path for one shape."""

    path: AnyPath
    index: int  # in the catalog
    limits: tuple[Rejection, ...]  # why it cannot compute the shape; empty when it can
    status: Status
    doubt: Rejection | None  # why its status is not PROVEN
    evidence: Evidence | None  # what the status rests on
    is_reviewed: bool  # the evidence is from git
    proven_timing: Timing | None  # by valid evidence, whatever befell the path since; None where none is believed
    may_compete: bool  # on this machine, with the first tier
    barred: Rejection | None = None  # why its bits may depend on the batch, where they must not

    def rated(self) -> Rated["Standing"]:
        timing = self.proven_timing if is_chosen_by_time(self.path.name) else None
        return Rated(self, self.index, timing, self.path.tier is Tier.FALLBACK, self.may_compete)

    def may_serve(self, policy: Policy) -> bool:
        return not self.limits and self.barred is None and self.status in _MAY_SERVE[policy]

    def rejections(self, policy: Policy) -> tuple[Rejection, ...]:
        """All that stands against it under this policy: what it cannot compute, else what is not proven of it."""
        if self.barred is not None:
            doubts = () if self.doubt is None or self.status.is_valid else (self.doubt,)
            return (*self.limits, *doubts, self.barred)
        if self.limits or self.doubt is None or (self.status.is_valid and self.status in _MAY_SERVE[policy]):
            return self.limits
        return (self.doubt,)


def decide(
    shape: ShapeT,
    *,
    paths: Sequence[AnyPath],
    fingerprint: Fingerprint,
    book: Book,
    quarantined: Pairs,
    policy: Policy,
    overridden: Pairs = frozenset(),
    order: ClassOrder | None = None,
) -> Decision[ShapeT]:
    """Choose among `paths` (the catalog, most preferred first), of which those of other operators are left out.

    With `order`, that of the shape's class, paths that were not shown to sum in it may serve under no policy. That they
    are faster makes no fallback of another; that the wanted order could not be chosen does.

    `quarantined` holds the pairs of (path, str(shape)) that broke, `overridden` those that an operator took out.

    The first tier goes before the fallback tier; inside a tier the faster measured path, then the catalog's order
    (`first_of`, which also says where a fallback may go first). Under DEGRADE the better status goes before all of
    that. Raises ValueError without any path of the shape's operator.
    """
    operator = operator_of(shape)
    paths = [it for it in paths if it.operator is operator and not (it.is_for_order and order is None)]
    if not paths:
        raise ValueError(f"the catalog is empty: it has no path of {operator.value}")
    excluded = dict.fromkeys(overridden, _OVERRIDDEN) | dict.fromkeys(quarantined, _QUARANTINED)
    standings = [
        _standing(path, index, shape, fingerprint=fingerprint, book=book, excluded=excluded, order=order)
        for index, path in enumerate(paths)
    ]
    able = [standing for standing in standings if standing.may_serve(policy)]
    chosen = _chosen(able)
    in_wanted = standings if order is None else _of_order(standings, order.wanted)
    in_chosen = standings if order is None else _of_order(standings, order.order)
    wanted, reasons = _wanted(in_wanted, chosen, shape, policy)
    return Decision(
        shape=shape,
        path=chosen.path.name if chosen else None,
        status=chosen.status if chosen else _status_unserved(in_chosen),
        wanted=wanted.path.name,
        fallback_reasons=reasons,
        candidates=tuple(
            Candidate(standing.path.name, standing.rejections(policy))
            for standing in standings
            if standing is not chosen
        ),
        matrix_digest=book.reviewed.digest if chosen and chosen.is_reviewed else None,
        notes=_notes(able, chosen),
        order=None if order is None or chosen is None else chosen.path.order,
    )


def path_standing(
    path: AnyPath, shape: AnyShape, *, fingerprint: Fingerprint, book: Book
) -> tuple[Status, Rejection | None]:
    """The status of one path for one shape by the evidence alone, and why it is not PROVEN."""
    status, doubt, _, _ = _status(path, shape, fingerprint, book)
    return status, doubt


def evidence_for(
    path: AnyPath, shape: AnyShape, *, fingerprint: Fingerprint, book: Book, is_ordered: bool = False
) -> Evidence | None:
    """Return the evidence behind the status of one path for one shape; stale evidence where there is no other.

    is_ordered  whether evidence with the check of the path's order outweighs such without
    """
    return _status(path, shape, fingerprint, book, is_ordered=is_ordered)[2]


def _standing(
    path: AnyPath,
    index: int,
    shape: AnyShape,
    *,
    fingerprint: Fingerprint,
    book: Book,
    excluded: Mapping[tuple[str, str], Rejection],
    order: ClassOrder | None,
) -> Standing:
    limits = path.rejects(shape, fingerprint)
    if path.run is None and not limits:
        limits = (Rejection(Reject.ARCH, "its module cannot be imported here"),)
    status, doubt, evidence, is_reviewed = _status(path, shape, fingerprint, book, is_ordered=order is not None)
    timing = evidence.believed_timing if evidence is not None and status.is_valid else None
    bar = None if order is None else order.bar(path, shape, evidence if status.is_valid else None)
    if order is not None and path.order != order.order:
        doubt = None  # another order says enough
    elif bar is not None and status.is_valid:
        status, doubt = (Status.FAILED if bar.is_failure else Status.UNPROVEN), None
    barred = None if bar is None else bar.rejection
    if (taken_out := excluded.get((path.name, str(shape)), path.refused)) is not None:
        status, doubt = Status.QUARANTINED, taken_out
    may_compete = fingerprint.device in path.competes_on
    return Standing(path, index, limits, status, doubt, evidence, is_reviewed, timing, may_compete, barred)


def _status(
    path: AnyPath, shape: AnyShape, fingerprint: Fingerprint, book: Book, *, is_ordered: bool = False
) -> tuple[Status, Rejection | None, Evidence | None, bool]:
    """A failure on this very stack outweighs any proof; a proof by review outweighs the machine's own.

    is_ordered  whether the check of the path's order is asked for: evidence with it outweighs such without
    """
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
        elif proof is None or (is_ordered and _says_more(evidence, proof[0], path)):
            proof = evidence, is_reviewed
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
    return Status.UNPROVEN, Rejection(Reject.UNPROVEN, "it has not been measured"), None, False


def _says_more(evidence: Evidence, reviewed: Evidence, path: AnyPath) -> bool:
    """Return whether only the machine's own evidence has the check of the path's order, or a failure of it."""
    own, known = (None if it.invariance is None else it.invariance for it in (evidence, reviewed))
    if path.order is None or own is None or not own.is_of(path.order):
        return False
    return known is None or not known.is_of(path.order) or (known.is_passed and not own.is_passed)


def _problems(book: Book) -> str:
    return "; ".join(problem.detail for problem in book.reviewed.problems)


def _refused(book: Book) -> str:
    """Return a note on refused matrix files: they may hold the missing proof."""
    return f"; refused of the matrix: {_problems(book)}" if book.reviewed.problems else ""


def _failure(evidence: Evidence) -> str:
    """Describe a failed check: which, by how much, where, and where to read what to do."""
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


def _of_order(standings: list[Standing], order: str | None) -> list[Standing]:
    """Return those of an order; all where there is none of it."""
    return [standing for standing in standings if order is not None and standing.path.order == order] or standings


def _chosen(able: list[Standing]) -> Standing | None:
    """Choose a proven path, by review or by this machine alike; only DEGRADE lets others stand here."""
    best = min((_RANK[standing.status] for standing in able), default=None)
    chosen = first_of(standing.rated() for standing in able if _RANK[standing.status] == best)
    return None if chosen is None else chosen.of


def _notes(able: list[Standing], chosen: Standing | None) -> tuple[str, ...]:
    """Explain a choice to operators: a fallback that competed and won, and times that are not believed."""
    if chosen is None or not chosen.status.is_valid:
        return ()
    proven = [standing for standing in able if standing.status.is_valid]
    beaten = [standing for standing in proven if beats(chosen.rated(), standing.rated())]
    notes = [
        f"{chosen.path.name} takes {_us(chosen)}, {standing.path.name} {_us(standing)}: the faster serves"
        for standing in beaten
        if standing.path.tier is Tier.FIRST
    ]
    notes += [
        f"{standing.path.name} is not chosen by its time: {doubt}"
        for standing in proven
        if is_chosen_by_time(standing.path.name)
        and standing.evidence is not None
        and (doubt := standing.evidence.timing_doubt) is not None
    ]
    return tuple(notes)


def _us(standing: Standing) -> str:
    assert standing.proven_timing is not None
    return f"{standing.proven_timing.p50_us:.4g} us"


def _wanted(
    standings: list[Standing], chosen: Standing | None, shape: AnyShape, policy: Policy
) -> tuple[Standing, tuple[Reject, ...]]:
    """The path that would serve if nothing stood against it, and what does; no reasons when it is the chosen one.

    That is the first of the first tier which serves the phase and can compute the shape, else the first which this
    machine can run at all; one that could serve as well but was measured slower than the chosen one is not wanted. One
    that was measured faster and then broke goes before all: it served.
    """
    first = [standing for standing in standings if _is_first_choice(standing, shape)]
    here = [standing for standing in first if Reject.ARCH not in {code.code for code in standing.limits}]
    able = [standing for standing in here if not standing.limits]
    broken = None if chosen is None else _preferred_until_it_broke(standings, policy)
    for standing in (*([] if broken is None else [broken]), *(able or here or first)):
        against = standing.rejections(policy)
        if standing is chosen or against:
            return standing, tuple(dict.fromkeys(rejection.code for rejection in against))
    if chosen is not None and able:  # a fallback that competes is faster than all of them
        return chosen, ()
    if chosen is not None:  # the catalog holds no path of the first tier for this phase
        doubts = tuple(dict.fromkeys(rejection.code for rejection in chosen.rejections(policy)))
        return chosen, doubts or (Reject.LAYOUT,)
    against = standings[0].rejections(policy)
    return standings[0], tuple(dict.fromkeys(rejection.code for rejection in against))


def _preferred_until_it_broke(standings: list[Standing], policy: Policy) -> Standing | None:
    """The path that broke in service and would go before all that may serve now, by its time and its tier."""
    able = [standing for standing in standings if standing.may_serve(policy) and standing.status.is_valid]
    broken = [
        standing
        for standing in standings
        if standing.status is Status.QUARANTINED and not standing.limits and standing.proven_timing is not None
    ]
    best = first_of(standing.rated() for standing in (*able, *broken))
    if best is None or best.of.status is not Status.QUARANTINED:
        return None
    # Behind fallbacks alone the wanted path is one of the first tier.
    return best.of if any(standing.path.tier is Tier.FIRST for standing in (*able, *broken)) else None


def _is_first_choice(standing: Standing, shape: AnyShape) -> bool:
    return standing.path.tier is Tier.FIRST and standing.path.serves(shape)


def _status_unserved(standings: list[Standing]) -> Status:
    able = [standing.status for standing in standings if not standing.limits]
    return min(able, key=lambda status: _RANK[status], default=Status.UNPROVEN)
