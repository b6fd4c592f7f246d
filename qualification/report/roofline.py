"""The roofline of a machine as SVG, a point for each chosen path. Source: Williams, Waterman and Patterson 2009."""

import math
from collections.abc import Sequence
from html import escape

from qualification.common.svg import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, headline, labels, page, text
from qualification.report.views import RoofPoint, Roofs


def roofline(points: Sequence[RoofPoint], roofs: Roofs) -> str:
    """Draw the points below their roofs; both axes are logarithmic: FLOPs a byte, and TFLOP/s."""
    most = roofs.flops_per_second / 1e12
    xs = [point.intensity for point in points] + [roofs.ridge]
    x_lo, x_hi = 10 ** math.floor(math.log10(min(xs))), 10 ** math.ceil(math.log10(max(xs)))
    ys = [point.tflops for point in points] + [most]
    y_lo, y_hi = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        right = math.log10(x / x_lo) / math.log10(x_hi / x_lo)
        up = math.log10(max(y, y_lo) / y_lo) / math.log10(y_hi / y_lo)
        return LEFT + width * right, TOP + height * (1 - up)

    parts = [headline("Rate by arithmetic intensity: nearer to the roof is better")]
    for x in _decades(x_lo, x_hi):
        at, _ = place(x, y_lo)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{TOP + height}" stroke="#dddddd"/>')
        parts.append(text(at, TOP + height + 20, f"{x:g}"))
    for y in _decades(y_lo, y_hi):
        _, at = place(x_lo, y)
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{LEFT + width}" y2="{at:.1f}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, at + 4, f"{y:g}", anchor="end"))
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
        parts.append(f'<circle cx="{LEFT + width + 24}" cy="{TOP + 10 + 20 * index}" r="4" fill="{colour}"/>')
        parts.append(text(LEFT + width + 34, TOP + 14 + 20 * index, path, anchor="start"))
    return page([*parts, *labels("FLOPs a byte of HBM", "TFLOP/s")])


def _decades(lo: float, hi: float) -> list[float]:
    return [lo * 10**n for n in range(round(math.log10(hi / lo)) + 1)]
