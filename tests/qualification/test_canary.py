"""The canary against a scripted server, over real HTTP."""

import argparse
import json
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from qualification.canary.golden import load_golden
from qualification.canary.run import add_arguments, run
from qualification.canary.verdict import (
    MIN_SAMPLES,
    Answer,
    ExitCode,
    Outcome,
    Stage,
    Verdict,
    exit_code,
    judge_numerics,
    judge_performance,
    judge_plan,
    judge_service,
)

COUNTERS = {
    'hallmark_attention_fallback_total{reason="head_dim"}': 0,
    'hallmark_requests_total{route="/v1/completions",outcome="server_error"}': 0,
    'hallmark_requests_total{route="/v1/completions",outcome="ok"}': 3,
    'hallmark_kernel_compiles_total{after_ready="true"}': 0,
    'hallmark_kernel_compiles_total{after_ready="false"}': 9,
    "hallmark_nonfinite_logits_total": 0,
    'hallmark_engine_restarts_total{cause="killed"}': 0,
}


def row(**changes: object) -> dict[str, object]:
    return {"shape": "s", "path": "a", "status": "provisional", "wanted": "a", "fallback_reasons": []} | changes


@dataclass
class Script:
    """What the fake server says; a test changes a field and looks at the verdict."""

    model: str = "demo"
    rows: list[dict[str, object]] = field(default_factory=lambda: [row(), row(status="proven")])
    fingerprint: dict[str, object] = field(default_factory=lambda: {"gpu": "fake", "sm": 90, "driver": None})
    counters: dict[str, float] = field(default_factory=lambda: dict(COUNTERS))
    counters_grow: str | None = None  # this one by 1 with each completion
    salt: int = 0  # another one answers otherwise
    first_token_s: float = 0.0
    completions_status: int = 200
    seen: list[dict[str, object]] = field(default_factory=list)  # bodies of completions
    keys: set[str | None] = field(default_factory=set)  # Authorization headers


