"""Judging evidence: what keeps a qualification from passing, and what differs between two bodies of evidence."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import IntEnum

from kernels.experts.kinds import ExpertFormat
from kernels.experts.shape import ExpertsShape
from kernels.linear.shape import PLAIN, LinearShape
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.path import AnyPath, Tier
from kernels.vocabulary.path_order import tier_of
from kernels.vocabulary.shape import AttentionShape
from qualification.common.exit_code import ExitCode
from qualification.evidence.anchors import anchors_of, broken_promise, classes_of
from qualification.evidence.choice import choice_of, is_left_to_fallback
from qualification.evidence.evidence import Evidence, strain
from qualification.evidence.matrix import Key
from qualification.evidence.summary import Changed, check_text, order_text, status_of, time_text, unchanged


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason why a qualification does not pass, with its shape."""

    code: ExitCode
    shape: AnyShape
    detail: str

    def __str__(self) -> str:
        return f"{self.code.name.lower()}: {self.shape}: {self.detail}"


_GRAVEST_FINDING_FIRST = (ExitCode.NUMERICS, ExitCode.ENVIRONMENT, ExitCode.INCONCLUSIVE)


def judge(
    shapes: Iterable[AnyShape],
    known: Mapping[Key, Evidence],
    *,
    paths: Sequence[AnyPath],
    fingerprint: Fingerprint,
) -> list[Finding]:
    """Return what keeps a run from passing, gravest first; empty: a path of the first tier is proven for every shape.

    `known` holds valid evidence only, `paths` those that were asked for. A fallback path with wrong numbers is no
    finding while another serves: nothing will ever choose it. A path that breaks the promise of its order always is.
    """
    shapes = list(shapes)
    found = _broken_orders(shapes, known, paths)
    for shape in shapes:
        able = [path for path in paths if path.run is not None and not path.rejects(shape, fingerprint)]
        has_first = any(path.tier is Tier.FIRST and path.serves(shape) for path in paths)
        found += _findings(shape, able, known, has_first=has_first)
    return sorted(found, key=lambda finding: _GRAVEST_FINDING_FIRST.index(finding.code))


def _broken_orders(shapes: list[AnyShape], known: Mapping[Key, Evidence], paths: Sequence[AnyPath]) -> list[Finding]:
    """Return a finding for each shape and path whose bits depend on the batch or are not those of the order."""
    found = []
    for of_class in classes_of(shapes).values():
        for order in dict.fromkeys(path.order for path in paths if path.order is not None):
            keys = [(shape, path.name) for path in paths if path.order == order for shape in of_class]
            entries = [known[key] for key in keys if key in known]
            anchors = anchors_of(entries, order)
            for entry in entries:
                if (broken := broken_promise(entry, order, anchors)) is not None:
                    found.append(Finding(ExitCode.NUMERICS, entry.shape, f"{entry.path} {broken}"))
    return found


def _findings(shape: AnyShape, able: list[AnyPath], known: Mapping[Key, Evidence], *, has_first: bool) -> list[Finding]:
    entries = [known[shape, path.name] for path in able if (shape, path.name) in known]
    missing = [path.name for path in able if (shape, path.name) not in known]
    wrong = [entry for entry in entries if entry.failure is None and not entry.is_proven]
    chosen = choice_of(entries)
    found = [
        Finding(ExitCode.NUMERICS, shape, f"{entry.path} fails its checks")
        for entry in wrong
        if chosen is None or tier_of(entry.path) is Tier.FIRST
    ]
    if missing:
        found.append(Finding(ExitCode.INCONCLUSIVE, shape, f"not measured: {', '.join(missing)}"))
    elif chosen is None and not wrong:
        raised = "; ".join(f"{entry.path}: {entry.failure}" for entry in entries)
        found.append(Finding(ExitCode.ENVIRONMENT, shape, f"no path serves it ({raised or 'every path rejects it'})"))
    elif chosen is not None and has_first and is_left_to_fallback(chosen, entries):
        found.append(Finding(ExitCode.ENVIRONMENT, shape, f"only the fallback {chosen.path} serves it"))
    return found


SPEED_TOLERANCE = 0.05  # as a share of the time; measured spread is added to it
_ERROR_TOLERANCE = 0.1  # as a share of the worst check: the same bits give the same error


