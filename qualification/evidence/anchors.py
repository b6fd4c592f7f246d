"""The bits that all paths of one order must give of the same input, whatever the phase or the number of rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kernels.convolution.shape import ConvolutionShape
from kernels.recurrence.shape import RecurrenceShape
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.shape import AttentionShape, Mask
from qualification.evidence.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Anchor:
    """The bits of one input, by the path that stands first."""

    digest: str
    path: str


def class_of(shape: AnyShape) -> str:
    """Return a line that all shapes share in which the same numbers of a sequence can be computed.

    That is a shape's own line without phase, buckets and page size. Rows of a prompt with images are computed with and
    without spans, so both are one class.
    """
    if isinstance(shape, RecurrenceShape | ConvolutionShape):
        return shape.kind.replace(f" {shape.phase.value}", "", 1)
    if not isinstance(shape, AttentionShape):
        return shape.kind
    words = str(shape).split()[1:]
    kept = [it for it in words if not it.startswith(("q-", "c-", "page"))]
    return " ".join(["attention", *(Mask.CAUSAL.value if it == Mask.SPANS.value else it for it in kept)])


def classes_of(shapes: Iterable[AnyShape]) -> dict[str, list[AnyShape]]:
    """Return the shapes by their class, each once."""
    found: dict[str, list[AnyShape]] = {}
    for shape in dict.fromkeys(shapes):
        found.setdefault(class_of(shape), []).append(shape)
    return found


def anchors_of(entries: Iterable[Evidence], order: str) -> dict[str, Anchor]:
    """Return the anchors of an order by input, from valid evidence of one class, the most preferred first."""
    found: dict[str, Anchor] = {}
    for entry in entries:
        seen = entry.invariance
        if entry.is_proven and seen is not None and seen.is_of(order) and seen.is_passed:
            for point, digest in seen.digests:
                found.setdefault(point, Anchor(digest, entry.path))
    return found


def broken_promise(entry: Evidence, order: str, anchors: Mapping[str, Anchor]) -> str | None:
    """Return by what a path breaks the promise of its order, as the end of a sentence that names it.

    None where it keeps it, and where it was not checked.
    """
    seen = entry.invariance
    if seen is None or not seen.is_of(order):
        return None
    if not seen.is_passed:
        return f"claims order {order}, but {seen.failure}"
    for point, digest in seen.digests:
        anchor = anchors.get(point)
        if anchor is not None and anchor.digest != digest:
            return f"claims order {order}, but has other bits than {anchor.path} on the input {point!r}"
    return None
