"""`hallmark bench serve` against scripted servers, over real HTTP, and its rows and ratios."""

import argparse
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from bench.serve.cases import ServeCase, cases_of
from bench.serve.command import add_arguments, plan_of, run
from bench.serve.row import LatencyObjectives, rows_of
from qualification.load.sample import ClientLag, LoadRequest, LoadResult, Sample
from qualification.load.served import Scenario, ServedSide, ServeFile, ServePlan, ServeRow
from qualification.report.ratios import ratios
from server.cli.main import build_parser
from support.scripted_server import Script, serving

LAG = ClientLag(0.0, 0.0, 0.0, 0.0)
EASY = LatencyObjectives({}, 1e9)
TINY = ("--quick", "--scenarios", "ttft", "--lengths", "8", "16", "--samples", "6", "--processes", "1")


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


def bench(tmp_path: Path, url: str, *argv: str) -> int:
    return run(parsed("--url", url, "--out-dir", str(tmp_path), *argv))


def file_of(path: Path) -> ServeFile:
    return msgspec.json.decode(path.read_bytes(), type=ServeFile)


def test_every_scenario_is_measured_printed_and_written(
    tmp_path: Path, url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.token_s = 0.0005
    less = ("--tpot-output", "8", "--requests", "9", "--rate", "200", "--mix-output-most", "4", "--prefix-tokens", "20")
    assert bench(tmp_path, url, "--quick", "--processes", "1", *less) == 0
    printed = capsys.readouterr().out
    assert "NO_DATA 5/299" in printed
    rows = {(row.case, row.group): row for row in file_of(tmp_path / "serve-hallmark.json").sides[0].rows}
    assert {"ttft 128", "tpot 4", "throughput 8", "mix 200", "prefix 20"} <= {case for case, _ in rows}
    assert {group for case, group in rows if case == "prefix 20"} == {"cold", "warm"}
    assert all(row.num_errors == 0 and row.is_counted_by_server for row in rows.values())
    assert rows["ttft 128", "all"].ttft_p50_ms is not None
    assert rows["ttft 128", "all"].ttft_p99_ms is None
    assert rows["throughput 8", "all"].output_tokens_per_s is not None
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {f"serve-hallmark{end}" for end in (".json", ".md", "-ttft.svg", "-tpot.svg")}


def test_peer_at_a_url_gets_the_same_tokens(
    tmp_path: Path, url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Script(first_token_s=lambda _: 0.2)
    with serving(slow) as other:
        assert bench(tmp_path, url, *TINY, "--samples", "8", "--lengths", "8", "--peer", f"vllm={other}") == 0
    assert sorted(body["prompt"] for body in script.bodies) == sorted(body["prompt"] for body in slow.bodies)
    lines = [line for line in capsys.readouterr().out.splitlines() if "TTFT p50, ms" in line and "ttft 8" in line]
    assert [line.split()[-1] for line in lines] == ["yes"]


def test_a_peers_file_stands_for_a_server_that_is_gone(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, url, *TINY, "--name", "vllm") == 0
    assert bench(tmp_path, url, *TINY, "--peer", f"vllm={tmp_path / 'serve-vllm.json'}") == 0
    assert "TTFT p50, ms" in capsys.readouterr().out
    assert [side.name for side in file_of(tmp_path / "serve-hallmark.json").sides] == ["hallmark"]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--rate", "0", "must be positive, got 0"),
        ("--rate", "nan", "must be positive, got nan"),
        ("--timeout", "inf", "must be positive, got inf"),
        ("--tpot-objective", "x", "must be positive, got x"),
        ("--ttft-objective", "le_128=nan", "must be positive, got nan"),
        ("--processes", "-1", "must be a whole number of at least 1, got -1"),
        ("--samples", "0", "must be a whole number of at least 1, got 0"),
    ],
)
def test_a_load_that_cannot_be_is_refused_before_it_is_sent(
    tmp_path: Path, url: str, flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench(tmp_path, url, *TINY, f"{flag}={value}")
    assert capsys.readouterr().err.endswith(f"argument {flag}: {message}\n")


def test_what_cannot_be_measured_is_one_line_and_writes_nothing(
    tmp_path: Path, url: str, refused_url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, url, *TINY, "--api-key-file", "/dev/null") == 3
    assert capsys.readouterr().err == "hallmark: /dev/null holds no key\n"
    (tmp_path / "file").write_text("")
    assert bench(tmp_path / "file" / "out", url, *TINY) == 3
    assert "Not a directory" in capsys.readouterr().err
    assert script.bodies == []
    assert bench(tmp_path, url, *TINY) == 0
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    capsys.readouterr()
    assert bench(tmp_path, refused_url, *TINY) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"max_model_len": 16}, 0, "not measured: ttft 16: 17 tokens, hallmark takes 16"),
        ({"status": 429}, 4, "6 errors, the first: HTTP 429: go away"),
    ],
)
def test_a_case_that_is_left_out_or_fails_is_named(
    tmp_path: Path, changes: dict[str, int], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Script(**changes)) as url:
        assert bench(tmp_path, url, *TINY) == code
    assert said in capsys.readouterr().out


