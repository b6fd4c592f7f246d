"""Rows of whole steps as tables, charts and what follows from them. Imports no torch."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from bench.steps.fit import CLIFF, curve, off_curve, slope
from bench.steps.row import DecodeRow, Inside, LoadRow, PrefillRow, StepsFile, Sweep
from qualification.common.svg import COLOURS, Line, bars, svg
from qualification.common.table import table
from server.engine.scheduling.step_parts import Part

Row = TypeVar("Row", PrefillRow, DecodeRow)
_LONG = 512  # tokens from which a prompt's time should be its own, not the step's
_PREFILL_HEAD = (
    "prompt, tokens", "steps", "p50, ms", "+-", "n", "CPU, ms", "tokens/s", "floor, ms", "of floor", "slope", "x curve",
    "", "by",
)  # fmt: skip
_DECODE_HEAD = (
    "batch", "context, tokens", "p50, ms", "+-", "n", "CPU, ms", "tokens/s", "floor, ms", "of floor", "x curve", "",
    "by",
)  # fmt: skip
_INSIDE_HEAD = ("steps of", "p50, ms", "host, ms", "x curve", "", "device busy", *(part.value for part in Part))


def derived(file: StepsFile) -> dict[str, object]:
    """Slopes and cliffs: what a later run is compared by."""
    prefill = [(float(row.tokens), file.cost_of(row)) for row in file.prefill]
    return {
        "prefill_slope": _rounded(_slope(prefill)),
        f"prefill_slope_from_{_LONG}": _rounded(_slope([pair for pair in prefill if pair[0] >= _LONG])),
        "cliffs": cliffs(file),
    }


def cliffs(file: StepsFile) -> list[str]:
    """Return the cells that cost more than CLIFF times the smooth curve through their sweep."""
    prompts = [f"a prompt of {row.tokens}" for row in file.prefill]
    found = _flagged(prompts, _off(file.prefill, _tokens_of, file.cost_of), "its time")
    for sweep in Sweep:
        rows = file.decodes(sweep)
        steps = [f"decode of {row.batch} x {row.context}" for row in rows]
        found += _flagged(steps, _off(rows, _x_of, file.cost_of), "a step's time")
        found += _flagged(steps, _off(rows, _x_of, _host), "the host's part")
    return found


def report_lines(file: StepsFile) -> list[str]:
    """Every table, slope and cliff for a terminal. Times are milliseconds."""
    lines = _titled("Prompts alone, to the first token:", _PREFILL_HEAD, _prefill_cells(file))
    found = derived(file)
    slopes = [f"{name.replace('_', ' ')}: {found[name]}" for name in found if name != "cliffs" and found[name]]
    lines += [f"Log-log {', '.join(slopes)} (1: in proportion to the prompt, 2: to its square).", ""] if slopes else []
    for sweep in Sweep:
        lines += _titled(f"Decode steps by {sweep.value}:", _DECODE_HEAD, _decode_cells(file, sweep))
    lines += _titled("Where a step's time goes:", _INSIDE_HEAD, _inside_cells(file))
    nothing = f"Of sweeps of five sizes and more, nothing costs over {CLIFF:g} x the smooth curve."
    lines += [f"CLIFF: {cliff}" for cliff in cliffs(file)] or [nothing]
    return lines + [f"not measured: {reason}" for reason in file.skipped]


def steps_charts(file: StepsFile) -> dict[str, str]:
    """Name of a file without its ending -> SVG, for each sweep with at least two sizes."""
    title, charts = f"{file.model['name']} on {file.machine['gpu']}", {}
    if len(file.prefill) > 1:
        lines = _lines(file, file.prefill, _tokens_of)
        charts["prefill"] = svg(
            f"Time to the first token by prompt length, {title}: lower is better",
            "tokens of the prompt",
            "ms to the first token",
            lines,
            is_log=True,
        )
    for sweep in Sweep:
        rows = file.decodes(sweep)
        if len(rows) < 2:
            continue
        fixed = f"context {rows[0].context}" if sweep is Sweep.BATCH else f"batch {rows[0].batch}"
        x_label = "sequences" if sweep is Sweep.BATCH else "tokens of each context"
        host = Line("host's part", tuple((_x_of(row), row.inside.host.p50) for row in rows), COLOURS[2], False)
        lines = [*_lines(file, rows, _x_of), host]
        name = f"Time of a decode step by {sweep.value}, {fixed}, {title}: lower is better"
        charts[f"decode-{sweep.value}"] = svg(name, x_label, "ms of a step", lines, is_log=True)
        if sweep is Sweep.BATCH:
            columns = {str(row.x): row.inside.parts_ms for row in rows}
            columns |= {f"{row.streams}, load": row.inside.parts_ms for row in file.load}
            charts["parts"] = bars(
                f"Where the time of a decode step goes, {fixed}, {title}", x_label, "share of a step", columns
            )
    return charts


def _titled(title: str, head: Sequence[str], cells: Sequence[tuple[str, ...]]) -> list[str]:
    return [title, "", *table(head, cells), ""] if cells else []


def _prefill_cells(file: StepsFile) -> list[tuple[str, ...]]:
    cells, rows = [], file.prefill
    for index, (row, off) in enumerate(zip(rows, _off(rows, _tokens_of, file.cost_of), strict=True)):
        local = _slope([(float(it.tokens), file.cost_of(it)) for it in rows[max(0, index - 1) : index + 1]])
        head = (f"{row.tokens}", f"{row.steps}", *_time_cells(row, row.tokens))
        cells.append((*head, "-" if local is None else f"{local:.2f}", *_off_cells(off), ", ".join(row.paths)))
    return cells


def _decode_cells(file: StepsFile, sweep: Sweep) -> list[tuple[str, ...]]:
    rows = file.decodes(sweep)
    return [
        (f"{row.batch}", f"{row.context}", *_time_cells(row, row.batch), *_off_cells(off), ", ".join(row.paths))
        for row, off in zip(rows, _off(rows, _x_of, file.cost_of), strict=True)
    ]


def _inside_cells(file: StepsFile) -> list[tuple[str, ...]]:
    cells = []
    for sweep in Sweep:
        rows = file.decodes(sweep)
        for row, off in zip(rows, _off(rows, _x_of, _host), strict=True):
            cells.append((f"decode {row.batch} x {row.context}", *_parts_cells(row, row.inside, *_off_cells(off))))
    for load in file.load:
        name = f"load {load.streams} x {load.prompt} + {load.output}, {load.tokens_per_s:g} tok/s"
        cells.append((name, *_parts_cells(load, load.inside, "-", "")))
    return cells


def _time_cells(row: PrefillRow | DecodeRow, num_tokens: int) -> tuple[str, ...]:
    time, floor_ms = row.time, row.floor_ms
    floor = ("-", "-") if floor_ms is None else (f"{floor_ms:.3g}", f"{100 * floor_ms / time.p50:.0f} %")
    rate = f"{1e3 * num_tokens / time.p50:.4g}"
    return f"{time.p50:.4g}", f"{100 * time.spread:.0f} %", f"{time.n}", f"{row.cpu.p50:.4g}", rate, *floor


def _parts_cells(row: DecodeRow | LoadRow, inside: Inside, *off: str) -> tuple[str, ...]:
    busy = "-" if inside.busy is None else f"{100 * inside.busy:.0f} %"
    total = sum(inside.parts_ms.values()) or 1.0
    shares = [f"{100 * inside.parts_ms[part.value] / total:.1f} %" for part in Part]
    return f"{row.time.p50:.4g}", f"{inside.host.p50:.3g}", *off, busy, *shares


def _off_cells(off: float) -> tuple[str, str]:
    return f"{off:.2f}", "CLIFF" if off > CLIFF else ""


def _lines(file: StepsFile, rows: Sequence[Row], x_of: Callable[[Row], float]) -> list[Line]:
    """Measured time, what growth is judged by with its smooth curve, and the floor where it is known."""

    def line(name: str, ys: Iterable[float], colour: str, is_dashed: bool) -> Line:
        return Line(name, tuple(zip(map(x_of, rows), ys, strict=True)), colour, is_dashed)

    lines: list[Line] = [line("time, p50", (row.time.p50 for row in rows), COLOURS[0], False)]
    if file.machine["device"] == "cpu":
        lines.append(line("processor time, p50", (row.cpu.p50 for row in rows), COLOURS[4], False))
    smooth = curve(list(map(x_of, rows)), list(map(file.cost_of, rows)))
    lines.append(line("smooth curve", smooth, COLOURS[1], True))
    floors = [row.floor_ms for row in rows if row.floor_ms is not None]
    return [*lines, line("floor", floors, "#666666", True)] if len(floors) == len(rows) else lines


def _off(rows: Sequence[Row], x_of: Callable[[Row], float], y_of: Callable[[Row], float]) -> list[float]:
    return off_curve([x_of(row) for row in rows], [y_of(row) for row in rows])


def _flagged(names: Sequence[str], offs: Sequence[float], what: str) -> list[str]:
    return [
        f"{name}: {what} is {off:.2f} x the smooth curve" for name, off in zip(names, offs, strict=True) if off > CLIFF
    ]


def _slope(pairs: Sequence[tuple[float, float]]) -> float | None:
    return slope([x for x, _ in pairs], [y for _, y in pairs])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _tokens_of(row: PrefillRow) -> float:
    return row.tokens


def _x_of(row: DecodeRow) -> float:
    return row.x


def _host(row: DecodeRow) -> float:
    return row.inside.host.best