class Handler(BaseHTTPRequestHandler):
    script: Script

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        script = self.script
        script.keys.add(self.headers["authorization"])
        if self.path == "/v1/models":
            self.send({"data": [{"id": script.model, "max_model_len": 700}]})
        elif self.path == "/attention":
            self.send({"fingerprint": script.fingerprint, "shapes": script.rows})
        elif self.path == "/metrics":
            names = {name.split("{")[0] for name in script.counters}
            types = [f"# TYPE {name} counter\n" for name in sorted(names)]
            text = "".join([*types, *(f"{name} {value}\n" for name, value in script.counters.items())])
            self.send_text(text, "text/plain")
        else:
            self.send({}, 404)

    def do_POST(self) -> None:
        script = self.script
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self.send({"tokens": list(range(50))})
            return
        script.seen.append(body)
        if script.counters_grow:
            script.counters[script.counters_grow] += 1
        if script.completions_status != 200:
            self.send({"error": {}}, script.completions_status)
        elif body.get("stream"):
            time.sleep(script.first_token_s)
            self.send_text('data: {"choices":[{"text":"x"}]}\n\ndata: [DONE]\n\n', "text/event-stream")
        else:
            answer = " ".join(str(token + script.salt) for token in body["prompt"][:20])
            self.send({"choices": [{"text": answer}]})

    def send(self, body: object, status: int = 200) -> None:
        self.send_text(json.dumps(body), "application/json", status)

    def send_text(self, text: str, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Generator[str, None, None]:
    handler = type("Scripted", (Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def canary(url: str, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(["--url", url, *flags]))


@pytest.fixture
def golden(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    file = tmp_path / "golden.json"
    assert canary(url, "--record", str(file), "--samples", str(MIN_SAMPLES)) == ExitCode.PASS
    capsys.readouterr()
    return str(file)


def test_a_server_that_is_as_recorded_passes(url: str, golden: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert canary(url, "--golden", golden) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [*(stage.value for stage in Stage), "verdict"]
    assert all("PASS" in line for line in lines)
    assert "1 proven by the matrix, 1 by the server itself" in lines[1]


def test_the_golden_file_names_model_machine_and_every_fitting_length(golden: str) -> None:
    recorded = load_golden(Path(golden))
    assert recorded.model == "demo"
    assert recorded.fingerprint == {"gpu": "fake", "sm": 90, "driver": None}
    assert [len(prompt.token_ids) for prompt in recorded.prompts] == [5, 127, 129, 400, 600]
    assert {bucket: len(times) for bucket, times in recorded.ttft_s.items()} == {"le_128": 5, "le_512": 5, "le_2k": 5}
    assert len(Path(golden).read_text().splitlines()) >= 5 + len(recorded.prompts)


def test_prompts_are_asked_greedily_and_never_twice_for_time(url: str, golden: str, script: Script) -> None:
    script.seen.clear()
    canary(url, "--golden", golden)
    assert all(body["temperature"] == 0 for body in script.seen)
    timed = [tuple(body["prompt"]) for body in script.seen if body.get("stream")]
    assert len(timed) == len(set(timed)) == 3 * 8


def test_no_prefix_that_an_earlier_run_left_in_a_cache_can_answer(url: str, golden: str, script: Script) -> None:
    salts = []
    for _ in range(2):
        script.seen.clear()
        canary(url, "--golden", golden)
        (salt,) = {body["cache_salt"] for body in script.seen if "temperature" in body}
        salts.append(salt)
    assert salts[0] != salts[1]


def test_other_tokens_exit_1(url: str, golden: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.salt = 1
    assert canary(url, "--golden", golden) == 1
    assert "le_128-5: differs from character 0 of" in capsys.readouterr().out


def test_a_slower_first_token_exits_2(
    url: str, golden: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.first_token_s = 0.03
    assert canary(url, "--golden", golden, "--samples", "5") == 2
    assert "performance: FAIL" in capsys.readouterr().out


def test_a_shape_that_falls_back_exits_3(
    url: str, golden: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.rows.append(row(path="sdpa.math", fallback_reasons=["head_dim"]))
    assert canary(url, "--golden", golden) == 3
    assert "s: falls back from a to sdpa.math (head_dim)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "counter",
    [name for name in COUNTERS if '"ok"' not in name and '"false"' not in name],
    ids=lambda name: name.split("{")[0],
)
def test_a_counter_that_grows_during_the_run_exits_3(url: str, golden: str, script: Script, counter: str) -> None:
    script.counters_grow = counter
    assert canary(url, "--golden", golden) == 3


def test_counters_of_good_things_may_grow(url: str, golden: str, script: Script) -> None:
    script.counters_grow = 'hallmark_requests_total{route="/v1/completions",outcome="ok"}'
    assert canary(url, "--golden", golden) == 0


def test_another_model_exits_3(url: str, golden: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.model = "other"
    assert canary(url, "--golden", golden) == 3
    assert "environment: FAIL: the server serves other, the golden file is of demo" in capsys.readouterr().out


def test_nobody_there_exits_3_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert canary("http://127.0.0.1:9") == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("environment: FAIL: http://127.0.0.1:9/v1/models: ")


def test_without_a_golden_file_it_is_inconclusive(url: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.model = "unheard-of"  # none ships for it
    assert canary(url) == 4
    assert "no golden file for unheard-of: record one with --record" in capsys.readouterr().out


def test_a_damaged_golden_file_exits_3(url: str, golden: str) -> None:
    Path(golden).write_text(Path(golden).read_text()[:-5])
    assert canary(url, "--golden", golden) == 3


def test_another_machine_compares_tokens_but_not_times(
    url: str, golden: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.fingerprint["gpu"] = "other"
    assert canary(url, "--golden", golden) == 4
    output = capsys.readouterr().out
    assert "numerics: PASS" in output
    assert "performance: NO DATA" in output
    assert canary(url, "--golden", golden, "--no-performance") == 0


def test_too_few_samples_are_inconclusive(url: str, golden: str) -> None:
    assert canary(url, "--golden", golden, "--samples", str(MIN_SAMPLES - 1)) == 4


def test_a_metric_that_is_missing_is_inconclusive(url: str, golden: str, script: Script) -> None:
    del script.counters["hallmark_nonfinite_logits_total"]
    assert canary(url, "--golden", golden) == 4


def test_a_counter_without_any_label_set_stands_at_0(url: str, golden: str, script: Script) -> None:
    del script.counters['hallmark_attention_fallback_total{reason="head_dim"}']
    script.counters["hallmark_attention_fallback_total"] = 0
    assert canary(url, "--golden", golden) == 0


def test_a_server_that_answers_no_prompt_is_no_pass(url: str, golden: str, script: Script) -> None:
    script.completions_status = 503
    assert canary(url, "--golden", golden) == 4


def test_provisional_shapes_fail_where_a_review_is_required(url: str, golden: str) -> None:
    assert canary(url, "--golden", golden, "--require-proven") == 3


def test_the_key_is_sent(url: str, script: Script, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    canary(url, "--api-key-file", str(key))
    assert script.keys == {"Bearer secret"}


# --- verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(**outcomes: Outcome) -> list[Verdict]:
    return [Verdict(Stage[stage.upper()], outcome, "") for stage, outcome in outcomes.items()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 4),
        ({"plan": Outcome.PASS}, 0),
        ({"plan": Outcome.PASS, "performance": Outcome.SKIPPED}, 0),
        ({"performance": Outcome.SKIPPED}, 4),
        ({"plan": Outcome.PASS, "performance": Outcome.NO_DATA}, 4),
        ({"plan": Outcome.NO_DATA, "performance": Outcome.FAIL}, 2),
        ({"plan": Outcome.FAIL, "performance": Outcome.FAIL}, 3),
        ({"service": Outcome.FAIL, "plan": Outcome.PASS}, 3),
        ({"plan": Outcome.FAIL, "numerics": Outcome.FAIL, "performance": Outcome.FAIL}, 1),
    ],
)
def test_the_gravest_verdict_is_the_exit_code(given: dict[str, Outcome], expected: int) -> None:
    assert exit_code(verdicts(**given)) == expected


@pytest.mark.parametrize("status", ["unproven", "stale", "failed", "quarantined"])
def test_a_shape_that_is_not_proven_fails_the_plan(status: str) -> None:
    assert judge_plan([row(status=status)], must_be_reviewed=False).outcome is Outcome.FAIL


def test_an_empty_or_unreadable_plan_is_no_pass() -> None:
    assert judge_plan([], must_be_reviewed=False).outcome is Outcome.NO_DATA
    assert judge_plan([{"shape": "s"}], must_be_reviewed=False).outcome is Outcome.NO_DATA


def test_on_another_machine_a_late_difference_is_noise_and_an_early_one_is_not() -> None:
    expected = "abcdefghij"
    late = [Answer("a", expected, "abcdefghi!"), Answer("b", expected, expected)]
    assert judge_numerics(late, is_same_machine=False).outcome is Outcome.PASS
    assert judge_numerics(late, is_same_machine=True).outcome is Outcome.FAIL
    early = [Answer("a", expected, "a!"), Answer("b", expected, "b!")]
    assert judge_numerics(early, is_same_machine=False).outcome is Outcome.FAIL


def test_a_missing_answer_is_neither_right_nor_wrong() -> None:
    answers = [Answer("a", "text", "text"), Answer("b", "text", None)]
    assert judge_numerics(answers, is_same_machine=True).outcome is Outcome.NO_DATA


def test_only_the_slow_bucket_is_named() -> None:
    known = {"le_128": [0.01] * 5, "le_2k": [0.1] * 5}
    verdict = judge_performance(known, known | {"le_2k": [0.13] * 5}, is_same_machine=True, max_factor=1.2)
    assert verdict.outcome is Outcome.FAIL
    assert [reason.split(":")[0] for reason in verdict.reasons] == ["le_2k"]


def test_milliseconds_of_noise_do_not_fail_a_fast_bucket() -> None:
    verdict = judge_performance({"le_128": [0.002] * 5}, {"le_128": [0.006] * 5}, is_same_machine=True, max_factor=1.5)
    assert verdict.outcome is Outcome.PASS


def test_a_restart_during_the_run_is_inconclusive() -> None:
    assert judge_service({"fallbacks": 5.0}, {"fallbacks": 0.0}).outcome is Outcome.NO_DATA
