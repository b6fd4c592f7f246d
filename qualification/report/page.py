"""The report as one HTML page that needs nothing beside itself. No torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jinja2

from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Phase
from qualification.common.svg import Line, svg
from qualification.evidence.evidence import SUITE, Evidence, strain
from qualification.evidence.verdicts import SPEED_TOLERANCE
from qualification.report.answers import Serving, model_gains, phase_gains, servings, statuses, where_gained
from qualification.report.ratios import ratios, ratios_table
from qualification.report.roofline import roofline
from qualification.report.sources import BenchFile, Live, Sources
from qualification.report.views import HeatRow, ModelView, Roofs, roofs_of

_TEMPLATE = Path(__file__).with_name("page.html.j2")
_MAX_BYTE_ROWS = 60
_PEER_COLOURS = ("#7a5195", "#8c6d31", "#637939", "#ad494a")


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The page's content for one model."""

    name: str
    paths: list[str]
    servings: list[Serving]
    heat_map: list[HeatRow]
    charts: list[str]


@dataclass(frozen=True, slots=True)
class Headline:
    """Verdict that a reader sees first."""

    is_good: bool
    verdict: str
    detail: str


@dataclass(frozen=True, slots=True)
class ByteRow:
    shape: str
    path: str
    tiled: int
    standard: int
    measured: int | None


def render(sources: Sources, *, at: str, command: str) -> str:
    """`at`: ISO 8601, UTC; `command`: what a person typed."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    content = {**_machine(sources), **_answers(sources), **_tables(sources)}
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        **content, headline=_headline(sources, content), sections=_sections(content), at=at, command=command
    )


def _headline(sources: Sources, content: Mapping[str, Any]) -> Headline:
    """Bad where a shape has no proof, a file is refused, evidence is of older checks, or a live server falls back."""
    counts, num = content["counts"], content["num_shapes"]
    doubts = []
    if counts["nothing"]:
        doubts.append(f"{counts['nothing']} of {num} shapes have no proven path.")
    if sources.refused:
        doubts.append(f"{len(sources.refused)} of the files are refused.")
    if any(run.suite != SUITE for run in content["runs"]):
        doubts.append("Some of the evidence is stale.")
    if sources.live and (content["live_differs"] or sources.live.attention.get("num_fallbacks")):
        doubts.append("The server falls back, or runs on another machine or stack.")
    if doubts:
        return Headline(False, "Not everything is proven.", " ".join(doubts))
    fallbacks = f", {counts['fallback']} of them on a proven fallback only" if counts["fallback"] else ""
    return Headline(True, "Everything is proven.", f"Each of the {num} shapes has a proven path{fallbacks}.")


def _sections(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Anchor and title of each section that the page has."""
    optional = {"server": content["live"], "roofline": content["roof_charts"], "peers": content["benches"]}
    optional["served"] = content["served"]
    titles = {
        "server": "The server",
        "questions": "Five questions",
        "proof": "Proof",
        "speed": "Speed and memory",
        "roofline": "Roofline",
        "bytes": "Bytes",
        "peers": "Beside peers",
        "served": "Served",
        "files": "Files",
    }
    return [(name, title) for name, title in titles.items() if optional.get(name, True)]


def _machine(sources: Sources) -> dict[str, Any]:
    machine = sources.fingerprint
    names = [field.name for field in fields(Fingerprint)]
    return {
        "machine": machine,
        "stack": [(name, value) for name, value in _texts(machine) if value],
        "stale_fields": names,
        "digests": sources.digests,
        "refused": sources.refused,
        "live": sources.live,
        "live_differs": _differing(machine, sources.live),
        "runs": _runs(sources),
        "suite": SUITE,
    }


def _differing(machine: Fingerprint, live: Live | None) -> list[str]:
    """Fields in which a running server's fingerprint is not the evidence's; none where it reports none."""
    theirs = live.attention.get("fingerprint") if live else None
    if not isinstance(theirs, dict):
        return []
    return [
        f"{name} {theirs[name] or 'none'}"
        for name, value in _texts(machine)
        if name in theirs and str(theirs[name] or "") != value
    ]


def _runs(sources: Sources) -> list[Evidence]:
    """One entry of each run that measured any of this, the oldest first."""
    entries = (entry for model in sources.models for entry in model.entries)
    found = {(entry.at, entry.commit or "", entry.command or "", entry.suite): entry for entry in entries}
    return [found[key] for key in sorted(found)]


def _texts(machine: Fingerprint) -> list[tuple[str, str]]:
    """Fields of the fingerprint for people; empty where the machine has none."""
    values = [(field.name, getattr(machine, field.name)) for field in fields(Fingerprint)]
    return [(name, "" if value is None else str(getattr(value, "value", value))) for name, value in values]


