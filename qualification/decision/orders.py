"""The choice of one order for each class of shapes that a server can meet, and what has to be measured for it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape, operator_of
from kernels.vocabulary.path import AnyPath
from qualification.decision.class_order import ClassOrder
from qualification.decision.decision import Book, Pairs, Policy, decide, evidence_for, path_standing
from qualification.evidence.anchors import Anchor, anchors_of, classes_of

_MOST_NAMED = 3  # shapes that a reason names


@dataclass(frozen=True, slots=True)
class Known:
    """All that a choice of orders depends on, beside the shapes."""

    paths: Sequence[AnyPath]  # the catalog, most preferred first
    fingerprint: Fingerprint
    book: Book
    policy: Policy
    quarantined: Pairs
    overridden: Pairs = frozenset()


def choose_orders(shapes: Iterable[AnyShape], known: Known) -> dict[str, ClassOrder]:
    """Return, by class, the first order of the catalog in which some path may serve every shape of the class.

    Where none serves all of them, that is the first which can compute them all, else the first of all; the decisions
    in it then name what is missing.
    """
    return {name: _choose(name, of_class, known) for name, of_class in classes_of(shapes).items()}


def unchecked_pairs(shapes: Iterable[AnyShape], known: Known) -> list[tuple[AnyShape, AnyPath]]:
    """Return what has to be measured before an order can serve each class that none serves yet.

    That is, of the first order that may still come to serve the class, every able path without valid evidence of its
    order. Empty once each class is served, or can be by nothing that could be measured.
    """
    pairs: list[tuple[AnyShape, AnyPath]] = []
    for name, of_class in classes_of(shapes).items():
        if _choose(name, of_class, known).is_served:
            continue
        for order in _able_orders(of_class, known):
            missing = [(shape, path) for shape in of_class for path in _unknown(shape, order, known)]
            if missing:
                pairs += missing
                break
    return pairs


def _choose(name: str, shapes: Sequence[AnyShape], known: Known) -> ClassOrder:
    orders, able = _orders(shapes, known), _able_orders(shapes, known)
    wanted = able[0] if able else None
    lacking: dict[str, str] = {}
    for order in orders:
        candidate = ClassOrder(name, order, wanted, anchors=_anchors(shapes, order, known))
        unserved = [shape for shape in shapes if _is_unserved(shape, candidate, known)]
        if not unserved:
            return replace(candidate, is_served=True, lacking=lacking)
        named = ", ".join(str(shape) for shape in unserved[:_MOST_NAMED])
        others = f" and {len(unserved) - _MOST_NAMED} more" if len(unserved) > _MOST_NAMED else ""
        lacking[order] = named + others
    first = wanted or next(iter(orders), None)
    anchors = {} if first is None else _anchors(shapes, first, known)
    return ClassOrder(name, first, wanted, lacking=lacking, anchors=anchors)


def _is_unserved(shape: AnyShape, order: ClassOrder, known: Known) -> bool:
    found = decide(
        shape,
        paths=known.paths,
        fingerprint=known.fingerprint,
        book=known.book,
        quarantined=known.quarantined,
        policy=known.policy,
        overridden=known.overridden,
        order=order,
    )
    return found.path is None


def _orders(shapes: Sequence[AnyShape], known: Known) -> list[str]:
    """Return the orders of paths that can compute some of the shapes on this machine, in the catalog's order."""
    found = [path.order for path in _of_operator(shapes, known) if any(_is_able(path, it, known) for it in shapes)]
    return list(dict.fromkeys(order for order in found if order is not None))


def _able_orders(shapes: Sequence[AnyShape], known: Known) -> list[str]:
    """Return the orders of which some path can compute each shape."""
    paths = _of_operator(shapes, known)
    return [
        order
        for order in _orders(shapes, known)
        if all(any(path.order == order and _is_able(path, shape, known) for path in paths) for shape in shapes)
    ]


def _of_operator(shapes: Sequence[AnyShape], known: Known) -> list[AnyPath]:
    operator = operator_of(shapes[0])
    return [path for path in known.paths if path.operator is operator]


def _is_able(path: AnyPath, shape: AnyShape, known: Known) -> bool:
    return path.run is not None and path.refused is None and not path.rejects(shape, known.fingerprint)


def _unknown(shape: AnyShape, order: str, known: Known) -> list[AnyPath]:
    """Return paths of the order that may come to serve the shape, of which nothing valid is known."""
    found = []
    for path in _of_operator([shape], known):
        if path.order != order or not _is_able(path, shape, known) or (path.name, str(shape)) in known.quarantined:
            continue
        status, _ = path_standing(path, shape, fingerprint=known.fingerprint, book=known.book)
        evidence = evidence_for(path, shape, fingerprint=known.fingerprint, book=known.book, is_ordered=True)
        seen = None if evidence is None else evidence.invariance
        if not status.has_result or (status.is_valid and (seen is None or not seen.is_of(order))):
            found.append(path)
    return found


def _anchors(shapes: Sequence[AnyShape], order: str, known: Known) -> Mapping[str, Anchor]:
    """Return the bits of the order by input: of the first path of the catalog that was checked, of its first shape."""
    found = (
        evidence
        for path in _of_operator(shapes, known)
        if path.order == order
        for shape in shapes
        if (evidence := evidence_for(path, shape, fingerprint=known.fingerprint, book=known.book, is_ordered=True))
        and not evidence.differing_fields(path, known.fingerprint)
    )
    return anchors_of(found, order)
