"""The report: what it says follows from the evidence, and a page stands alone."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from bench.serve.file import save
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.path import Tier
from kernels.vocabulary.shape import Phase
from qualification.evidence.evidence import SUITE
from qualification.evidence.full_model import Attention, FullModel, ModelTiming
from qualification.evidence.matrix import save_matrix
from qualification.load.served import ServedSide, ServeFile, ServePlan
from qualification.report.page import render
from qualification.report.sources import ReportError, gather
from qualification.report.views import ModelView
from server.cli.main import main
from support.local_http import listening
from support.qualification_fakes import DECODE, MACHINE, SHAPE, checks, evidence, path

OURS, MATH = path("triton.prefill"), path("sdpa.math", Tier.FALLBACK)
LONGER = replace(SHAPE, query_bucket=Bucket.LE_512, context_bucket=Bucket.LE_512)


def model() -> ModelView:
    """Ours proven everywhere, 40 and 10 times faster than math, which fails in decode."""
    decode = evidence(DECODE, MATH, 50.0, checks=checks(2.0))
    return ModelView(
        "tiny",
        (
            evidence(SHAPE, OURS, 10.0, kernels=("hallmark_prefill",), floor_us=5.0, temporary_bytes=2**20),
            evidence(SHAPE, MATH, 400.0, floor_us=5.0, temporary_bytes=2**26),
            evidence(LONGER, OURS, 20.0, floor_us=15.0, temporary_bytes=2**21),
            evidence(LONGER, MATH, 200.0, floor_us=15.0, temporary_bytes=2**28, measured_bytes=3_000_000),
            evidence(DECODE, OURS, 10.0),
            decode,
        ),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_matrix(tmp_path / "tiny.json", model().entries)
    return tmp_path


def page(place: Path, **options: object) -> str:
    given = {"benches": [], "served": [], "url": None, **options}
    return render(gather(place, **given), at="2026-11-21T00:00:00+00:00", command="hallmark report")  # type: ignore[arg-type]


class _Parts(HTMLParser):
    """The open tags, the rows of tables, and whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.fetched: list[str] = []
        self.anchors: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br", "wbr"}:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
        self.ids += [value or "" for name, value in attrs if name == "id"]
        links = [value or "" for name, value in attrs if name in {"src", "href"}]
        self.anchors += [link.removeprefix("#") for link in links if link.startswith("#")]
        self.fetched += [link for link in links if not link.startswith("#")]

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closed at once."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parts_of(text: str) -> _Parts:
    parts = _Parts()
    parts.feed(text)
    return parts


def test_tables_hold_what_was_measured(folder: Path) -> None:
    text = page(folder)
    rows = parts_of(text).rows
    assert [str(SHAPE), "triton.prefill", "hallmark_prefill", "10 us", "sdpa.math", "40"] in rows
    assert [str(DECODE), "triton.prefill", "not recorded", "10 us", "none", ""] in rows  # what failed is no fallback
    assert "would take 40 times as long on sdpa.math" in text
    kinds = re.findall(r'<td class="n (chosen|proven|failed)"', text)
    assert kinds == ["chosen", "proven"] * 2 + ["chosen", "failed"]  # a row a shape
    assert ["prefill", "2", "20.00", "10.00", "40.00"] in rows  # shapes, geometric mean, least and most gain
    assert facts_of(text)[1] == "3"  # by proof
    assert [
        str(SHAPE),
        "triton.prefill",
        "0.333",
        "memory",
        "0.0001024",
        "50%",
    ] in rows  # FLOPs a byte ... of the floor
    assert [str(LONGER), "triton.prefill", "21.7", "arithmetic", "0.4293", "75%"] in rows
    assert len(re.findall("<circle [^>]*><title>.* of the floor</title>", text)) == 2  # points of the roofline
    assert "<b>0.572 TFLOP/s, 0.0264 TB/s</b>" in text  # the most that any floor allows


