"""Two distributions before and after, as an SVG without any library."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 420, 260, 44
BEFORE, AFTER = "#0072b2", "#d55e00"
Panel = tuple[str, Sequence[float], Sequence[float]]  # title, seconds before, seconds after


def cdf_plot(panels: Sequence[Panel]) -> str:
    """Cumulative distributions side by side, time on a logarithmic axis that all panels share."""
    values = [value for _, before, after in panels for value in (*before, *after)]
    lo, hi = math.log10(min(values)), math.log10(max(values))
    width = WIDTH * len(panels)
    about = "Share of requests that have their first token by then: further left is better"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{HEIGHT}" fill="white"/>'
    ]
    for index, (title, before, after) in enumerate(panels):
        parts.append(f'<g transform="translate({index * WIDTH},0)">')
        parts += _axes(title, lo, hi)
        parts += [_line(before, lo, hi, BEFORE), _line(after, lo, hi, AFTER), "</g>"]
    parts.append(f'<text x="{MARGIN}" y="14" font-size="13" font-weight="bold">{about}</text>')
    parts.append(f'<text x="{WIDTH - 160}" y="{HEIGHT - 76}" fill="{BEFORE}">before the upgrade</text>')
    parts.append(f'<text x="{WIDTH - 160}" y="{HEIGHT - 60}" fill="{AFTER}">after, for 10% of traffic</text></svg>')
    return "\n".join(parts) + "\n"


def _x(log_s: float, lo: float, hi: float) -> float:
    return MARGIN + (log_s - lo) / ((hi - lo) or 1.0) * (WIDTH - 1.5 * MARGIN)


def _y(share: float) -> float:
    return HEIGHT - MARGIN + (2 * MARGIN - HEIGHT) * share


def _axes(title: str, lo: float, hi: float) -> list[str]:
    parts = [f'<text x="{MARGIN}" y="32" font-size="12">{escape(title)}</text>']
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        y = _y(share)
        label = "" if share == 1.0 else f"{share:.0%}"
        parts.append(f'<path d="M{MARGIN},{y:.1f}H{WIDTH - MARGIN / 2}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in (m * 10.0**e for e in range(-4, 3) for m in (1, 2, 5)):
        if lo <= math.log10(tick) <= hi:
            x = _x(math.log10(tick), lo, hi)
            parts.append(f'<path d="M{x:.1f},{_y(0)}V{_y(1)}" stroke="#eee"/>')
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{tick * 1000:g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">time to first token, ms</text>')
    return parts


def _line(values: Sequence[float], lo: float, hi: float, color: str) -> str:
    ordered = sorted(values)
    points = (f"{_x(math.log10(v), lo, hi):.1f},{_y((i + 1) / len(ordered)):.1f}" for i, v in enumerate(ordered))
    return f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{" ".join(points)}"/>'