def _answers(sources: Sources) -> dict[str, Any]:
    models = sources.models
    counts: Counter[str] = Counter({"first": 0, "fallback": 0, "nothing": 0})
    for model in models:
        counts += statuses(model)
    all_servings = [serving for model in models for serving in servings(model) if serving.next_ratio is not None]
    checks = [pair for model in models for pair in model.worst_checks()]
    whole = model_gains(sources.gains)
    nearest: dict[str, Any] = {}
    for where, check in sorted(checks, key=lambda pair: -strain(pair[1].measured, pair[1].limit)):
        nearest.setdefault(check.name, (where, check))
    return {
        "counts": {name: counts[name] for name in ("first", "fallback", "nothing")},
        "num_shapes": sum(len(model.shapes) for model in models),
        "slowest": max(all_servings, key=lambda serving: serving.next_ratio or 0, default=None),
        "worst": list(nearest.values()),
        "gains": phase_gains(models),
        "model_gains": whole,
        "where_gained": where_gained(whole),
        "speed_tolerance": SPEED_TOLERANCE,
    }


def _tables(sources: Sources) -> dict[str, Any]:
    roofs = roofs_of(entry for model in sources.models for entry in model.entries)
    head, lines = ratios_table(ratios(sources.served[0], sources.served[1:])) if sources.served else ((), [])
    return {
        "models": [
            ModelPart(model.name, model.paths, servings(model), model.heat_map(), _charts(model, sources.benches))
            for model in sources.models
        ],
        "roofs": roofs,
        "roof_charts": _roof_charts(sources, roofs),
        "bytes": _byte_rows(sources),
        "benches": sources.benches,
        "served_head": head,
        "served": lines,
    }


def _charts(model: ModelView, benches: Sequence[BenchFile]) -> list[str]:
    found = []
    for phase in PLANNED_PHASES:
        unit = "TB/s" if phase is Phase.DECODE else "TFLOP/s"
        for lines, title, label in (
            (
                [*model.speed_lines(phase), *_peer_lines(model, phase, benches)],
                f"{phase.value}: {unit} by tokens of context, higher is better",
                unit,
            ),
            (
                model.memory_lines(phase),
                f"{phase.value}: peak temporary memory by tokens of context, lower is better",
                "MiB",
            ),
        ):
            if lines and any(y > 0 for line in lines for _, y in line.points):
                found.append(svg(title, "tokens of context", label, lines))
    return found


def _peer_lines(model: ModelView, phase: Phase, benches: Sequence[BenchFile]) -> list[Line]:
    """Peers of a bench of the same heads, without window, softcap or sinks; in decode those of one sequence."""
    shapes = [shape for shape in model.shapes if isinstance(shape, AttentionShape)]
    heads = {(shape.num_heads, shape.num_kv_heads, shape.head_dim) for shape in shapes}
    rows = [
        row
        for bench in benches
        for row in bench.rows
        if row.is_peer and row.is_right and row.is_plain and row.phase == phase.value
        if (row.heads, row.kv_heads, row.head_dim) in heads and (phase is not Phase.DECODE or row.sequences == 1)
    ]
    found = []
    names = sorted({row.contender for bench in benches for row in bench.rows if row.is_peer})
    for index, name in enumerate(names):
        points = {float(row.longest_context): row.rate for row in rows if row.contender == name}
        if len(points) > 1:
            found.append(Line(f"{name} (bench)", tuple(sorted(points.items())), _PEER_COLOURS[index % 4], True))
    return found


def _roof_charts(sources: Sources, roofs: Roofs | None) -> list[tuple[str, str, list[Any]]]:
    if roofs is None:
        return []
    views = [(model.name, model.roof()) for model in sources.models]
    return [(name, roofline(points, roofs), list(points)) for name, points in views if points]


def _byte_rows(sources: Sources) -> list[ByteRow]:
    """Measured ones first, then those of the paths that serve, the most bytes first; the page stays readable."""
    rows: dict[tuple[str, str], ByteRow] = {}
    for model in sources.models:
        chosen = model.chosen  # once: of twelve models it took 3 of a report's 4 s, entry by entry
        for entry in model.entries:
            key = (str(entry.shape), entry.path)
            if entry.measured_bytes is not None or (entry is chosen[entry.shape] and key not in rows):
                rows[key] = ByteRow(*key, *entry.predicted_bytes, entry.measured_bytes)
    return sorted(rows.values(), key=lambda row: (row.measured is None, -row.tiled))[:_MAX_BYTE_ROWS]
