"""A canary's result as JSON, Markdown, JUnit and a chart. Sends no requests."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from kernels.vocabulary.buckets import bucket_of
from qualification.canary.golden import Times
from qualification.canary.performance import SideTimes
from qualification.canary.verdict import Outcome, Verdict, exit_code
from qualification.common.exit_code import ExitCode
from qualification.common.svg import Line, colours_of, svg
from qualification.load.client import joined
from qualification.load.sample import ClientLag, LoadResult

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # a server's words may hold any of it


@dataclass(slots=True)
class Result:
    """All that a run found."""

    url: str
    baseline: str
    started_at: str  # ISO 8601, UTC
    verdicts: list[Verdict] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of the trace
    times: dict[str, SideTimes] = field(default_factory=dict)  # by side

    @property
    def code(self) -> ExitCode:
        return exit_code(self.verdicts)


def write(folder: Path, result: Result) -> list[Path]:
    """Write canary.json, .md, .xml, and .svg where times were taken. Raises OSError."""
    texts = {"canary.json": as_json(result), "canary.md": as_markdown(result), "canary.xml": as_junit(result)}
    chart = as_chart(result)
    if chart is not None:
        texts["canary.svg"] = chart
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def as_json(result: Result) -> str:
    verdicts = [
        asdict(verdict) | {"stage": verdict.stage.value, "outcome": verdict.outcome.value}
        for verdict in result.verdicts
    ]
    content = {
        "url": result.url,
        "baseline": result.baseline,
        "started_at": result.started_at,
        "exit_code": result.code.value,
        "verdict": result.code.name.lower(),
        "verdicts": verdicts,
        "times": {name: {"by_bucket": side.times, "errors": side.errors} for name, side in result.times.items()},
        "client_lag": {name: _lag(side) for name, side in result.times.items()},
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n"


def as_markdown(result: Result) -> str:
    lines = [
        f"# Canary: {result.code.name.lower()} (exit {result.code.value})",
        "",
        f"{result.url} against {result.baseline}, {result.started_at}",
        "",
        "| stage | bucket | verdict | what was seen |",
        "| --- | --- | --- | --- |",
    ]
    for verdict in result.verdicts:
        seen = "<br>".join(" ".join(text.split()) for text in (verdict.detail, *verdict.reasons)).replace("|", "\\|")
        lines.append(f"| {verdict.stage.value} | {verdict.bucket or ''} | {verdict.outcome.value} | {seen} |")
    return "\n".join(lines) + "\n"


def as_junit(result: Result) -> str:
    """A test case for each verdict. No data is an error, for CI must not take it for a pass."""
    outcomes = [verdict.outcome for verdict in result.verdicts]
    suite = ElementTree.Element(
        "testsuite",
        name="hallmark canary",
        tests=str(len(outcomes)),
        failures=str(outcomes.count(Outcome.FAIL)),
        errors=str(outcomes.count(Outcome.NO_DATA)),
        skipped=str(outcomes.count(Outcome.SKIPPED)),
        timestamp=result.started_at,
    )
    kinds = {Outcome.FAIL: "failure", Outcome.NO_DATA: "error", Outcome.SKIPPED: "skipped"}
    for verdict in result.verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname=f"canary.{verdict.stage.value}", name=verdict.name)
        if verdict.outcome in kinds:
            detail = ElementTree.SubElement(case, kinds[verdict.outcome], message=_NO_XML.sub("?", verdict.detail))
            detail.text = _NO_XML.sub("?", "\n".join(verdict.reasons))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def as_chart(result: Result) -> str | None:
    """Prompt tokens to the first token a second, by the trace's lengths; None from less than two of them."""
    lines, colours = [], colours_of(result.times)
    for n, (name, side) in enumerate(result.times.items()):
        points = _points(result.lengths, side.times)
        if len(points) > 1:
            lines.append(Line(name, points, colours[name], n > 0))
    if not lines:
        return None
    return svg(
        "Speed to the first token by prompt length: higher is better",
        "tokens of the prompt",
        "prompt tokens a second until the first token",
        lines,
    )


def _points(lengths: Sequence[int], times: Mapping[str, Times]) -> tuple[tuple[float, float], ...]:
    found = []
    for length in lengths:
        known = times.get(bucket_of(length).label)
        if known is not None and known.ttft_s:
            found.append((float(length), length / statistics.median(known.ttft_s)))
    return tuple(found)


def _lag(side: SideTimes) -> ClientLag:
    return joined([LoadResult([], lag) for lag in side.lags]).lag
