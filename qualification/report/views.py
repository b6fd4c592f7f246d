"""The evidence of one model, arranged for a page: a heat map, lines, points of the roofline. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernels.vocabulary.operators import AnyShape, buckets_of, is_bound_by_memory, phase_of
from kernels.vocabulary.path import Tier
from kernels.vocabulary.path_order import tier_of
from kernels.vocabulary.recurrence_operator import place_of_phase
from kernels.vocabulary.shape import AttentionShape, Phase
from kernels.vocabulary.value_shape import any_flops
from qualification.common.svg import COLOURS, SPARE_COLOUR, Line
from qualification.evidence.choice import choice_of
from qualification.evidence.evidence import Check, Evidence, strain
from qualification.evidence.summary import check_text, time_text

_FLOOR_COLOUR = "#999999"


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape on one path."""

    kind: str  # "chosen", "proven", "failed" or "none"
    text: str
    title: str  # for those who point at it


@dataclass(frozen=True, slots=True)
class HeatRow:
    shape: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Roofs:
    """The highest rates of a machine."""

    flops_per_second: float
    bytes_per_second: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on arithmetic is the limit."""
        return self.flops_per_second / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class RoofPoint:
    """A chosen path on its timed call."""

    shape: str
    intensity: float  # FLOPs a byte of HBM, by the IO model of tiled attention
    tflops: float
    is_compute_bound: bool
    floor_fraction: float
    path: str


@dataclass(frozen=True, slots=True)
class ModelView:
    name: str
    entries: tuple[Evidence, ...]

    @property
    def shapes(self) -> list[AnyShape]:
        return sorted({entry.shape for entry in self.entries}, key=_shape_order)

    @property
    def paths(self) -> list[str]:
        """Our own first."""
        return sorted({entry.path for entry in self.entries}, key=lambda path: (tier_of(path) is Tier.FALLBACK, path))

    @property
    def chosen(self) -> dict[AnyShape, Evidence | None]:
        """Return the entry that serves each shape by this evidence."""
        return {shape: choice_of(self.entries_of(shape)) for shape in self.shapes}

    def heat_map(self) -> list[HeatRow]:
        """A row a shape, a cell a path in the order of `paths`."""
        found = {(entry.shape, entry.path): entry for entry in self.entries}
        chosen = self.chosen
        return [
            HeatRow(str(shape), tuple(_cell(found.get((shape, path)), chosen[shape]) for path in self.paths))
            for shape in self.shapes
        ]

    def speed_lines(self, phase: Phase) -> list[Line]:
        """Rate against context for each path, and the floor dashed: TFLOP/s, in decode TB/s."""
        timed = [
            entry for entry in self._longest_queries(phase) if entry.timing is not None and _window(entry.shape) is None
        ]
        lines = [
            Line(path, _points((entry.tested_context_tokens, _rate(entry)) for entry in group), colour, tier_dashed)
            for path, colour, tier_dashed, group in self._by_path(timed)
        ]
        floors = {
            entry.tested_context_tokens: _rate(entry) / fraction
            for entry in timed
            if (fraction := entry.floor_fraction) is not None
        }
        return [*lines, Line("floor", _points(floors.items()), _FLOOR_COLOUR, True)] if floors else lines

    def memory_lines(self, phase: Phase) -> list[Line]:
        """Peak temporary memory in MiB against context, for each path."""
        known = [entry for entry in self._longest_queries(phase) if entry.temporary_bytes is not None]
        return [
            Line(
                path, _points((e.tested_context_tokens, (e.temporary_bytes or 0) / 2**20) for e in group), colour, dash
            )
            for path, colour, dash, group in self._by_path(known)
        ]

    def roof(self) -> list[RoofPoint]:
        """Every chosen path that was timed on a machine with a known floor."""
        roofs = roofs_of(self.entries)
        served = [entry for entry in self.chosen.values() if entry is not None]
        return [] if roofs is None else [point for entry in served if (point := roof_point(entry, roofs))]

    def worst_checks(self) -> list[tuple[str, Check]]:
        """Return, for each kind of check, the result nearest to its limit of the paths that serve; nearest first."""
        worst: dict[str, tuple[str, Check]] = {}
        for entry in self.chosen.values():
            for check in () if entry is None else entry.checks:
                known = worst.get(check.name)
                if known is None or _strain(check) > _strain(known[1]):
                    assert entry is not None
                    worst[check.name] = (f"{entry.shape} on {entry.path}", check)
        return sorted(worst.values(), key=lambda pair: -_strain(pair[1]))

    def entries_of(self, shape: AnyShape) -> list[Evidence]:
        return [entry for entry in self.entries if entry.shape == shape]

    def _by_path(self, entries: Sequence[Evidence]) -> list[tuple[str, str, bool, list[Evidence]]]:
        """Path, its colour in every chart of the model, whether its line is dashed (a fallback), and its entries.

        Only where a line has two points.
        """
        found = []
        for index, name in enumerate(self.paths):
            group = [entry for entry in entries if entry.path == name]
            if len({entry.tested_context_tokens for entry in group}) > 1:
                colour = COLOURS[index] if index < len(COLOURS) else SPARE_COLOUR
                found.append((name, colour, tier_of(name) is Tier.FALLBACK, group))
        return found

    def _longest_queries(self, phase: Phase) -> list[Evidence]:
        """Keep, for each path and context, the entry with the most queries: a line is a function of the context."""
        longest: dict[tuple[str, int, int | None], Evidence] = {}
        for entry in self.entries:
            if phase_of(entry.shape) != phase.value:
                continue
            key = (entry.path, entry.tested_context_tokens, _window(entry.shape))
            known = longest.get(key)
            if known is None or known.tested_query_tokens < entry.tested_query_tokens:
                longest[key] = entry
        return list(longest.values())


def roofs_of(entries: Iterable[Evidence]) -> Roofs | None:
    """The machine's two ceilings, read off the floors: a floor is the larger of the times that they allow."""
    floored = [entry for entry in entries if entry.floor_us]
    if not floored:
        return None
    return Roofs(
        max(_flops(e) / _floor_s(e) for e in floored), max(e.predicted_bytes[0] / _floor_s(e) for e in floored)
    )