@pytest.mark.parametrize(
    ("decode_ms", "answers"),
    [
        (30.0, ["In both: prefill 1.50 to 1.50 times, decode 3.00 to 3.00 times."]),
        (10.2, ["In prefill alone: prefill 1.50 to 1.50 times, decode 1.02 to 1.02 times."]),
        (None, []),  # nothing was timed by the fallback
    ],
)
def test_a_models_gain_is_named_by_phase(tmp_path: Path, decode_ms: float | None, answers: list[str]) -> None:
    prefill = ModelTiming(Phase.PREFILL, 512, 1, Attention.PLAN, ("triton.prefill",), 10.0, 0.01, 9, 2.0)
    timings = (prefill, replace(prefill, tokens=2048), replace(prefill, phase=Phase.DECODE))
    if decode_ms is not None:
        slower = replace(prefill, attention=Attention.FALLBACK, p50_ms=15.0)
        timings += (slower, replace(slower, phase=Phase.DECODE, p50_ms=decode_ms))
    save_matrix(tmp_path / "tiny.json", model().entries, FullModel("tiny", "2026-11-21T00:00:00+00:00", 2, timings))
    text = page(tmp_path)
    assert re.findall("<b>(In .*?)</b>", text) == answers
    short, long = (row for row in parts_of(text).rows if row[:2] == ["tiny", "prefill"])
    assert short[2:] == ["512", "1", "10", "2", *(["15", "1.50"] if decode_ms else ["-", "-"])]
    assert long[2:] == ["2048", "1", "10", "2", "-", "-"]


def test_lines_run_over_two_lengths_or_are_not_drawn() -> None:
    view = model()
    assert [line.name for line in view.speed_lines(Phase.PREFILL)] == ["triton.prefill", "sdpa.math", "floor"]
    assert view.speed_lines(Phase.DECODE) == []
    assert [point[1] for point in view.memory_lines(Phase.PREFILL)[0].points] == [1.0, 2.0]


def test_a_page_is_well_formed_and_fetches_nothing(folder: Path) -> None:
    text = page(folder)
    parts = parts_of(text)
    assert parts.open == []
    assert parts.fetched == []
    assert {"questions", "proof", "speed", "bytes", "files"} <= set(parts.anchors)
    assert set(parts.anchors) == set(parts.ids)
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def verdict_of(text: str) -> tuple[str, list[int]]:
    """Return whether the page says well or ill, and the numbers in its reason."""
    [(kind, said)] = re.findall('<p class="verdict (well|ill)">(.*)</p>', text)
    return kind, [int(number) for number in re.findall(r"\d+", said)]


def facts_of(text: str) -> list[str]:
    """The page's figures: shapes, and those served by proof, by a fallback and by nothing."""
    [facts] = re.findall('<h1>.*?<ul class="facts">(.*?)</ul>', text, re.DOTALL)
    return re.findall("<b>(.*?)</b>", facts)[:4]


def test_a_page_opens_with_its_verdict(folder: Path, tmp_path: Path) -> None:
    proven = page(folder)
    assert (verdict_of(proven), facts_of(proven)) == (("well", [3]), ["3", "3", "0", "0"])
    other = tmp_path / "unproven"
    save_matrix(other / "tiny.json", [evidence(SHAPE, MATH), evidence(DECODE, OURS, checks=checks(2.0))])
    ill = page(other)
    assert (verdict_of(ill), facts_of(ill)) == (("ill", [1, 2]), ["2", "0", "1", "1"])


def test_counted_bytes_of_any_file_are_in_the_page(tmp_path: Path) -> None:
    """Two models with one shape."""
    for name, counted in (("a", None), ("b", 1_234_000_000), ("c", None)):
        save_matrix(tmp_path / f"{name}.json", [evidence(SHAPE, OURS, measured_bytes=counted)])
    assert page(tmp_path).count('<td class="n">1,234</td>') == 1