def test_a_file_of_another_load_is_refused(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, url, *TINY, "--name", "vllm") == 0
    assert bench(tmp_path, url, *TINY, "--seed", "7", "--peer", f"vllm={tmp_path / 'serve-vllm.json'}") == 3
    assert "another load: seed 20261121 against 7" in capsys.readouterr().err


def test_no_two_runs_send_the_same_prompt(tmp_path: Path, url: str, script: Script) -> None:
    for _ in range(2):
        bench(tmp_path, url, *TINY)
    prompts = [tuple(body["prompt"]) for body in script.bodies]
    assert len(set(prompts)) == len(prompts) == 2 * 2 * (6 + 2)


def test_the_flags_are_the_plan() -> None:
    arguments = build_parser().parse_args(["bench", "serve", "--url", "u", "--lengths", "3", "4", "--rate", "2.5"])
    plan = plan_of(arguments)
    assert (plan.lengths, plan.rate, plan.samples) == ((3, 4), 2.5, ServePlan().samples)
    assert plan_of(parsed("--url", "u", "--scenarios", "mix")).scenarios == (Scenario.MIX,)


@pytest.mark.parametrize("names", [("hallmark",), ("vllm", "vllm")])
def test_two_sides_of_one_name_are_refused(
    tmp_path: Path, url: str, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, url, *TINY, *(flag for name in names for flag in ("--peer", f"{name}={url}"))) == 3
    assert capsys.readouterr().err == f"hallmark: two sides are called {names[-1]}\n"