def roof_point(entry: Evidence, roofs: Roofs) -> RoofPoint | None:
    """Return the place in the chart; None where it was not timed, or its floor is not known."""
    if entry.floor_fraction is None or entry.tflops is None:
        return None
    intensity = _flops(entry) / entry.predicted_bytes[0]
    return RoofPoint(
        str(entry.shape), intensity, entry.tflops, intensity >= roofs.ridge, entry.floor_fraction, entry.path
    )


def _flops(entry: Evidence) -> float:
    return any_flops(entry.shape, entry.tested_query_tokens, entry.tested_context_tokens) * entry.timed_sequences


def _floor_s(entry: Evidence) -> float:
    assert entry.floor_us is not None
    return entry.floor_us * 1e-6


def _cell(entry: Evidence | None, chosen: Evidence | None) -> Cell:
    if entry is None:
        return Cell("none", "", "not measured: the path's limits reject the shape, or it was not asked for")
    time = time_text(None if entry.timing is None else entry.timing.p50_us)
    if not entry.is_proven:
        why = entry.failure or check_text(entry.worst_check)
        return Cell("failed", "failed", " ".join(why.split())[:200])
    details = [f"worst: {check_text(entry.worst_check)}"]
    details += [] if entry.timing_doubt is None else [f"its time is not believed: {entry.timing_doubt}"]
    details += [] if entry.all_kernels is None else [f"kernels: {', '.join(entry.all_kernels)}"]
    details += [] if entry.floor_fraction is None else [f"{entry.floor_fraction:.0%} of what the machine can do"]
    mark = "" if entry.timing_doubt is None else "?"
    return Cell("chosen" if entry is chosen else "proven", time + mark, "; ".join(details))


def _points(points: Iterable[tuple[int, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((float(x), y) for x, y in points))


def _rate(entry: Evidence) -> float:
    if is_bound_by_memory(entry.shape):
        return (entry.bytes_per_second or 0.0) / 1e12
    return entry.tflops or 0.0


def _strain(check: Check) -> float:
    return strain(check.measured, check.limit)


def _window(shape: AnyShape) -> int | None:
    return shape.window if isinstance(shape, AttentionShape) else None


def _shape_order(shape: AnyShape) -> tuple[int, int, int, int, str]:
    queries, context = buckets_of(shape)
    return place_of_phase(phase_of(shape)), _window(shape) or 0, queries.lo, context.lo, str(shape)
