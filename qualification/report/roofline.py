"""The roofline of a machine as SVG, a point for each chosen path. Source: Williams, Waterman and Patterson 2009."""

import math
from collections.abc import Sequence
from html import escape

from qualification.bench.plot import COLOURS
from qualification.report.views import RoofPoint, Roofs

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 30, 56  # margins around the plotted area


def roofline(points: Sequence[RoofPoint], roofs: Roofs) -> str:
    """Both axes logarithmic: FLOPs a byte, and TFLOP/s."""
    most = roofs.flops_per_second / 1e12
    xs = [point.intensity for point in points] + [roofs.ridge]
    x_lo, x_hi = 10 ** math.floor(math.log10(min(xs))), 10 ** math.ceil(math.log10(max(xs)))
    ys = [point.tflops for point in points] + [most]
    y_lo, y_hi = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        right = math.log10(x / x_lo) / math.log10(x_hi / x_lo)
        up = math.log10(max(y, y_lo) / y_lo) / math.log10(y_hi / y_lo)
        return _LEFT + width * right, _TOP + height * (1 - up)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">']
    parts.append('<rect width="100%" height="100%" fill="#ffffff"/>')
    for x in _decades(x_lo, x_hi):
        at, _ = place(x, y_lo)
        parts.append(f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_TOP + height}" stroke="#dddddd"/>')
        parts.append(_text(at, _TOP + height + 20, f"{x:g}"))
    for y in _decades(y_lo, y_hi):
        _, at = place(x_lo, y)
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_LEFT + width}" y2="{at:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, at + 4, f"{y:g}", anchor="end"))
    corner = [(x, min(most, x * roofs.bytes_per_second / 1e12)) for x in (x_lo, roofs.ridge, x_hi)]
    roof = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*pair) for pair in corner))
    parts.append(f'<polyline points="{roof}" fill="none" stroke="#333333" stroke-width="2"/>')
    for index, path in enumerate(sorted({point.path for point in points})):
        colour = COLOURS[index % len(COLOURS)]
        for point in points:
            if point.path == path:
                x, y = place(point.intensity, point.tflops)
                label = f"{point.shape}: {point.tflops:.4g} TFLOP/s, {point.floor_fraction:.0%} of the floor"
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(label)}</title></circle>'
                )
        parts.append(f'<circle cx="{_LEFT + width + 24}" cy="{_TOP + 10 + 20 * index}" r="4" fill="{colour}"/>')
        parts.append(_text(_LEFT + width + 34, _TOP + 14 + 20 * index, path, anchor="start"))
    parts.append(_text(_LEFT + width / 2, _HEIGHT - 12, "FLOPs a byte of HBM"))
    middle = _TOP + height / 2
    parts.append(f'<g transform="rotate(-90 18 {middle})">{_text(18, middle, "TFLOP/s")}</g>')
    return "\n".join([*parts, "</svg>"])


def _decades(lo: float, hi: float) -> list[float]:
    return [lo * 10**n for n in range(round(math.log10(hi / lo)) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}" fill="#333333">{escape(text)}</text>'