@pytest.mark.parametrize("peer", ["vllm", "=x", "vllm="])
def test_a_peer_without_name_or_place_is_refused(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--url", "u", "--peer", peer)
    assert "NAME=URL or NAME=FILE" in capsys.readouterr().err


# --- cases and rows ---------------------------------------------------------------------------------------------------


def test_no_prompt_of_a_plan_comes_twice() -> None:
    plan = ServePlan(lengths=(64, 128), samples=5, streams=(8,), requests=20, prefix_groups=2, mix_input_most=256)
    sent = [request for case in cases_of(plan, "x") for part in (case.warm_up, *case.rounds) for request in part]
    beginnings = [
        tuple(request.token_ids[:16]) for request in sent if not request.label and len(request.token_ids) > 16
    ]
    assert len(set(beginnings)) >= 0.9 * len(beginnings)
    assert len({tuple(request.token_ids) for request in sent}) >= 0.9 * len(sent)


def test_mix_has_each_length_equally_often_per_round() -> None:
    plan = ServePlan(scenarios=(Scenario.MIX,), mix_lengths=(96, 384), requests=60, mix_rounds=3, mix_output=5)
    [case] = cases_of(plan, "x")
    assert [Counter(len(request.token_ids) for request in part) for part in case.rounds] == [{96: 10, 384: 10}] * 3
    assert {request.max_tokens for part in case.rounds for request in part} == {5}
    times = [request.at_s for request in case.rounds[0]]
    assert len(times) == len(set(times))
    assert times == sorted(times)


def sample(first: float, *later: float, num_prompt: int = 10, num_tokens: int | None = None) -> Sample:
    return Sample(num_prompt, "", 0.0, 0.0, [first, *later], num_tokens or 1 + len(later), True)


def failed() -> Sample:
    return Sample(10, "", 0.0, 0.0, [], 0, False, "HTTP 500: no")


def rows(scenario: Scenario, *samples: Sample, objectives: LatencyObjectives = EASY) -> list[ServeRow]:
    round_ = tuple(LoadRequest(0.0, [11] * it.num_prompt_tokens, 4) for it in samples)
    return rows_of(ServeCase(scenario, 1, (round_,), ()), [LoadResult(list(samples), LAG)], objectives)


def test_rate_is_tokens_from_first_send_to_last_token() -> None:
    [row] = rows(Scenario.THROUGHPUT, sample(1.0, 2.0), sample(1.5, 2.5, 4.0), failed())
    assert row.output_tokens_per_s == 5 / 4.0
    assert (row.num_requests, row.num_errors, row.first_error) == (3, 1, "HTTP 500: no")


def test_a_streams_tokens_count_only_while_all_streams_run() -> None:
    early = sample(1.0, 9.0, 9.1, 9.2, 9.3)  # waited for the prompt of the other
    late = sample(9.05, 9.25, 9.45)
    [row] = rows(Scenario.TPOT, early, late)
    assert row.tpot_ms == [pytest.approx(100.0), pytest.approx(200.0)]


def test_several_tokens_a_read_are_several_tokens() -> None:
    [row] = rows(Scenario.TPOT, sample(1.0, 2.0, 3.0, num_tokens=9))
    assert row.tpot_ms == [250.0]
    assert row.tokens_per_read == 3.0
    [row] = rows(Scenario.MIX, sample(1.0, 2.0, 3.0, num_tokens=9))[:1]
    assert row.tpot_ms == [250.0]


def test_a_mix_has_a_row_for_all_and_for_each_bucket_in_order() -> None:
    found = rows(Scenario.MIX, sample(1.0, num_prompt=600), sample(1.0, num_prompt=5), sample(1.0, num_prompt=129))
    assert [row.group for row in found] == ["all", "le_128", "le_512", "le_2k"]
    assert [row.num_requests for row in found] == [3, 1, 1, 1]


def test_goodput_counts_answers_that_keep_every_objective() -> None:
    objectives = LatencyObjectives({"le_128": 100.0}, 10.0)
    good, late, slow = sample(0.1, 0.11), sample(0.2, 0.21), sample(0.1, 0.2)
    [row, *_] = rows(Scenario.MIX, good, late, slow, failed(), objectives=objectives)
    assert row.good_share == 0.25
    assert row.goodput_per_s == pytest.approx(1 / 0.21)


def test_ratio_is_better_only_when_its_interval_excludes_1() -> None:
    def side(name: str, *ttfts: float) -> ServedSide:
        return ServedSide(name, "", "m", rows(Scenario.TTFT, *(sample(ttft) for ttft in ttfts)), [])

    times = [1.0 + 0.01 * n for n in range(12)]
    same, faster = side("same", *times), side("faster", *(0.5 * time for time in times))
    [ratio] = ratios(faster, [same])
    assert (ratio.value, ratio.is_better) == (pytest.approx(0.5), True)
    [ratio] = ratios(same, [faster])
    assert ratio.is_better is False
    [ratio] = ratios(same, [same])
    assert ratio.is_better is None
