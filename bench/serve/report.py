"""Rows of load as tables, Markdown and charts, with the ratio to each peer. No torch."""

from collections.abc import Iterable, Sequence

from qualification.common.quantiles import needed_samples
from qualification.common.svg import Line, colours_of, svg
from qualification.load.served import Scenario, ServedSide, ServeRow
from qualification.report.ratios import same_case

_HEAD = (
    "case",
    "group",
    "server",
    "requests",
    "errors",
    "TTFT p50, ms",
    "TTFT p90, ms",
    "TTFT p99, ms",
    "token p50, ms",
    "gap p50, ms",
    "gap p99, ms",
    "tokens/s",
    "good answers",
)
# Above these the client itself is a part of what it measured.
_MAX_LAG_SHARE = 0.05
_MAX_LAG_MS = 2.0  # timers of libuv have steps of 1 ms


def sides_table(sides: Sequence[ServedSide]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and lines, sides of a case below one another. Times are milliseconds."""
    lines = []
    for row in sides[0].rows:
        for side in sides:
            same = same_case(side.rows, row)
            if same is not None:
                lines.append((same.case, same.group, side.name, *_cells(same)))
    return _HEAD, lines


def warnings(sides: Sequence[ServedSide]) -> list[str]:
    """Return doubts about the numbers: a client that was late, tokens without a count, errors."""
    lines = []
    for side in sides:
        for row in side.rows:
            lag_ms = 1e3 * max(row.lag.loop_p99_s, row.lag.send_p99_s)
            scale = row.ttft_p50_ms or max(row.ttft_ms, default=0.0)
            where = f"{side.name}, {row.case}, {row.group}"
            if row.group == "all" and lag_ms > _MAX_LAG_MS and lag_ms > _MAX_LAG_SHARE * scale:
                lines.append(
                    f"{where}: DISTORTED: the client itself was {lag_ms:.1f} ms late (p99); TTFT is {scale:.1f}"
                )
            if not row.is_counted_by_server:
                lines.append(f"{where}: the server counts no tokens; one an event is assumed")
            if row.first_error is not None and row.group == "all":
                lines.append(f"{where}: {row.num_errors} errors, the first: {row.first_error}")
        lines += [f"{side.name}: not measured: {reason}" for reason in side.skipped]
    return lines


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(line)} |" for line in lines),
    ]


def serve_charts(sides: Sequence[ServedSide]) -> dict[str, str]:
    """Name of a file without its ending -> SVG, for each scenario with two places on its axis."""
    wanted = {
        "ttft": (
            Scenario.TTFT,
            "Speed to the first token by prompt length: higher is better",
            "tokens of the prompt",
            "prompt tokens a second until the first token",
        ),
        "tpot": (Scenario.TPOT, "Time per token by streams: lower is better", "streams together", "ms a token, p50"),
        "throughput": (
            Scenario.THROUGHPUT,
            "Tokens a second by requests at once: higher is better",
            "requests at once",
            "tokens a second",
        ),
    }
    charts, colours = {}, colours_of(side.name for side in sides)
    for name, (scenario, title, x_label, y_label) in wanted.items():
        lines = [
            Line(side.name, points, colours[side.name], n > 0)
            for n, side in enumerate(sides)
            if len(points := _points(side.rows, scenario)) > 1
        ]
        if lines:
            charts[name] = svg(title, x_label, y_label, lines)
    return charts


def _points(rows: Iterable[ServeRow], scenario: Scenario) -> tuple[tuple[float, float], ...]:
    found = []
    for row in rows:
        if row.scenario is not scenario:
            continue
        if scenario is Scenario.TTFT and row.ttft_p50_ms is not None:
            found.append((row.x, 1e3 * row.x / row.ttft_p50_ms))
        elif scenario is Scenario.TPOT and row.tpot_p50_ms is not None:
            found.append((row.x, row.tpot_p50_ms))
        elif scenario is Scenario.THROUGHPUT and row.output_tokens_per_s is not None:
            found.append((row.x, row.output_tokens_per_s))
    return tuple(sorted(found))


def _cells(row: ServeRow) -> tuple[str, ...]:
    num_ttft = len(row.ttft_ms)
    return (
        f"{row.num_requests}",
        f"{row.num_errors}",
        _number(row.ttft_p50_ms, num_ttft, 0.5),
        _number(row.ttft_p90_ms, num_ttft, 0.9),
        _number(row.ttft_p99_ms, num_ttft, 0.99),
        _number(row.tpot_p50_ms, len(row.tpot_ms), 0.5) if row.tpot_ms else "-",
        _number(row.gap_p50_ms, row.num_gaps, 0.5) if row.num_gaps else "-",
        _number(row.gap_p99_ms, row.num_gaps, 0.99) if row.num_gaps else "-",
        "-" if row.output_tokens_per_s is None else f"{row.output_tokens_per_s:.0f}",
        f"{row.good_share:.1%}",
    )


def _number(value: float | None, num_samples: int, q: float) -> str:
    return f"NO_DATA {num_samples}/{needed_samples(q)}" if value is None else f"{value:.2f}"
