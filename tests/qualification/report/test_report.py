"""The report: what it says follows from the evidence, and a page stands alone."""

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from local_http import listening
from qualification_fakes import DECODE, MACHINE, SHAPE, checks, evidence, path

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.path import Tier
from kernels.vocabulary.shape import Phase
from qualification.bench.serve.cases import ServePlan
from qualification.bench.serve.file import ServedSide, ServeFile, save
from qualification.evidence.evidence import SUITE
from qualification.evidence.full_model import Attention, FullModel, ModelTiming
from qualification.evidence.matrix import save_matrix
from qualification.report.answers import model_gains, phase_gains, servings, statuses, where_gained
from qualification.report.command import add_arguments, run
from qualification.report.page import render
from qualification.report.roofline import roofline
from qualification.report.sources import ReportError, gather
from qualification.report.views import ModelView, roofs_of

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
    """Tags in order, those that are open, and whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.anchors: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br", "wbr"}:
            self.open.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        links = [value or "" for name, value in attrs if name in {"src", "href"}]
        self.anchors += [link.removeprefix("#") for link in links if link.startswith("#")]
        self.fetched += [link for link in links if not link.startswith("#")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closed at once."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_fastest_proven_first_tier_path_serves() -> None:
    first = servings(model())[0]
    assert (first.path, first.kernels, first.next_path, first.next_ratio) == (
        "triton.prefill",
        "hallmark_prefill",
        "sdpa.math",
        40.0,
    )


def test_a_failed_path_is_no_fallback() -> None:
    decode = servings(model())[-1]
    assert (decode.path, decode.next_path, decode.next_ratio) == ("triton.prefill", "none", None)


def test_shapes_are_counted_by_what_serves_them() -> None:
    only_math = ModelView("m", (evidence(SHAPE, MATH), evidence(DECODE, OURS, checks=checks(2.0))))
    assert statuses(only_math) == {"fallback": 1, "nothing": 1}
    assert statuses(model()) == {"first": 3}


def test_heat_map_marks_serving_proven_and_failed() -> None:
    view = model()
    kinds = {row.shape: [cell.kind for cell in row.cells] for row in view.heat_map()}
    assert view.paths == ["triton.prefill", "sdpa.math"]
    assert kinds == {
        str(SHAPE): ["chosen", "proven"],
        str(LONGER): ["chosen", "proven"],
        str(DECODE): ["chosen", "failed"],
    }


def test_gain_of_a_phase_is_a_geometric_mean() -> None:
    (gain,) = phase_gains([model()])
    assert (gain.phase, gain.shapes, gain.least, gain.most) == ("prefill", 2, 10.0, 40.0)
    assert gain.geometric_mean == pytest.approx(20.0)


def test_a_models_gain_is_not_its_kernels_gain() -> None:
    timing = ModelTiming(Phase.PREFILL, 512, 1, Attention.PLAN, ("triton.prefill",), 10.0, 0.01, 9, 2.0)
    slower = replace(timing, attention=Attention.FALLBACK, p50_ms=15.0)
    alone = replace(timing, tokens=2048)
    short, long = model_gains([FullModel("tiny", "2026-11-21", 2, (timing, slower, alone))])
    assert (short.tokens, short.plan_ms, short.attention_ms, short.gain) == (512, 10.0, 2.0, 1.5)
    assert (long.tokens, long.fallback_ms, long.gain) == (2048, None, None)


@pytest.mark.parametrize(
    ("decode_ms", "answer"),
    [
        (30.0, "In both: prefill 1.50 to 1.50 times, decode 3.00 to 3.00 times."),
        (10.2, "In prefill alone: prefill 1.50 to 1.50 times, decode 1.02 to 1.02 times."),
    ],
)
def test_answer_names_phases_in_which_the_model_gains(decode_ms: float, answer: str) -> None:
    prefill = ModelTiming(Phase.PREFILL, 512, 1, Attention.PLAN, ("triton.prefill",), 10.0, 0.01, 9, 2.0)
    decode = replace(prefill, phase=Phase.DECODE)
    slower = replace(prefill, attention=Attention.FALLBACK, p50_ms=15.0)
    slow_decode = replace(decode, attention=Attention.FALLBACK, p50_ms=decode_ms)
    timed = FullModel("tiny", "2026-11-21", 2, (prefill, decode, slower, slow_decode))
    assert where_gained(model_gains([timed])) == answer
    assert where_gained(model_gains([replace(timed, timings=(prefill, decode))])) == ""


def test_the_roofs_are_the_most_that_any_floor_allows() -> None:
    entries = model().entries
    roofs = roofs_of(entries)
    assert roofs is not None
    rates = [entry.predicted_bytes[0] / (entry.floor_us * 1e-6) for entry in entries if entry.floor_us]
    assert roofs.bytes_per_second == max(rates)
    assert roofs_of([evidence(SHAPE, OURS)]) is None


def test_a_point_left_of_the_ridge_is_bound_by_memory() -> None:
    view = model()
    roofs = roofs_of(view.entries)
    assert roofs is not None
    for point in view.roof():
        assert point.is_compute_bound == (point.intensity >= roofs.ridge)
    assert roofline(view.roof(), roofs).count("<title>") == len(view.roof()) == 2


def test_lines_run_over_two_lengths_or_are_not_drawn() -> None:
    view = model()
    assert [line.name for line in view.speed_lines(Phase.PREFILL)] == ["triton.prefill", "sdpa.math", "floor"]
    assert view.speed_lines(Phase.DECODE) == []
    assert [point[1] for point in view.memory_lines(Phase.PREFILL)[0].points] == [1.0, 2.0]


def test_a_page_is_well_formed_and_fetches_nothing(folder: Path) -> None:
    text = page(folder)
    parts = _Parts()
    parts.feed(text)
    assert parts.open == []
    assert parts.fetched == []
    assert {"questions", "proof", "speed", "bytes", "files"} <= set(parts.anchors)
    assert set(parts.anchors) == set(parts.ids)
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_page_opens_with_its_verdict(folder: Path, tmp_path: Path) -> None:
    assert "<b>Everything is proven.</b> Each of the 3 shapes has a proven path." in page(folder)
    other = tmp_path / "unproven"
    save_matrix(other / "tiny.json", [evidence(SHAPE, OURS), evidence(DECODE, OURS, checks=checks(2.0))])
    assert "<b>Not everything is proven.</b> 1 of 2 shapes have no proven path." in page(other)


def test_a_page_answers_with_the_evidences_own_numbers(folder: Path) -> None:
    text = page(folder)
    assert f"{SHAPE}" in text
    assert "hallmark_prefill" in text
    assert "would take 40 times as long on sdpa.math" in text
    assert "<b>3</b> served by proof" in text
    assert re.search(r'<td class="n failed" title="[^"]*">failed</td>', text)


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
    assert "<b>7</b> fallbacks since its start" in text
    assert "<b>99.5%</b> of the time of decode by sdpa.math" in text
    assert "of the time of prefill" not in text
    assert "<b>1</b> compiles after ready since its start" in text


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
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out = folder / "none" / "page.html"
    assert run(parser.parse_args([str(folder), "--out", str(out)])) == 3
    assert capsys.readouterr().err == f"hallmark: {out} cannot be written: No such file or directory\n"


def test_unreadable_evidence_is_named_as_such(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([str(folder / ("x" * 300)), "--out", str(folder / "page.html")])) == 3
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


def test_the_command_says_of_how_many_models_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for n, said in enumerate(("page.html: 1 model, ", "page.html: 2 models, ")):
        save_matrix(tmp_path / "evidence" / f"{n}.json", [evidence(SHAPE, OURS, timing=None)])
        assert run(parser.parse_args([str(tmp_path / "evidence"), "--out", str(tmp_path / "page.html")])) == 0
        assert said in capsys.readouterr().out
