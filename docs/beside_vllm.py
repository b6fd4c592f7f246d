"""Write the table of speed in README.md and its chart, from the files of docs/benchmarks. A test compares both.

.venv/bin/python docs/beside_vllm.py
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qualification.common.svg import COLOURS, text

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
CHART = DOCS / "images" / "beside-vllm.svg"
BENCHMARKS = DOCS / "benchmarks"
# Cases of `hallmark bench serve`, with the heads of their columns; of all but the last less is better.
CASES = {
    "ttft 128": "first token, 128 in",
    "ttft 8192": "8,192 in",
    "tpot 8": "token, 8 streams",
    "throughput 128": "tokens a second, 128 streams",
}
LEGEND = {"ttft 128": "first token, 128 in", "ttft 8192": "first token, 8,192 in", "tpot 8": "token, 8 streams"}
WIDTH, LEFT, TOP, BAR, GAP = 760, 190, 92, 15, 18  # pixels of the chart; LEFT: beside the names


@dataclass(frozen=True, slots=True)
class Row:
    """A model, and the files of its runs; where two have a case, the later file's is taken."""

    name: str
    files: tuple[str, ...]
    note: str = ""  # a mark behind its tokens a second


ROWS = (
    Row("Llama-3.1-8B", ("serve-llama8b.json",)),
    Row("Llama-3.1-8B, fp8", ("serve-llama8b-fp8-beside-vllm-nvidia-h200.json",)),
    Row("Qwen3-30B-A3B", ("serve-qwen3-30b-a3b.json",)),
    Row("gpt-oss-20b", ("serve-gpt-oss-20b-nvidia-h200.json", "serve-gpt-oss-20b-nvidia-h200-again.json"), r"\*"),
    Row("Qwen3.5-35B-A3B", ("serve-qwen3.5-35b-a3b-nvidia-h200.json",)),
    Row("Llama-3.1-8B, two GPUs", ("tensor-parallel-8b-beside-vllm-nvidia-h200.json",)),
)


def pairs_of(row: Row) -> dict[str, tuple[float, float]]:
    """Return ours and vLLM's number of each case: milliseconds (p50), or tokens a second.

    Raises KeyError where a case was not measured on both sides.
    """
    found: dict[str, dict[bool, float]] = {case: {} for case in CASES}
    for file in row.files:
        of_file: dict[tuple[str, bool], float] = {}
        for server, case, value in _measured(json.loads((BENCHMARKS / file).read_text())):
            of_file.setdefault((case, "vllm" in server), value)  # of several sides of ours the first
        for (case, is_peer), value in of_file.items():
            if case in found:
                found[case][is_peer] = value
    return {case: (sides[False], sides[True]) for case, sides in found.items()}


def _measured(run: dict[str, object]) -> Iterator[tuple[str, str, float]]:
    """Yield server, case and number of a run's rows."""
    sides = run["sides"]
    assert isinstance(sides, list)
    for side in sides:
        for row in side["rows"]:
            number = {"ttft": "ttft_p50_ms", "tpot": "tpot_p50_ms"}.get(row["scenario"], "output_tokens_per_s")
            yield side["name"], row["case"], row[number]


def dates() -> tuple[str, str]:
    """Return the days of the oldest and of the newest run."""
    runs = [json.loads((BENCHMARKS / file).read_text()) for row in ROWS for file in row.files]
    days = sorted(run.get("date", run.get("at"))[:10] for run in runs)
    return days[0], days[-1]


def table() -> str:
    """Return the table of README.md: ours / vLLM's."""
    head = ("ms, ours / vLLM's", *CASES.values())
    rows = [
        (
            row.name,
            *(_cell(pair) + (row.note if case == "throughput 128" else "") for case, pair in pairs.items()),
        )
        for row in ROWS
        for pairs in [pairs_of(row)]
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows))


def _cell(pair: tuple[float, float]) -> str:
    return " / ".join(f"{it:,.0f}" if it >= 100 else f"{it:#.3g}" for it in pair)


def chart() -> str:
    """Return the chart: of each model the times over vLLM's, a bar each, beside a line at 1."""
    shown = list(LEGEND)
    each = len(shown) * BAR + GAP
    height = TOP + each * len(ROWS) + 34
    scale = (WIDTH - LEFT - 60) / 1.1
    first, last = dates()
    parts = [
        text(16, 24, "Time beside vLLM 0.26.0 on H200s; shorter is better, 1 is vLLM's", size=15, anchor="start"),
        text(16, 44, f"p50, bf16 or as named (gpt-oss: mxfp4), random weights, {first} to {last}", anchor="start"),
    ]
    for place, case in enumerate(shown):
        x = 16 + 190 * place
        parts.append(f'<rect x="{x}" y="56" width="12" height="12" fill="{COLOURS[place]}"/>')
        parts.append(text(x + 18, 66, LEGEND[case], anchor="start"))
    for tick in (0.25, 0.5, 0.75, 1.0):
        x, bottom = LEFT + scale * tick, height - 30
        dash = "" if tick == 1.0 else ' stroke-dasharray="3 3"'
        colour = "#333333" if tick == 1.0 else "#cccccc"
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="{colour}"{dash}/>')
        parts.append(text(x, bottom + 16, f"{tick:g}"))
    for index, row in enumerate(ROWS):
        top, pairs = TOP + each * index, pairs_of(row)
        parts.append(text(16, top + 12, row.name, size=13, anchor="start"))
        for place, case in enumerate(shown):
            ours, theirs = pairs[case]
            y, ratio = top + BAR * place, ours / theirs
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{scale * ratio:.1f}" height="{BAR - 3}" fill="{COLOURS[place]}"/>'
            )
            parts.append(text(LEFT + scale * ratio + 6, y + 10, f"{ratio:.2f}", anchor="start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>\n"])


def written(page: str) -> str:
    """Return README.md's text with the table filled."""
    mark = "<!-- beside_vllm -->"
    return re.sub(rf"{mark}.*?{mark}", lambda _: f"{mark}\n{table()}\n\n{mark}", page, flags=re.DOTALL)


def write() -> None:
    README.write_text(written(README.read_text()))
    CHART.write_text(chart())


if __name__ == "__main__":
    write()