class Harm(IntEnum):
    """The most harmful first."""

    LOST = 0  # a path served by proof, and now none does
    # A path of the first tier served; now a fallback does, or another of that tier in place of a lost proof.
    FALLBACK = 1
    WRONG = 2  # a path of the first tier that does not serve computes wrong numbers now
    SLOWER = 3
    STATUS = 4  # a path that does not serve has another status, or one that serves launches other kernels
    ERROR = 5  # the path that serves errs more, within its limits
    PATH = 6  # another path serves, and is not slower
    BETTER = 7  # faster, more exact, or newly proven


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: evidence, and what has changed since it was measured, seen from where it is to be used."""

    evidence: Mapping[Key, Evidence]
    changed: Changed = unchanged

    def entries(self, shape: AnyShape, paths: Sequence[str]) -> dict[str, Evidence]:
        return {path: self.evidence[shape, path] for path in paths if (shape, path) in self.evidence}

    def valid(self, entries: Mapping[str, Evidence]) -> list[Evidence]:
        return [entry for entry in entries.values() if not self.changed(entry)]

    def choice(self, entries: Mapping[str, Evidence]) -> Evidence | None:
        return choice_of(self.valid(entries))

    def status(self, entries: Mapping[str, Evidence], path: str) -> str:
        return status_of(entries[path], self.changed(entries[path])) if path in entries else "unproven"


@dataclass(frozen=True, slots=True)
class Difference:
    shape: AnyShape
    harm: Harm
    size: float  # within its kind of harm more is worse
    code: ExitCode  # what it alone would make of a deploy
    details: tuple[str, ...]


def differences(a: Side, b: Side, *, speed_tolerance: float = SPEED_TOLERANCE) -> list[Difference]:
    """Compare two sides; empty when every shape has the same path, status, error and speed.

    A shape that one side alone has is compared with the other side's of another format of weights or of the KV cache:
    a model in 8 bits does the work of the same model in 16.
    """
    names: dict[AnyShape, set[str]] = {}
    for shape, path in (*a.evidence, *b.evidence):
        names.setdefault(shape, set()).add(path)
    partners = _partners({shape for shape, _ in a.evidence}, {shape for shape, _ in b.evidence})
    found = [
        _difference_of_formats((shape, names[shape]), (other, names[other]), a, b, speed_tolerance)
        for shape, other in partners.items()
    ]
    paired = {*partners, *partners.values()}
    rest = {shape: paths for shape, paths in names.items() if shape not in paired}
    found += [_difference(shape, sorted(paths), a, b, speed_tolerance) for shape, paths in rest.items()]
    kept = [difference for difference in found if difference is not None]
    return sorted(kept, key=lambda difference: (difference.harm, -difference.size, str(difference.shape)))


def _partners(of_a: Set[AnyShape], of_b: Set[AnyShape]) -> dict[AnyShape, AnyShape]:
    """Return the shape of b for each of a that the other side lacks, and that is the same but for its format."""
    alone: dict[AnyShape, tuple[list[AnyShape], list[AnyShape]]] = {}
    for side, shapes in enumerate((of_a - of_b, of_b - of_a)):
        for shape in shapes:
            alone.setdefault(_in_16_bits(shape), ([], []))[side].append(shape)
    return {old[0]: new[0] for old, new in alone.values() if len(old) == len(new) == 1}


def _in_16_bits(shape: AnyShape) -> AnyShape:
    """Return the shape of the same work with plain weights, or with a KV cache of the model's dtype."""
    if isinstance(shape, LinearShape):
        return replace(shape, weight_format=PLAIN)
    if isinstance(shape, ExpertsShape):
        return replace(shape, format=ExpertFormat.PLAIN)
    return replace(shape, kv_dtype=shape.dtype) if isinstance(shape, AttentionShape) else shape


def _difference_of_formats(
    old: tuple[AnyShape, Set[str]], new: tuple[AnyShape, Set[str]], a: Side, b: Side, speed_tolerance: float
) -> Difference | None:
    """Compare what serves two shapes that differ in their format alone; the difference is the second one's."""
    (shape, paths), (other, others) = old, new
    before, after = a.choice(a.entries(shape, sorted(paths))), b.choice(b.entries(other, sorted(others)))
    if before is None and after is None:
        return None
    was, now = (str(it).split() for it in (shape, other))
    words = [f"{one} -> {two}" for one, two in zip(was, now, strict=True) if one != two]
    details = [f"format {', '.join(words)}"]
    if _name(before) != _name(after):
        details.append(_path_change(before, after))
    if before is None or after is None:
        code = ExitCode.PASS if before is None else ExitCode.ENVIRONMENT
        return Difference(other, Harm.LOST if after is None else Harm.BETTER, 0.0, code, tuple(details))
    checks = before.worst_check, after.worst_check
    if before.path != after.path and checks[0] is not None and checks[1] is not None:
        details.append(f"{check_text(checks[0])} -> {check_text(checks[1])}")
    harms = _choice_harms(before, after, details, speed_tolerance) or [(Harm.PATH, 0.0)]
    harm, size = min(harms, key=lambda entry: entry[0])
    code = ExitCode.PERFORMANCE if harm is Harm.SLOWER else ExitCode.PASS
    return Difference(other, harm, size, code, tuple(details))


def exit_code_of(found: Sequence[Difference]) -> ExitCode:
    codes = {difference.code for difference in found}
    gravest = (ExitCode.NUMERICS, ExitCode.ENVIRONMENT, ExitCode.PERFORMANCE)
    return next((code for code in gravest if code in codes), ExitCode.PASS)


