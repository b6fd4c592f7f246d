"""Line charts as SVG: rate against length, a line for each contender. Imports no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kernels.shape import Phase
from qualification.bench.cases import FIXED, BenchCase
from qualification.bench.row import Row, sorted_rows
from qualification.bench.table import speed_of

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 48, 56  # margins around the plotted area
# Source: Okabe and Ito, colours that colour-blind readers can tell apart; grey for the rest.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_SPARE_COLOUR = "#999999"

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: tuple[Point, ...]  # x ascending and positive
    colour: str
    is_dashed: bool


def charts(rows: Iterable[Row]) -> dict[str, str]:
    """Name of a file without its ending -> SVG: one chart for all that differs in length alone."""
    rows = [row for row in sorted_rows(rows) if row.case.mix == FIXED]
    colours = dict(zip(dict.fromkeys(row.contender for row in rows), COLOURS, strict=False))
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_group_of(row.case), []).append(row)
    return {
        name: _chart(name, group, colours)
        for name, group in groups.items()
        if len({max(row.case.keys) for row in group}) > 1
    }


def svg(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """A chart with a logarithmic x axis, ticked where points are, and a y axis from 0."""
    xs = sorted({x for line in lines for x, _ in line.points})
    step = _nice_step(max(y for line in lines for _, y in line.points))
    top = step * max(1, math.ceil(max(y for line in lines for _, y in line.points) / step))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    spread = math.log2(xs[-1] / xs[0]) or 1.0

    def place(x: float, y: float) -> Point:
        return _LEFT + width * math.log2(x / xs[0]) / spread, _TOP + height * (1 - y / top)

    parts = [_text(_LEFT, 26, title, size=15, anchor="start")]
    for n in range(round(top / step) + 1):
        _, y = place(xs[0], n * step)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + width}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{n * step:g}", anchor="end"))
    for x in xs:
        at, _ = place(x, 0)
        parts.append(
            f'<line x1="{at:.1f}" y1="{_TOP + height}" x2="{at:.1f}" y2="{_TOP + height + 5}" stroke="#666666"/>'
        )
        parts.append(_text(at, _TOP + height + 20, f"{x / 1024:.3g}k" if x >= 1024 else f"{x:g}"))
    parts.append(_text(_LEFT + width / 2, _HEIGHT - 12, x_label))
    parts.append(f'<g transform="rotate(-90 18 {_TOP + height / 2})">{_text(18, _TOP + height / 2, y_label)}</g>')
    for index, line in enumerate(lines):
        parts += _drawn(line, [place(x, y) for x, y in line.points])
        parts += _legend(line, _LEFT + width + 18, _TOP + 10 + 20 * index)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>\n"])


def _group_of(case: BenchCase) -> str:
    shape = case.shape
    parts = [shape.phase.value, shape.dtype.value, f"d{shape.head_dim}", f"h{shape.num_heads}x{shape.num_kv_heads}"]
    parts += [f"chunk{max(case.queries)}"] if shape.phase is Phase.EXTEND else []
    parts += [f"batch{len(case.queries)}"] if shape.phase is Phase.DECODE else []
    parts += [f"window{shape.window}"] if shape.window is not None else []
    parts += [f"softcap{shape.softcap:g}"] if shape.softcap is not None else []
    return "-".join([*parts, *(["sinks"] if shape.sinks else [])])


def _chart(name: str, rows: Sequence[Row], colours: Mapping[str, str]) -> str:
    points: dict[str, list[Point]] = {}
    for row in rows:
        points.setdefault(row.contender, []).append((max(row.case.keys), speed_of(row)))
    peers = {row.contender for row in rows if row.is_peer}
    lines = [
        Line(contender, tuple(sorted(found)), colours.get(contender, _SPARE_COLOUR), contender in peers)
        for contender, found in points.items()
    ]
    unit = "TB/s" if rows[0].case.shape.phase is Phase.DECODE else "TFLOP/s"
    return svg(name.replace("-", " "), "tokens of a sequence", unit, lines)


def _drawn(line: Line, places: Sequence[Point]) -> list[str]:
    dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>' for x, y in places]
    return [f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>', *dots]


def _legend(line: Line, x: float, y: float) -> list[str]:
    return [*_drawn(line, [(x, y), (x + 26, y)]), _text(x + 34, y + 4, line.name, anchor="start")]


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#333333">{escape(text)}</text>'
    )


def _nice_step(largest: float) -> float:
    """1, 2 or 5 times a power of ten, such that it goes four to ten times into `largest`."""
    power = 10.0 ** math.floor(math.log10(largest / 4)) if largest > 0 else 1.0
    return next(factor * power for factor in (5.0, 2.0, 1.0) if factor * power * 4 <= largest or factor == 1.0)