def test_page_has_date_command_and_age_of_checks(tmp_path: Path) -> None:
    known = evidence(SHAPE, path("triton.x"), commit="abc123", command="hallmark qualify --preset demo")
    save_matrix(tmp_path / "a.json", [known])
    told = " ".join(page(tmp_path).split())
    said = "2026-11-20T12:00:00+00:00 by <code>hallmark qualify --preset demo</code>, commit <code>abc123</code>"
    assert said in told
    assert "Stale: " not in told
    save_matrix(tmp_path / "a.json", [replace(known, suite=SUITE - 1)])
    older = f"run of 2026-11-20T12:00:00+00:00 were suite {SUITE - 1}, this version's are suite {SUITE}."
    assert f'<p class="alarm">Stale: the checks of the {older}' in page(tmp_path)


def test_text_from_a_file_cannot_become_markup(tmp_path: Path) -> None:
    broken = evidence(SHAPE, OURS, checks=(), failure="<script>alert(1)</script>", timing=None)
    save_matrix(tmp_path / "tiny.json", [broken])
    text = page(tmp_path)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_a_changed_file_is_named_and_shown_as_refused(folder: Path) -> None:
    (folder / "other.json").write_text((folder / "tiny.json").read_text().replace("400.0", "300.0"))
    text = page(folder)
    assert "Refused: other.json does not match its digest" in text


def test_a_folder_of_refused_files_says_why(folder: Path) -> None:
    (folder / "tiny.json").write_text((folder / "tiny.json").read_text()[:1000])
    with pytest.raises(ReportError, match=r"no file of evidence can be read: tiny\.json cannot be read"):
        gather(folder, [], [], None)


def test_two_machines_are_two_reports(folder: Path) -> None:
    other = [replace(entry, fingerprint=replace(MACHINE, gpu="Other")) for entry in model().entries]
    save_matrix(folder / "other.json", other)
    with pytest.raises(ReportError, match="evidence of 2: Other, Test CPU"):
        gather(folder, [], [], None)


def test_a_file_that_is_no_bench_is_refused_by_its_name(folder: Path) -> None:
    wrong = folder / "bench.txt"
    wrong.write_text("{}")
    with pytest.raises(ReportError, match=r"bench\.txt cannot be used"):
        gather(folder / "tiny.json", [wrong], [], None)