def _difference(shape: AnyShape, paths: Sequence[str], a: Side, b: Side, speed_tolerance: float) -> Difference | None:
    of_a, of_b = a.entries(shape, paths), b.entries(shape, paths)
    before, after = a.choice(of_a), b.choice(of_b)
    details = [_path_change(before, after)] if _name(before) != _name(after) else []
    statuses = [(path, a.status(of_a, path), b.status(of_b, path)) for path in paths]
    changes: dict[str, list[str]] = {}
    for path, was, now in statuses:
        if was != now:
            changes.setdefault(f"{was} -> {now}", []).append(path)
    details += [f"{', '.join(those)} {change}" for change, those in changes.items()]
    is_wrong = any(
        was == "proven" and _is_wrong(of_b.get(path)) and tier_of(path) is Tier.FIRST for path, was, _ in statuses
    )
    if before is None or after is None:
        if not details:
            return None
        harm = Harm.LOST if before is not None else Harm.STATUS if after is None else Harm.BETTER
        code = ExitCode.PASS if before is None else _code_of_loss(before, of_b, is_wrong)
        return Difference(shape, harm, 0.0, code, tuple(details))
    harms = [(Harm.STATUS, 0.0)] if changes else []
    if tier_of(before.path) is Tier.FIRST and b.status(of_b, before.path) != "proven":
        harms.append((Harm.FALLBACK, 0.0))
    if is_wrong:
        harms.append((Harm.WRONG, 0.0))
    if not is_left_to_fallback(before, a.valid(of_a)) and is_left_to_fallback(after, b.valid(of_b)):
        harms.append((Harm.FALLBACK, 0.0))
    harms += _choice_harms(before, after, details, speed_tolerance)
    if not harms:
        return None
    harm, size = min(harms, key=lambda entry: entry[0])
    codes = {
        Harm.FALLBACK: _code_of_loss(before, of_b, is_wrong),
        Harm.WRONG: ExitCode.NUMERICS,
        Harm.SLOWER: ExitCode.PERFORMANCE,
    }
    return Difference(shape, harm, size, codes.get(harm, ExitCode.PASS), tuple(details))


def _choice_harms(
    before: Evidence, after: Evidence, details: list[str], speed_tolerance: float
) -> list[tuple[Harm, float]]:
    """Kinds and sizes of what changed of the path that serves; says so in `details`."""
    harms: list[tuple[Harm, float]] = []
    if before.path != after.path:
        harms.append((Harm.PATH, 0.0))
    if after.timing_doubt is not None and before.timing_doubt is None:
        harms.append((Harm.STATUS, 0.0))
        details.append(f"the time of {after.path} is not believed now: {after.timing_doubt}")
    if before.timing is not None and after.timing is not None and before.timing_doubt is after.timing_doubt is None:
        ratio = after.timing.p50_us / before.timing.p50_us
        if abs(ratio - 1) > max(speed_tolerance, before.timing.spread + after.timing.spread):
            harms.append((Harm.SLOWER, ratio) if ratio > 1 else (Harm.BETTER, 1 - ratio))
            times = (time_text(before.timing.p50_us), time_text(after.timing.p50_us))
            details.append(f"{times[0]} -> {times[1]} (x{ratio:.2f})")
    if before.path == after.path and order_text(before) != order_text(after):
        is_lost = before.invariance is not None and before.invariance.is_passed
        harms.append((Harm.STATUS if is_lost else Harm.BETTER, 0.0))
        details.append(f"order {order_text(before)} -> {order_text(after)}")
    if before.path == after.path and None not in (before.kernels, after.kernels):
        names = [sorted(entry.all_kernels or ()) for entry in (before, after)]
        if names[0] != names[1]:
            harms.append((Harm.STATUS, 0.0))
            details.append(f"kernels {', '.join(names[0])} -> {', '.join(names[1])}")
    was, now = before.worst_check, after.worst_check
    if was is not None and now is not None and before.path == after.path:
        strains = strain(was.measured, was.limit), strain(now.measured, now.limit)
        if abs(strains[1] - strains[0]) > _ERROR_TOLERANCE * max(strains):
            harms.append((Harm.ERROR, strains[1]) if strains[1] > strains[0] else (Harm.BETTER, 0.0))
            details.append(f"{check_text(was)} -> {check_text(now)}")
    return harms


def _code_of_loss(before: Evidence, entries: Mapping[str, Evidence], is_wrong: bool) -> ExitCode:
    """Wrong numbers, of the path that served or (`is_wrong`) of another of the first tier; else what keeps it away."""
    return ExitCode.NUMERICS if is_wrong or _is_wrong(entries.get(before.path)) else ExitCode.ENVIRONMENT


def _is_wrong(entry: Evidence | None) -> bool:
    return entry is not None and entry.failure is None and not entry.is_proven


def _path_change(before: Evidence | None, after: Evidence | None) -> str:
    return f"path {_name(before)} -> {_name(after)}"


def _name(entry: Evidence | None) -> str:
    return "none" if entry is None else entry.path
