"""Line and bar charts as SVG. Imports no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 440
# Margins around the plotted area. On the left stand ticks of up to 7 characters, 50 wide, beside the name of the axis.
LEFT, RIGHT, TOP, BOTTOM = 82, 190, 48, 56
# Source: Okabe and Ito, colours that colour-blind readers can distinguish; grey for the rest.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
SPARE_COLOUR = "#999999"
# The colour of a server by the beginning of its name, the same in every chart; others take what is left, in order.
_SERVERS = {
    "hallmark": COLOURS[0],
    "candidate": COLOURS[0],
    "vllm": COLOURS[1],
    "sglang": COLOURS[2],
    "baseline": COLOURS[1],
}
_LONG_TITLE = 84  # characters of the usual size that fit
_MANY = 12  # points on the x axis: ticks of more would overlap

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: tuple[Point, ...]  # x ascending and positive
    colour: str
    is_dashed: bool


def colours_of(servers: Iterable[str]) -> dict[str, str]:
    """A colour for each server: its own where it has one, the same in every chart, otherwise one that no other has."""
    found: dict[str, str] = {}
    names = list(servers)
    for name in names:
        own = next((colour for known, colour in _SERVERS.items() if name.lower().startswith(known)), None)
        if own is not None and own not in found.values():
            found[name] = own
    free = [colour for colour in COLOURS if colour not in {*found.values(), *_SERVERS.values()}]
    for name in names:
        if name not in found:
            found[name] = free.pop(0) if free else SPARE_COLOUR
    return found


def svg(title: str, x_label: str, y_label: str, lines: Sequence[Line], *, is_log: bool = False) -> str:
    """A chart with a logarithmic x axis, ticked where points are, and a y axis from 0, or logarithmic (all y > 0)."""
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    ticks = _log_ticks(min(ys), max(ys)) if is_log else _ticks(max(ys))
    low, top = ticks[0], ticks[-1]
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    spread = math.log2(xs[-1] / xs[0]) or 1.0

    def place(x: float, y: float) -> Point:
        up = math.log(y / low) / math.log(top / low) if is_log else y / top
        return LEFT + width * math.log2(x / xs[0]) / spread, TOP + height * (1 - up)

    parts = [headline(title)]
    for tick in ticks:
        _, y = place(xs[0], tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + width}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tick:g}", anchor="end"))
    powers = [x for x in xs if math.log2(x).is_integer()]
    for x in powers if powers and len(xs) > _MANY else xs:
        at, _ = place(x, top)
        parts.append(
            f'<line x1="{at:.1f}" y1="{TOP + height}" x2="{at:.1f}" y2="{TOP + height + 5}" stroke="#666666"/>'
        )
        parts.append(text(at, TOP + height + 20, f"{x / 1024:.3g}k" if x >= 1024 else f"{x:g}"))
    for index, line in enumerate(lines):
        parts += _drawn(line, [place(x, y) for x, y in line.points])
        parts += _legend(line, LEFT + width + 18, TOP + 10 + 20 * index)
    return page([*parts, *labels(x_label, y_label)])


def bars(title: str, x_label: str, y_label: str, columns: Mapping[str, Mapping[str, float]]) -> str:
    """A column for each name under the x axis, made of parts as shares of its sum, in the order of the first column."""
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    each = width / len(columns)
    parts = [headline(title)]
    for percent in range(0, 101, 20):
        y = TOP + height * (1 - percent / 100)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + width}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, y + 4, f"{percent} %", anchor="end"))
    for index, (label, column) in enumerate(columns.items()):
        left, bottom, total = LEFT + each * (index + 0.1), float(TOP + height), sum(column.values()) or 1.0
        for name in names:
            tall = height * column.get(name, 0.0) / total
            bottom -= tall
            parts.append(_box(left, bottom, 0.8 * each, tall, _colour(names.index(name))))
        parts.append(text(left + 0.4 * each, TOP + height + 20, label))
    for index, name in enumerate(names):
        y = TOP + 10 + 20 * (len(names) - 1 - index)  # as the parts stand on each other
        parts += [_box(LEFT + width + 18, y - 7, 14, 14, _colour(index))]
        parts += [text(LEFT + width + 40, y + 4, name, anchor="start")]
    return page([*parts, *labels(x_label, y_label)])


def _colour(index: int) -> str:
    return COLOURS[index] if index < len(COLOURS) else SPARE_COLOUR


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.2f}" width="{width:.1f}" height="{height:.2f}" fill="{colour}"/>'


def headline(title: str) -> str:
    """The title, smaller where it is long."""
    return text(LEFT, 26, title, size=15 if len(title) <= _LONG_TITLE else 11, anchor="start")


def labels(x_label: str, y_label: str) -> list[str]:
    """The names of the axes: below the plotted area, and upright at the left edge."""
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    return [
        text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 12, x_label),
        f'<g transform="rotate(-90 18 {middle})">{text(18, middle, y_label)}</g>',
    ]


def page(parts: Sequence[str]) -> str:
    """The whole picture, on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>\n"])


def _ticks(largest: float) -> list[float]:
    """Return ticks from 0 to `largest` or above."""
    step = _nice_step(largest)
    return [n * step for n in range(max(1, math.ceil(largest / step)) + 1)]


def _log_ticks(least: float, largest: float) -> list[float]:
    """Powers of ten around all, where they are few with their 2s and 5s, but none beyond the first one out."""
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(largest)) + 1)
    factors = (1, 2, 5) if len(decades) <= 4 else (1,)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    low = max((tick for tick in ticks if tick <= least), default=ticks[0])
    top = min((tick for tick in ticks if tick >= largest), default=ticks[-1])
    return [tick for tick in ticks if low <= tick <= max(top, ticks[ticks.index(low) + 1])]


def _drawn(line: Line, places: Sequence[Point]) -> list[str]:
    dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>' for x, y in places]
    return [f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>', *dots]


def _legend(line: Line, x: float, y: float) -> list[str]:
    return [*_drawn(line, [(x, y), (x + 26, y)]), text(x + 34, y + 4, line.name, anchor="start")]


def text(x: float, y: float, content: str, *, size: int = 12, anchor: str = "middle") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="#333333">{escape(content)}</text>'


def _nice_step(largest: float) -> float:
    """1, 2 or 5 times a power of ten, such that it goes four to ten times into `largest`."""
    power = 10.0 ** math.floor(math.log10(largest / 4)) if largest > 0 else 1.0
    return next(factor * power for factor in (5.0, 2.0, 1.0) if factor * power * 4 <= largest or factor == 1.0)