def test_results_without_a_peer_are_mentioned(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.txt"
    save(file, ServeFile(1, "", "", ServePlan(), "", [ServedSide("ours", "", "", [], [])]))
    with pytest.raises(ReportError, match="--served has ours alone"):
        gather(folder / "tiny.json", [], [file], None)
    assert len(gather(folder / "tiny.json", [], [file, file], None).served) == 2


def test_rows_of_a_bench_stand_beside_their_peers(folder: Path, tmp_path: Path) -> None:
    row = {
        "phase": "prefill", "dtype": "bf16", "heads": 4, "kv_heads": 2, "head_dim": 64, "lengths": "fixed",
        "window": None, "softcap": None, "sinks": False, "longest_query": 512, "longest_context": 512, "sequences": 1,
        "contender": "triton.prefill", "is_peer": False, "is_right": True, "tflops": 10.0, "bytes_per_second": 1e9,
        "best_peer": "fa3", "ratio_to_best_peer": 0.875,
    }  # fmt: skip
    peers = [
        row | {"contender": "fa3", "is_peer": True, "longest_context": n, "ratio_to_best_peer": None}
        for n in (512, 2048)
    ]
    bench = tmp_path / "bench.txt"
    bench.write_text(json.dumps({"command": "hallmark bench attention", "at": "today", "rows": [row, *peers]}))
    text = page(folder / "tiny.json", benches=[bench])
    assert '<td class="n ">0.88</td>' in text
    assert "fa3 (bench)" in text


@contextmanager
def answering(answers: dict[str, str]) -> Iterator[str]:
    """A server that knows these paths, at the returned URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(answers.get(self.path, "").encode())

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with listening(Handler) as url:
        yield url


def test_a_live_server_shows_its_fallbacks(folder: Path) -> None:
    shape = {
        "shape": "prefill x",
        "is_fallback": True,
        "path": "sdpa.math",
        "wanted": "triton.prefill",
        "fallback_reasons": ["head_dim"],
    }
    attention = {
        "state": "ready",
        "model": "demo",
        "num_fallbacks": 1,
        "shapes": [shape],
        "launches": {"sdpa.math": 7},
        "attestation": {
            "result": "match",
            "batches": [
                {"phase": "decode", "paths": ["sdpa.math"], "explained": {"share": 0.9946}},
                {"phase": "prefill", "paths": ["sdpa.math"], "explained": None},
                {"phase": "extend", "paths": ["sdpa.math"]},  # of an older server
            ],
        },
    }
    metrics = "\n".join(
        (
            "# TYPE hallmark_attention_fallback_total counter",
            'hallmark_attention_fallback_total{model="demo",reason="head_dim"} 5.0',
            'hallmark_attention_fallback_total{model="demo",reason="arch"} 2.0',
            "# TYPE hallmark_kernel_compiles_total counter",
            'hallmark_kernel_compiles_total{after_ready="false"} 3.0',
            'hallmark_kernel_compiles_total{after_ready="true"} 1.0\n',
        )
    )
    answers = {"/attention": json.dumps(attention), "/metrics": metrics}
    with answering(answers) as url:
        text = page(folder, url=url)
    assert "prefill x: sdpa.math instead of triton.prefill (head_dim)" in text
    assert re.findall(r"<b>(\d+)</b> (fallbacks|compiles after ready)", text) == [
        ("7", "fallbacks"),
        ("1", "compiles after ready"),
    ]
    assert re.findall(r"<b>([\d.]+%)</b> of the time of (\w+) by (\S+)", text) == [("99.5%", "decode", "sdpa.math")]


@pytest.mark.parametrize(("torch", "is_told"), [("0.1", True), (None, False)])
def test_server_of_another_stack_is_reported(folder: Path, torch: str | None, is_told: bool) -> None:
    theirs = gather(folder, [], [], None).fingerprint
    fingerprint = {name: getattr(theirs, name) for name in ("gpu", "driver", "torch")}
    if torch is not None:
        fingerprint["torch"] = torch
    attention = {
        "state": "ready", "model": "demo", "num_fallbacks": 0, "shapes": [], "launches": {}, "attestation": None,
        "fingerprint": fingerprint,
    }  # fmt: skip
    with answering({"/attention": json.dumps(attention), "/metrics": ""}) as url:
        text = page(folder, url=url)
    assert ("another machine or stack than this evidence is of: torch 0.1." in text) == is_told


def test_a_page_that_cannot_be_written_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "none" / "page.html"
    assert main(["report", str(folder), "--out", str(out)]) == 3
    assert capsys.readouterr().err == f"hallmark: {out} cannot be written: No such file or directory\n"


def test_unreadable_evidence_is_named_as_such(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder / ("x" * 300)), "--out", str(folder / "page.html")]) == 3
    said = capsys.readouterr().err
    assert "xxx" in said
    assert "page.html" not in said


def test_a_server_that_does_not_tell_is_one_clear_line(folder: Path) -> None:
    with answering({}) as url, pytest.raises(ReportError, match="does not report its plan"):
        gather(folder, [], [], url)


def test_evidence_without_times_makes_a_page_without_charts(tmp_path: Path) -> None:
    save_matrix(tmp_path / "tiny.json", [evidence(SHAPE, OURS, timing=None)])
    text = page(tmp_path)
    assert "<svg" not in text
    assert "No fallback was measured" in text
    assert "TFLOP/s, " not in text  # of no floor


def test_the_command_says_of_how_many_models_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n, said in enumerate(("page.html: 1 model, ", "page.html: 2 models, ")):
        save_matrix(tmp_path / "evidence" / f"{n}.json", [evidence(SHAPE, OURS, timing=None)])
        assert main(["report", str(tmp_path / "evidence"), "--out", str(tmp_path / "page.html")]) == 0
        assert said in capsys.readouterr().out
