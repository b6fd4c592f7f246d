"""Charts of the rows of `hallmark bench attention`: rate against length, a line for each contender.

Imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from bench.attention.cases import FIXED, BenchCase
from bench.attention.row import Row, sorted_rows
from bench.attention.table import speed_of
from kernels.vocabulary.shape import Phase
from qualification.common.svg import COLOURS, SPARE_COLOUR, Line, Point, svg

_MANY = 12  # batches of decode of one context that make a chart


def charts(rows: Iterable[Row]) -> dict[str, str]:
    """Name of a file without its ending -> SVG: one chart for all that differs in length alone, or in batch."""
    rows = [row for row in sorted_rows(rows) if row.case.mix == FIXED]
    colours = dict(zip(dict.fromkeys(row.contender for row in rows), COLOURS, strict=False))
    by_length: dict[str, list[Row]] = {}
    by_batch: dict[str, list[Row]] = {}
    for row in rows:
        case = row.case
        batch = f"batch{len(case.keys)}"
        if case.shape.phase is not Phase.DECODE:
            by_length.setdefault(_group_of(case, ""), []).append(row)
            continue
        by_length.setdefault(_group_of(case, batch), []).append(row)
        by_batch.setdefault(_group_of(case, f"context{case.keys[0]}"), []).append(row)
    lengths = {name: found for name, found in by_length.items() if len({row.case.keys[0] for row in found}) > 1}
    batches = {name: found for name, found in by_batch.items() if len({len(row.case.keys) for row in found}) > _MANY}
    return {
        **{name: _chart(name, found, colours, "tokens of a sequence", _length_of) for name, found in lengths.items()},
        **{name: _chart(name, found, colours, "sequences", _batch_of) for name, found in batches.items()},
    }


def _length_of(case: BenchCase) -> int:
    return max(case.keys)


def _batch_of(case: BenchCase) -> int:
    return len(case.keys)


def _group_of(case: BenchCase, fixed: str) -> str:
    """Return the name of a case's chart; `fixed` names what does not differ in a chart of decode."""
    shape = case.shape
    parts = [shape.phase.value, shape.dtype.value, f"d{shape.head_dim}", f"h{shape.num_heads}x{shape.num_kv_heads}"]
    parts += [f"chunk{max(case.queries)}"] if shape.phase is Phase.EXTEND else []
    parts += [fixed] if fixed else []
    parts += [f"queries{max(case.queries)}"] if shape.phase is Phase.DECODE and max(case.queries) > 1 else []
    parts += [f"window{shape.window}"] if shape.window is not None else []
    parts += [f"softcap{shape.softcap:g}"] if shape.softcap is not None else []
    return "-".join([*parts, *(["sinks"] if shape.sinks else [])])


def _chart(
    name: str, rows: Sequence[Row], colours: Mapping[str, str], x_label: str, place: Callable[[BenchCase], int]
) -> str:
    points: dict[str, list[Point]] = {}
    for row in rows:
        points.setdefault(row.contender, []).append((place(row.case), speed_of(row)))
    peers = {row.contender for row in rows if row.is_peer}
    lines = [
        Line(contender, tuple(sorted(found)), colours.get(contender, SPARE_COLOUR), contender in peers)
        for contender, found in points.items()
    ]
    unit = "TB/s" if rows[0].case.shape.phase is Phase.DECODE else "TFLOP/s"
    return svg(f"{name.replace('-', ' ')}: {unit} by {x_label}, higher is better", x_label, unit, lines)
